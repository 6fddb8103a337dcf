"""Owns the apply queue: one lane per tenant, one worker per lane, and nothing about what a turn does.

A lane waits until its schedule is due, then calls `step`. Level-triggered: an event only means "look again",
so lost, doubled or merged events change nothing but delay. What a step raises becomes a hold or a backoff;
whatever holds a tenant back is reported to `say`, in one place, with the time it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rezuscloud.model.errors import ApiError
from rezuscloud.model.meta import utc_now
from rezuscloud.model.tenant import HeldBy
from rezuscloud.reconcile.outcome import Held, Hold, RunFailed
from rezuscloud.reconcile.schedule import Schedule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turn:
    """Why a tenant is looked at. `forced`: a person asked for a run now. `resync`: compare with the world."""

    tenant: str
    forced: bool
    resync: bool


Step = Callable[[Turn], Awaitable[None]]
Say = Callable[[str, Sequence[Hold]], Awaitable[None]]


@dataclass
class _Lane:
    tenant: str
    schedule: Schedule
    poked: asyncio.Event = field(default_factory=asyncio.Event)
    forced: bool = False
    resync_at: float | None = None
    said_until: float | None = None
    last_failure: str = ""
    is_busy: bool = False
    task: asyncio.Task[None] | None = None


class ApplyQueue:
    """The lanes of all tenants."""

    def __init__(self, step: Step, say: Say, *, quiet_s: float, cap_s: float, resync_s: float) -> None:
        self._step = step
        self._say = say
        self._quiet_s = quiet_s
        self._cap_s = cap_s
        self._resync_s = resync_s
        self._lanes: dict[str, _Lane] = {}
        self._is_closing = False

    @property
    def depth(self) -> int:
        """How many tenants wait for their turn."""
        return sum(lane.schedule.due is not None for lane in self._lanes.values())

    @property
    def busy(self) -> int:
        return sum(lane.is_busy for lane in self._lanes.values())

    def changed(self, tenant: str) -> None:
        """What is declared has changed: (re)starts the debounce."""
        lane = self._lane(tenant)
        was_due = lane.schedule.due
        lane.schedule.changed(_now())
        now_due = lane.schedule.due
        assert now_due is not None
        if was_due is None or now_due < was_due:  # a lane that waits for an earlier time looks again anyway
            lane.poked.set()

    def wake(self, tenant: str, *, forced: bool = False) -> None:
        """Look at the tenant now."""
        lane = self._lane(tenant)
        lane.forced = lane.forced or forced
        lane.schedule.wake(_now())
        lane.poked.set()

    def forget(self, tenant: str) -> None:
        """The tenant is gone: its lane ends when it is done with its turn."""
        lane = self._lanes.pop(tenant, None)
        if lane is not None and lane.task is not None and not lane.is_busy:
            lane.task.cancel()

    async def close(self) -> None:
        """No new turns; waits for the turns that are going on. Interrupting them is the caller's matter."""
        self._is_closing = True
        tasks = []
        for lane in self._lanes.values():
            if lane.task is not None:
                tasks.append(lane.task)
                lane.poked.set()
                if not lane.is_busy:
                    lane.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _lane(self, tenant: str) -> _Lane:
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = _Lane(tenant, Schedule(quiet_s=self._quiet_s, cap_s=self._cap_s))
            # Spread over the period, so that after a start not all tenants are compared at once.
            self._plan_resync(lane, share=random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            self._lanes[tenant] = lane
            if not self._is_closing:
                lane.task = asyncio.create_task(self._serve(lane), name=f"lane:{tenant}")
        return lane

    def _plan_resync(self, lane: _Lane, share: float = 1.0) -> None:
        lane.resync_at = _now() + share * self._resync_s if self._resync_s else None

    async def _serve(self, lane: _Lane) -> None:
        while not self._is_closing and self._lanes.get(lane.tenant) is lane:
            lane.poked.clear()
            due = lane.schedule.due
            at = min((t for t in (due, lane.resync_at) if t is not None), default=None)
            delay = None if at is None else at - _now()
            if delay is None or delay > 0:
                if due is not None:
                    await self._say_waiting(lane, due)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(lane.poked.wait(), delay)
                continue
            await self._take_turn(lane, resync=due is None or due > _now())

    async def _take_turn(self, lane: _Lane, *, resync: bool) -> None:
        turn = Turn(lane.tenant, forced=lane.forced, resync=resync)
        lane.schedule.take()
        lane.forced = False
        lane.said_until = None
        lane.is_busy = True
        try:
            await self._step(turn)
            lane.schedule.succeeded()
        except Held as held:
            await self._try_say(lane.tenant, [held.hold])
            if held.retry_after_s is not None:
                lane.schedule.look_again(_now() + held.retry_after_s)
        except RunFailed as failed:
            await self._back_off(lane, str(failed))
        except ApiError as error:
            log.warning("tenant %s: a turn failed: %s", lane.tenant, error.message)
            await self._back_off(lane, error.message)
        except Exception:
            log.exception("tenant %s: a turn failed in a way nobody foresaw", lane.tenant)
            await self._back_off(lane, "an internal error; the server's log has the details")
        finally:
            lane.is_busy = False
            self._plan_resync(lane)

    async def _back_off(self, lane: _Lane, message: str) -> None:
        lane.last_failure = message
        lane.schedule.failed(_now())

    async def _say_waiting(self, lane: _Lane, due: float) -> None:
        """Tells what the lane waits for; not more often than the end moves by a second."""
        if lane.said_until is not None and abs(due - lane.said_until) < 1.0:
            return
        lane.said_until = due
        until = utc_now() + dt.timedelta(seconds=due - _now())
        if lane.schedule.debounce_ends is not None:
            hold = Hold(HeldBy.DEBOUNCE, "waits for the changes to settle", until)
        elif lane.schedule.failures:
            tries = lane.schedule.failures
            hold = Hold(
                HeldBy.BACKOFF,
                f"try {tries} failed: {lane.last_failure}; the next one comes by itself",
                until,
            )
        else:
            return
        await self._try_say(lane.tenant, [hold])

    async def _try_say(self, tenant: str, holds: Sequence[Hold]) -> None:
        try:
            await self._say(tenant, holds)
        except Exception:
            log.exception("tenant %s: what holds it back could not be written", tenant)


def _now() -> float:
    return asyncio.get_running_loop().time()
