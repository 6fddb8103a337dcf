"""Owns pages of lists: how far a client has read, and the list as it was when it began.

All pages of one list show one moment. The moment is found again by undoing what the change log has seen
since; when the log no longer reaches back, the client lists anew (410 Expired).
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from rezuscloud.model.errors import BadRequest, Expired
from rezuscloud.model.events import ChangeType
from rezuscloud.model.meta import Doc
from rezuscloud.store.db import Store
from rezuscloud.store.resources import Stored


@dataclass(frozen=True, slots=True)
class Page:
    """One page, ordered by namespace and name. `version` is the moment that all pages of the list show."""

    items: Sequence[Stored]
    version: int
    continue_: str = ""
    """Token of the next page; empty on the last one."""
    remaining: int | None = None
    """How many items follow; None when there are none, or when selectors make the number unknown."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a client has read in the list of one kind."""

    kind: str
    version: int
    namespace: str
    name: str

    def to_token(self) -> str:
        fields = [self.kind, self.version, self.namespace, self.name]
        return base64.urlsafe_b64encode(orjson.dumps(fields)).decode().rstrip("=")

    @classmethod
    def from_token(cls, token: str, kind: str) -> Position:
        """Raises BadRequest for a token that was not made by `to_token` for this kind."""
        try:
            fields = orjson.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        except (binascii.Error, ValueError):
            fields = None
        match fields:
            case [str(named), int(version), str(namespace), str(name)] if named == kind and version >= 0:
                return cls(named, version, namespace, name)
        raise BadRequest(f"the continue token is not one of a list of {kind}; list again without it")


def items_after(items: Sequence[Stored], position: Position) -> Sequence[Stored]:
    """What follows a position in a sorted list."""
    return items[bisect_right(items, (position.namespace, position.name), key=_key) :]


def list_as_of(store: Store, kind: str, namespace: str | None, version: int) -> Sequence[Stored]:
    """The list as it was at `version`. Raises Expired when the log does not reach back to it."""
    if version > store.log.version:
        raise Expired("the continue token is of another history of this server; list again without it")
    now = store.objects.list(kind, namespace)
    before: dict[tuple[str, str], Doc | None] = {}
    for event in store.log.since(version, kind):
        meta = event.doc["metadata"]
        if namespace in (None, meta.get("namespace", "")):
            # Only the first change after the moment tells what was there at the moment.
            was = None if event.type is ChangeType.ADDED else event.before or event.doc
            before.setdefault((meta.get("namespace", ""), meta["name"]), was)
    if not before:
        return now
    items = [item for item in now if _key(item) not in before]
    items += [Stored(doc, orjson.dumps(doc)) for doc in before.values() if doc is not None]
    return sorted(items, key=_key)


def _key(item: Stored) -> tuple[str, str]:
    meta = item.doc["metadata"]
    return meta.get("namespace", ""), meta["name"]
