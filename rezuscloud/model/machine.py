"""Owns Machine: one machine, projected from TF state (spec) and observed (status)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rezuscloud.model.tenant import Role


class Stage(StrEnum):
    CREATED = "Created"
    BOOTING = "Booting"
    MAINTENANCE = "Maintenance"
    CONFIGURED = "Configured"
    JOINED = "Joined"
    READY = "Ready"
    REBOOTING = "Rebooting"
    UPGRADING = "Upgrading"
    LEAVING = "Leaving"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Address:
    type: str
    """InternalIP, ExternalIP or Hostname."""
    address: str


@dataclass(frozen=True)
class MachineSpec:
    node_group: str
    role: Role
    slot: int
    provider: str
    provider_id: str
    hostname: str
    addresses: tuple[Address, ...] = ()
    shape: str | None = None
    zone: str | None = None
