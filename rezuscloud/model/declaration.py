"""Owns the declaration: all that is declared in one tenant, as one canonical JSON value, and its revision.

The declaration travels inside TF state (a `terraform_data` of that name), so that state alone brings the
tenant, its node groups and its machines back. It holds metadata, spec and pins; no counters, no status.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rezuscloud.model.meta import LABEL_NODE_GROUP, LABEL_ROLE, LABEL_TENANT, Doc, digest
from rezuscloud.model.tenant import machine_name

_SYSTEM_LABELS = frozenset({LABEL_NODE_GROUP, LABEL_ROLE, LABEL_TENANT})


@dataclass(frozen=True)
class Pins:
    """What was chosen once and must not drift with the spec.

    `contract` is the Talos machine-config contract (vX.Y) of the first apply; `bootstrap_machine` the machine
    whose etcd was bootstrapped; `slots` the slots of each group as last applied.
    """

    contract: str
    bootstrap_machine: str
    slots: dict[str, list[int]] = field(default_factory=dict)


def is_leaving(doc: Doc) -> bool:
    """Deletion was asked; finalizers may still hold the resource."""
    return bool(doc["metadata"].get("deletionTimestamp"))


def active_groups(groups: Iterable[Doc]) -> list[Doc]:
    """The node groups that are declared and not on their way out, by name."""
    return sorted((g for g in groups if not is_leaving(g)), key=lambda g: g["metadata"]["name"])


def declared_slots(groups: Iterable[Doc]) -> dict[str, list[int]]:
    """Group name → the slots that its `replicas` asks for. Slots count from 1; the highest leaves first."""
    return {g["metadata"]["name"]: list(range(1, g["spec"]["replicas"] + 1)) for g in active_groups(groups)}


def declared_machines(groups: Iterable[Doc]) -> set[str]:
    """Names of all machines that should exist."""
    return {machine_name(group, slot) for group, slots in declared_slots(groups).items() for slot in slots}


def declare(tenant: Doc, groups: Iterable[Doc], machines: Iterable[Doc]) -> Doc:
    """The declaration's content, without pins and revision: exactly what `declared_revision` digests.

    `machines` adds what people wrote on projected machines (labels, annotations); their system labels and
    machines that are no longer declared are left out, so that a projection never changes the revision.
    """
    groups = list(groups)
    wanted = declared_machines(groups)
    marked = []
    for machine in sorted(machines, key=lambda m: m["metadata"]["name"]):
        meta = machine["metadata"]
        labels = {k: v for k, v in (meta.get("labels") or {}).items() if k not in _SYSTEM_LABELS}
        annotations = meta.get("annotations") or {}
        if meta["name"] in wanted and (labels or annotations):
            marked.append({"name": meta["name"], "labels": labels, "annotations": annotations})
    return {
        "tenant": _without_pause(_declared(tenant)),
        "nodeGroups": [_declared(group) for group in active_groups(groups)],
        "machines": marked,
    }


def declared_revision(content: Doc) -> str:
    """Equal revisions mean that nothing is owed. The pause switch does not count: a paused tenant is never
    applied, so pausing would owe something for as long as it lasts (ADR 0012)."""
    tenant = content["tenant"]
    spec = {key: value for key, value in tenant["spec"].items() if key != "paused"}
    return digest({**content, "tenant": {**tenant, "spec": spec}})


def _without_pause(declared: Doc) -> Doc:
    """What is applied is not paused, so TF state never says that it is."""
    if not declared["spec"].get("paused"):
        return declared
    return {**declared, "spec": {key: value for key, value in declared["spec"].items() if key != "paused"}}


def _declared(doc: Doc) -> Doc:
    meta = doc["metadata"]
    kept: dict[str, Any] = {
        "name": meta["name"],
        "uid": meta["uid"],
        "creationTimestamp": meta["creationTimestamp"],
    }
    for key in ("labels", "annotations"):
        if meta.get(key):
            kept[key] = meta[key]
    return {"metadata": kept, "spec": doc["spec"]}
