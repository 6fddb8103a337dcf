"""Supervised tasks: restart, order of stopping, and what they tell of themselves."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rezuscloud.kit.tasks import LONGEST_DELAY_S, TaskSupervisor, backoff_s


def test_the_delay_doubles_from_a_tenth_of_a_second_to_half_a_minute() -> None:
    for failures in range(1, 100):
        full = min(0.1 * 2 ** (failures - 1), LONGEST_DELAY_S)
        assert full / 2 <= backoff_s(failures) <= full


async def test_a_task_that_raises_is_started_again_and_logged_with_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks, recovered, lives = TaskSupervisor(), asyncio.Event(), 0

    async def run() -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            raise RuntimeError("first life")
        recovered.set()
        await asyncio.Event().wait()

    tasks.start("watch", run)
    async with asyncio.timeout(5):
        await recovered.wait()
    (told,) = tasks.describe()
    assert told == {
        "name": "watch",
        "state": "running",
        "restarts": 1,
        "last_error": "RuntimeError: first life",
    }
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "task watch failed" in record.getMessage()
    assert record.exc_info is not None
    await tasks.close()


async def test_a_task_between_two_lives_is_told_as_failed() -> None:
    tasks, raised = TaskSupervisor(), asyncio.Event()

    async def run() -> None:
        raised.set()
        raise RuntimeError("down")

    tasks.start("watch", run)
    await raised.wait()
    await asyncio.sleep(0)
    assert tasks.describe()[0]["state"] == "failed"
    await tasks.close()


async def test_a_task_without_restart_stays_failed() -> None:
    tasks, lives = TaskSupervisor(), 0

    async def run() -> None:
        nonlocal lives
        lives += 1
        raise RuntimeError("once")

    tasks.start("once", run, restart=False)
    await asyncio.sleep(0.3)
    assert lives == 1
    assert tasks.describe()[0]["state"] == "failed"
    await tasks.close()


async def test_a_task_that_returns_has_ended() -> None:
    tasks = TaskSupervisor()

    async def run() -> None:
        return None

    tasks.start("short", run)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert tasks.describe() == [{"name": "short", "state": "ended", "restarts": 0, "last_error": ""}]
    await tasks.close()


async def test_a_cancellation_from_within_is_a_failure_and_not_the_end() -> None:
    tasks, recovered, lives = TaskSupervisor(), asyncio.Event(), 0

    async def run() -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            other = asyncio.ensure_future(asyncio.Event().wait())
            other.cancel()
            await other
        recovered.set()

    tasks.start("watch", run)
    async with asyncio.timeout(5):
        await recovered.wait()
    assert tasks.describe()[0]["restarts"] == 1
    await tasks.close()


async def test_close_stops_in_reverse_order_one_after_the_other() -> None:
    tasks, ends = TaskSupervisor(), []

    def task(name: str) -> None:
        async def run() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                ends.append(name)

        tasks.start(name, run)

    for name in ("first", "second", "third"):
        task(name)
    await asyncio.sleep(0)
    await tasks.close()
    assert ends == ["third", "second", "first"]
    assert tasks.describe() == []


async def test_stop_ends_one_task_and_leaves_the_others() -> None:
    tasks = TaskSupervisor()
    for name in ("one", "two"):
        tasks.start(name, asyncio.Event().wait)  # type: ignore[arg-type]  # its True is of no use
    await tasks.stop("one")
    await tasks.stop("never there")
    assert [told["name"] for told in tasks.describe()] == ["two"]
    await tasks.close()


async def test_two_tasks_cannot_bear_one_name() -> None:
    tasks = TaskSupervisor()
    tasks.start("watch", asyncio.Event().wait)  # type: ignore[arg-type]  # its True is of no use
    with pytest.raises(ValueError, match="watch"):
        tasks.start("watch", asyncio.Event().wait)  # type: ignore[arg-type]  # its True is of no use
    await tasks.close()
