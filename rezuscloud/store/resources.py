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
_RECENT = 256
"""Changes that are kept decoded."""


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
        return self.at(Key(kind, namespace, name))

    def at(self, key: Key) -> Stored | None:
        found = self._kinds.get(key.kind)
        return found.get(key) if found else None

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
                self._forget_uid(gone, key)
            return
        if key not in kind:
            insort(order, key)
        else:
            self._forget_uid(kind[key], key)
        kind[key] = stored
        if uid := stored.doc["metadata"].get("uid"):
            self._by_uid[uid] = key

    def _forget_uid(self, stored: Stored, key: Key) -> None:
        uid = stored.doc["metadata"].get("uid", "")
        if self._by_uid.get(uid) == key:
            del self._by_uid[uid]


MAX_LOG_BYTES = 64 * 2**20
"""Documents that are megabytes long must not fill the memory: of those fewer are kept."""


class Change:
    """One committed change as the log keeps it: bytes, which cost a fifth of what documents do. The newest
    ones also keep their event, which is asked for again and again."""

    __slots__ = ("_event", "before", "kind", "raw", "type", "version")

    def __init__(self, event: ResourceEvent, raw: bytes, before: bytes | None) -> None:
        self.version = event.version
        self.type = event.type
        self.kind = event.kind
        self.raw = raw
        self.before = before
        """The resource as it was, when that is known."""
        self._event: ResourceEvent | None = event

    @property
    def event(self) -> ResourceEvent:
        return self._event or self.decode({})

    def decode(self, known: dict[int, Doc]) -> ResourceEvent:
        """`known` holds documents by the identity of their bytes: the next change of the same resource
        begins where this one ends."""
        if self._event is not None:
            return self._event
        for raw in (self.before, self.raw):
            if raw is not None and id(raw) not in known:
                known[id(raw)] = orjson.loads(raw)
        before = known[id(self.before)] if self.before is not None else None
        return ResourceEvent(self.version, self.type, known[id(self.raw)], before)

    def forget(self) -> None:
        self._event = None


class ChangeLog:
    """The newest committed changes, by version: so many, but no more than fit into MAX_LOG_BYTES."""

    def __init__(self, kept: int) -> None:
        self.version = 0
        """The newest version; every resource's resourceVersion is one of these numbers."""
        self._kept = kept
        self._changes: deque[Change] = deque()
        self._bytes = 0
        self._oldest = 0
        """A watch may start at this version or a later one."""

    @property
    def oldest_kept(self) -> int:
        """The version of the oldest change that is known; all before it may be removed."""
        return self._changes[0].version if self._changes else self.version

    def since(self, version: int, kind: str | None = None) -> list[ResourceEvent]:
        """All changes after a version, of one kind or of all (None). Raises Expired when some of them are no
        longer known."""
        if version >= self.version:
            return []
        if version < self._oldest:
            raise Expired(
                f"too old resource version: {version} ({self._oldest}); list anew and go on from there"
            )
        found: list[Change] = []
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if kind in (None, change.kind):
                found.append(change)
        known: dict[int, Doc] = {}
        return [change.decode(known) for change in reversed(found)]

    def append(self, change: Change) -> None:
        """Only for the writer."""
        self._add(change)
        while len(self._changes) > self._kept or self._bytes > MAX_LOG_BYTES:
            gone = self._changes.popleft()
            self._oldest = gone.version
            self._bytes -= len(gone.raw)
        self.version = change.version
        if len(self._changes) > _RECENT:
            self._changes[-_RECENT - 1].forget()

    def _add(self, change: Change) -> None:
        self._changes.append(change)
        self._bytes += len(change.raw)

    def load(self, rows: Iterable[tuple[int, str, bytes]], last: int) -> None:
        """Only at the start: the rows in order, and the last version ever given."""
        newest: dict[Key, bytes] = {}
        for version, word, raw in rows:
            doc, type_ = orjson.loads(raw), ChangeType(word)
            if not self._changes:
                self._oldest = version - 1
            key = key_of(doc)
            change = Change(ResourceEvent(version, type_, doc), raw, newest.pop(key, None))
            change.forget()
            self._add(change)
            if type_ is not ChangeType.DELETED:
                newest[key] = raw
        self.version = last
        if not self._changes:
            self._oldest = last
