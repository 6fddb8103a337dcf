"""A door between the engine and the state backend that a test can hold shut, and what runs below a folder.

The engine is given as a small program that only changes the addresses of the state and then becomes the real
one. So a test can stop the world at an exact point of a run, and the product knows nothing of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from aiohttp import web

from rezuscloud.kit.process import start_ticks


class Held:
    """One request that waits at the gate."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.passes = asyncio.Event()
        self.answers = asyncio.Event()
        self.answered = asyncio.Event()
        self.answers.set()

    async def arrived(self, timeout_s: float = 20) -> None:
        """The request is there; the server has not seen it."""
        await asyncio.wait_for(self.reached.wait(), timeout_s)

    async def pass_on(self, timeout_s: float = 20) -> None:
        """Lets the server answer it, and keeps the answer from the engine until `answer`."""
        self.answers.clear()
        self.passes.set()
        await asyncio.wait_for(self.answered.wait(), timeout_s)

    def answer(self) -> None:
        self.answers.set()

    def release(self) -> None:
        """Lets it through."""
        self.passes.set()
        self.answers.set()


class Gate:
    """Passes everything on, but for requests that are held. `engine` is the program that uses it."""

    def __init__(self, engine: Path) -> None:
        self.engine = engine
        self._held: dict[str, Held] = {}

    def hold(self, method: str) -> Held:
        """Holds the next request of this method."""
        held = self._held[method] = Held()
        return held

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        address = request.query["to"]
        # `init` asks an address of its own for a state: that is nobody's.
        held = self._held.pop(request.method, None) if "/state/" in address else None
        if held is not None:
            held.reached.set()
            await held.passes.wait()
        if lock_id := request.query.get("ID"):
            address += f"?ID={lock_id}"
        names = ("Authorization", "Content-Type", "Content-MD5")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, address, data=body or None, headers=headers) as answer,
            ):
                status, raw = answer.status, await answer.read()
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()  # as the dead server itself would
            return web.Response(status=502)
        if held is not None:
            held.answered.set()
            await held.answers.wait()
        return web.Response(status=status, body=raw)

    def open(self) -> None:
        for held in self._held.values():
            held.release()


@asynccontextmanager
async def gated(engine: Path, folder: Path) -> AsyncIterator[Gate]:
    """A gate, and in `folder` the engine that goes through it."""
    gate = Gate(folder / "gated-engine")
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/", gate.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        lines = ["#!/bin/sh"]
        for name in ("TF_HTTP_ADDRESS", "TF_HTTP_LOCK_ADDRESS", "TF_HTTP_UNLOCK_ADDRESS"):
            lines.append(f'[ -n "${name}" ] && export {name}="{url}?to=${name}"')
        lines.append(f'exec "{engine}" "$@"')
        gate.engine.write_text("\n".join(lines) + "\n")
        gate.engine.chmod(0o755)
        yield gate
    finally:
        gate.open()
        await runner.cleanup()


# ---------------------------------------------------------------- processes


def run_dirs(data_dir: Path) -> list[Path]:
    """Working directories of runs that are there."""
    return sorted((data_dir / "runs").glob("*/*"))


def engine_pid(data_dir: Path) -> int | None:
    """The engine that works for a run right now, as its run directory tells."""
    for path in (data_dir / "runs").glob("*/*/run.json"):
        with suppress(OSError, ValueError):
            record = json.loads(path.read_bytes())
            if "pid" in record and start_ticks(record["pid"]) == record["startTicks"]:
                return int(record["pid"])
    return None


def processes_in(folder: Path) -> dict[int, str]:
    """Processes that work in a folder or below: pid → command line. Zombies do not count."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            cwd = (entry / "cwd").readlink()
            if cwd.is_relative_to(folder):
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
    return found
