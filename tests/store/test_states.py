"""TF states: which upload is the next version, who holds the lock, and what a large one costs."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.errors import Conflict, InternalError
from rezuscloud.model.meta import utc_now
from rezuscloud.store.db import Store
from rezuscloud.store.states import Lock, LockHeld, StateMeta
from tests.support.store import DATABASE, rows, rss_mib

TENANT = "uid-1"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path) as opened:
        yield opened


def lock(id_: str = "L1", run: str = "run-1") -> Lock:
    return Lock(id_, {"ID": id_, "Who": "me@here"}, "run-1", run, utc_now().replace(microsecond=0))


async def take(store: Store, held: Lock | None = None, tenant: str = TENANT) -> None:
    await store.transact(lambda tx: store.states.take_lock(tx, tenant, held or lock()))


async def accept(store: Store, body: bytes, serial: int = 1, **changes: Any) -> tuple[StateMeta, bool]:
    tenant = changes.pop("tenant", TENANT)
    facts: dict[str, Any] = {
        "serial": serial,
        "lineage": "line",
        "sha256": hashlib.sha256(body).hexdigest(),
        "encrypted": True,
        "key_id": "k1",
        "run": "run-1",
        "lock_id": "L1",
        "resource_count": 3,
    }
    return await store.transact(lambda tx: store.states.accept(tx, tenant, body, **(facts | changes)))


# ---------------------------------------------------------------- accepting


async def test_each_accepted_state_is_a_new_version_and_stays_as_it_came(store: Store) -> None:
    await take(store)
    first, is_new = await accept(store, b"one", 1)
    assert (first.version, is_new) == (1, True)
    second, _ = await accept(store, b"two", 2)
    same_serial, _ = await accept(store, b"three", 2)
    assert [second.version, same_serial.version] == [2, 3]
    assert store.states.current(TENANT) == same_serial
    assert [await store.states.body(TENANT, version) for version in (1, 2, 3, 4)] == [
        b"one",
        b"two",
        b"three",
        None,
    ]
    assert await store.states.body(TENANT) == b"three"
    assert await store.states.history(TENANT) == [first, second, same_serial]
    assert await store.states.body("another") is None
    assert await store.states.history("another") == []
    assert (first.size_bytes, first.key_id, first.encrypted, first.resource_count) == (3, "k1", True, 3)


async def test_a_repeated_upload_changes_nothing(store: Store, tmp_path: Path) -> None:
    await take(store)
    first, _ = await accept(store, b"one")
    assert await accept(store, b"one") == (first, False)
    assert rows(tmp_path, "SELECT count(*) FROM states") == [(1,)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lock_id": "other"}, "lock"),
        ({"lock_id": None}, "lock"),
        ({"serial": 4}, "older"),
        ({"lineage": "foreign"}, "lineage"),
    ],
)
async def test_what_must_not_replace_the_stored_state_is_refused(
    store: Store, changes: dict[str, Any], words: str
) -> None:
    await take(store)
    kept, _ = await accept(store, b"one", 5)
    with pytest.raises(Conflict, match=words):
        await accept(store, b"new", **({"serial": 6} | changes))
    assert store.states.current(TENANT) == kept
    assert await store.states.body(TENANT) == b"one"


async def test_without_a_lock_nothing_is_accepted(store: Store) -> None:
    for lock_id in (None, "", "L1"):
        with pytest.raises(Conflict, match="lock"):
            await accept(store, b"one", lock_id=lock_id)


async def test_an_empty_state_may_be_followed_by_another_lineage(store: Store) -> None:
    await take(store)
    await accept(store, b"empty", 9, resource_count=0)
    meta, _ = await accept(store, b"new", 1, lineage="second")
    assert (meta.version, meta.lineage) == (2, "second")


async def test_only_the_newest_versions_are_kept(store: Store) -> None:
    await take(store)
    for serial in range(1, 8):
        await accept(store, b"s%d" % serial, serial, keep=3)
    assert [meta.version for meta in await store.states.history(TENANT)] == [5, 6, 7]
    assert await store.states.body(TENANT, 4) is None


# ---------------------------------------------------------------- locks


async def test_the_lock_has_one_holder_and_the_same_request_again_is_fine(store: Store) -> None:
    await take(store)
    await take(store)
    with pytest.raises(LockHeld, match="me@here") as held:
        await take(store, lock("L2"))
    assert held.value.lock.id == "L1"
    await take(store, lock("L2"), tenant="another")

    def release(id_: str) -> Any:
        return store.transact(lambda tx: store.states.release_lock(tx, TENANT, id_))

    assert await release("L2") is False
    assert await release("L1") is True
    assert await release("L1") is False
    assert store.states.lock(TENANT) is None
    await take(store, lock("L3"))


async def test_of_two_who_ask_at_once_one_gets_the_lock(store: Store) -> None:
    results = await asyncio.gather(
        *(take(store, lock(f"L{number}")) for number in range(8)), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None)] + [LockHeld] * 7


async def test_states_and_locks_outlive_a_restart(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await take(store)
        await take(store, lock("L2"), tenant="second")
        meta, _ = await accept(store, b"one")
        await accept(store, b"two", 2)
        current, held = store.states.current(TENANT), store.states.lock(TENANT)
    async with Store.open(tmp_path) as store:
        assert store.states.current(TENANT) == current
        assert store.states.lock(TENANT) == held
        assert store.states.lock("second") == lock("L2") or store.states.lock("second") is not None
        assert await store.states.body(TENANT, meta.version) == b"one"
        assert store.records.get(f"lock/{TENANT}") is None, "locks are no records"


async def test_a_state_that_vanished_from_the_database_is_not_taken_for_no_state(store: Store) -> None:
    await take(store)
    await accept(store, b"body")
    await store.transact(lambda tx: tx.execute("DELETE FROM states"))
    with pytest.raises(InternalError, match="missing in the database"):
        await store.states.body(TENANT)


async def test_dropping_forgets_versions_and_lock_and_nothing_of_others(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        for tenant in (TENANT, "other"):
            await take(store, tenant=tenant)
            await accept(store, b"one", tenant=tenant)
        await store.transact(lambda tx: store.states.drop(tx, TENANT))
        assert store.states.current(TENANT) is None
        assert store.states.lock(TENANT) is None
        assert await store.states.body(TENANT) is None
        assert not any(TENANT in str(key) for key in store.memory)
    async with Store.open(tmp_path) as store:
        assert store.states.current(TENANT) is None
        assert store.states.lock(TENANT) is None
        assert await store.states.body("other") == b"one"


# ---------------------------------------------------------------- large


@pytest.mark.parametrize("size", [10_000_000, 64 * 2**20])
async def test_a_large_state_does_not_stay_in_memory_nor_in_the_log(
    store: Store, tmp_path: Path, size: int
) -> None:
    await take(store)
    await accept(store, b"warm")
    await store.states.body(TENANT)
    gc.collect()
    before = rss_mib()
    tracemalloc.start()
    for serial in (2, 3):
        body = os.urandom(size)
        expected = hashlib.sha256(body).digest()
        await accept(store, body, serial, sha256=expected.hex())
        del body
        read = await store.states.body(TENANT)
        assert read is not None
        assert hashlib.sha256(read).digest() == expected
        del read
    await asyncio.sleep(0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 2**20
    # Below its own limit of 32 MiB the allocator keeps what was freed, so only the larger one proves that
    # SQLite holds nothing.
    assert rss_mib() - before < (8 if size > 32 * 2**20 else 32)
    wal = tmp_path / f"{DATABASE}-wal"
    async with asyncio.timeout(10):
        while wal.stat().st_size > 0:
            await asyncio.sleep(0.05)


async def test_a_large_state_that_is_refused_does_not_stay_in_memory(store: Store) -> None:
    await take(store)
    await accept(store, b"warm", 7)
    gc.disable()  # what only the collector would find may stay for long
    try:
        before = rss_mib()
        with pytest.raises(Conflict):
            await accept(store, os.urandom(64 * 2**20), 1)
        await asyncio.sleep(0)
        assert rss_mib() - before < 8
    finally:
        gc.enable()


async def test_the_event_loop_goes_on_while_a_large_state_is_written(store: Store) -> None:
    await take(store)
    body = os.urandom(64 * 2**20)
    longest = 0.0
    loop = asyncio.get_running_loop()
    writing = asyncio.create_task(accept(store, body, sha256="0"))
    while not writing.done():
        started = loop.time()
        await asyncio.sleep(0.001)
        longest = max(longest, loop.time() - started)
    await writing
    assert longest < 0.25
