"""Resources and the change log: what one transaction is to those who watch, and what a restart remembers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.errors import Expired
from rezuscloud.store import db
from rezuscloud.store.db import Store, Transaction
from tests.support.store import doc, put, rows


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path) as opened:
        yield opened


def told(store: Store, since: int = 0) -> list[tuple[str, str, Any, Any]]:
    """Type, name, value and the value before, of each event."""
    return [
        (
            event.type.value,
            event.doc["metadata"]["name"],
            event.doc["spec"]["value"],
            event.before["spec"]["value"] if event.before else None,
        )
        for event in store.log.since(since)
    ]


# ---------------------------------------------------------------- one transaction

Act = Callable[[Transaction], object]
_put1: Act = lambda tx: tx.put(doc("a", 1))  # noqa: E731 - a table reads better
_put2: Act = lambda tx: tx.put(doc("a", 2))  # noqa: E731
_put3: Act = lambda tx: tx.put(doc("a", 3))  # noqa: E731
_delete: Act = lambda tx: tx.delete("Tenant", "", "a")  # noqa: E731


@pytest.mark.parametrize(
    ("existed", "acts", "events", "is_there"),
    [
        (False, [_put2, _put3], [("ADDED", "a", 3, None)], True),
        (True, [_put2, _put3], [("MODIFIED", "a", 3, 1)], True),
        (True, [_put2, _delete], [("DELETED", "a", 2, 1)], False),
        (True, [_delete], [("DELETED", "a", 1, 1)], False),
        (True, [_delete, _put3], [("DELETED", "a", 1, 1), ("ADDED", "a", 3, None)], True),
        (False, [_put2, _delete], [("ADDED", "a", 2, None), ("DELETED", "a", 2, 2)], False),
        (
            True,
            [_delete, _put2, _put3, _delete],
            [("DELETED", "a", 1, 1), ("ADDED", "a", 3, None), ("DELETED", "a", 3, 3)],
            False,
        ),
        (True, [_put1], [], True),
    ],
)
async def test_what_a_transaction_does_to_an_object_is_told_as_it_ends(
    tmp_path: Path, existed: bool, acts: list[Act], events: list[Any], is_there: bool
) -> None:
    async with Store.open(tmp_path) as store:
        if existed:
            await put(store, doc("a", 1))
        start = store.log.version
        await store.transact(lambda tx: [act(tx) for act in acts])
        assert told(store, start) == events
        found = store.objects.get("Tenant", "", "a")
        assert (found is not None) is is_there
        assert (store.objects.by_uid("uid-Tenant--a") is not None) is is_there
        for event in store.log.since(0):
            assert event.doc["metadata"]["resourceVersion"] == str(event.version)
        raw = found.raw if found else None
    stored = rows(tmp_path, "SELECT doc FROM objects")
    assert stored == ([(raw,)] if raw else [])
    async with Store.open(tmp_path) as store:
        assert told(store, start) == events, "a restart tells the same"


async def test_a_write_does_not_change_what_it_was_given(store: Store) -> None:
    given = doc("a", 1)
    stored = await put(store, given)
    assert "resourceVersion" not in given["metadata"]
    assert stored["metadata"]["resourceVersion"] == "1"
    changed = {**stored, "spec": {"value": 2}}
    again = await put(store, changed)
    assert changed["metadata"]["resourceVersion"] == "1"
    assert again["metadata"]["resourceVersion"] == "2"


async def test_true_and_one_and_one_point_nought_are_three_values(store: Store) -> None:
    versions = [
        (await put(store, doc("a", value)))["metadata"]["resourceVersion"] for value in (1, True, 1.0)
    ]
    assert versions == ["1", "2", "3"]
    same = await put(store, {"spec": {"value": 1.0}, **{k: v for k, v in doc("a").items() if k != "spec"}})
    assert same["metadata"]["resourceVersion"] == "3", "the order of keys is no change"


async def test_deleting_what_is_not_there_raises(store: Store) -> None:
    with pytest.raises(KeyError):
        await store.transact(lambda tx: tx.delete("Tenant", "", "none"))


async def test_another_uid_under_the_same_name_is_found_by_its_own(store: Store) -> None:
    await put(store, doc("a", uid="one"))

    def replace(tx: Transaction) -> None:
        tx.delete("Tenant", "", "a")
        tx.put(doc("a", uid="two"))

    await store.transact(replace)
    assert store.objects.by_uid("one") is None
    found = store.objects.by_uid("two")
    assert found is not None
    assert found.doc["metadata"]["name"] == "a"


# ---------------------------------------------------------------- reading


async def test_lists_are_ordered_by_namespace_and_name_also_inside_a_transaction(store: Store) -> None:
    places = [("b", "x"), ("a", "z"), ("a-b", "m"), ("a", "b"), ("ab", "a"), ("a", "a-1")]
    await put(store, *(doc(name, kind="Machine", namespace=space) for space, name in places))
    await put(store, doc("other"))

    def order(docs: list[Any]) -> list[tuple[str, str]]:
        return [(d["metadata"]["namespace"], d["metadata"]["name"]) for d in docs]

    assert order([stored.doc for stored in store.objects.list("Machine")]) == sorted(places)
    assert order([stored.doc for stored in store.objects.list("Machine", "a")]) == [
        ("a", "a-1"),
        ("a", "b"),
        ("a", "z"),
    ]
    assert store.objects.list("Machine", "none") == []
    assert store.objects.list("Nothing") == []

    def change(tx: Transaction) -> list[tuple[str, str]]:
        tx.put(doc("aa", kind="Machine", namespace="a"))
        tx.delete("Machine", "a", "b")
        assert order(tx.list("Machine")) == sorted({*places, ("a", "aa")} - {("a", "b")})
        return order(tx.list("Machine", "a"))

    assert await store.transact(change) == [("a", "a-1"), ("a", "aa"), ("a", "z")]


async def test_touching_changes_what_is_read_and_leaves_no_trace(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        await put(store, doc("a"))
        heard: list[Any] = []
        store.on_commit.append(heard.append)
        store.objects.touch("Tenant", "", "a", {"observedAt": "noon"})
        store.objects.touch("Tenant", "", "none", {"observedAt": "noon"})
        found = store.objects.get("Tenant", "", "a")
        assert found is not None
        assert found.doc["status"] == {"observedAt": "noon"}
        assert b"noon" in found.raw
        assert found.doc["metadata"]["resourceVersion"] == "1"
        assert heard == []
        assert store.log.version == 1
    async with Store.open(tmp_path) as store:
        found = store.objects.get("Tenant", "", "a")
        assert found is not None
        assert "status" not in found.doc


# ---------------------------------------------------------------- the log


async def test_the_log_is_replayed_after_a_restart_with_what_was_before(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        for value in (1, 2, 3):
            await put(store, doc("a", value), doc("m", value, kind="Machine", namespace="a"))
        await store.transact(lambda tx: tx.delete("Tenant", "", "a"))
        await put(store, doc("a", 4))
        live = [told(store, since) for since in range(store.log.version + 1)]
        events = store.log.since(0)
    async with Store.open(tmp_path) as store:
        assert store.log.since(0) == events
        assert [told(store, since) for since in range(store.log.version + 1)] == live
        assert told(store, 6) == [("DELETED", "a", 3, 3), ("ADDED", "a", 4, None)]
        machines = store.log.since(0, "Machine")
        assert [event.kind for event in machines] == ["Machine"] * 3
        assert store.log.since(10**9) == []


@pytest.fixture
def short_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "KEPT_CHANGES", 20)
    monkeypatch.setattr(db, "PRUNE_EVERY", 10)


@pytest.mark.usefixtures("short_log")
async def test_the_log_keeps_its_newest_changes_and_tells_when_older_ones_are_asked_for(
    tmp_path: Path,
) -> None:
    async with Store.open(tmp_path) as store:
        for value in range(100):
            await put(store, doc("a", value))
            count, oldest = rows(tmp_path, "SELECT count(*), min(version) FROM changes")[0]
            assert min(value + 1, 20) <= count <= 31
        assert store.log.version == 100
        assert [value for _, _, value, _ in told(store, 80)] == list(range(80, 100))
        assert told(store, 80)[0] == ("MODIFIED", "a", 80, 79)
        with pytest.raises(Expired, match="list anew"):
            store.log.since(79)
        assert oldest <= 81
    async with Store.open(tmp_path) as store:
        assert [value for _, _, value, _ in told(store, 80)] == list(range(80, 100))
        with pytest.raises(Expired):
            store.log.since(79)


@pytest.mark.usefixtures("short_log")
async def test_servers_that_live_briefly_prune_as_well(tmp_path: Path) -> None:
    for value in range(12):
        async with Store.open(tmp_path) as store:
            for each in range(5):
                await put(store, doc("a", (value, each)))
    assert rows(tmp_path, "SELECT count(*) FROM changes")[0][0] <= 31


@pytest.mark.usefixtures("short_log")
async def test_numbers_that_were_skipped_do_not_shorten_the_log(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        for value in range(30):
            await put(store, doc("a", value))

            def change_and_delete(tx: Transaction) -> None:
                tx.put(doc("a", "last words"))
                tx.delete("Tenant", "", "a")

            await store.transact(change_and_delete)
            assert rows(tmp_path, "SELECT count(*) FROM changes")[0][0] >= min(2 * (value + 1), 20)
        assert store.log.version == 90
        assert len(store.log.since(store.log.oldest_kept - 1)) == 20


@pytest.mark.usefixtures("short_log")
async def test_a_version_is_never_given_twice(tmp_path: Path) -> None:
    async with Store.open(tmp_path) as store:
        for value in range(40):
            await put(store, doc("a", value))
        await store.transact(lambda tx: tx.delete("Tenant", "", "a"))
    async with Store.open(tmp_path) as store:
        # As if the whole log had been pruned.
        await store.transact(lambda tx: tx.execute("DELETE FROM changes"))
    async with Store.open(tmp_path) as store:
        assert store.log.version == 41
        assert store.log.since(41) == []
        with pytest.raises(Expired):
            store.log.since(40)
        assert (await put(store, doc("b")))["metadata"]["resourceVersion"] == "42"
        assert told(store, 41) == [("ADDED", "b", 0, None)]


async def test_changes_long_past_are_told_as_they_were(store: Store) -> None:
    for value in range(600):
        await put(store, doc("a", value))
    everything = told(store)
    assert everything[0] == ("ADDED", "a", 0, None)
    assert everything[1:] == [("MODIFIED", "a", value, value - 1) for value in range(1, 600)]


async def test_documents_of_megabytes_do_not_fill_the_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rezuscloud.store.resources.MAX_LOG_BYTES", 50_000)
    for number in range(12):
        doc = {"kind": "Tenant", "metadata": {"name": "a", "uid": "u", "n": number}, "spec": "x" * 10_000}
        await store.transact(lambda tx, doc=doc: tx.put(doc))
    with pytest.raises(Expired):
        store.log.since(store.log.version - 6)
    assert len(store.log.since(store.log.version - 3)) == 3
