"""A state backend that is only a variable: for tests of the engine that need no rules, but need faults."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class StateStub:
    """Holds one state and one lock, counts requests, and fails as it is told."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.lock: dict[str, Any] | None = None
        self.requests: Counter[str] = Counter()
        self.refuse_writes_with: int | None = None
        """The code that answers every POST."""
        self.hang_writes = False
        """POST is never answered."""
        self.on_write: Callable[[], None] = lambda: None
        """Called when a POST has come in, before it is answered."""
        self.url = ""

    @property
    def env(self) -> dict[str, str]:
        """What the engine needs to find its state here."""
        names = ("TF_HTTP_ADDRESS", "TF_HTTP_LOCK_ADDRESS", "TF_HTTP_UNLOCK_ADDRESS")
        return dict.fromkeys(names, self.url)

    @property
    def resources(self) -> dict[str, Any]:
        """Address → instance of what is in the state."""
        found = json.loads(self.state)["resources"] if self.state else []
        return {f"{each['type']}.{each['name']}": each["instances"][0] for each in found}

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests[request.method] += 1
        body = await request.read()
        match request.method:
            case "GET":
                return web.Response(body=self.state) if self.state else web.Response(status=404)
            case "POST":
                return await self._write(body, request.query.get("ID"))
            case "LOCK" if self.lock is not None:
                return web.json_response(self.lock, status=423)
            case "LOCK":
                self.lock = json.loads(body)
            case "UNLOCK":
                self.lock = None
        return web.Response()

    async def _write(self, body: bytes, lock_id: str | None) -> web.Response:
        self.on_write()
        if self.hang_writes:
            await asyncio.Event().wait()
        if self.refuse_writes_with is not None:
            return web.Response(status=self.refuse_writes_with)
        if self.lock is None or self.lock["ID"] != lock_id:
            return web.Response(status=409)
        self.state = body
        return web.Response()


@asynccontextmanager
async def state_stub() -> AsyncIterator[StateStub]:
    """One on a port of its own."""
    stub = StateStub()
    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/state", stub._answer)
    async with TestServer(app, shutdown_timeout=0.1) as server:
        stub.url = str(server.make_url("/state"))
        yield stub
