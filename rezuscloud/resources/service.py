"""Owns the one door: every reading and every change of a resource, whoever asks.

Each method asks `access/policy` first, judges with `admission.py`, and writes in one transaction. Events,
runs and files are made by others, from what was committed; the service does not know the queue.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from rezuscloud.access.identity import Identity
from rezuscloud.access.policy import authorize
from rezuscloud.model.declaration import is_leaving
from rezuscloud.model.errors import BadRequest, Conflict, Forbidden, Invalid, NotFound
from rezuscloud.model.meta import (
    LABEL_NODE_GROUP,
    Doc,
    Match,
    SelectorError,
    parse_field_selector,
    parse_label_selector,
)
from rezuscloud.plugin.types import Provider
from rezuscloud.resources import causes
from rezuscloud.resources.admission import Admission, DropUnknown, check_version, not_found, own
from rezuscloud.resources.desk import Desk
from rezuscloud.resources.manifests import apply_documents
from rezuscloud.resources.paging import Page, Position, items_after, list_as_of
from rezuscloud.resources.patch import apply_patch
from rezuscloud.resources.registry import REGISTRY, Kind
from rezuscloud.store.db import Store, Transaction
from rezuscloud.store.resources import Stored

__all__ = ["Desk", "DropUnknown", "Page", "ResourceService", "parse_selectors"]

T = TypeVar("T")


class _Rehearsed(Exception):
    """Ends a dry run: the transaction is thrown away, the result is kept."""

    def __init__(self, result: Any) -> None:
        self.result = result


class ResourceService:
    """Get, list, create, replace, patch and delete for every kind of the registry.

    `kind` is always the kind's name ("NodeGroup"), `namespace` the tenant's name, or "" for what lies in
    none. A method that takes `drop` refuses unknown fields (400) unless `drop` is given, which then names the
    fields that were dropped. `dry_run` judges and computes the result, and stores nothing.
    """

    def __init__(self, store: Store, providers: Mapping[str, Provider]) -> None:
        self._store = store
        self._admission = Admission(providers)

    # ------------------------------------------------------------ reading

    def get(self, identity: Identity, kind: str, namespace: str, name: str) -> Stored:
        """One object. Raises NotFound."""
        entry = REGISTRY.kind(kind)
        authorize(identity, "get", entry.plural, namespace or None)
        found = self._store.objects.get(kind, namespace, name)
        if found is None:
            raise not_found(entry, name)
        return found

    def list(
        self,
        identity: Identity,
        kind: str,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 0,
        continue_: str = "",
    ) -> Page:
        """The objects of a kind, of one tenant or of all (None). `limit` 0 means no pages.

        Raises BadRequest for selectors and tokens that cannot be read, Expired for a token that is too old.
        """
        entry = REGISTRY.kind(kind)
        authorize(identity, "list", entry.plural, namespace or None)
        version = self._store.log.version
        if continue_:
            position = Position.from_token(continue_, entry.plural)
            version = position.version
            items = items_after(list_as_of(self._store, kind, namespace, version), position)
        else:
            items = self._store.objects.list(kind, namespace)
        matches = parse_selectors(entry, labels, fields)
        if matches is not None:
            items = [item for item in items if matches(item.doc)]
        if limit <= 0 or len(items) <= limit:
            return Page(items, version)
        last = items[limit - 1].doc["metadata"]
        token = Position(entry.plural, version, last.get("namespace", ""), last["name"]).to_token()
        return Page(items[:limit], version, token, len(items) - limit if matches is None else None)

    # ------------------------------------------------------------ writing

    async def create(
        self,
        identity: Identity,
        kind: str,
        namespace: str,
        doc: Doc,
        *,
        dry_run: bool = False,
        drop: DropUnknown | None = None,
    ) -> Stored:
        """A new object. Raises AlreadyExists, Invalid, BadRequest, Forbidden; NotFound for its tenant."""
        entry = REGISTRY.kind(kind)
        self._permit(identity, "create", entry, namespace)
        doc = _object(doc)

        def write(desk: Desk) -> Doc:
            return desk.save(self._admission.new(desk, entry, namespace, doc, drop, known={}))

        return await self._write(write, dry_run)

    async def replace(
        self,
        identity: Identity,
        kind: str,
        namespace: str,
        name: str,
        doc: Doc,
        *,
        dry_run: bool = False,
        drop: DropUnknown | None = None,
    ) -> Stored:
        """An object as `doc` says; its status and the system's metadata stay. Raises NotFound, Conflict."""
        entry = REGISTRY.kind(kind)
        self._permit(identity, "update", entry, namespace)
        doc = _object(doc)

        def write(desk: Desk) -> Doc:
            current = _current(desk, entry, namespace, name)
            return desk.save_or_release(self._admission.changed(entry, current, doc, drop))

        return await self._write(write, dry_run)

    async def patch(
        self,
        identity: Identity,
        kind: str,
        namespace: str,
        name: str,
        patch: Any,
        content_type: str,
        *,
        subresource: str = "",
        dry_run: bool = False,
        drop: DropUnknown | None = None,
    ) -> Stored:
        """An object after a merge patch or a JSON patch; `subresource` is "", "status" or "scale".

        Raises UnsupportedMediaType for other patches, Invalid for one that does not fit the current object.
        """
        entry = REGISTRY.kind(kind)
        self._permit(identity, "patch", entry, namespace, subresource)

        def write(desk: Desk) -> Doc:
            current = _current(desk, entry, namespace, name)
            seen = scale_of(current) if subresource == "scale" else current
            doc = own(apply_patch(seen, patch, content_type))
            return self._save(desk, entry, current, doc, subresource, drop)

        return await self._write(write, dry_run)

    async def replace_status(
        self,
        identity: Identity,
        kind: str,
        namespace: str,
        name: str,
        doc: Doc,
        *,
        dry_run: bool = False,
    ) -> Stored:
        """An object with an admin's own status keys; all but `status` is ignored, the system's keys stay."""
        return await self._replace_part(identity, kind, namespace, name, doc, "status", dry_run)

    async def replace_scale(
        self,
        identity: Identity,
        kind: str,
        namespace: str,
        name: str,
        doc: Doc,
        *,
        dry_run: bool = False,
    ) -> Stored:
        """A node group with the `spec.replicas` of a Scale object; `scale_of` shows the result as one."""
        return await self._replace_part(identity, kind, namespace, name, doc, "scale", dry_run)

    async def delete(
        self,
        identity: Identity,
        kind: str,
        namespace: str,
        name: str,
        *,
        preconditions: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> tuple[Doc, bool]:
        """Asks an object to leave. True when it is gone now, False while finalizers hold it.

        Asking again changes nothing. `preconditions` (uid, resourceVersion) that do not hold raise Conflict.
        """
        entry = REGISTRY.kind(kind)
        self._permit(identity, "delete", entry, namespace)

        def write(desk: Desk) -> tuple[Doc, bool]:
            current = _current(desk, entry, namespace, name)
            _check_preconditions(entry, current, preconditions or {})
            if is_leaving(current):
                return current, False
            doc = desk.save_or_release(self._admission.leaving(desk, entry, current))
            return doc, desk.get(kind, namespace, name) is None

        doc, is_gone = await self._transact(write, dry_run)
        return (self._unwritten(doc) if dry_run else doc), is_gone

    async def apply_manifests(
        self,
        identity: Identity,
        docs: Sequence[Doc],
        *,
        dry_run: bool = False,
        drop: DropUnknown | None = None,
    ) -> builtins.list[Doc]:
        """Creates or updates all documents in one transaction, or none. The results are in the order given.

        What is wrong in any of them is told at once, with its document: `items[1].spec.replicas`.
        """
        documents = [own(doc) for doc in docs]

        def write(desk: Desk) -> builtins.list[Doc]:
            def permit(verb: str, kind: Kind, namespace: str) -> None:
                self._permit(identity, verb, kind, namespace)

            return apply_documents(desk, self._admission, documents, permit, drop)

        results = await self._transact(write, dry_run)
        return [self._unwritten(doc) for doc in results] if dry_run else results

    async def transact(self, fn: Callable[[Desk], T]) -> T:
        """The system's own writes: all that `fn` does at the desk, in one transaction.

        `fn` runs in the event loop and must be quick; what it writes is judged by nobody.
        """
        return await self._transact(fn, False)

    # ------------------------------------------------------------ how

    async def _replace_part(
        self, identity: Identity, kind: str, namespace: str, name: str, doc: Doc, part: str, dry_run: bool
    ) -> Stored:
        entry = REGISTRY.kind(kind)
        self._permit(identity, "update", entry, namespace, part)
        doc = _object(doc)

        def write(desk: Desk) -> Doc:
            current = _current(desk, entry, namespace, name)
            return self._save(desk, entry, current, doc, part, None)

        return await self._write(write, dry_run)

    def _save(
        self, desk: Desk, kind: Kind, current: Doc, doc: Doc, subresource: str, drop: DropUnknown | None
    ) -> Doc:
        if subresource == "status":
            return desk.tx.put(self._admission.with_status(kind, current, doc))
        if subresource == "scale":
            check_version(kind, current, doc)
            doc = _scaled(kind, current, doc)
        return desk.save_or_release(self._admission.changed(kind, current, doc, drop))

    def _permit(
        self, identity: Identity, verb: str, kind: Kind, namespace: str, subresource: str = ""
    ) -> None:
        """Raises Forbidden: because of who asks, or because nobody but the system does this."""
        asked = f"{kind.plural}/{subresource}" if subresource else kind.plural
        authorize(identity, verb, asked, namespace or None)
        if subresource and subresource not in kind.subresources:
            raise NotFound(f"{kind.plural} have no subresource {subresource!r}", kind=kind.plural)
        why = ""
        if subresource == "status" and identity.role not in ("admin", "system"):
            why = "status is written by the system and by admins"
        elif subresource == "status" and kind.writable == "system" and not kind.user_metadata:
            why = "its status is written by the system alone"
        elif not subresource and verb not in kind.verbs:
            why = {"create": kind.how_made, "delete": kind.how_removed}.get(
                verb, f"it is written by the system; {kind.how_made}"
            )
        if why:
            raise Forbidden(f"{asked} is forbidden: cannot {verb} resource: {why}", kind=kind.plural)

    async def _write(self, fn: Callable[[Desk], Doc], dry_run: bool) -> Stored:
        doc = await self._transact(fn, dry_run)
        if dry_run:
            doc = self._unwritten(doc)
        stored = self._committed(doc)
        # Another write of the same commit group may have changed the object once more.
        if stored is not None and stored.doc is doc:
            return stored
        return Stored(doc, orjson.dumps(doc))

    def _committed(self, doc: Doc) -> Stored | None:
        meta = doc["metadata"]
        return self._store.objects.get(doc["kind"], meta.get("namespace", ""), meta["name"])

    def _unwritten(self, doc: Doc) -> Doc:
        """The result of a dry run with the version that the object still has, so that `kubectl diff` shows
        only what would change."""
        meta = {key: value for key, value in doc["metadata"].items() if key != "resourceVersion"}
        current = self._committed(doc)
        if current is not None:
            meta["resourceVersion"] = current.doc["metadata"]["resourceVersion"]
        return {**doc, "metadata": meta}

    async def _transact(self, fn: Callable[[Desk], T], dry_run: bool) -> T:
        def run(tx: Transaction) -> T:
            desk = Desk(tx)
            result = fn(desk)
            desk.finish()
            if dry_run:
                raise _Rehearsed(result)
            return result

        try:
            return await self._store.transact(run)
        except _Rehearsed as rehearsed:
            result: T = rehearsed.result
            return result


def parse_selectors(kind: Kind, labels: str, fields: str) -> Match | None:
    """One test for both selectors, or None when there is nothing to test. Raises BadRequest."""
    try:
        tests = [
            *([parse_label_selector(labels)] if labels else []),
            *([parse_field_selector(fields, kind.selectable_fields)] if fields else []),
        ]
    except SelectorError as error:
        raise BadRequest(f"the selector cannot be read: {error}") from None
    if len(tests) == 2:
        return lambda doc: tests[0](doc) and tests[1](doc)
    return tests[0] if tests else None


def scale_of(group: Doc) -> Doc:
    """A node group as autoscaling/v1 Scale, which `kubectl scale` reads and writes."""
    meta = group["metadata"]
    shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: meta[key] for key in shown if key in meta},
        "spec": {"replicas": group["spec"]["replicas"]},
        "status": {
            "replicas": (group.get("status") or {}).get("replicas", 0),
            "selector": f"{LABEL_NODE_GROUP}={meta['name']}",
        },
    }


def _scaled(kind: Kind, current: Doc, scale: Doc) -> Doc:
    spec = scale.get("spec")
    if not isinstance(spec, dict) or "replicas" not in spec:
        name = current["metadata"]["name"]
        raise Invalid.of(kind.kind, name, [causes.required(("spec", "replicas"))])
    return {**current, "spec": {**current["spec"], "replicas": spec["replicas"]}}


def _object(doc: Any) -> Doc:
    copy = own(doc)
    if not isinstance(copy, dict):
        raise BadRequest("the body must be a JSON object")
    return copy


def _current(desk: Desk, kind: Kind, namespace: str, name: str) -> Doc:
    current = desk.get(kind.kind, namespace, name)
    if current is None:
        raise not_found(kind, name)
    return current


def _check_preconditions(kind: Kind, current: Doc, preconditions: Mapping[str, str]) -> None:
    meta = current["metadata"]
    for key, words in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        wanted = preconditions.get(key)
        if wanted is not None and wanted != meta[key]:
            raise Conflict(
                f'Operation cannot be fulfilled on {kind.plural} "{meta["name"]}": Precondition failed: '
                f"{words} in precondition: {wanted}, {words} in object meta: {meta[key]}",
                kind=kind.plural,
                name=meta["name"],
            )
