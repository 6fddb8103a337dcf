"""Small records by key, and the logs of runs."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rezuscloud.store.db import Store, Transaction
from rezuscloud.store.records import LOG_CAP, RunLogs
from tests.support.store import rows

UID = "0a1b2c3d-0000-4000-8000-000000000001"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path) as opened:
        yield opened


async def test_records_are_kept_changed_and_removed(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        records = store.records
        given = {"hash": "x", "list": [1]}
        await store.transact(lambda tx: records.put(tx, "admin", given))
        given["list"] = []
        assert records.get("admin") == {"hash": "x", "list": [1]}, "what was given is copied"
        await store.transact(lambda tx: (records.put(tx, "n", 1), records.put(tx, "gone", 1)))
        await store.transact(lambda tx: (records.put(tx, "n", True), records.delete(tx, "gone")))
        assert records.get("n") is True
        assert records.get("gone") is None
        assert records.get("never") is None
    async with Store.open(tmp_path) as store:
        assert store.records.get("admin") == {"hash": "x", "list": [1]}
        assert store.records.get("n") is True
        assert store.records.get("gone") is None
    assert rows(tmp_path, "SELECT key FROM records ORDER BY key") == [("admin",), ("n",)]


async def test_null_is_the_same_as_none(store: Store, tmp_path: Path) -> None:
    await store.transact(lambda tx: store.records.put(tx, "key", 1))
    await store.transact(lambda tx: store.records.put(tx, "key", None))
    assert store.records.get("key") is None
    assert rows(tmp_path, "SELECT count(*) FROM records") == [(0,)]


async def test_the_locks_of_states_cannot_be_written_as_records(store: Store) -> None:
    def put(tx: Transaction) -> None:
        store.records.put(tx, "lock/uid", {})

    with pytest.raises(ValueError, match="lock"):
        await store.transact(put)


# ---------------------------------------------------------------- run logs


def test_a_run_log_grows_and_is_read_from_any_offset(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path / "logs")
    assert logs.read(UID) == (b"", 0)
    assert logs.size(UID) == 0
    logs.append(UID, b"one\n")
    logs.append(UID, b"two\n")
    assert logs.read(UID) == (b"one\ntwo\n", 8)
    assert logs.read(UID, 4) == (b"two\n", 8)
    assert logs.read(UID, 2, 3) == (b"e\nt", 5)
    assert logs.read(UID, 8) == (b"", 8)
    assert logs.read(UID, 500) == (b"", 500)
    assert logs.size(UID) == 8
    assert stat.S_IMODE((tmp_path / "logs" / f"{UID}.log").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    logs.delete(UID)
    logs.delete(UID)
    assert logs.size(UID) == 0


def test_a_run_log_ends_at_its_limit_and_says_so_once(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path / "logs")
    for _ in range(12):
        logs.append(UID, b"x" * 2**20)
    assert LOG_CAP < logs.size(UID) < LOG_CAP + 200
    tail, _ = logs.read(UID, LOG_CAP - 10)
    assert tail.startswith(b"x" * 10 + b"\n--- ")
    assert tail.count(b"limit") == 1


@pytest.mark.parametrize("uid", ["", "../../etc/passwd", "a/b", "UPPER-CASE", "x" * 100, "0a1b2c3d\n"])
def test_what_is_no_uid_names_no_file(tmp_path: Path, uid: str) -> None:
    logs = RunLogs(tmp_path / "logs")
    for act in (lambda: logs.append(uid, b"x"), lambda: logs.read(uid), lambda: logs.delete(uid)):
        with pytest.raises(ValueError, match="no uid"):
            act()
    assert not (tmp_path / "logs").exists()
