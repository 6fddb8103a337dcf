"""Owns the patience with failed logins: how long an account or an address must wait for its next try.

It knows nothing of passwords. State lives in memory only: a restart forgives.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass
class _Tries:
    failures: int = 0
    last: float = 0.0
    blocked_until: float = 0.0


class Throttle:
    """Counts tries per key; after `free` tries in a row each further one doubles the wait.

    A try is charged before it is judged, so that many at once cannot slip through; success forgives.
    Keys without a try for `forget_s` are forgotten, and at most `capacity` keys are remembered.
    """

    def __init__(
        self,
        *,
        free: int,
        cap_s: float,
        forget_s: float = 900.0,
        capacity: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free = free
        self._cap_s = cap_s
        self._forget_s = forget_s
        self._capacity = capacity
        self._clock = clock
        self._tries: OrderedDict[Hashable, _Tries] = OrderedDict()

    def wait_s(self, key: Hashable) -> float:
        """Seconds until this key may try again; 0 when it may now."""
        tries = self._tries.get(key)
        return max(0.0, tries.blocked_until - self._clock()) if tries else 0.0

    def charge(self, key: Hashable) -> None:
        """Counts one try, as if it had failed."""
        now = self._clock()
        tries = self._tries.get(key)
        if tries is None or now - tries.last > self._forget_s:
            tries = self._tries[key] = _Tries()
        tries.failures += 1
        tries.last = now
        over = tries.failures - self._free
        if over >= 0:
            tries.blocked_until = now + min(2.0 ** min(over, 30), self._cap_s)
        self._tries.move_to_end(key)
        while len(self._tries) > self._capacity:
            self._tries.popitem(last=False)

    def forgive(self, key: Hashable) -> None:
        """Success: the key starts anew."""
        self._tries.pop(key, None)
