"""`rezusctl` as a person uses it: in a shell, in a pipe, on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import Ended
from tests.support.server import BIN, Doc, Server

TIMEOUT_S = 60.0
REZUSCTL = str(BIN / "rezusctl")
_ON_TERMINAL = "import os, sys; os.login_tty(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"


class Cli:
    """One person's `rezusctl`. What it prints never holds a traceback."""

    def __init__(self, home: Path, server: str = "", token: str = "") -> None:
        self.home = home
        self.config = home / ".config/rezusctl/config.json"
        given = {"REZUSCTL_SERVER": server, "REZUSCTL_TOKEN": token}
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LANG": "C.UTF-8",
            **{name: value for name, value in given.items() if value},
        }

    @classmethod
    def of(cls, server: Server) -> Cli:
        """Somebody who has the server's token."""
        return cls(server.data_dir.parent, server.url, server.token)

    async def run(self, *words: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Ended:
        child = await self._start(*words, env=env)
        try:
            out, err = await asyncio.wait_for(child.communicate(stdin.encode()), TIMEOUT_S)
        finally:
            await _end(child)
        assert child.returncode is not None
        ended = Ended(child.returncode, out.decode(), err.decode())
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    async def ok(self, *words: str, stdin: str = "") -> str:
        """What a command prints that must succeed."""
        ended = await self.run(*words, stdin=stdin)
        assert ended.code == 0, ended
        return ended.stdout

    async def fails(self, *words: str, code: int = 1, stdin: str = "") -> str:
        """What a command says that must fail."""
        ended = await self.run(*words, stdin=stdin)
        assert ended.code == code, ended
        return ended.stderr

    async def doc(self, *words: str) -> Any:
        """What a command prints as YAML."""
        return yaml.safe_load(await self.ok(*words))

    @asynccontextmanager
    async def running(self, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """A command that goes on, for the block."""
        child = await self._start(*words)
        try:
            yield child
        finally:
            await _end(child)

    async def _start(self, *words: str, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            REZUSCTL,
            *words,
            cwd=self.home,
            env={**self.env, **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def on_terminal(self, *words: str, types: Mapping[str, str] | None = None, **env: str) -> Ended:
        """A command on a terminal; `types` says what is typed when a text appears. stdout holds all that is
        on the screen."""
        return await asyncio.to_thread(self._on_terminal, words, dict(types or {}), env)

    def _on_terminal(self, words: tuple[str, ...], types: dict[str, str], env: dict[str, str]) -> Ended:
        master, slave = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, str(slave), REZUSCTL, *words],
            cwd=self.home,
            env={**self.env, "TERM": "xterm", "COLUMNS": "200", **env},
            pass_fds=[slave],
        )
        os.close(slave)
        screen, seen = b"", 0
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                if not select.select([master], [], [], 0.1)[0]:
                    continue
                try:
                    piece = os.read(master, 65536)
                except OSError:  # the child has closed the terminal
                    break
                screen += piece
                for text, reply in types.items():
                    if (at := screen.find(text.encode(), seen)) >= 0:
                        seen = at + len(text)
                        os.write(master, reply.encode())
            code = child.wait(TIMEOUT_S)
        finally:
            os.close(master)
            child.kill()
            child.wait()
        return Ended(code, screen.decode(errors="replace"), "")


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        child.kill()
    await child.wait()


async def interrupt(child: asyncio.subprocess.Process) -> Ended:
    """Ctrl-C, and how it ended."""
    child.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(child.communicate(), 10)
    assert child.returncode is not None
    return Ended(child.returncode, out.decode(), err.decode())


async def until_line(child: asyncio.subprocess.Process, text: str) -> str:
    """The next line of a command's output that holds the text."""
    assert child.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        async for line in child.stdout:
            if text in line.decode():
                return line.decode()
    raise AssertionError(f"the output ended without {text!r}")


def manifest(*docs: Doc) -> str:
    return yaml.safe_dump_all(docs)
