"""The file and its only writer: what is acknowledged is there, what cannot be trusted is refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.errors import InsufficientStorage, InternalError, Unavailable
from rezuscloud.store import db
from rezuscloud.store.db import Store, StoreDamaged, StoreInUse, Transaction
from tests.support.store import DATABASE, doc, fill, fingerprint, put, rows, rss_mib, small_disk

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 4) as path:
        yield path


def names(store: Store, kind: str = "Tenant") -> list[str]:
    return [stored.doc["metadata"]["name"] for stored in store.objects.list(kind)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- durable

_WRITER = """
import asyncio, sys
from pathlib import Path
from rezuscloud.store.db import Store
from tests.support.store import doc

async def main():
    async with Store.open(Path(sys.argv[1])) as store:
        async def write(client):
            for number in range(10 ** 9):
                name = f"t{client}-{number}"
                await store.transact(lambda tx: (tx.put(doc(name)), store.records.put(tx, name, number)))
                print(name, flush=True)
        await asyncio.gather(*map(write, range(4)))

asyncio.run(main())
"""


@contextlib.contextmanager
def writing(data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes without end and names each thing when it is acknowledged."""
    argv = [sys.executable, "-c", _WRITER, str(data_dir)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("count", [1, 37, 150])
async def test_all_that_was_acknowledged_is_there_after_a_kill(tmp_path: Path, count: int) -> None:
    with writing(tmp_path) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().strip() for _ in range(count)]
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.read().splitlines()[:-1]  # the last line may be cut
    async with Store.open(tmp_path) as store:
        assert set(acknowledged) <= set(names(store))
        # An object, its change and its record come together or not at all.
        logged = [event.doc["metadata"]["name"] for event in store.log.since(0)]
        assert sorted(logged) == names(store)
        assert all(store.records.get(name) is not None for name in names(store))
        assert store.log.version == len(logged)


async def test_what_waits_at_closing_is_still_written(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        waiting = [asyncio.create_task(put(store, doc(f"t{number:03}"))) for number in range(170)]
        await asyncio.sleep(0)
    assert len(await asyncio.gather(*waiting)) == 170
    with pytest.raises(Unavailable, match="stopping"):
        await put(store, doc("late"))
    async with Store.open(tmp_path) as store:
        assert len(names(store)) == 170


async def test_the_settings_are_those_that_make_commits_durable(store: Store) -> None:
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 5000,
        "page_size": 16384,
        "trusted_schema": 0,
        "mmap_size": 0,
    }

    def ask(connection: sqlite3.Connection) -> dict[str, Any]:
        return {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in wanted}

    assert await store._writer.run(ask) == wanted
    assert await store.read(ask) == wanted
    assert await store.read(lambda c: c.execute("PRAGMA query_only").fetchone()[0]) == 1
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        await store.read(lambda c: c.execute("DELETE FROM objects"))


# ---------------------------------------------------------------- alone


async def test_a_second_opener_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    with writing(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(StoreInUse) as refused:
            async with Store.open(tmp_path):
                pass
        assert str(process.pid) in str(refused.value)
        assert str(tmp_path) in str(refused.value)
        assert process.stdout.readline(), "the first goes on"


async def test_a_child_process_does_not_keep_the_directory_taken(tmp_path: Path) -> None:
    async with Store.open(tmp_path):
        child = subprocess.Popen(["/bin/sleep", "60"], close_fds=False)
    try:
        assert not any(
            str(tmp_path) in str(link.readlink()) for link in Path(f"/proc/{child.pid}/fd").iterdir()
        )
        async with Store.open(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


async def test_only_the_owner_may_read_any_file_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        async with Store.open(tmp_path / "data") as store:
            await put(store, doc("a"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").iterdir()}
            directory = stat.S_IMODE((tmp_path / "data").stat().st_mode)
    finally:
        os.umask(old)
    expected = {DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", "initialised", "lock"}
    assert modes == dict.fromkeys(expected, 0o600)
    assert directory == 0o700


# ---------------------------------------------------------------- sound


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _noise(path: Path) -> None:
    path.write_bytes(os.urandom(2**16))


def _damaged_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2 * 16384 : 3 * 16384] = os.urandom(16384)
    path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _foreign(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE somebody (s TEXT)")


def _newer(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9999")


async def _refuse(data_dir: Path) -> str:
    """The words of the refusal; nothing was touched and the next one may try."""
    before = fingerprint(data_dir, without=("lock", f"{DATABASE}-shm"))
    for _ in range(2):
        with pytest.raises(StoreDamaged) as refused:
            async with Store.open(data_dir):
                pass
    assert fingerprint(data_dir, without=("lock", f"{DATABASE}-shm")) == before
    return str(refused.value)


@pytest.mark.parametrize("has_marker", [True, False])
@pytest.mark.parametrize("damage", [_empty, _noise, _damaged_page, _cut, _foreign])
async def test_a_database_that_cannot_be_trusted_is_refused_and_left_untouched(
    tmp_path: Path, damage: Any, has_marker: bool
) -> None:
    async with Store.open(tmp_path) as store:
        await put(store, *(doc(f"t{number}", "x" * 3000) for number in range(40)))
    damage(tmp_path / DATABASE)
    if not has_marker:
        (tmp_path / "initialised").unlink()
    said = await _refuse(tmp_path)
    assert "cannot be used" in said
    assert "rebuild --from-state" in said


async def test_a_database_that_went_missing_is_not_made_anew(tmp_path: Path) -> None:
    async with Store.open(tmp_path):
        pass
    (tmp_path / DATABASE).unlink()
    assert "missing" in await _refuse(tmp_path)
    assert not (tmp_path / DATABASE).exists()


async def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with Store.open(tmp_path):
        pass
    _newer(tmp_path / DATABASE)
    assert "newer RezusCloud (schema 9999" in await _refuse(tmp_path)


async def test_the_log_of_a_killed_server_is_not_moved_into_a_file_that_is_refused(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await put(store, *(doc(f"old-{number}", "x" * 3000) for number in range(40)))
    with writing(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
    assert (tmp_path / f"{DATABASE}-wal").stat().st_size > 0
    content = bytearray((tmp_path / DATABASE).read_bytes())
    for start in range(2 * 16384, len(content), 16384):
        content[start : start + 16384] = os.urandom(16384)
    (tmp_path / DATABASE).write_bytes(content)
    await _refuse(tmp_path)


async def test_a_first_start_that_was_interrupted_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / f"{DATABASE}.new").write_bytes(b"half")
    async with Store.open(tmp_path) as store:
        await put(store, doc("a"))
    assert not (tmp_path / f"{DATABASE}.new").exists()
    (tmp_path / "initialised").unlink()  # killed between the two
    async with Store.open(tmp_path) as store:
        assert names(store) == ["a"]
    assert (tmp_path / "initialised").exists()


async def test_a_failed_start_gives_the_directory_back(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"")
    with pytest.raises(StoreDamaged):
        async with Store.open(tmp_path):
            pass
    (tmp_path / DATABASE).unlink()
    async with Store.open(tmp_path):
        pass


# ---------------------------------------------------------------- full


async def test_on_a_full_disk_writes_are_refused_reads_go_on_and_it_heals_by_itself(disk: Path) -> None:
    async with Store.open(disk / "data") as store:
        told: list[str] = []
        store.on_full.append(lambda: told.append("full"))
        await put(store, doc("before"))
        fill(disk / "filling")
        with pytest.raises(InsufficientStorage, match="Free some space") as refused:
            for number in range(500):
                await put(store, doc(f"t{number}", "x" * 20_000))
        assert refused.value.code == 507
        assert told == ["full"]
        assert store.degraded is not None
        stored = names(store)
        assert "before" in stored
        assert await store.read(lambda c: c.execute("SELECT count(*) FROM objects").fetchone()[0]) == len(
            stored
        )
        with pytest.raises(InsufficientStorage):
            await put(store, doc("still", "x" * 200_000))

        (disk / "filling").unlink()
        await put(store, doc("after"))
        assert store.degraded is None
        stored = names(store)
    async with Store.open(disk / "data") as store:
        assert names(store) == stored
        assert "after" in stored


async def test_a_start_on_a_full_disk_does_not_blame_the_database(disk: Path) -> None:
    async with Store.open(disk / "data") as store:
        await put(store, doc("before"))
    fill(disk / "filling")
    try:
        async with Store.open(disk / "data") as store:
            assert names(store) == ["before"]
    except StoreDamaged as refused:
        assert "cannot be opened" in str(refused)
        assert "free space" in str(refused)
    (disk / "filling").unlink()
    async with Store.open(disk / "data") as store:
        assert names(store) == ["before"]


# ---------------------------------------------------------------- in a group


async def together(store: Store, *fns: Any) -> list[Any]:
    """Runs them in one commit; gives results and exceptions."""
    commits: list[float] = []
    store.on_commit_timed.append(commits.append)
    results = await asyncio.gather(*(store.transact(fn) for fn in fns), return_exceptions=True)
    store.on_commit_timed.remove(commits.append)
    assert len(commits) <= 1
    return results


async def test_in_a_group_each_sees_what_earlier_ones_did_and_nobody_else_does(store: Store) -> None:
    def first(tx: Transaction) -> None:
        tx.put(doc("b", 1))
        tx.stage("key", "value")

    def second(tx: Transaction) -> list[Any]:
        seen = tx.get("Tenant", "", "b")
        assert seen is not None
        assert store.objects.get("Tenant", "", "b") is None
        assert store.log.version == 0
        tx.put(doc("a", 2))
        return [seen["spec"]["value"], tx.peek("key"), [d["metadata"]["name"] for d in tx.list("Tenant")]]

    def third(tx: Transaction) -> Any:
        tx.delete("Tenant", "", "b")
        tx.stage("key", None)
        return tx.get("Tenant", "", "b"), tx.peek("key"), len(tx.list("Tenant"))

    assert await together(store, first, second, third) == [None, [1, "value", ["a", "b"]], (None, None, 1)]
    assert names(store) == ["a"]
    assert [event.version for event in store.log.since(0)] == [1, 2, 3]
    assert store.memory == {}, "what is removed leaves no trace"


async def test_one_that_raises_loses_its_own_changes_and_no_others(store: Store) -> None:
    def fails(tx: Transaction) -> None:
        tx.put(doc("lost"))
        tx.stage("lost", 1)
        store.records.put(tx, "lost", 1)
        raise ValueError("no")

    def cannot_be_written(tx: Transaction) -> None:
        tx.put(doc("odd", object()))

    def stops(tx: Transaction) -> None:
        next(iter(()))

    results = await together(
        store,
        lambda tx: tx.put(doc("one")),
        fails,
        cannot_be_written,
        stops,
        lambda tx: tx.put(doc("two")),
    )
    assert [type(result) for result in results] == [dict, ValueError, TypeError, RuntimeError, dict]
    assert names(store) == ["one", "two"]
    assert store.records.get("lost") is None
    assert [event.version for event in store.log.since(0)] == [1, 2], "no number is used up"


async def test_a_commit_that_fails_fails_for_all_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    await put(store, doc("kept", 1))
    heard: list[Any] = []
    store.on_commit.append(heard.append)

    def poison(tx: Transaction) -> None:
        tx.stage("mine", 1)
        tx.execute("INSERT INTO nowhere VALUES (1)")

    results = await together(store, lambda tx: tx.put(doc("kept", 2)), poison, lambda tx: tx.put(doc("new")))
    assert [type(result) for result in results] == [InternalError] * 3
    assert "nothing was changed" in str(results[0])
    assert store.degraded is not None
    assert heard == []
    assert store.memory == {}
    assert store.objects.list("Tenant")[0].doc["spec"]["value"] == 1
    assert (await put(store, doc("next")))["metadata"]["resourceVersion"] == "2"
    assert store.degraded is None
    assert rows(tmp_path / "data", "SELECT name FROM objects ORDER BY name") == [("kept",), ("next",)]


async def test_something_unforeseen_in_a_commit_is_told_and_stops_nobody(store: Store) -> None:
    def unforeseen(tx: Transaction) -> None:
        def work(connection: sqlite3.Connection) -> None:
            raise OverflowError("too large")

        tx.run(work, size_bytes=0)

    assert [type(result) for result in await together(store, unforeseen)] == [InternalError]
    await put(store, doc("a"))
    assert names(store) == ["a"]


async def test_a_writer_that_ends_leaves_nobody_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(self: Store, batch: Any) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_prune", explode)
        waiting = [asyncio.create_task(put(store, doc(f"t{number}"))) for number in range(120)]
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    assert {type(result) for result in results} == {InternalError}
    await put(store, doc("next"))


async def test_who_is_cancelled_while_waiting_is_left_out_and_while_writing_is_not_awaited(
    store: Store,
) -> None:
    first = asyncio.create_task(put(store, doc("first")))
    second = asyncio.create_task(put(store, doc("second")))
    await asyncio.sleep(0)
    second.cancel()  # still waits
    await first
    third = asyncio.create_task(put(store, doc("third")))
    while not store._writing:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    third.cancel()  # is being written
    await put(store, doc("fourth"))
    assert names(store) == ["first", "fourth", "third"]
    assert second.cancelled()
    assert third.cancelled()


async def test_all_hear_of_commits_in_order_before_the_writers_are_answered(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    story: list[str] = []

    def broken(events: Any) -> None:
        raise RuntimeError("deaf")

    store.on_commit.append(broken)
    store.on_commit.append(
        lambda events: story.extend(f"heard {event.doc['metadata']['name']}" for event in events)
    )
    store.on_commit_timed.append(lambda seconds: 1 / 0)

    async def write(name: str) -> None:
        await put(store, doc(name))
        story.append(f"answered {name}")

    with caplog.at_level(logging.ERROR):
        await asyncio.gather(*(write(f"t{number:02}") for number in range(60)))
    heard = [line for line in story if line.startswith("heard")]
    assert heard == [f"heard t{number:02}" for number in range(60)]
    for number in range(60):
        assert story.index(f"heard t{number:02}") < story.index(f"answered t{number:02}")
    assert "failed" in caplog.text


# ---------------------------------------------------------------- little


async def test_what_changes_nothing_writes_nothing_and_idling_writes_nothing(
    store: Store, tmp_path: Path
) -> None:
    stored = await put(store, doc("a"), doc("b"))
    await store.transact(lambda tx: store.records.put(tx, "key", {"n": 1}))
    commits: list[float] = []
    store.on_commit_timed.append(commits.append)

    def state() -> list[tuple[str, int, int]]:
        return sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in (tmp_path / "data").iterdir())

    def written() -> int:
        return int(re.findall(r"^wchar: (\d+)", Path("/proc/self/io").read_text(), re.M)[0])

    before, bytes_before = state(), written()

    def nothing(tx: Transaction) -> None:
        assert tx.put(doc("b"))["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
        tx.list("Tenant")
        store.records.put(tx, "key", {"n": 1})
        store.records.delete(tx, "no such key")
        store.states.drop(tx, "no such tenant")

    await store.transact(nothing)
    store.objects.touch("Tenant", "", "a", {"observedAt": "now"})
    await asyncio.sleep(0.3)
    assert commits == []
    assert state() == before
    assert written() - bytes_before < 100, "only what wakes the event loop"


async def test_the_write_ahead_log_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "CHECKPOINT_BYTES", 2**20)
    monkeypatch.setattr(db, "QUIET_S", 0.05)
    async with Store.open(tmp_path) as store:
        wal = tmp_path / f"{DATABASE}-wal"
        for number in range(120):
            await put(store, doc(f"t{number % 5}", number))
        assert wal.stat().st_size < 3 * 2**20
        body = bytes(3 * 2**20)

        def big(tx: Transaction) -> None:
            tx.run(
                lambda c: c.execute("INSERT INTO records VALUES ('big', zeroblob(?))", (len(body),)),
                size_bytes=len(body),
            )

        await store.transact(big)
        await until(lambda: wal.stat().st_size == 0)
        await put(store, doc("after"))


async def test_a_long_change_log_costs_bytes_and_not_documents(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await put(store, *(doc(f"t{number}", ["value"] * 150) for number in range(2000)))
    gc.collect()
    tracemalloc.start()
    try:
        async with Store.open(tmp_path) as store:
            with_objects = tracemalloc.get_traced_memory()[0]
            log_alone = sum(len(change.raw) for change in store.log._changes)
            store.log._changes.clear()
            gc.collect()
            freed = with_objects - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert freed < log_alone * 1.5


async def test_many_writes_at_once_share_commits(store: Store) -> None:
    commits: list[float] = []
    store.on_commit_timed.append(commits.append)
    await asyncio.gather(*(put(store, doc(f"t{number}")) for number in range(200)))
    assert len(commits) <= 6
    assert len(names(store)) == 200
    assert rss_mib() < 500


@pytest.mark.parametrize("count", [1, 2, 8, 9, 64, 65, 200])
async def test_a_transaction_of_any_length_is_written_whole(store: Store, tmp_path: Path, count: int) -> None:
    await put(store, *(doc(f"t{number:03}", 1) for number in range(count)))
    await put(store, *(doc(f"t{number:03}", 2) for number in range(count)))
    stored = rows(tmp_path / "data", "SELECT name, doc FROM objects ORDER BY name")
    assert [name for name, _ in stored] == [f"t{number:03}" for number in range(count)]
    assert [raw for _, raw in stored] == [each.raw for each in store.objects.list("Tenant")]
    logged = rows(tmp_path / "data", "SELECT version FROM changes ORDER BY version")
    assert [version for (version,) in logged] == list(range(1, 2 * count + 1))
    await store.transact(
        lambda tx: [tx.delete("Tenant", "", each["metadata"]["name"]) for each in tx.list("Tenant")]
    )
    assert rows(tmp_path / "data", "SELECT count(*) FROM objects") == [(0,)]
