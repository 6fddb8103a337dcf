"""Owns background tasks: a named list that is started in one order and stopped in the reverse one.

A task that raises is logged with its name and started again, later each time; so one failing task neither
dies in silence nor takes the house down with it. It does not know what the tasks do, and starts no processes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 30.0


def backoff_s(failures: int) -> float:
    """Seconds to wait after so many failures in a row (1, 2, …): 0.1 doubled each time, at most 30.

    Jitter takes away up to half, so that tasks that failed together do not come back together.
    """
    delay: float = min(FIRST_DELAY_S * 2 ** min(failures - 1, 32), LONGEST_DELAY_S)
    return delay * random.uniform(0.5, 1)  # noqa: S311 - jitter is no secret


@dataclass
class _Entry:
    name: str
    state: str = "running"
    restarts: int = 0
    last_error: str = ""
    task: asyncio.Task[None] = field(init=False)


class TaskSupervisor:
    """The background tasks of a server, by name."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def start(self, name: str, run: Callable[[], Awaitable[None]], *, restart: bool = True) -> None:
        """Starts `run` in the background.

        When it returns, the task has ended. When it raises, it is run again after `backoff_s`, unless
        `restart` is false. A run of more than 30 s forgets earlier failures.

        Raises ValueError when a task of this name is there already.
        """
        if name in self._entries:
            raise ValueError(f"there is a task {name!r} already")
        entry = self._entries[name] = _Entry(name)
        entry.task = asyncio.create_task(_supervise(entry, run, restart), name=name)

    async def stop(self, name: str) -> None:
        """Cancels one task, waits for its end and forgets it. Does nothing when there is none."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            entry.task.cancel()
            await asyncio.wait([entry.task])

    async def close(self) -> None:
        """Stops all tasks, the last started first, each one only when the one before it has ended."""
        while self._entries:
            await self.stop(next(reversed(self._entries)))

    def describe(self) -> list[dict[str, Any]]:
        """One entry a task: `name`, `state`, `restarts`, `last_error` ("" when it never raised).

        `state` is "running"; "failed" (it raised, and waits for its restart or stays so); "ended".
        """
        return [
            {"name": e.name, "state": e.state, "restarts": e.restarts, "last_error": e.last_error}
            for e in self._entries.values()
        ]


async def _supervise(entry: _Entry, run: Callable[[], Awaitable[None]], restart: bool) -> None:
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        entry.state = "running"
        began = loop.time()
        try:
            await run()
        except (Exception, asyncio.CancelledError) as error:
            if _is_being_stopped():
                raise
            entry.state = "failed"
            entry.last_error = f"{type(error).__name__}: {error}"
            if not restart:
                log.exception("task %s failed and is not started again", entry.name)
                return
            failures = 1 if loop.time() - began > LONGEST_DELAY_S else failures + 1
            delay_s = backoff_s(failures)
            log.exception("task %s failed; it starts again in %.1f s", entry.name, delay_s)
            await asyncio.sleep(delay_s)
            entry.restarts += 1
        else:
            entry.state = "ended"
            return


def _is_being_stopped() -> bool:
    """Tells our own cancellation from one that `run` got from something it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
