"""Owns the provider `example`: turns declared machines into OpenTofu resources, and TF state into machines.

It builds on OpenTofu's built-in `terraform_data`, so it works at once and makes nothing. Put your cloud's
resources in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import voluptuous as vol

from rezuscloud.model.machine import Address
from rezuscloud.plugin.types import (
    Fragment,
    MachineFacts,
    MachineRequest,
    Provider,
    RenderRequest,
    RequiredProvider,
    TfResource,
)

# Yours: the resource type that is a machine, and the source address of the OpenTofu provider that makes it.
MACHINE_TYPE = "terraform_data"
SOURCE = "terraform.io/builtin/terraform"


class ExampleProvider(Provider):
    name: ClassVar[str] = "example"
    title: ClassVar[str] = "Example"

    def config_schema(self) -> vol.Schema:
        """What a node group may say in `providerConfig`. Refuse here what your cloud would refuse later."""
        return vol.Schema(
            {
                vol.Optional("size", default=1, description="Number of CPUs"): vol.All(
                    int, vol.Range(min=1, max=64)
                ),
                vol.Optional("zone", default="zone-1", description="Where the machine stands"): vol.All(
                    str, vol.Length(min=1, max=63)
                ),
            }
        )

    def credentials_schema(self) -> vol.Schema:
        return vol.Schema({vol.Required("apiToken", description="Token of the cloud's API"): str})

    def required_providers(self) -> Mapping[str, RequiredProvider]:
        """Built-in resources need none. Yours, for instance:

        {"acme": RequiredProvider("registry.opentofu.org/acme/acme", "~> 1.2")}
        """
        return {}

    def render(self, *, request: RenderRequest) -> Fragment:
        """Pure: no clock, no randomness, no I/O. Strings are literal; for an expression write Expr("…")."""
        machines = {machine.resource_name: _resource(machine) for machine in request.machines}
        return Fragment(resource={MACHINE_TYPE: machines} if machines else {})

    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        """The only way for secrets: variables that your OpenTofu provider reads."""
        return {"EXAMPLE_API_TOKEN": credentials["apiToken"]} if credentials else {}

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        """Facts of the machine that this resource is. Resources of others come here too: answer None."""
        if (resource.provider, resource.type) != (SOURCE, MACHINE_TYPE):
            return None
        values = resource.attributes.get("input")
        if not resource.name.startswith("machine_") or not isinstance(values, Mapping):
            return None
        facts = values.get("value", values)  # only because terraform_data keeps {"value": …, "type": …}
        if not isinstance(facts, Mapping) or facts.get("provider") != self.name:
            return None
        return MachineFacts(
            machine=resource.name.removeprefix("machine_"),
            provider_id=resource.attributes["id"],
            hostname=facts["hostname"],
            addresses=(Address("InternalIP", facts["address"]),),
            shape=facts["class"] or None,
            zone=facts["zone"],
        )


def _resource(machine: MachineRequest) -> Mapping[str, Any]:
    return {
        "input": {
            "provider": ExampleProvider.name,
            "hostname": machine.name,
            "address": "192.0.2.1",
            "class": machine.machine_class,
            "size": machine.config["size"],
            "zone": machine.config["zone"],
        }
    }
