"""Owns how what is known becomes status: conditions, counts and machines of one tenant, in one transaction.

Pure decisions on documents; it reads no clock but the transaction's and starts nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rezuscloud.model.declaration import (
    active_groups,
    declare,
    declared_machines,
    declared_revision,
    is_leaving,
)
from rezuscloud.model.machine import Stage
from rezuscloud.model.meta import (
    FINALIZER_MACHINES,
    Condition,
    Doc,
    format_time,
    get_condition,
    parse_time,
    to_wire,
)
from rezuscloud.model.tenant import HeldBy
from rezuscloud.plugin.types import Observation
from rezuscloud.reconcile.outcome import Hold
from rezuscloud.resources.service import Desk
from rezuscloud.tofu.projection import Projection, system_labels

FRESH = dt.timedelta(seconds=300)
"""An observation older than this says nothing any more."""


_WAITED = frozenset({"ChangePending", "Held", "NoEngine", "NoControlPlane"})
"""Reasons of Applied that end with the change that caused them."""
_OWED = "what is declared has not been applied yet"


def tenant_condition(desk: Desk, tenant: Doc, type_: str, status: str, reason: str, message: str) -> None:
    """Sets one condition of a tenant, as observed at the tenant's present generation."""
    meta = tenant["metadata"]
    desk.set_condition(
        "Tenant", "", meta["name"], Condition(type_, status, reason, message, meta["generation"])
    )


def publish_holds(desk: Desk, tenant: str, holds: Sequence[Hold]) -> None:
    """Writes `heldBy`. An entry that was there before keeps its `since`."""
    doc = desk.tx.get("Tenant", "", tenant)
    if doc is None:
        return
    before = {entry["by"]: entry["since"] for entry in doc["status"].get("heldBy", [])}
    now = format_time(desk.tx.now)
    entries = [hold.to_wire(before.get(hold.by.value, now)) for hold in holds]
    desk.set_status("Tenant", "", tenant, {"heldBy": entries})
    refresh_tenant(desk, tenant)


def lift_holds(desk: Desk, tenant: str, *kinds: HeldBy) -> None:
    """Takes away what a person has just settled, so that nobody reads it as still true. The turn that follows
    says what is still in the way."""
    doc = desk.tx.get("Tenant", "", tenant)
    if doc is not None and (holds := doc["status"].get("heldBy")):
        kept = [hold for hold in holds if hold["by"] not in kinds]
        desk.set_status("Tenant", "", tenant, {"heldBy": kept})


def publish_projection(desk: Desk, tenant: str, projection: Projection, *, state_version: int | None) -> None:
    """Makes Machines, node groups' counts and the tenant's applied revision say what TF state says."""
    doc = desk.tx.get("Tenant", "", tenant)
    if doc is None:
        return
    groups = {group["metadata"]["name"]: group for group in desk.tx.list("NodeGroup", tenant)}
    marks = _marks(projection)
    existing = {machine["metadata"]["name"]: machine for machine in desk.tx.list("Machine", tenant)}
    for machine in projection.machines:
        old = existing.pop(machine.name, None)
        is_new = old is None or old["metadata"]["uid"] != machine.uid
        mark = marks.get(machine.name, {}) if old is None else {}
        labels = (mark.get("labels") or {}) | system_labels(tenant, machine.spec)
        status: dict[str, Any] | None = None
        if is_new or machine.tainted:
            status = {"stage": Stage.CREATED.value, "ready": False, "conditions": []}
        desk.put(
            "Machine",
            tenant,
            machine.name,
            spec=to_wire(machine.spec),
            status=status,
            labels=labels,
            annotations=mark.get("annotations") or None,
            owner=groups.get(machine.spec.node_group),
            uid=machine.uid,
        )
    for name in existing:
        desk.remove("Machine", tenant, name)
    envelope = projection.declaration
    desk.set_status(
        "Tenant",
        "",
        tenant,
        {
            "appliedRevision": envelope["declaredRevision"] if envelope else None,
            "pins": envelope["pins"] if envelope else None,
            "stateVersion": state_version,
        },
    )
    for name, group in groups.items():
        if is_leaving(group) and not any(m.spec.node_group == name for m in projection.machines):
            desk.clear_finalizers("NodeGroup", tenant, name, FINALIZER_MACHINES)
    refresh_tenant(desk, tenant)


def publish_observations(desk: Desk, tenant: str, observations: Iterable[Observation]) -> None:
    """Writes what was seen of machines. `observedAt` is only written together with something that changed."""
    now = format_time(desk.tx.now)
    for seen in observations:
        machine = desk.tx.get("Machine", tenant, seen.machine)
        if machine is None:
            continue
        status = {
            "stage": seen.stage.value,
            "ready": seen.ready is True,
            "talosVersion": seen.talos_version,
            "kubernetesVersion": seen.kubernetes_version,
        }
        ready = {True: "True", False: "False", None: "Unknown"}[seen.ready]
        condition = Condition("Ready", ready, seen.reason, seen.message, machine["metadata"]["generation"])
        known = get_condition(machine, "Ready")
        is_same = known is not None and all(machine["status"].get(k) == v for k, v in status.items())
        if (
            is_same
            and known
            and (known["status"], known["reason"], known["message"])
            == (
                ready,
                seen.reason,
                seen.message,
            )
        ):
            continue
        desk.set_status("Machine", tenant, seen.machine, status | {"observedAt": now})
        desk.set_condition("Machine", tenant, seen.machine, condition)
    refresh_tenant(desk, tenant)


def refresh_tenant(desk: Desk, tenant: str) -> None:
    """Brings a tenant's counts and its Ready and Reachable conditions up to what its machines say."""
    doc = desk.tx.get("Tenant", "", tenant)
    if doc is None:
        return
    groups = desk.tx.list("NodeGroup", tenant)
    machines = desk.tx.list("Machine", tenant)
    counts = {
        "declared": len(declared_machines(groups)),
        "existing": len(machines),
        "ready": sum(machine["status"].get("ready") is True for machine in machines),
    }
    desk.set_status("Tenant", "", tenant, {"machines": counts})
    _refresh_applied(desk, doc)
    for group in groups:
        _refresh_group(desk, tenant, group, machines)
    for type_, verdict in (
        ("Ready", _ready(doc, groups, machines, desk.tx.now)),
        ("Reachable", _reachable(machines)),
    ):
        tenant_condition(desk, doc, type_, *verdict)


def _refresh_applied(desk: Desk, tenant: Doc) -> None:
    """Applied is never True while something is owed, and a change that was taken back is owed no more."""
    applied = get_condition(tenant, "Applied")
    if applied is None:
        return
    if _is_owed(tenant):
        if applied["status"] == "True":
            tenant_condition(desk, tenant, "Applied", "False", "ChangePending", _OWED)
    elif applied["reason"] in _WAITED:
        tenant_condition(desk, tenant, "Applied", "True", "Applied", "everything is as declared")


def _is_owed(tenant: Doc) -> bool:
    status = tenant["status"]
    return bool(status.get("declaredRevision") != status.get("appliedRevision"))


def _refresh_group(desk: Desk, tenant: str, group: Doc, machines: Sequence[Doc]) -> None:
    mine = [m for m in machines if m["spec"]["nodeGroup"] == group["metadata"]["name"]]
    desk.set_status(
        "NodeGroup",
        tenant,
        group["metadata"]["name"],
        {
            "replicas": len(mine),
            "readyReplicas": sum(m["status"].get("ready") is True for m in mine),
            "observedGeneration": group["metadata"]["generation"],
        },
    )


def _ready(
    tenant: Doc, groups: Sequence[Doc], machines: Sequence[Doc], now: dt.datetime
) -> tuple[str, str, str]:
    if is_leaving(tenant):
        return "False", "Deleting", "the tenant is being deleted"
    if not active_groups(groups):
        return "False", "NothingDeclared", "no node group is declared yet"
    if _is_owed(tenant):
        return "False", "ChangePending", _OWED
    names = {machine["metadata"]["name"] for machine in machines}
    if missing := sorted(declared_machines(groups) - names):
        return "False", "MachinesMissing", f"not there yet: {_some(missing)}"
    unseen, unready, unsure = [], [], []
    for machine in machines:
        condition = get_condition(machine, "Ready")
        name = machine["metadata"]["name"]
        if condition is None:
            unseen.append(name)
        elif condition["status"] == "False":
            unready.append(name)
        elif condition["status"] == "Unknown" or is_stale(machine, now):
            unsure.append(name)
    if unready:
        return "False", "MachinesNotReady", f"not ready: {_some(unready)}"
    if unseen:
        return "Unknown", "NotObserved", f"never observed: {_some(unseen)}"
    if unsure:
        return "Unknown", "ObservationStale", f"not observed lately: {_some(unsure)}"
    return "True", "AllMachinesReady", f"all {len(machines)} machines are ready"


def _reachable(machines: Sequence[Doc]) -> tuple[str, str, str]:
    seen = [c for m in machines if (c := get_condition(m, "Ready")) is not None]
    if not machines or not seen:
        return "Unknown", "NotObserved", "no machine has been observed yet"
    silent = [m["metadata"]["name"] for m in machines if _status_of(m) == "Unknown"]
    if silent:
        return "False", "MachinesSilent", f"no answer from: {_some(silent)}"
    return "True", "AllMachinesAnswer", f"all {len(seen)} observed machines answer"


def _status_of(machine: Doc) -> str:
    condition = get_condition(machine, "Ready")
    return condition["status"] if condition else "Unseen"


def is_stale(machine: Doc, now: dt.datetime) -> bool:
    """Whether the last observation of a machine is too old to be believed."""
    observed_at = machine["status"].get("observedAt")
    return observed_at is None or now - parse_time(observed_at) > FRESH


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _marks(projection: Projection) -> Mapping[str, Mapping[str, Any]]:
    """What people wrote on machines, as the declaration in TF state remembers it."""
    if projection.declaration is None:
        return {}
    return {mark["name"]: mark for mark in projection.declaration["declaration"].get("machines", [])}


def current_revision(tenant: Doc, groups: Sequence[Doc], machines: Sequence[Doc]) -> tuple[Doc, str]:
    """The declaration's content and its revision, from documents read together."""
    content = declare(tenant, groups, machines)
    return content, declared_revision(content)
