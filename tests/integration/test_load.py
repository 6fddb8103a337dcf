"""Many edits, many tenants, a bus that dies, a client that never reads: the house stands and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.server import Doc, Server, control_plane, running, workers

TENANTS = 50


# ---------------------------------------------------------------- the bus


@pytest.mark.engine
async def test_watches_and_applies_go_on_while_nats_server_is_killed_again_and_again(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        async with _watching(server, "runs") as seen:
            killed: set[int] = set()
            for number in range(4):
                pid = await server.until(lambda: _nats(server, killed))
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                started = time.monotonic()
                await server.declare("personal", control_plane(1), workers(number))
                await server.until_applied("personal")
                await _until_seen(seen, f"run-{number + 1}", "Succeeded")
                assert time.monotonic() - started < 10
        assert len(killed) == 4
        assert len(await server.runs("personal")) == 4
        assert (await server.get("/readyz"))["status"] == "ready"
        await server.until(lambda: _nats(server, killed))  # and it is there again


async def _nats(server: Server, not_these: set[int]) -> int | None:
    """The nats-server that is a child of ours right now."""
    return next((pid for pid in _children(server.pid, "nats-server") if pid not in not_these), None)


# ---------------------------------------------------------------- edits and tenants


@pytest.mark.engine
async def test_a_hundred_edits_in_a_second_are_one_or_two_runs(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_DEBOUNCE_S="1") as server:
        await server.declare("personal", control_plane(1), workers(1))
        path = "/api/v1/namespaces/personal/nodegroups/workers"
        for number in range(100):
            change = {"spec": {"replicas": 1 + number % 3, "providerConfig": {"zone": f"zone-{number}"}}}
            await server.patch(path, change)
        hold = (await server.tenant("personal"))["status"]["heldBy"][0]
        assert (hold["by"], bool(hold["until"])) == ("debounce", True)
        await server.until_applied("personal")
        assert len(await server.runs("personal")) in (1, 2)
        state = await server.get("/api/v1/namespaces/personal/machines/workers-1")
        assert state["spec"]["zone"] == "zone-99"


@pytest.mark.engine
async def test_fifty_tenants_at_once_never_run_more_engines_than_allowed(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_MAX_RUNS="2") as server:
        names = [f"tenant-{number:02}" for number in range(TENANTS)]
        async with _sampling(server) as most, _watching(server, "tenants") as seen:
            await asyncio.gather(*(server.declare(name, control_plane(1)) for name in names))

            async def are_applied() -> bool:
                items = (await server.get("/api/v1/tenants"))["items"]
                return len(items) == TENANTS and all(map(_is_settled, items))

            await server.until(are_applied, 90)
        assert 1 <= max(most) <= 2, "engines at once"
        holds = [
            hold for event in seen for hold in event["object"]["status"].get("heldBy", ()) if "by" in hold
        ]
        waited = [hold["message"] for hold in holds if hold["by"] == "capacity"]
        assert len(waited) >= TENANTS // 2
        assert "2 runs are going on, which is the limit" in waited[0]
        runs = (await server.get("/api/v1/runs"))["items"]
        assert len(runs) == TENANTS
        assert {run["status"]["phase"] for run in runs} == {"Succeeded"}
        await server.until(lambda: asyncio.to_thread(_is_empty, tmp_path / "data" / "runs"))


def _is_empty(runs: Path) -> bool:
    return not list(runs.glob("*/*"))


def _is_settled(tenant: Doc) -> bool:
    status = tenant["status"]
    is_applied = status["declaredRevision"] == status.get("appliedRevision")
    return is_applied and not status.get("currentRun") and not status.get("heldBy")


@contextlib.asynccontextmanager
async def _sampling(server: Server) -> AsyncIterator[list[int]]:
    """How many engines work, looked at all the time."""
    counts: list[int] = []

    async def look() -> None:
        while True:
            counts.append(len(_children(server.pid, "tofu")))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(look())
    try:
        yield counts
    finally:
        task.cancel()


# ---------------------------------------------------------------- clients


async def test_a_client_that_never_reads_its_watch_is_dropped_and_costs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "data", None, REZUSCLOUD_LOG_LEVEL="warning") as server:
        await server.declare("personal", control_plane(1), paused=True)
        async with _watching(server, "tenants") as seen:
            without = await _memory_of_changes(server, seen)
            deaf = [
                await _deaf_watch(server, accept)
                for accept in ("application/json", "text/event-stream")
                for _ in range(4)
            ]
            with_deaf = await _memory_of_changes(server, seen)
        # Kept for each of the deaf, these changes would be 128 MB.
        assert with_deaf < without + 20, f"{with_deaf} MiB instead of {without}"
        for sock in deaf:
            assert await _is_dropped(sock)
        assert (await server.get("/readyz"))["status"] == "ready"


async def _memory_of_changes(server: Server, seen: list[Doc]) -> int:
    """By how many MiB the server grows with 800 large changes, which a good client sees in time."""
    before = _memory_mib(server.pid)
    for number in range(800):
        note = f"{number}{'x' * 20_000}"
        started = time.monotonic()
        await server.patch("/api/v1/tenants/personal", {"metadata": {"annotations": {"note": note}}})
        if number % 50 == 0:
            await _until_note(seen, f"{number}x")
            assert time.monotonic() - started < 2, "the others are served in time"
            seen.clear()
    return _memory_mib(server.pid) - before


async def _deaf_watch(server: Server, accept: str) -> socket.socket:
    """A connection that asks for a watch and never reads a byte of it."""
    url = urlsplit(server.url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (url.hostname, url.port))
    head = (
        f"GET /api/v1/tenants?watch=true HTTP/1.1\r\nHost: {url.netloc}\r\nAccept: {accept}\r\n"
        f"Authorization: Bearer {server.token}\r\n\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(sock, head.encode())
    return sock


async def _is_dropped(sock: socket.socket) -> bool:
    """Reads what the kernel still holds: after it comes the end, and not all the changes."""
    loop = asyncio.get_running_loop()
    size = 0
    with contextlib.closing(sock):
        try:
            async with asyncio.timeout(5):
                while chunk := await loop.sock_recv(sock, 2**16):
                    size += len(chunk)
        except ConnectionResetError:
            pass
    return size < 10 * 2**20


# ---------------------------------------------------------------- small things


@contextlib.asynccontextmanager
async def _watching(server: Server, plural: str) -> AsyncIterator[list[Doc]]:
    """All events of a kind, as one watch that is never opened again brings them."""
    seen: list[Doc] = []
    url = f"{server.url}/api/v1/{plural}?watch=true"
    async with server.session.get(url, headers=server.headers) as stream:
        assert stream.status == 200

        async def read() -> None:
            while line := await stream.content.readuntil(b"\n"):
                seen.append(json.loads(line))

        task = asyncio.create_task(read())
        try:
            yield seen
            assert not task.done(), "the watch has ended"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_seen(seen: list[Doc], name: str, phase: str) -> None:
    async with asyncio.timeout(10):
        while not any(
            event["object"]["metadata"]["name"] == name and event["object"]["status"]["phase"] == phase
            for event in seen
        ):
            await asyncio.sleep(0.01)


async def _until_note(seen: list[Doc], start: str) -> None:
    async with asyncio.timeout(10):
        while not any(
            event["object"]["metadata"].get("annotations", {}).get("note", "").startswith(start)
            for event in seen
        ):
            await asyncio.sleep(0.005)


def _children(pid: int, program: str) -> list[int]:
    """Direct children of a process that run this program and have not ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                stat = Path(f"/proc/{child}/stat").read_text()
                name, _, rest = stat.partition("(")[2].rpartition(")")
                if name == program and rest.split()[0] not in "ZX":
                    found.append(int(child))
    return found


def _memory_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024
