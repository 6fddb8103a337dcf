"""Owns when a tenant's turn comes: trailing debounce with a cap, and backoff after failures.

Pure arithmetic on monotonic seconds; whoever waits is `queue.py`. So every rule is tested without waiting.
"""

from __future__ import annotations

import random
from collections.abc import Callable

BACKOFF_FIRST_S = 5.0
BACKOFF_LAST_S = 300.0


class Schedule:
    """When one tenant is due.

    A change makes it due after `quiet_s` without another change, at the latest `cap_s` after the first one.
    A failure makes it due after a growing delay; a change ends that delay, because it may be the cure.
    """

    def __init__(self, *, quiet_s: float, cap_s: float, jitter: Callable[[], float] = random.random) -> None:
        self._quiet_s = quiet_s
        self._cap_s = cap_s
        self._jitter = jitter
        self._first_change: float | None = None
        self._last_change = 0.0
        self._not_before: float | None = None
        self.failures = 0

    def changed(self, now: float) -> None:
        """The tenant was changed: starts or prolongs the debounce."""
        if self._first_change is None:
            self._first_change = now
        self._last_change = now
        self._not_before = None
        self.failures = 0

    def wake(self, now: float) -> None:
        """Look at the tenant as soon as possible, whatever was planned."""
        self._first_change = None
        self._not_before = now

    def failed(self, now: float) -> float:
        """Notes a failure and returns the delay until the next try, in seconds."""
        self.failures += 1
        delay = min(BACKOFF_FIRST_S * 2.0 ** (self.failures - 1), BACKOFF_LAST_S)
        delay *= 0.8 + 0.4 * self._jitter()
        self.look_again(now + delay)
        return delay

    def look_again(self, at: float) -> None:
        """Makes the tenant due at that time, unless it is due before."""
        if self._not_before is None or at < self._not_before:
            self._not_before = at

    def succeeded(self) -> None:
        self.failures = 0

    def take(self) -> None:
        """The turn has come: all that made it due is served by it."""
        self._first_change = None
        self._not_before = None

    @property
    def debounce_ends(self) -> float | None:
        """When the debounce ends, or None when no change is waiting."""
        if self._first_change is None:
            return None
        return min(self._last_change + self._quiet_s, self._first_change + self._cap_s)

    @property
    def due(self) -> float | None:
        """When the tenant is due, or None when nothing is waiting."""
        times = [at for at in (self.debounce_ends, self._not_before) if at is not None]
        return min(times) if times else None
