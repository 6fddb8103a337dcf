"""One lane per tenant: turns, holds, backoff."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from rezuscloud.model.tenant import HeldBy
from rezuscloud.reconcile.outcome import Held, Hold, RunFailed
from rezuscloud.reconcile.queue import ApplyQueue, Turn


class Desk:
    """Records turns and what is said; `trouble` is raised by the next turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.said: list[tuple[str, Sequence[Hold]]] = []
        self.trouble: list[BaseException | None] = []
        self.turned = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.at_once = 0
        self.most_at_once = 0

    async def step(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.turned.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.at_once -= 1
        if self.trouble and (error := self.trouble.pop(0)) is not None:
            raise error

    async def say(self, tenant: str, holds: Sequence[Hold]) -> None:
        self.said.append((tenant, holds))

    async def until(self, turns: int) -> None:
        async with asyncio.timeout(5):
            while len(self.turns) < turns:
                self.turned.clear()
                await self.turned.wait()


@pytest.fixture
async def desk() -> Desk:
    return Desk()


@pytest.fixture
async def queue(desk: Desk) -> AsyncIterator[ApplyQueue]:
    queue = ApplyQueue(desk.step, desk.say, quiet_s=0.05, cap_s=0.2, resync_s=0)
    yield queue
    await queue.close()


async def test_many_changes_in_a_moment_are_one_turn(desk: Desk, queue: ApplyQueue) -> None:
    for _ in range(100):
        queue.changed("a")
    await desk.until(1)
    await asyncio.sleep(0.15)
    assert len(desk.turns) == 1


async def test_a_stream_of_changes_cannot_starve_its_apply(desk: Desk, queue: ApplyQueue) -> None:
    started = asyncio.get_running_loop().time()
    while not desk.turns and asyncio.get_running_loop().time() - started < 2:
        queue.changed("a")
        await asyncio.sleep(0.01)
    assert 0.15 < asyncio.get_running_loop().time() - started < 1.0


async def test_a_change_during_a_turn_gets_a_turn_of_its_own(desk: Desk, queue: ApplyQueue) -> None:
    desk.gate = asyncio.Event()
    queue.wake("a")
    await desk.until(1)
    queue.changed("a")
    desk.gate.set()
    await desk.until(2)
    assert desk.most_at_once == 1


async def test_tenants_do_not_wait_for_each_other(desk: Desk, queue: ApplyQueue) -> None:
    desk.gate = asyncio.Event()
    for name in ("a", "b", "c"):
        queue.wake(name)
    await desk.until(3)
    assert (desk.most_at_once, queue.busy) == (3, 3)
    desk.gate.set()


async def test_what_holds_a_tenant_is_said_and_looked_at_again(desk: Desk, queue: ApplyQueue) -> None:
    hold = Hold(HeldBy.LOCK, "somebody works there")
    desk.trouble = [Held(hold, retry_after_s=0.05)]
    queue.wake("a")
    await desk.until(2)
    assert ("a", [hold]) in desk.said


async def test_a_failed_run_says_when_the_next_try_comes(desk: Desk, queue: ApplyQueue) -> None:
    desk.trouble = [RunFailed("run-1: no capacity")]
    queue.wake("a")
    await desk.until(1)
    async with asyncio.timeout(5):
        while not desk.said:
            await asyncio.sleep(0.01)
    (tenant, (hold,)) = desk.said[-1]
    assert (tenant, hold.by) == ("a", HeldBy.BACKOFF)
    assert "run-1: no capacity" in hold.message
    assert hold.until is not None


async def test_a_bug_in_a_turn_is_logged_and_does_not_end_the_lane(
    desk: Desk, queue: ApplyQueue, caplog: pytest.LogCaptureFixture
) -> None:
    desk.trouble = [ZeroDivisionError("boom")]
    queue.wake("a")
    await desk.until(1)
    queue.wake("a", forced=True)
    await desk.until(2)
    assert desk.turns[1].forced
    assert "boom" in caplog.text


async def test_a_tenant_is_compared_with_the_world_now_and_then(desk: Desk) -> None:
    queue = ApplyQueue(desk.step, desk.say, quiet_s=0, cap_s=0, resync_s=0.05)
    queue.wake("a")
    await desk.until(3)
    assert [turn.resync for turn in desk.turns[:3]] == [False, True, True]
    await queue.close()


async def test_closing_waits_for_the_turn_that_goes_on(desk: Desk, queue: ApplyQueue) -> None:
    desk.gate = asyncio.Event()
    queue.wake("a")
    await desk.until(1)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    desk.gate.set()
    await asyncio.wait_for(closing, 5)
