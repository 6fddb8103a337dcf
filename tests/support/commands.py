"""The real `rezuscloud` and `rezusctl`, and an operator's own tofu, as child processes."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.server import BIN, Server

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


async def run(program: Path | str, *words: str, cwd: Path, env: Mapping[str, str]) -> Ended:
    """Runs a command to its end; one that takes too long is killed, and the test fails."""
    child = await asyncio.create_subprocess_exec(
        str(program),
        *words,
        cwd=cwd,
        env={"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(cwd), **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    return Ended(child.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


async def rezuscloud(*words: str, data_dir: Path, **env: str) -> Ended:
    """`rezuscloud`, on a data directory."""
    return await run(
        BIN / "rezuscloud",
        *words,
        cwd=data_dir.parent,
        env={"REZUSCLOUD_DATA_DIR": str(data_dir), "REZUSCLOUD_ADDR": "127.0.0.1:0", **env},
    )


async def rezusctl(server: Server, *words: str) -> Ended:
    """`rezusctl`, against a server, with its token."""
    return await run(
        BIN / "rezusctl",
        *words,
        cwd=server.data_dir.parent,
        env={"REZUSCTL_SERVER": server.url, "REZUSCTL_TOKEN": server.token},
    )


def read_exports(text: str) -> dict[str, str]:
    """The variables that a shell would have after `eval` of lines `export NAME=VALUE`."""
    words = [shlex.split(line) for line in text.splitlines() if line.startswith("export ")]
    return {name: value for _, word in words for name, _, value in [word.partition("=")]}
