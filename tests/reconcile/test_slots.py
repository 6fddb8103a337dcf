"""How many runs go on at once."""

from __future__ import annotations

import asyncio

from rezuscloud.reconcile.slots import RUN_MIB, RunSlots


async def test_no_more_runs_go_on_than_the_limit_and_waiting_is_told() -> None:
    slots = RunSlots(2, free_mib=lambda: 10_000)
    told: list[str] = []
    most = 0

    async def tell(why: str) -> None:
        told.append(why)

    async def work() -> None:
        nonlocal most
        async with slots.take(tell):
            most = max(most, slots.active)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(work() for _ in range(10)))
    assert most == 2
    assert told and "2 runs are going on" in told[0]
    assert (slots.active, slots.waiting) == (0, 0)


async def test_without_free_memory_one_run_still_goes_on() -> None:
    slots = RunSlots(8, free_mib=lambda: RUN_MIB - 1)
    most = 0

    async def tell(why: str) -> None:
        assert "MiB" in why

    async def work() -> None:
        nonlocal most
        async with slots.take(tell):
            most = max(most, slots.active)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(work() for _ in range(3)))
    assert most == 1


async def test_a_run_that_fails_gives_its_slot_back() -> None:
    slots = RunSlots(1, free_mib=lambda: 10_000)

    async def tell(why: str) -> None:
        raise AssertionError(why)

    for _ in range(2):
        try:
            async with slots.take(tell):
                raise ValueError
        except ValueError:
            pass
    assert slots.active == 0
