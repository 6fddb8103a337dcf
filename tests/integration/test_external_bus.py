"""An external NATS instead of a child of ours."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rezuscloud.bus.server import find_nats_server
from tests.support.server import control_plane, running

pytestmark = pytest.mark.engine


@asynccontextmanager
async def nats(directory: Path) -> AsyncIterator[str]:
    """A nats-server that is not ours; gives its URL."""
    ports = directory / "ports"
    ports.mkdir()
    argv = [str(find_nats_server()), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", str(ports)]
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(10):
            while not (files := list(ports.glob("*.ports"))) or not files[0].read_text():
                await asyncio.sleep(0.02)
        found = re.search(r"nats://[\d.]+:\d+", files[0].read_text())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        await process.wait()


async def test_an_external_nats_is_used_instead_of_a_child(tmp_path: Path, engine_path: Path) -> None:
    async with (
        nats(tmp_path) as url,
        running(tmp_path / "data", engine_path, REZUSCLOUD_NATS_URL=url) as server,
    ):
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert children == []
        await server.declare("home", control_plane(1))
        await server.until_applied("home")
        parts = {part["name"]: part for part in (await server.get("/readyz"))["parts"]}
        assert parts["bus"] == {"name": "bus", "ready": True, "message": ""}


async def test_a_server_starts_and_works_while_the_external_nats_is_away(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_NATS_URL="nats://127.0.0.1:9") as server:
        await server.declare("home", control_plane(1))
        await server.until_applied("home")
        parts = {part["name"]: part for part in (await server.get("/readyz"))["parts"]}
        assert "away" in parts["bus"]["message"]
