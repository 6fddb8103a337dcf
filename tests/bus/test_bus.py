"""The bus with a real nats-server: settings, death and return of the server, life without it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import nats
import pytest

from rezuscloud.bus.client import CHANGES, Bus, _matches, change_subject
from rezuscloud.bus.server import NatsFailed, NatsServer, find_nats_server, run_server
from rezuscloud.kit.process import StartError, start_ticks
from rezuscloud.kit.tasks import TaskSupervisor


async def until(claim: Callable[[], bool], *, within_s: float = 10) -> None:
    async with asyncio.timeout(within_s):
        while not claim():
            await asyncio.sleep(0.002)


class Ear:
    """Remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.news = asyncio.Event()

    def __call__(self, subject: str, payload: bytes) -> None:
        self.heard.append((subject, payload))
        self.news.set()

    async def wait_for(self, payload: bytes) -> None:
        async with asyncio.timeout(10):
            while payload not in [p for _, p in self.heard]:
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSupervisor]:
    supervisor = TaskSupervisor()
    yield supervisor
    await supervisor.close()


@pytest.fixture
async def server(tmp_path: Path, tasks: TaskSupervisor) -> AsyncIterator[NatsServer]:
    async with run_server(tmp_path / "nats", tasks) as running:
        yield running


async def kill(server: NatsServer) -> int:
    """kill -9, and waits until the supervisor knows it."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: server.pid != pid)
    return pid


def of_process(server: NatsServer, name: str) -> bytes:
    return Path(f"/proc/{server.pid}/{name}").read_bytes()


# ---------------------------------------------------------------- the server


async def test_the_server_listens_on_loopback_only_and_its_settings_are_private(
    server: NatsServer, tmp_path: Path
) -> None:
    assert server.url.startswith("nats://127.0.0.1:")
    settings = tmp_path / "nats" / "nats-server.conf"
    assert settings.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "nats").stat().st_mode & 0o777 == 0o700
    port = int(server.url.rpartition(":")[2])
    sockets = [line.split() for line in of_process(server, "net/tcp").decode().splitlines()[1:]]
    listening = [s[1] for s in sockets if s[1].endswith(f":{port:04X}") and s[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]


async def test_the_token_is_in_no_argument_and_the_environment_is_empty(server: NatsServer) -> None:
    assert server.token.encode() not in of_process(server, "cmdline")
    assert of_process(server, "environ") == b""


async def test_nobody_connects_without_the_token(server: NatsServer) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await nats.connect(server.url, allow_reconnect=False, error_cb=_ignore)


async def test_a_killed_server_comes_back_at_the_same_url_with_the_same_token(
    server: NatsServer, tasks: TaskSupervisor
) -> None:
    url, token = server.url, server.token
    old = await kill(server)
    await until(lambda: server.is_running)
    assert (server.url, server.token) == (url, token)
    assert server.pid not in (None, old)
    client = await nats.connect(url, token=token, allow_reconnect=False)
    await client.close()
    (told,) = tasks.describe()
    assert told["restarts"] == 1
    assert "ended by itself (code -9)" in told["last_error"]


async def test_the_server_is_gone_when_the_block_ends(tmp_path: Path, tasks: TaskSupervisor) -> None:
    async with run_server(tmp_path / "nats", tasks) as server:
        pid = server.pid
        assert pid is not None
        ticks = start_ticks(pid)
    assert start_ticks(pid) != ticks
    assert (server.pid, server.is_running) == (None, False)
    assert tasks.describe() == []
    assert list((tmp_path / "nats").glob("*.ports")) == []


async def test_a_ports_file_of_a_killed_server_does_not_mislead(
    tmp_path: Path, tasks: TaskSupervisor
) -> None:
    (tmp_path / "nats").mkdir()
    (tmp_path / "nats" / "nats-server_1.ports").write_text('{"nats":["nats://127.0.0.1:1"]}')
    async with run_server(tmp_path / "nats", tasks) as server:
        assert server.url != "nats://127.0.0.1:1"
        assert len(list((tmp_path / "nats").glob("*.ports"))) == 1


async def test_a_server_that_does_not_start_is_told_with_its_last_words(
    tmp_path: Path, tasks: TaskSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rezuscloud.bus.server._SETTINGS", "port: {port}\nno such setting {token}{directory}")
    with pytest.raises(NatsFailed, match="ended by itself"):
        async with run_server(tmp_path / "nats", tasks):
            pass
    assert tasks.describe() == []


async def test_a_missing_nats_server_is_told_with_what_to_do(
    tmp_path: Path, tasks: TaskSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match="REZUSCLOUD_NATS_URL"):
        async with run_server(tmp_path / "nats", tasks):
            pass


# ---------------------------------------------------------------- the bus


async def test_what_is_published_reaches_every_bus_that_subscribes(server: NatsServer) -> None:
    async with (
        Bus.connect(server.url, token=server.token) as one,
        Bus.connect(server.url, token=server.token) as two,
    ):
        ears = Ear(), Ear()
        await one.subscribe(CHANGES, ears[0])
        await two.subscribe(CHANGES, ears[1])
        one.publish(change_subject("Tenant", "uid-1"), b"7")
        for ear in ears:
            await ear.wait_for(b"7")
            assert ear.heard == [("rezuscloud.changes.tenant.uid-1", b"7")]


async def test_the_bus_reconnects_to_a_killed_server_and_keeps_its_subscriptions(server: NatsServer) -> None:
    async with (
        Bus.connect(server.url, token=server.token) as bus,
        Bus.connect(server.url, token=server.token) as other,
    ):
        ear = Ear()
        await bus.subscribe(CHANGES, ear)
        for life in (b"1", b"2"):
            await kill(server)
            await until(lambda: not bus.is_connected and not other.is_connected)
            await until(lambda: server.is_running and bus.is_connected and other.is_connected)
            other.publish(change_subject("Tenant", "uid"), life)
            await ear.wait_for(life)


async def test_publishing_while_the_server_is_down_calls_local_subscribers_at_once(
    server: NatsServer,
) -> None:
    async with Bus.connect(server.url, token=server.token) as bus:
        ear, deaf = Ear(), Ear()
        await bus.subscribe(CHANGES, ear)
        await bus.subscribe("rezuscloud.other.>", deaf)
        await kill(server)
        await until(lambda: not bus.is_connected)
        bus.publish(change_subject("Run", "uid"), b"1")
        assert ear.heard == [("rezuscloud.changes.run.uid", b"1")]
        assert deaf.heard == []


async def test_nothing_published_around_a_death_stops_the_publisher(server: NatsServer) -> None:
    async with Bus.connect(server.url, token=server.token) as bus:
        ear = Ear()
        await bus.subscribe(CHANGES, ear)
        killed = asyncio.create_task(kill(server))
        for number in range(500):
            bus.publish(change_subject("Run", "uid"), b"%d" % number)
            await asyncio.sleep(0)
        await killed
        await until(lambda: server.is_running and bus.is_connected)
        bus.publish(change_subject("Run", "uid"), b"last")
        await ear.wait_for(b"last")


async def test_a_bus_begins_without_a_server_and_connects_when_it_comes() -> None:
    port = _free_port()
    async with Bus.connect(f"nats://127.0.0.1:{port}") as bus:
        assert not bus.is_connected
        ear = Ear()
        await bus.subscribe(CHANGES, ear)
        bus.publish(change_subject("Run", "uid"), b"alone")
        assert [payload for _, payload in ear.heard] == [b"alone"]
        async with _plain_server(port):
            await until(lambda: bus.is_connected)
            bus.publish(change_subject("Run", "uid"), b"together")
            await ear.wait_for(b"together")


async def test_a_bus_whose_token_was_refused_connects_when_it_is_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "rezuscloud.bus.client")

    def refused() -> bool:
        return "authorization violation" in caplog.text.lower()

    port = _free_port()
    async with Bus.connect(f"nats://127.0.0.1:{port}", token="right") as bus:
        async with _plain_server(port, "--auth", "wrong"):
            await until(refused)
            assert not bus.is_connected
        async with _plain_server(port, "--auth", "right"):
            await until(lambda: bus.is_connected)
        async with _plain_server(port, "--auth", "wrong"):
            caplog.clear()
            await until(refused)
        async with _plain_server(port, "--auth", "right"):
            await until(lambda: bus.is_connected)


async def test_publish_takes_anything_and_never_raises(server: NatsServer) -> None:
    async with Bus.connect(server.url, token=server.token) as bus:
        ear = Ear()
        await bus.subscribe(CHANGES, ear)
        bus.publish("not a subject\r\n", b"1")
        bus.publish("", b"2")
        bus.publish(change_subject("Run", "uid"), b"x" * 2_000_000)
        for number in range(20_000):
            bus.publish(change_subject("Run", "uid"), b"%d" % number)
        bus.publish(change_subject("Run", "uid"), b"last")
        await ear.wait_for(b"last")
        assert bus.is_connected
    bus.publish(change_subject("Run", "uid"), b"after the end")
    assert ear.heard[-1][1] == b"after the end"


async def test_a_subscriber_that_raises_harms_nobody(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(subject: str, payload: bytes) -> None:
        raise ZeroDivisionError

    async with Bus.connect(server.url, token=server.token) as bus:
        ear = Ear()
        await bus.subscribe(CHANGES, broken)
        await bus.subscribe(CHANGES, ear)
        bus.publish(change_subject("Run", "uid"), b"1")
        await ear.wait_for(b"1")
        bus.publish(change_subject("Run", "uid"), b"2")
        await ear.wait_for(b"2")
        await until(lambda: sum("a subscriber of" in r.getMessage() for r in caplog.records) == 2)


async def test_a_lost_server_is_told_once_and_its_return_too(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Bus.connect(server.url, token=server.token) as bus:
        await kill(server)
        await until(lambda: not bus.is_connected)
        await until(lambda: bus.is_connected)
        await until(lambda: any("connected again" in r.getMessage() for r in caplog.records))
    told = [r.getMessage() for r in caplog.records if r.name == "rezuscloud.bus.client"]
    assert sum("is not connected" in line for line in told) == 1
    assert server.token not in caplog.text


def test_patterns_follow_nats() -> None:
    assert _matches(CHANGES, change_subject("Tenant", "u"))
    assert _matches("a.*.c", "a.b.c")
    assert not _matches("a.*.c", "a.b.d")
    assert not _matches("a.>", "a")
    assert not _matches("a.b", "a.b.c")
    assert not _matches("a.b.c", "a.b")


# ---------------------------------------------------------------- help


async def _ignore(error: Exception) -> None:
    pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _plain_server:  # noqa: N801 - used as a function
    """A nats-server of nobody's, on a port that we choose."""

    def __init__(self, port: int, *arguments: str) -> None:
        self._arguments = ["-a", "127.0.0.1", "-p", str(port), *arguments]
        self._port = port

    async def __aenter__(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            str(find_nats_server()), *self._arguments, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(10):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    writer.close()
                    return
                except OSError:
                    await asyncio.sleep(0.005)

    async def __aexit__(self, *exc_info: object) -> None:
        self._process.kill()
        await self._process.wait()
