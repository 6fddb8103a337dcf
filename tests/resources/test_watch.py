"""Watching: nothing is lost between the first list and what follows, and nobody waits for a slow reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from rezuscloud.bus.client import Bus
from rezuscloud.bus.server import run_server
from rezuscloud.kit.tasks import TaskSupervisor
from rezuscloud.model.errors import Expired
from rezuscloud.model.events import ChangeType, ResourceEvent
from rezuscloud.model.meta import Doc, parse_label_selector
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.watch import (
    MAX_WAITING,
    Frame,
    SlowConsumer,
    Watcher,
    WatchHub,
    bookmark,
    seen_as,
)
from rezuscloud.store.db import Store
from tests.support.resources import ADMIN, group, tenant


class DirectBus:
    """A bus that cannot reach its server: it calls its own subscribers."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.callbacks: list[Callable[[str, bytes], None]] = []

    def publish(self, subject: str, payload: bytes) -> None:
        if not self.deaf:
            for callback in self.callbacks:
                callback(subject, payload)

    async def subscribe(self, pattern: str, callback: Callable[[str, bytes], None]) -> None:
        self.callbacks.append(callback)


@asynccontextmanager
async def running(store: Store, bus: Bus | DirectBus) -> AsyncIterator[WatchHub]:
    hub = WatchHub(store, bus)  # type: ignore[arg-type] # a DirectBus is enough
    task = asyncio.create_task(hub.run())
    try:
        yield hub
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def hub(store: Store) -> AsyncIterator[WatchHub]:
    async with running(store, DirectBus()) as hub:
        yield hub


async def take(watcher: Watcher, count: int) -> list[Frame]:
    frames: list[Frame] = []
    async with asyncio.timeout(5):
        while len(frames) < count:
            frames += await watcher.take()
    return frames


def told(frames: list[Frame]) -> list[tuple[str, str]]:
    return [(frame.type, frame.doc["metadata"]["name"]) for frame in frames]


async def create(service: ResourceService, *names: str, labels: Doc | None = None) -> None:
    for name in names:
        doc = tenant(name)
        if labels:
            doc["metadata"]["labels"] = labels
        await service.create(ADMIN, "Tenant", "", doc)


async def test_a_watch_begins_with_what_exists_and_goes_on_with_what_changes(
    service: ResourceService, hub: WatchHub
) -> None:
    await create(service, "a", "b")
    watcher = hub.open("Tenant", None, initial=True)
    await create(service, "c")
    await service.replace(ADMIN, "Tenant", "", "a", tenant("a", paused=True))
    await service.transact(lambda desk: desk.remove("Tenant", "", "b"))
    frames = await take(watcher, 5)
    assert told(frames) == [
        ("ADDED", "a"),
        ("ADDED", "b"),
        ("ADDED", "c"),
        ("MODIFIED", "a"),
        ("DELETED", "b"),
    ]
    assert [frame.version for frame in frames] == [0, 0, 3, 4, 5]
    assert frames[4].doc["metadata"]["resourceVersion"] == "5"


async def test_a_watch_resumes_after_a_version(service: ResourceService, hub: WatchHub) -> None:
    await create(service, "a", "b")
    watcher = hub.open("Tenant", None, since=1, initial=False)
    await create(service, "c")
    assert told(await take(watcher, 2)) == [("ADDED", "b"), ("ADDED", "c")]


async def test_a_watch_without_version_and_list_tells_only_what_happens_from_now_on(
    service: ResourceService, hub: WatchHub
) -> None:
    await create(service, "a")
    watcher = hub.open("Tenant", None, initial=False)
    await create(service, "b")
    assert told(await take(watcher, 1)) == [("ADDED", "b")]


async def test_a_version_of_another_history_has_expired(hub: WatchHub) -> None:
    with pytest.raises(Expired):
        hub.open("Tenant", None, since=99, initial=False)


async def test_nothing_is_lost_or_doubled_when_watches_open_amid_writes(
    service: ResourceService, store: Store, hub: WatchHub
) -> None:
    names = [f"t{number:02}" for number in range(40)]
    watchers: list[Watcher] = []

    async def open_many() -> None:
        for number in range(40):
            watchers.append(hub.open("Tenant", None, initial=number % 2 == 0, since=0))
            await asyncio.sleep(0)

    await asyncio.gather(*(create(service, name) for name in names), open_many())
    for watcher in watchers:
        frames = await take(watcher, len(names))
        assert sorted(told(frames)) == [("ADDED", name) for name in names]
        watcher.close()
    assert hub.watchers == 0
    assert hub.version == store.log.version


async def test_only_the_kind_and_tenant_asked_for_is_told(service: ResourceService, hub: WatchHub) -> None:
    await create(service, "one", "two")
    in_one = hub.open("NodeGroup", "one", initial=True)
    everywhere = hub.open("NodeGroup", None, initial=True)
    for namespace in ("two", "one"):
        await service.create(ADMIN, "NodeGroup", namespace, group(namespace=namespace))
    assert [f.doc["metadata"]["namespace"] for f in await take(everywhere, 2)] == ["two", "one"]
    assert [f.doc["metadata"]["namespace"] for f in await take(in_one, 1)] == ["one"]


async def test_entering_and_leaving_a_selector_is_added_and_deleted(
    service: ResourceService, hub: WatchHub
) -> None:
    matches = parse_label_selector("env=home")
    live = hub.open("Tenant", None, matches=matches, initial=True)
    await create(service, "a", labels={"env": "home"})
    for labels in ({"env": "home", "x": "1"}, {"env": "work"}, {"env": "work", "x": "2"}, {"env": "home"}):
        doc = tenant("a")
        doc["metadata"]["labels"] = labels
        await service.replace(ADMIN, "Tenant", "", "a", doc)
    await service.transact(lambda desk: desk.remove("Tenant", "", "a"))
    expected = ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    assert [frame.type for frame in await take(live, 5)] == expected
    replayed = hub.open("Tenant", None, matches=matches, since=0, initial=False)
    assert [frame.type for frame in await take(replayed, 5)] == expected


def test_when_the_log_forgot_how_an_object_was_the_answer_errs_on_telling() -> None:
    doc = {"kind": "Tenant", "metadata": {"labels": {"env": "home"}}}
    event = ResourceEvent(7, ChangeType.MODIFIED, doc, None)
    assert seen_as(event, parse_label_selector("env=home")) is ChangeType.MODIFIED
    assert seen_as(event, parse_label_selector("env=work")) is ChangeType.DELETED


async def test_an_event_is_encoded_once_for_all_who_watch(service: ResourceService, hub: WatchHub) -> None:
    watchers = [hub.open("Tenant", None, initial=False) for _ in range(3)]
    await create(service, "a")
    first, second, third = [(await take(watcher, 1))[0] for watcher in watchers]
    assert first is second is third
    assert first.json_line is second.json_line
    line = orjson.loads(first.json_line)
    assert line == {"type": "ADDED", "object": service.get(ADMIN, "Tenant", "", "a").doc}
    head, name, data, *rest = first.sse.split(b"\n")
    assert (head, name, rest) == (b"id: 1", b"event: ADDED", [b"", b""])
    assert orjson.loads(data.removeprefix(b"data: ")) == line


async def test_the_middle_of_a_first_list_is_no_place_to_resume(
    service: ResourceService, hub: WatchHub
) -> None:
    await create(service, "a")
    watcher = hub.open("Tenant", None, initial=True)
    assert watcher.version == 0
    (frame,) = await take(watcher, 1)
    assert frame.sse.startswith(b"event: ADDED\n")
    assert watcher.version == 1


async def test_a_bookmark_moves_on_with_changes_of_other_kinds(
    service: ResourceService, hub: WatchHub
) -> None:
    await create(service, "a")
    watcher = hub.open("NodeGroup", None, initial=True)
    changes = hub.open("Tenant", None, initial=False)
    await create(service, "b")
    await take(changes, 1)
    assert watcher.version == hub.version == 2
    frame = bookmark("NodeGroup", watcher.version, ends_initial=True)
    assert orjson.loads(frame.json_line) == {
        "type": "BOOKMARK",
        "object": {
            "kind": "NodeGroup",
            "apiVersion": "v1",
            "metadata": {
                "resourceVersion": "2",
                "annotations": {"k8s.io/initial-events-end": "true"},
            },
        },
    }


async def test_who_does_not_read_is_dropped_and_holds_nobody_up(
    service: ResourceService, hub: WatchHub
) -> None:
    dropped = asyncio.Event()
    slow = hub.open("Tenant", None, initial=True)
    slow.on_drop = dropped.set
    quick = hub.open("Tenant", None, initial=True)
    await create(service, "a")
    for number in range(MAX_WAITING + 1):
        await service.transact(lambda desk, n=number: desk.set_status("Tenant", "", "a", {"n": n}))
        await take(quick, 1)
    async with asyncio.timeout(5):
        await dropped.wait()
    assert hub.watchers == 1
    with pytest.raises(SlowConsumer):
        await slow.take()


async def test_a_long_first_list_and_a_long_replay_drop_nobody(
    service: ResourceService, hub: WatchHub
) -> None:
    count = MAX_WAITING + 50
    await service.apply_manifests(ADMIN, [tenant(f"t{number:03}") for number in range(count)])
    listed = hub.open("Tenant", None, initial=True)
    replayed = hub.open("Tenant", None, since=0, initial=False)
    await create(service, "z")
    for watcher in (listed, replayed):
        assert len({frame.doc["metadata"]["name"] for frame in await take(watcher, count + 1)}) == count + 1


async def test_taking_ends_at_its_time_limit_and_when_closed(hub: WatchHub) -> None:
    watcher = hub.open("Tenant", None, initial=True)
    assert await watcher.take(timeout_s=0.01) == []
    waiting = asyncio.create_task(watcher.take())
    await asyncio.sleep(0)
    hub.close()
    async with asyncio.timeout(5):
        assert await waiting == []
        assert [frame async for frame in watcher] == []


async def test_subscribers_see_every_event_in_order_and_one_that_fails_stops_nobody(
    service: ResourceService, hub: WatchHub
) -> None:
    seen: list[int] = []

    def fail(event: ResourceEvent) -> None:
        raise RuntimeError("boom")

    hub.subscribe(fail)
    hub.subscribe(lambda event: seen.append(event.version))
    watcher = hub.open("Tenant", None, initial=False)
    await create(service, "a", "b", "c")
    await take(watcher, 3)
    assert seen == [1, 2, 3]


async def test_a_lost_wake_up_only_delays(service: ResourceService, store: Store) -> None:
    async with running(store, DirectBus(deaf=True)) as hub:
        watcher = hub.open("Tenant", None, initial=False)
        await create(service, "a")
        assert told(await take(watcher, 1)) == [("ADDED", "a")]


async def test_changes_travel_over_a_real_nats_server(
    service: ResourceService, store: Store, tmp_path: Path
) -> None:
    tasks = TaskSupervisor()
    try:
        async with (
            run_server(tmp_path / "bus", tasks) as server,
            Bus.connect(server.url, token=server.token) as bus,
            running(store, bus) as hub,
        ):
            watcher = hub.open("Tenant", None, initial=True)
            await create(service, "a", "b")
            assert told(await take(watcher, 2)) == [("ADDED", "a"), ("ADDED", "b")]
    finally:
        await tasks.close()
