"""Owns the provider `lab`: machines from nothing but OpenTofu's built-in `terraform_data`.

A machine is a record in TF state. Its facts are the `input`, so they change in place; the image stands in
`triggers_replace`, so another image replaces it. Latency and faults are provisioners: these are not kept in
state, so changing them changes no machine that exists.

What a person typed reaches the two fixed shell scripts through their environment only, never as their text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import voluptuous as vol

from rezuscloud.model.machine import Address, Stage
from rezuscloud.model.tenant import Role
from rezuscloud.plugin.types import (
    Feature,
    Fragment,
    MachineFacts,
    MachineRequest,
    Observation,
    ObserveTarget,
    Provider,
    RenderRequest,
    TfResource,
)
from rezuscloud_lab import schema

_SHELL = ["/bin/sh", "-c"]
# exec: OpenTofu kills the shell alone when it is interrupted; a `sleep` below the shell would live on.
_WAIT = 'exec sleep "$LAB_SECONDS"'
_FAIL = 'printf "%s\\n" "$LAB_MESSAGE" >&2; exit 1'

_BUILT_IN = "terraform.io/builtin/terraform"
_PREFIX = "machine_"
_API_PORT = 6443


class LabProvider(Provider):
    """Machines that exist only in TF state, and are as healthy as they are told to be."""

    name: ClassVar[str] = "lab"
    title: ClassVar[str] = "Lab (simulated machines)"
    features: ClassVar[frozenset[Feature]] = frozenset({Feature.OBSERVE, Feature.ENDPOINT})

    def config_schema(self) -> vol.Schema:
        return schema.CONFIG

    def render(self, *, request: RenderRequest) -> Fragment:
        machines = {machine.resource_name: _resource(request, machine) for machine in request.machines}
        control_plane = [machine for machine in request.machines if machine.role is Role.CONTROLPLANE]
        output = {}
        if control_plane and not request.spec.control_plane_endpoint:
            address = _address(request.tenant_uid, control_plane[0].name)
            output["control_plane_endpoint"] = {"value": f"{address}:{_API_PORT}"}
        return Fragment(resource={"terraform_data": machines} if machines else {}, output=output)

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        if (resource.provider, resource.type) != (_BUILT_IN, "terraform_data"):
            return None
        facts = _plain(resource.attributes.get("output")) or _plain(resource.attributes.get("input"))
        if not resource.name.startswith(_PREFIX) or not isinstance(facts, Mapping):
            return None
        if facts.get("provider") != self.name:  # another provider may build on terraform_data as well
            return None
        return MachineFacts(
            machine=resource.name.removeprefix(_PREFIX),
            provider_id=resource.attributes["id"],
            hostname=facts["hostname"],
            addresses=(Address("InternalIP", facts["address"]),),
            shape=facts["class"] or None,
            zone=facts["zone"],
        )

    async def observe(self, *, machines: Sequence[ObserveTarget]) -> Sequence[Observation]:
        return [_observation(machine) for machine in machines]


def _resource(request: RenderRequest, machine: MachineRequest) -> Mapping[str, Any]:
    config = machine.config
    body: dict[str, Any] = {
        "input": {
            "provider": LabProvider.name,
            "name": machine.name,
            "role": machine.role.value,
            "slot": machine.slot,
            "hostname": machine.name,
            "address": _address(request.tenant_uid, machine.name),
            "class": machine.machine_class,
            "zone": config["zone"],
            "memoryMb": config["memoryMb"],
            "tags": config["tags"],
        },
        "triggers_replace": {"image": config["image"]},
    }
    provisioners = [
        *_scripts({}, config["latencyS"], config["failCreate"]),
        *_scripts({"when": "destroy"}, config["destroyLatencyS"], config["failDestroy"]),
    ]
    if provisioners:  # OpenTofu refuses an empty list of them
        body["provisioner"] = provisioners
    return body


def _scripts(when: Mapping[str, str], seconds: float, message: str) -> list[Mapping[str, Any]]:
    steps = []
    if seconds:
        steps.append((_WAIT, {"LAB_SECONDS": f"{seconds:.3f}"}))
    if message:
        steps.append((_FAIL, {"LAB_MESSAGE": message}))
    return [
        {"local-exec": {**when, "interpreter": _SHELL, "command": command, "environment": environment}}
        for command, environment in steps
    ]


def _address(tenant_uid: str, machine: str) -> str:
    """A loopback address that stays the same for ever; never 127.0.x.x, where real services listen."""
    a, b, c = hashlib.sha256(f"{tenant_uid}/{machine}".encode()).digest()[:3]
    return f"127.{1 + a % 254}.{b}.{1 + c % 254}"


def _plain(value: Any) -> Any:
    """The value of a dynamically typed attribute, which TF state keeps as {"value": …, "type": …}."""
    if isinstance(value, Mapping) and value.keys() == {"value", "type"}:
        return value["value"]
    return value


def _observation(target: ObserveTarget) -> Observation:
    health = target.config.get("health") or {}
    is_ready = target.machine not in health.get("notReady", ())
    return Observation(
        machine=target.machine,
        ready=is_ready,
        stage=Stage.READY if is_ready else Stage.BOOTING,
        reason="Simulated" if is_ready else "SimulatedFault",
        message="" if is_ready else health.get("message") or "providerConfig.health lists it as not ready",
        talos_version=health.get("talosVersion"),
        kubernetes_version=health.get("kubernetesVersion"),
    )
