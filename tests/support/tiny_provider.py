"""A provider as small as can be, for tests of the tofu room: machines are `terraform_data` records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import voluptuous as vol

from rezuscloud.model.declaration import Pins, declare, declared_slots
from rezuscloud.model.machine import Address
from rezuscloud.model.meta import Doc
from rezuscloud.plugin.types import Expr, Fragment, MachineFacts, Provider, RenderRequest, TfResource

TENANT_UID = "6f3c9a52-6a8e-4b1f-9b0a-0d7b6f0f8a11"


class TinyProvider(Provider):
    """`note` changes a machine in place, `image` replaces it, `fail` breaks its creation."""

    name: ClassVar[str] = "tiny"
    title: ClassVar[str] = "Tiny"

    def config_schema(self) -> vol.Schema:
        return vol.Schema(
            {
                vol.Optional("note", default=""): str,
                vol.Optional("image", default="v1"): str,
                vol.Optional("fail", default=False): bool,
                vol.Optional("extra", default=dict): dict,
            }
        )

    def render(self, *, request: RenderRequest) -> Fragment:
        machines: dict[str, Any] = {}
        for machine in request.machines:
            body: dict[str, Any] = {
                "input": {
                    "tenant": request.tenant,
                    "hostname": machine.name,
                    "note": machine.config["note"],
                    "extra": machine.config["extra"],
                    "double": Expr("1 + 1"),
                },
                "triggers_replace": machine.config["image"],
            }
            if machine.config["fail"]:
                body["provisioner"] = {"local-exec": {"command": "exit 1"}}
            machines[machine.resource_name] = body
        return Fragment(
            resource={"terraform_data": machines},
            output={"count": {"value": len(machines)}},
        )

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        if resource.type != "terraform_data":
            return None
        facts: Mapping[str, Any] = resource.attributes["input"]["value"]
        return MachineFacts(
            machine=resource.name.removeprefix("machine_"),
            provider_id=resource.attributes["id"],
            hostname=facts["hostname"],
            addresses=(Address("InternalIP", "192.0.2.7"),),
            zone="zone-a",
        )


def tenant_doc(name: str = "blue", **meta: Any) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "Tenant",
        "metadata": {
            "name": name,
            "uid": TENANT_UID,
            "creationTimestamp": "2026-12-01T00:00:00Z",
            **meta,
        },
        "spec": {"talosVersion": "v1.13.9", "kubernetesVersion": "v1.36.3"},
    }


def group_doc(
    name: str = "workers",
    replicas: int = 2,
    *,
    role: str = "worker",
    provider: str = "tiny:small",
    meta: Mapping[str, Any] | None = None,
    **config: Any,
) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "NodeGroup",
        "metadata": {
            "name": name,
            "namespace": "blue",
            "uid": f"uid-of-{name}",
            "creationTimestamp": "2026-12-01T00:00:01Z",
            **(meta or {}),
        },
        "spec": {
            "role": role,
            "replicas": replicas,
            "providerClass": provider,
            "providerConfig": config,
        },
    }


def control_plane() -> Doc:
    return group_doc("control", 1, role="controlplane")


def content_and_pins(tenant: Doc, groups: list[Doc], machines: list[Doc] | None = None) -> dict[str, Any]:
    """The keyword arguments of `render` that follow from the documents."""
    pins = Pins(contract="v1.13", bootstrap_machine="control-1", slots=declared_slots(groups))
    return {"content": declare(tenant, groups, machines or []), "pins": pins}
