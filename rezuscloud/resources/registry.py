"""Owns the list of kinds: one entry each, from which API, service, watch, tables and discovery are driven.

It says who writes a kind, what holds its deletion, what its tables show and which fields select. It does not
check values (`schemas.py`) and it does not write (`service.py`).
Decision: ADR 0001.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rezuscloud.model.meta import (
    FINALIZER_MACHINES,
    FINALIZER_SECRETS,
    Doc,
    get_condition,
    get_path,
)


@dataclass(frozen=True)
class Column:
    """One column of a table. `type` is OpenAPI's word; a "date" cell holds RFC 3339, drawn as an age."""

    name: str
    read: Callable[[Doc], Any]
    type: str = "string"
    priority: int = 0
    """0 = always shown; 1 = only in wide tables."""
    description: str = ""
    format: str = ""


@dataclass(frozen=True)
class Kind:
    """All that is true of a kind, whatever an object of it holds."""

    kind: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    namespaced: bool
    writable: str
    """"user": people declare it. "system": people only read it (but see `user_metadata`)."""
    columns: tuple[Column, ...]
    finalizers: tuple[str, ...] = ()
    """What a new object of this kind is given, so that its deletion waits for the system."""
    field_selectors: tuple[str, ...] = ()
    """Selectable beyond metadata.name and metadata.namespace."""
    user_metadata: bool = False
    """People may change labels and annotations of this system kind."""
    status_keys: frozenset[str] = frozenset()
    """Status that only the system writes; admins may keep keys of their own beside it."""
    conditions: frozenset[str] = frozenset()
    """Condition types that only the system writes."""
    how_made: str = ""
    """For a system kind: where its objects come from, and what to do instead of creating one."""
    how_removed: str = ""
    """For a system kind: what to do instead of deleting one."""
    has_spec: bool = True
    has_scale: bool = False
    """`kubectl scale` works on it."""

    @property
    def verbs(self) -> tuple[str, ...]:
        """What people may ask of it, in Kubernetes' words."""
        if self.writable == "user":
            return ("create", "delete", "get", "list", "patch", "update", "watch")
        if self.user_metadata:
            return ("get", "list", "patch", "update", "watch")
        return ("get", "list", "watch")

    @property
    def subresources(self) -> tuple[str, ...]:
        return (*(("status",) if self.has_spec else ()), *(("scale",) if self.has_scale else ()))

    @property
    def selectable_fields(self) -> tuple[str, ...]:
        return ("metadata.name", "metadata.namespace", *self.field_selectors)


class Registry:
    """The kinds, by each of their names."""

    def __init__(self, *kinds: Kind) -> None:
        self._by_kind = {kind.kind: kind for kind in kinds}
        self._by_plural = {kind.plural: kind for kind in kinds}

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._by_kind.values())

    def by_kind(self, kind: str) -> Kind | None:
        """The entry of `NodeGroup`."""
        return self._by_kind.get(kind)

    def by_plural(self, plural: str) -> Kind | None:
        """The entry of `nodegroups`."""
        return self._by_plural.get(plural)

    def kind(self, kind: str) -> Kind:
        """The entry of a kind that is known to exist. Raises KeyError."""
        return self._by_kind[kind]


# ---------------------------------------------------------------- cells


def _at(path: str) -> Callable[[Doc], Any]:
    return lambda doc: get_path(doc, path)


def _condition(type_: str) -> Callable[[Doc], Any]:
    return lambda doc: (get_condition(doc, type_) or {}).get("status", "Unknown")


def _reason(type_: str) -> Callable[[Doc], Any]:
    return lambda doc: (get_condition(doc, type_) or {}).get("reason", "")


def _held(doc: Doc) -> str:
    return ", ".join(held.get("by", "") for held in get_path(doc, "status.heldBy") or [])


def _ready_of_declared(doc: Doc) -> str:
    machines = get_path(doc, "status.machines") or {}
    return f"{machines.get('ready', 0)}/{machines.get('declared', 0)}"


def _address(doc: Doc) -> str:
    addresses = get_path(doc, "spec.addresses") or []
    return str(addresses[0].get("address", "")) if addresses else ""


def _regarding(doc: Doc) -> str:
    regarding = doc.get("involvedObject") or {}
    return f"{str(regarding.get('kind', '')).lower()}/{regarding.get('name', '')}"


_NAME = Column("Name", _at("metadata.name"), format="name")
_AGE = Column("Age", _at("metadata.creationTimestamp"), "date")


# ---------------------------------------------------------------- kinds

REGISTRY = Registry(
    Kind(
        kind="Tenant",
        plural="tenants",
        singular="tenant",
        short_names=("tn",),
        namespaced=False,
        writable="user",
        finalizers=(FINALIZER_MACHINES, FINALIZER_SECRETS),
        columns=(
            _NAME,
            Column("Ready", _condition("Ready")),
            Column("Applied", _condition("Applied")),
            Column("Machines", _ready_of_declared, description="ready / declared"),
            Column("Kubernetes", _at("spec.kubernetesVersion")),
            Column("Talos", _at("spec.talosVersion")),
            Column("Held", _held, description="what holds a change back"),
            Column("Endpoint", _at("spec.controlPlaneEndpoint"), priority=1),
            Column("Reason", _reason("Applied"), priority=1),
            _AGE,
        ),
        field_selectors=("spec.applyPolicy", "spec.paused", "spec.talosVersion", "spec.kubernetesVersion"),
        status_keys=frozenset(
            {
                "observedGeneration",
                "declaredRevision",
                "appliedRevision",
                "stateVersion",
                "pins",
                "heldBy",
                "machines",
                "currentRun",
                "lastRun",
            }
        ),
        conditions=frozenset({"Ready", "Applied", "Reachable", "Drifted", "Encrypted"}),
    ),
    Kind(
        kind="NodeGroup",
        plural="nodegroups",
        singular="nodegroup",
        short_names=("ng",),
        namespaced=True,
        writable="user",
        finalizers=(FINALIZER_MACHINES,),
        columns=(
            _NAME,
            Column("Role", _at("spec.role")),
            Column("Replicas", _at("spec.replicas"), "integer"),
            Column("Ready", _at("status.readyReplicas"), "integer"),
            Column("Class", _at("spec.providerClass")),
            _AGE,
        ),
        field_selectors=("spec.role", "spec.providerClass"),
        status_keys=frozenset({"observedGeneration", "replicas", "readyReplicas"}),
        conditions=frozenset({"Ready", "Applied"}),
        has_scale=True,
    ),
    Kind(
        kind="Machine",
        plural="machines",
        singular="machine",
        short_names=("mc",),
        namespaced=True,
        writable="system",
        user_metadata=True,
        columns=(
            _NAME,
            Column("Role", _at("spec.role")),
            Column("Stage", _at("status.stage")),
            Column("Ready", _at("status.ready"), "boolean"),
            Column("Address", _address),
            Column("Group", _at("spec.nodeGroup"), priority=1),
            Column("Provider ID", _at("spec.providerId"), priority=1),
            Column("Talos", _at("status.talosVersion"), priority=1),
            Column("Kubernetes", _at("status.kubernetesVersion"), priority=1),
            _AGE,
        ),
        field_selectors=("spec.nodeGroup", "spec.role", "spec.provider", "status.stage", "status.ready"),
        status_keys=frozenset(
            {"observedGeneration", "observedAt", "stage", "ready", "talosVersion", "kubernetesVersion"}
        ),
        conditions=frozenset({"Ready"}),
        how_made="machines come from node groups by way of TF state: raise spec.replicas of a NodeGroup",
        how_removed="a machine leaves when its NodeGroup is scaled down (the highest slot first) or deleted",
    ),
    Kind(
        kind="Provider",
        plural="providers",
        singular="provider",
        short_names=(),
        namespaced=False,
        writable="system",
        columns=(
            _NAME,
            Column("Loaded", _condition("Loaded")),
            Column("Title", _at("spec.title")),
            Column("Version", _at("spec.version")),
            Column("Package", _at("spec.package"), priority=1),
            _AGE,
        ),
        how_made="providers are Python packages: install one beside RezusCloud and restart the server",
        how_removed="providers are Python packages: uninstall it, or block it by name, and restart",
    ),
    Kind(
        kind="Run",
        plural="runs",
        singular="run",
        short_names=(),
        namespaced=True,
        writable="system",
        columns=(
            _NAME,
            Column("Action", _at("spec.action")),
            Column("Phase", _at("status.phase")),
            Column("Plan", _at("status.plan.summary")),
            Column("Risk", _at("status.plan.risk"), priority=1),
            Column("Error", _at("status.error.summary"), priority=1),
            _AGE,
        ),
        field_selectors=("spec.action", "spec.revision", "status.phase"),
        how_made="a run is made when something declared changes; the tenant's action `apply` starts one now",
        how_removed="runs are the tenant's history and are pruned by age; the run's action `cancel` stops it",
    ),
    Kind(
        kind="StateVersion",
        plural="stateversions",
        singular="stateversion",
        short_names=("sv",),
        namespaced=True,
        writable="system",
        columns=(
            _NAME,
            Column("Serial", _at("spec.serial"), "integer"),
            Column("Size", _at("spec.sizeBytes"), "integer"),
            Column("Encrypted", _at("spec.encrypted"), "boolean"),
            Column("Run", _at("spec.run")),
            Column("Lineage", _at("spec.lineage"), priority=1),
            Column("SHA256", _at("spec.sha256"), priority=1),
            _AGE,
        ),
        field_selectors=("spec.run", "spec.serial"),
        how_made="a state version is one TF state that the state backend accepted",
        how_removed="state versions are immutable; the oldest leave when newer ones arrive",
    ),
    Kind(
        kind="Event",
        plural="events",
        singular="event",
        short_names=("ev",),
        namespaced=True,
        writable="system",
        has_spec=False,
        columns=(
            Column("Last Seen", _at("lastTimestamp"), "date"),
            Column("Type", _at("type")),
            Column("Reason", _at("reason")),
            Column("Object", _regarding),
            Column("Message", _at("message")),
            Column("Count", _at("count"), "integer", priority=1),
            Column("Name", _at("metadata.name"), priority=1, format="name"),
        ),
        field_selectors=(
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "reason",
            "type",
        ),
        how_made="events are what the server saw happen",
        how_removed="only the newest events of a tenant are kept",
    ),
)
