"""Owns the system's own writes inside one transaction, and what must stay true after any write.

Two things hold after each: `Tenant.status.declaredRevision` is the digest of all that is declared in the
tenant, and an object that is leaving goes when its last finalizer does (a tenant with all that lies in it).
It does not check what people send (`admission.py`), and it knows nothing of the queue that reads its
results.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Iterable, Mapping
from typing import Any

from rezuscloud.model.declaration import declare, declared_revision, is_leaving
from rezuscloud.model.errors import AlreadyExists
from rezuscloud.model.meta import (
    API_VERSION,
    Condition,
    Doc,
    digest,
    format_time,
    get_path,
    make_ref,
    set_condition,
)
from rezuscloud.resources.registry import REGISTRY
from rezuscloud.store.db import Transaction

MAX_EVENTS = 200
"""Events kept in one tenant; the oldest leave."""

OUTSIDE_TENANTS = "default"
"""Namespace of events about what lies in no tenant. No tenant may bear this name."""


class Desk:
    """One transaction, seen by the system: several objects, all written or none."""

    def __init__(self, tx: Transaction) -> None:
        self.tx = tx
        self._touched: set[str] = set()

    # ------------------------------------------------------------ reading

    def get(self, kind: str, namespace: str, name: str) -> Doc | None:
        return self.tx.get(kind, namespace, name)

    def list(self, kind: str, namespace: str | None = None) -> list[Doc]:
        return self.tx.list(kind, namespace)

    # ------------------------------------------------------------ status

    def set_status(self, kind: str, namespace: str, name: str, changes: Mapping[str, Any]) -> Doc | None:
        """Merges top-level status keys; a value of None removes the key. None when the object is gone."""
        current = self.tx.get(kind, namespace, name)
        if current is None:
            return None
        status = dict(current.get("status") or {})
        for key, value in changes.items():
            if value is None:
                status.pop(key, None)
            else:
                status[key] = value
        return self.tx.put({**current, "status": status})

    def set_condition(self, kind: str, namespace: str, name: str, condition: Condition) -> None:
        """Sets one condition; nothing when the object is gone."""
        current = self.tx.get(kind, namespace, name)
        if current is not None:
            conditions = set_condition(get_path(current, "status.conditions") or (), condition, self.tx.now)
            self.set_status(kind, namespace, name, {"conditions": conditions})

    # ------------------------------------------------------------ objects of the system

    def put(
        self,
        kind: str,
        namespace: str,
        name: str,
        *,
        spec: Mapping[str, Any],
        status: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        owner: Doc | None = None,
        uid: str | None = None,
    ) -> Doc:
        """Creates or updates an object that the system owns.

        `labels` and `annotations` are set beside those that people wrote. `status` replaces the status; None
        keeps it. Another `uid` than the current one means another thing under the same name (a machine that
        was replaced): the old object is DELETED and a new one ADDED, with what people wrote on the old.
        """
        current = self.tx.get(kind, namespace, name)
        meta: Doc
        if current is not None and uid is not None and current["metadata"]["uid"] != uid:
            self.tx.delete(kind, namespace, name)
            kept = {key: current["metadata"].get(key) for key in ("labels", "annotations")}
            meta, current = {key: value for key, value in kept.items() if value}, None
        else:
            meta = dict(current["metadata"]) if current is not None else {}
        if current is None:
            meta = {
                "name": name,
                **({"namespace": namespace} if namespace else {}),
                "uid": uid or str(uuids.uuid4()),
                "generation": 1,
                "creationTimestamp": format_time(self.tx.now),
                **meta,
            }
        elif current["spec"] != spec:
            meta["generation"] += 1
        for key, values in (("labels", labels), ("annotations", annotations)):
            if values:
                meta[key] = {**(meta.get(key) or {}), **values}
        if owner is not None:
            meta["ownerReferences"] = [_owner_reference(owner)]
        old_status = current.get("status", {}) if current is not None else {}
        return self.save(
            {
                "apiVersion": API_VERSION,
                "kind": kind,
                "metadata": meta,
                "spec": dict(spec),
                "status": old_status if status is None else dict(status),
            }
        )

    def bring_back(self, doc: Doc) -> Doc:
        """Writes an object as a declaration in TF state remembers it: its uid, its age, its labels and spec.

        Only for a rebuild on an empty database. Raises AlreadyExists.
        """
        kind, meta = REGISTRY.kind(doc["kind"]), dict(doc["metadata"])
        namespace = meta.get("namespace", "")
        if self.tx.get(kind.kind, namespace, meta["name"]) is not None:
            raise AlreadyExists(
                f'{kind.plural} "{meta["name"]}" already exists; a rebuild needs an empty database',
                kind=kind.plural,
                name=meta["name"],
            )
        meta["generation"] = 1
        if kind.finalizers:
            meta["finalizers"] = list(kind.finalizers)
        status = initial_status(kind.kind, format_time(self.tx.now)) | (doc.get("status") or {})
        return self.save({**doc, "apiVersion": API_VERSION, "metadata": meta, "status": status})

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Removes an object at once, whatever its finalizers; nothing when it is gone."""
        if self.tx.get(kind, namespace, name) is not None:
            self._delete(kind, namespace, name)

    def clear_finalizers(self, kind: str, namespace: str, name: str, *finalizers: str) -> None:
        """Takes finalizers away. With the last one a leaving object goes; a tenant takes all that lies in
        it."""
        current = self.tx.get(kind, namespace, name)
        if current is None:
            return
        meta = dict(current["metadata"])
        left = [item for item in meta.pop("finalizers", ()) if item not in finalizers]
        if left:
            meta["finalizers"] = left
        self.save_or_release({**current, "metadata": meta})

    # ------------------------------------------------------------ events

    def record_event(
        self, regarding: Doc, *, reason: str, message: str, warning: bool = False, action: str = ""
    ) -> None:
        """Tells what happened to an object. The same again raises the count.

        `reason` is one CamelCase word, `action` what the server did or tried. Nothing is recorded about a
        tenant that is gone.
        """
        ref = make_ref(regarding)
        namespace = ref["name"] if ref["kind"] == "Tenant" else ref.get("namespace", OUTSIDE_TENANTS)
        if namespace != OUTSIDE_TENANTS and self.tx.get("Tenant", "", namespace) is None:
            return
        name = f"{ref['name']}.{digest([ref['kind'], ref.get('uid'), reason, message])}"
        current, now = self.tx.get("Event", namespace, name), format_time(self.tx.now)
        if current is not None:
            self.tx.put({**current, "count": current["count"] + 1, "lastTimestamp": now})
            return
        self._drop_old_events(namespace)
        self.tx.put(
            {
                "apiVersion": API_VERSION,
                "kind": "Event",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "uid": str(uuids.uuid4()),
                    "creationTimestamp": now,
                },
                "involvedObject": ref,
                "reason": reason,
                "message": message,
                "type": "Warning" if warning else "Normal",
                "action": action,
                "count": 1,
                "firstTimestamp": now,
                "lastTimestamp": now,
                "source": {"component": "rezuscloud"},
                "reportingComponent": "rezuscloud",
                "reportingInstance": "",
            }
        )

    def _drop_old_events(self, namespace: str) -> None:
        """Makes room for one more."""
        events = self.tx.list("Event", namespace)
        surplus = len(events) + 1 - MAX_EVENTS
        if surplus > 0:
            events.sort(key=lambda event: (event["lastTimestamp"], int(event["metadata"]["resourceVersion"])))
            for event in events[:surplus]:
                self.tx.delete("Event", namespace, event["metadata"]["name"])

    # ------------------------------------------------------------ what holds after every write

    def save(self, doc: Doc) -> Doc:
        """Writes metadata and spec as they are, and keeps the tenant's revision true."""
        kind, meta = doc["kind"], doc["metadata"]
        if kind == "Tenant":
            doc = self._with_revision(doc)
        elif kind in ("NodeGroup", "Machine"):
            self._touched.add(meta["namespace"])
        return self.tx.put(doc)

    def save_or_release(self, doc: Doc) -> Doc:
        """Like `save`, but an object that is leaving and no longer held is removed instead."""
        if not is_leaving(doc) or doc["metadata"].get("finalizers"):
            return self.save(doc)
        kind, meta = doc["kind"], doc["metadata"]
        if kind == "Tenant":
            for inner in REGISTRY:
                if inner.namespaced:
                    for item in self.tx.list(inner.kind, meta["name"]):
                        self.tx.delete(inner.kind, meta["name"], item["metadata"]["name"])
        return self._delete(kind, meta.get("namespace", ""), meta["name"])

    def finish(self) -> None:
        """Brings the revision of every touched tenant up to date; the last act of a transaction."""
        for name in sorted(self._touched):
            tenant = self.tx.get("Tenant", "", name)
            if tenant is not None:
                self.tx.put(self._with_revision(tenant))
        self._touched.clear()

    def _delete(self, kind: str, namespace: str, name: str) -> Doc:
        if kind in ("NodeGroup", "Machine"):
            self._touched.add(namespace)
        return self.tx.delete(kind, namespace, name)

    def _with_revision(self, tenant: Doc) -> Doc:
        name = tenant["metadata"]["name"]
        content = declare(tenant, self.tx.list("NodeGroup", name), self.tx.list("Machine", name))
        status = {**(tenant.get("status") or {}), "declaredRevision": declared_revision(content)}
        return {**tenant, "status": status}


def initial_status(kind: str, now: str) -> Doc:
    """What can honestly be said of a new object before anybody has looked at it."""
    if kind != "Tenant":
        return {}
    return {
        "conditions": list(
            _first_conditions(
                now,
                ("Applied", "False", "Pending", "declared; nothing has been applied yet"),
                ("Ready", "Unknown", "NotObserved", "no machine has been observed yet"),
            )
        )
    }


def _first_conditions(now: str, *claims: tuple[str, str, str, str]) -> Iterable[Doc]:
    for type_, status, reason, message in claims:
        yield {
            "type": type_,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": 0,
            "lastTransitionTime": now,
        }


def _owner_reference(owner: Doc) -> Doc:
    meta = owner["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": owner["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
