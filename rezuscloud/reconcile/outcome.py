"""Owns the words in which a reconcile step says how it ended, and what holds a change back.

A step returns, or raises one of these; each becomes a condition and a `heldBy` entry that a person can act
on. Any other exception is a bug: logged with its traceback and retried with backoff.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from rezuscloud.model.meta import Doc, format_time
from rezuscloud.model.tenant import HeldBy


@dataclass(frozen=True)
class Hold:
    """One entry of Tenant.status.heldBy. `since` is kept by whoever writes it."""

    by: HeldBy
    message: str
    until: dt.datetime | None = None
    who: str = ""

    def to_wire(self, since: str) -> Doc:
        entry = {"by": self.by.value, "message": self.message, "since": since}
        if self.until is not None:
            entry["until"] = format_time(self.until)
        if self.who:
            entry["who"] = self.who
        return entry


class Held(Exception):
    """Nothing more can be done now. Looked at again when the tenant changes, or after `retry_after_s`."""

    def __init__(self, hold: Hold, *, retry_after_s: float | None = None) -> None:
        super().__init__(hold.message)
        self.hold = hold
        self.retry_after_s = retry_after_s


class RunFailed(Exception):
    """A run ended without making the tenant true. Tried again with backoff."""
