"""Owns the public plugin API: what a provider is, and the values it exchanges with the core.

A provider turns declared machines into OpenTofu resources (`render`) and TF state back into machine facts
(`project`). It never starts processes, never sees other tenants and never decides whether something may be
applied. Arguments are passed by keyword, so that adding one breaks nobody.

It does not find or isolate plugins: that is `manager.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import voluptuous as vol

from rezuscloud.model.machine import Address, Stage
from rezuscloud.model.tenant import Role, TenantSpec

CONTRACT_VERSION = 1


class Feature(StrEnum):
    """What a provider can do beyond rendering. The core calls only what is declared."""

    PREFLIGHT = "preflight"
    OBSERVE = "observe"
    LIFESPAN = "lifespan"
    ENDPOINT = "endpoint"
    """Its fragment's outputs hold `control_plane_endpoint`; the tenant need not give one."""


class Delivery(StrEnum):
    """How a machine gets its machine config."""

    NONE = "none"
    USER_DATA = "user-data"
    TALOS_API = "talos-api"


@dataclass(frozen=True)
class Expr:
    """An OpenTofu expression, e.g. `Expr("local.image")`. Plain strings are always literal."""

    text: str


@dataclass(frozen=True)
class RequiredProvider:
    """One entry of `terraform.required_providers`. `source` is the full address with host."""

    source: str
    version: str


@dataclass(frozen=True)
class MachineRequest:
    """One machine to render. `name` is `<group>-<slot>` and stable for ever."""

    name: str
    group: str
    role: Role
    slot: int
    machine_class: str
    """What stands behind the colon of `providerClass`; may be empty."""
    config: Mapping[str, Any]
    """The group's `providerConfig`, after this provider's own schema (defaults filled in)."""

    @property
    def resource_name(self) -> str:
        """The name that the resource which *is* this machine must bear, whatever its type. No other resource
        may begin with `machine_`: the core recognises machines in plans by it."""
        return f"machine_{self.name}"


@dataclass(frozen=True)
class RenderRequest:
    """All machines of one tenant that belong to one provider, in stable order."""

    tenant: str
    tenant_uid: str
    spec: TenantSpec
    machines: tuple[MachineRequest, ...]


@dataclass(frozen=True)
class Fragment:
    """A provider's part of the configuration, in the shape of `.tf.json`.

    `resource` and `data` are {type: {name: body}}; `locals` and `output` {name: value or body}; `provider`
    {local name: block or list of blocks}. Leaves are JSON values or `Expr`. No secrets, ever.
    """

    resource: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    locals: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] = field(default_factory=dict)
    provider: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TfResource:
    """One managed resource instance of TF state."""

    address: str
    type: str
    name: str
    index: int | str | None
    provider: str
    """Full source address, e.g. `registry.opentofu.org/oracle/oci` or `terraform.io/builtin/terraform`."""
    attributes: Mapping[str, Any]
    tainted: bool = False


@dataclass(frozen=True)
class MachineFacts:
    """What TF state tells of one machine. `machine` is its name (`resource_name` without `machine_`)."""

    machine: str
    provider_id: str
    hostname: str
    addresses: tuple[Address, ...] = ()
    shape: str | None = None
    zone: str | None = None


@dataclass(frozen=True)
class ObserveTarget:
    """A machine whose health is asked for. `config` is the group's providerConfig as declared."""

    tenant: str
    machine: str
    provider_id: str
    role: Role
    addresses: tuple[Address, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """How a machine is, seen just now. `ready=None` means that it could not be told."""

    machine: str
    ready: bool | None
    stage: Stage
    reason: str
    message: str = ""
    talos_version: str | None = None
    kubernetes_version: str | None = None


@dataclass(frozen=True)
class Finding:
    """A result of `preflight`. `field` is a path inside providerConfig or credentials."""

    severity: str
    """error | warning"""
    message: str
    field: str = ""


@dataclass(frozen=True)
class LifespanContext:
    """What a provider with `Feature.LIFESPAN` gets for its own things beside the server."""

    data_dir: Path
    """A directory of its own, 0700, kept between starts."""


class Provider(abc.ABC):
    """Where machines come from. One instance serves all tenants; methods without `async` must be pure."""

    name: ClassVar[str]
    """What stands before the colon of `providerClass`; a DNS label."""
    title: ClassVar[str]
    contract_version: ClassVar[int] = CONTRACT_VERSION
    features: ClassVar[frozenset[Feature]] = frozenset()
    delivery: ClassVar[Delivery] = Delivery.NONE

    @abc.abstractmethod
    def config_schema(self) -> vol.Schema:
        """Schema of NodeGroup.spec.providerConfig; it also draws the form."""

    def credentials_schema(self) -> vol.Schema:
        """Schema of the Credential's data; nothing by default."""
        return vol.Schema({})

    def required_providers(self) -> Mapping[str, RequiredProvider]:
        """Local name → registry address and version range. Built-in resources need none."""
        return {}

    @abc.abstractmethod
    def render(self, *, request: RenderRequest) -> Fragment:
        """The tenant's part of the configuration. Equal requests give equal fragments."""

    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        """Variables that carry the credentials to the OpenTofu provider; the only way for secrets."""
        return {}

    @abc.abstractmethod
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        """Facts of the machine that this resource is, or None when it is not a machine of ours."""

    async def preflight(
        self, *, credentials: Mapping[str, str], config: Mapping[str, Any]
    ) -> Sequence[Finding]:
        """Checks that need the provider's API, before anything is planned (Feature.PREFLIGHT)."""
        return ()

    async def observe(self, *, machines: Sequence[ObserveTarget]) -> Sequence[Observation]:
        """How machines are, when the provider knows better than a Talos probe (Feature.OBSERVE)."""
        return ()

    def lifespan(self, *, context: LifespanContext) -> AbstractAsyncContextManager[None]:
        """Keeps something of its own alive beside the server (Feature.LIFESPAN)."""
        raise NotImplementedError(f"{self.name} declares no lifespan")
