"""Owns resources in memory and the change log: what GET, LIST and watch are served from.

Rows are written by `db.py`; this is the copy that is updated after each commit, so reading costs no I/O and
goes on when the disk is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import orjson

from rezuscloud.model.errors import Expired
from rezuscloud.model.events import ChangeType, ResourceEvent
from rezuscloud.model.meta import Doc

_SORTED = orjson.OPT_SORT_KEYS

MISSING: Any = object()
"""Stands in an overlay for a resource that was deleted."""


class Key(NamedTuple):
    """Where a resource lies; sorts as lists are ordered."""

    kind: str
    namespace: str
    name: str


class Stored(NamedTuple):
    """A resource and its bytes, made once. Nobody may change `doc`."""

    doc: Doc
    raw: bytes

    @classmethod
    def of(cls, raw: bytes) -> Stored:
        return cls(orjson.loads(raw), raw)


def encode(doc: Doc) -> Stored:
    return Stored(doc, orjson.dumps(doc))


def with_version(doc: Doc, version: str) -> Doc:
    """A copy with that resourceVersion; what is not on the way to it is shared."""
    return {**doc, "metadata": {**doc["metadata"], "resourceVersion": version}}


def key_of(doc: Doc) -> Key:
    meta = doc["metadata"]
    return Key(doc["kind"], meta.get("namespace") or "", meta["name"])


def is_same(doc: Doc, current: Doc) -> bool:
    """Whether a write of `doc` would change nothing. Its resourceVersion does not count.

    Python holds 1, 1.0 and True for equal, JSON does not, so equal documents are compared as bytes too.
    """
    doc = with_version(doc, current["metadata"]["resourceVersion"])
    return doc == current and orjson.dumps(doc, option=_SORTED) == orjson.dumps(current, option=_SORTED)


class Objects:
    """All resources as committed."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[Key, Stored]] = {}
        self._order: dict[str, list[Key]] = {}
        self._by_uid: dict[str, Key] = {}

    def get(self, kind: str, namespace: str, name: str) -> Stored | None:
        found = self._kinds.get(kind)
        return found.get(Key(kind, namespace, name)) if found else None

    def list(self, kind: str, namespace: str | None = None) -> list[Stored]:
        """Ordered by namespace and name; all tenants' when `namespace` is None."""
        found, order = self._kinds.get(kind, {}), self._order.get(kind, [])
        if namespace is None:
            return [found[key] for key in order]
        start = bisect_left(order, Key(kind, namespace, ""))
        result = []
        for key in islice(order, start, None):
            if key.namespace != namespace:
                break
            result.append(found[key])
        return result

    def by_uid(self, uid: str) -> Stored | None:
        key = self._by_uid.get(uid)
        return self.get(*key) if key else None

    def touch(self, kind: str, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Changes status keys in memory only: no row, no event, no new version. For what is observed often
        and matters little, such as `observedAt`."""
        stored = self.get(kind, namespace, name)
        if stored is not None:
            doc = {**stored.doc, "status": {**(stored.doc.get("status") or {}), **status}}
            self._kinds[kind][Key(kind, namespace, name)] = encode(doc)

    def set(self, key: Key, stored: Stored | None) -> None:
        """Only for the writer: what was committed."""
        kind, order = self._kinds.setdefault(key.kind, {}), self._order.setdefault(key.kind, [])
        if stored is None:
            if (gone := kind.pop(key, None)) is not None:
                del order[bisect_left(order, key)]
                self._by_uid.pop(gone.doc["metadata"].get("uid", ""), None)
            return
        if key not in kind:
            insort(order, key)
        elif (old_uid := kind[key].doc["metadata"].get("uid")) != stored.doc["metadata"].get("uid"):
            self._by_uid.pop(old_uid or "", None)
        kind[key] = stored
        if uid := stored.doc["metadata"].get("uid"):
            self._by_uid[uid] = key


class ChangeLog:
    """The newest committed changes, by version."""

    def __init__(self, kept: int) -> None:
        self.version = 0
        """The newest version; every resource's resourceVersion is one of these numbers."""
        self._events: deque[ResourceEvent] = deque(maxlen=kept)
        self._oldest = 0
        """A watch may start at this version or a later one."""

    def since(self, version: int) -> list[ResourceEvent]:
        """All changes after a version. Raises Expired when some of them are no longer known."""
        if version >= self.version:
            return []
        if version < self._oldest:
            raise Expired(
                f"too old resource version: {version} ({self._oldest}); list anew and go on from there"
            )
        behind = self.version - version
        if behind <= len(self._events) // 2:
            found: list[ResourceEvent] = []
            for event in reversed(self._events):
                if event.version <= version:
                    break
                found.append(event)
            return found[::-1]
        return [event for event in self._events if event.version > version]

    def extend(self, events: Iterable[ResourceEvent]) -> None:
        """Only for the writer."""
        for event in events:
            if self._events and len(self._events) == self._events.maxlen:
                self._oldest = self._events[0].version
            self._events.append(event)
            self.version = event.version

    def load(self, rows: Iterable[tuple[int, str, bytes]], last: int) -> None:
        """Only at the start: the rows in order, and the last version ever given."""
        known: dict[str, Doc] = {}
        for version, type_, raw in rows:
            doc = orjson.loads(raw)
            uid = doc["metadata"].get("uid", "")
            if not self._events:
                self._oldest = version - 1
            self._events.append(ResourceEvent(version, ChangeType(type_), doc, known.get(uid)))
            known[uid] = doc
        self.version = last
        if not self._events:
            self._oldest = last
