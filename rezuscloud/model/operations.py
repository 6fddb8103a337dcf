"""Owns Run: one plan with its apply, as it is seen on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunAction(StrEnum):
    APPLY = "apply"
    DESTROY = "destroy"
    DRIFT = "drift"


class RunPhase(StrEnum):
    PENDING = "Pending"
    PLANNING = "Planning"
    HELD = "Held"
    APPLYING = "Applying"
    PROJECTING = "Projecting"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    SUPERSEDED = "Superseded"
    INTERRUPTED = "Interrupted"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset(
    {RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.CANCELLED, RunPhase.SUPERSEDED, RunPhase.INTERRUPTED}
)


class MachineAction(StrEnum):
    """What a plan does to one machine, in cluster language."""

    ADD = "add"
    CHANGE = "change"
    REPLACE = "replace"
    REMOVE = "remove"


class Risk(StrEnum):
    """How much a plan can hurt: nothing changes · only additions or in-place · takes machines that were asked
    to go · replaces or destroys what nobody asked to lose."""

    NONE = "none"
    LOW = "low"
    REMOVES = "removes"
    DANGEROUS = "dangerous"


@dataclass(frozen=True)
class PlannedMachine:
    name: str
    action: MachineAction
    reason: str


@dataclass(frozen=True)
class PlanSummary:
    """Run.status.plan. `id` names exactly one saved plan; approval is bound to it."""

    id: str
    summary: str
    machines: tuple[PlannedMachine, ...]
    risk: Risk
    destroys: int
    """How many machines the plan removes or replaces."""
    changes: int
    """How many resources the plan touches, the declaration included."""
    guard: tuple[str, ...] = ()
    """Why it must be approved; empty when it need not."""


@dataclass(frozen=True)
class RunError:
    """What stopped a run: one line, the engine's detail, the resource's address, what to do."""

    summary: str
    detail: str = ""
    address: str = ""
    hint: str = ""


@dataclass(frozen=True)
class RunProgress:
    done: int
    total: int
    current: str | None = None
