"""Owns the typed views of what a person declares: Tenant, NodeGroup and ConfigPatch.

What was typed stays in the document as typed; these views only read it. Defaults of rendering live here,
beside the document, never in it.
Decision: ADR 0007.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    CONTROLPLANE = "controlplane"
    WORKER = "worker"


class ApplyPolicy(StrEnum):
    AUTO = "Auto"
    MANUAL = "Manual"


class HeldBy(StrEnum):
    """What can hold a change back (Tenant.status.heldBy[].by)."""

    DEBOUNCE = "debounce"
    PAUSE = "pause"
    APPROVAL = "approval"
    LOCK = "lock"
    BACKOFF = "backoff"
    ENGINE = "engine"
    CAPACITY = "capacity"
    RECOVERY = "recovery"
    DECLARATION = "declaration"  # the tenant cannot be rendered as declared, e.g. no control-plane group


@dataclass(frozen=True)
class TenantSpec:
    talos_version: str
    kubernetes_version: str
    control_plane_endpoint: str | None = None
    pod_subnets: tuple[str, ...] = ("10.244.0.0/16",)
    service_subnets: tuple[str, ...] = ("10.96.0.0/12",)
    credentials: Mapping[str, str] = field(default_factory=dict)
    apply_policy: ApplyPolicy = ApplyPolicy.AUTO
    paused: bool = False
    deletion_protection: bool = False


@dataclass(frozen=True)
class NodeGroupSpec:
    role: Role
    replicas: int
    provider_class: str
    provider_config: Mapping[str, Any] = field(default_factory=dict)
    node_labels: Mapping[str, str] = field(default_factory=dict)
    node_taints: tuple[Mapping[str, Any], ...] = ()

    @property
    def provider(self) -> str:
        """The provider's name: what stands before the colon of `providerClass`."""
        return self.provider_class.partition(":")[0]

    @property
    def machine_class(self) -> str:
        """What stands behind the colon (a shape or flavour); may be empty."""
        return self.provider_class.partition(":")[2]


def machine_name(group: str, slot: int) -> str:
    """Name of the machine in a slot of a group; slots count from 1."""
    return f"{group}-{slot}"
