"""Streams of changes, over a real socket, store and hub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rezuscloud.http.sse import Streams
from tests.support.api import TENANT, Api, group, serve

GROUPS = "/api/v1/namespaces/personal/nodegroups"
WATCH = GROUPS + "?watch=true"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path, streams=Streams(heartbeat_s=0.2, bookmark_s=0.2, look_s=0.05)) as running:
        await running.ok("POST", "/api/v1/tenants", TENANT)
        yield running


async def _line(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    line = await asyncio.wait_for(answer.content.readline(), 5)
    event: dict[str, Any] = json.loads(line)
    return event


async def _told(answer: aiohttp.ClientResponse) -> tuple[str, str]:
    event = await _line(answer)
    return event["type"], event["object"]["metadata"].get("name", "")


async def _event(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """The next Server-Sent Event that is no heartbeat."""
    while True:
        block = (await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)).decode()
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if fields:
            return fields


@asynccontextmanager
async def _events(api: Api, path: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with api.stream(path, Accept="text/event-stream", **headers) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"
        yield answer


# ---------------------------------------------------------------- JSON lines


async def test_a_watch_tells_what_is_there_and_then_each_change(api: Api) -> None:
    await api.ok("POST", GROUPS, group("a"))
    async with api.stream(WATCH) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
        assert answer.headers["X-Request-Id"]
        assert answer.headers["Server"] == ""
        assert await _told(answer) == ("ADDED", "a")
        made = await api.ok("POST", GROUPS, group("b"))
        event = await _line(answer)
        assert (event["type"], event["object"]) == ("ADDED", made)
        made["spec"]["replicas"] = 7
        await api.ok("PUT", GROUPS + "/b", made)
        event = await _line(answer)
        assert (event["type"], event["object"]["spec"]["replicas"]) == ("MODIFIED", 7)
        await api.ok("DELETE", GROUPS + "/b")
        assert await _told(answer) == ("MODIFIED", "b")
        await api.release("NodeGroup", "personal", "b")
        event = await _line(answer)
        assert event["type"] == "DELETED"
        assert int(event["object"]["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])


async def test_a_watch_from_a_version_tells_only_what_came_after(api: Api) -> None:
    await api.ok("POST", GROUPS, group("a"))
    version = (await api.ok("GET", GROUPS))["metadata"]["resourceVersion"]
    await api.ok("POST", GROUPS, group("b"))
    async with api.stream(f"{WATCH}&resourceVersion={version}") as answer:
        assert await _told(answer) == ("ADDED", "b")
        await api.ok("POST", GROUPS, group("c"))
        assert await _told(answer) == ("ADDED", "c")


async def test_sending_initial_events_ends_with_a_bookmark(api: Api) -> None:
    query = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    for names in ([], ["a"]):
        for name in names:
            await api.ok("POST", GROUPS, group(name))
        async with api.stream(WATCH + query) as answer:
            for name in names:
                assert await _told(answer) == ("ADDED", name)
            event = await _line(answer)
            assert event["type"] == "BOOKMARK"
            assert event["object"]["kind"] == "NodeGroup"
            meta = event["object"]["metadata"]
            assert meta["annotations"] == {"k8s.io/initial-events-end": "true"}
            assert int(meta["resourceVersion"]) == api.store.log.version
            again = await _line(answer)
            assert (again["type"], "annotations" in again["object"]["metadata"]) == ("BOOKMARK", False)


async def test_many_objects_arrive_before_the_bookmark(api: Api) -> None:
    items = [group(f"g{number:03}") for number in range(600)]
    for item in items:
        item["metadata"]["namespace"] = "personal"
    await api.ok("POST", "/api/v1/manifests", {"kind": "List", "items": items})
    async with api.stream(WATCH + "&sendInitialEvents=true") as answer:
        told = [await _told(answer) for _ in range(601)]
    assert told[:600] == [("ADDED", f"g{number:03}") for number in range(600)]
    assert told[600] == ("BOOKMARK", "")


async def test_a_watch_ends_in_good_order_after_timeout_seconds(api: Api) -> None:
    async with api.stream(WATCH + "&timeoutSeconds=1") as answer:
        assert await asyncio.wait_for(answer.content.read(), 5) == b""


async def test_selectors_judge_an_object_before_and_after(api: Api) -> None:
    await api.ok("POST", GROUPS, group("other", tier="db"))
    async with api.stream(WATCH + "&labelSelector=tier%3Dweb") as answer:
        made = await api.ok("POST", GROUPS, group("a", tier="web"))
        assert await _told(answer) == ("ADDED", "a")
        made["metadata"]["labels"]["tier"] = "db"
        made = await api.ok("PUT", GROUPS + "/a", made)
        assert await _told(answer) == ("DELETED", "a")
        made["metadata"]["labels"]["tier"] = "web"
        await api.ok("PUT", GROUPS + "/a", made)
        assert await _told(answer) == ("ADDED", "a")
    async with api.stream(WATCH + "&fieldSelector=metadata.name%3Dother") as answer:
        assert await _told(answer) == ("ADDED", "other")
    assert (await api.call("GET", WATCH + "&fieldSelector=spec.no%3Dx")).status == 400
    assert (await api.call("GET", WATCH + "&resourceVersion=abc")).status == 400
    assert (await api.call("GET", WATCH + "&timeoutSeconds=abc")).status == 400


async def test_one_object_can_be_watched_by_its_own_path(api: Api) -> None:
    await api.ok("POST", GROUPS, group("a"))
    await api.ok("POST", GROUPS, group("b"))
    async with api.stream(GROUPS + "/b?watch=true") as answer:
        assert await _told(answer) == ("ADDED", "b")


async def test_all_tenants_are_watched_at_once(api: Api) -> None:
    async with api.stream("/api/v1/nodegroups?watch=1") as answer:
        await api.ok("POST", GROUPS, group("a"))
        assert await _told(answer) == ("ADDED", "a")


async def test_a_version_of_another_history_is_an_error_in_the_stream(api: Api) -> None:
    async with api.stream(f"{WATCH}&resourceVersion={10**9}") as answer:
        assert answer.status == 200
        event = await _line(answer)
        assert event["type"] == "ERROR"
        assert (event["object"]["kind"], event["object"]["code"], event["object"]["reason"]) == (
            "Status",
            410,
            "Expired",
        )
        assert await asyncio.wait_for(answer.content.read(), 5) == b""


# ---------------------------------------------------------------- Server-Sent Events


async def test_events_carry_id_type_and_data_and_resume_by_last_event_id(api: Api) -> None:
    await api.ok("POST", GROUPS, group("a"))
    async with _events(api, GROUPS) as answer:
        first = await _event(answer)
        assert first["event"] == "ADDED"
        assert "id" not in first
        opened = await _event(answer)
        assert opened == {"retry": "2000", "id": str(api.store.log.version)}
        made = await api.ok("POST", GROUPS, group("b"))
        second = await _event(answer)
        assert second["event"] == "ADDED"
        assert second["id"] == made["metadata"]["resourceVersion"]
        assert json.loads(second["data"]) == {"type": "ADDED", "object": made}
    await api.ok("POST", GROUPS, group("c"))
    async with _events(api, GROUPS, Last_Event_ID=second["id"]) as answer:
        events = [await _event(answer) for _ in range(2)]
        names = [json.loads(each["data"])["object"]["metadata"]["name"] for each in events if "data" in each]
        assert names == ["c"]


async def test_silence_brings_heartbeats(api: Api) -> None:
    async with _events(api, GROUPS) as answer:
        await _event(answer)
        block = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 5)
        assert block == b": heartbeat\n\n"


async def test_a_lost_position_asks_to_list_anew_and_goes_on_live(api: Api) -> None:
    async with _events(api, GROUPS, Last_Event_ID=str(10**9)) as answer:
        resync = await _event(answer)
        assert resync["event"] == "resync"
        assert resync["id"] == str(api.store.log.version)
        assert json.loads(resync["data"])["code"] == 410
        await api.ok("POST", GROUPS, group("a"))
        event = await _event(answer)
        while "data" not in event:
            event = await _event(answer)
        assert json.loads(event["data"])["object"]["metadata"]["name"] == "a"


# ---------------------------------------------------------------- ends


async def test_a_stream_ends_when_the_password_changes(api: Api) -> None:
    async with api.stream(WATCH) as answer:
        await api.sessions.set_admin_password("something new")
        assert await asyncio.wait_for(answer.content.read(), 5) == b""


async def test_streams_end_in_good_order_when_the_server_stops(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as client:
        async with serve(tmp_path) as api:
            headers = {"Authorization": f"Bearer {api.token}"}
            answer = await client.get(api.listener.url + "/api/v1/tenants?watch=true", headers=headers)
            assert len(api.streams) == 1
        assert await asyncio.wait_for(answer.content.read(), 5) == b""


async def test_a_client_that_never_reads_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    streams = Streams(look_s=0.05, stall_s=1.0)
    async with serve(tmp_path, streams=streams) as api:
        await api.ok("POST", "/api/v1/tenants", TENANT)
        await api.ok("POST", GROUPS, group("a"))
        reader, writer = await asyncio.open_connection(api.listener.host, api.listener.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport of a socket has it
        request = f"GET {WATCH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.token}\r\n\r\n"
        writer.write(request.encode())
        async with api.stream(WATCH) as healthy:
            await _line(healthy)
            count = 0
            while count < 5 or len(streams) == 2:
                note = {"status": {"note": f"{count}-" + "x" * 20_000}}
                await api.ok(
                    "PATCH",
                    GROUPS + "/a/status",
                    note,
                    headers={"Content-Type": "application/merge-patch+json"},
                )
                assert (await _line(healthy))["object"]["status"] == note["status"]
                count += 1
                assert count < 2000, "the client that never reads was not dropped"
        del reader
        writer.close()
