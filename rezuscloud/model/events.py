"""Owns `ResourceEvent`: one committed change of one resource. It is born in the store, never elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rezuscloud.model.meta import Doc


class ChangeType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class ResourceEvent:
    """A change as the log holds it.

    `version` is the log's number and the resourceVersion inside `doc`. `before` is the resource as it was
    (None when it was ADDED, or when the log no longer knows), for selectors that an update leaves or enters.
    """

    version: int
    type: ChangeType
    doc: Doc
    before: Doc | None = None

    @property
    def kind(self) -> str:
        return str(self.doc["kind"])
