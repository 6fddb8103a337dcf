"""Owns how many tofu processes run at once, by a fixed bound and by the memory that is free right now."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

RUN_MIB = 400
"""What one run may need: about 60 MB for tofu and its state, the rest for its OpenTofu providers."""

_MEMORY_POLL_S = 1.0


def default_limit() -> int:
    """As many runs as cores allow twice over, but no more than memory holds."""
    return max(1, min(2 * (os.cpu_count() or 1), _total_mib() // RUN_MIB))


def _total_mib() -> int:
    total = _meminfo("MemTotal")
    limit = Path("/sys/fs/cgroup/memory.max")
    with contextlib.suppress(OSError, ValueError):  # no container: the machine's own memory counts
        total = min(total, int(limit.read_text()) // 2**20)
    return total


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) // 1024
    raise LookupError(key)


class RunSlots:
    """A bound on runs. Whoever waits is told first (`on_wait`), so that waiting is never silent."""

    def __init__(self, limit: int, *, free_mib: Callable[[], int] | None = None) -> None:
        self.limit = limit
        self.active = 0
        self.waiting = 0
        self._free_mib = free_mib or (lambda: _meminfo("MemAvailable"))
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def take(self, on_wait: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
        """Holds one slot for the block. One run is always allowed, however little memory is free."""
        if (why := self._obstacle()) is not None:
            self.waiting += 1
            try:
                await on_wait(why)
                async with self._freed:
                    while self._obstacle() is not None:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._freed.wait(), _MEMORY_POLL_S)
                    self.active += 1
            finally:
                self.waiting -= 1
        else:
            self.active += 1
        try:
            yield
        finally:
            self.active -= 1
            async with self._freed:
                self._freed.notify()

    def _obstacle(self) -> str | None:
        if self.active >= self.limit:
            return f"{self.active} runs are going on, which is the limit"
        if self.active and (free := self._free_mib()) < RUN_MIB:
            return f"only {free} MiB of memory are free, a run may need {RUN_MIB}"
        return None
