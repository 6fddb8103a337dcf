"""Owns the listening socket and its limits: idle and slow connections, connections per address, and answers
to what is not even HTTP.

It runs any application; what that answers is not its business.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from rezuscloud.http.errors import api_error, status_response
from rezuscloud.http.keys import ENTRANCE, Entrance

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one client may cost. Times in seconds."""

    idle_s: float = 75.0
    """A connection without a complete request for this long is closed, also a new or a dripping one. Longer
    than the 60 s for which proxies keep theirs."""
    per_address: int = 1024
    """Open connections of one address."""
    exempt: frozenset[str] = frozenset({"127.0.0.1", "::1"})
    """Addresses without that bound: this machine itself."""
    shutdown_s: float = 10.0
    """How long running requests may take after the stop was asked."""


@dataclass(frozen=True)
class Listener:
    """Where the server can be reached."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@asynccontextmanager
async def listen(
    app: web.Application, host: str, port: int, *, limits: Limits | None = None
) -> AsyncIterator[Listener]:
    """Serves `app` meanwhile; port 0 finds a free one. Leaving ends streams, then waits for running requests.

    Raises OSError when the address cannot be had.
    """
    limits = limits or Limits()
    runner = _Runner(
        app,
        limits,
        access_log=None,
        keepalive_timeout=limits.idle_s,
        shutdown_timeout=limits.shutdown_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        bound = runner.addresses[0]
        yield Listener(str(bound[0]), int(bound[1]))
    finally:
        await runner.cleanup()


class _Runner(web.AppRunner):
    __slots__ = ("_limits",)

    def __init__(self, app: web.Application, limits: Limits, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._limits = limits

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        handle = made.request_handler
        if (entrance := self._app.get(ENTRANCE)) is not None:
            handle = _by(entrance, handle)
        return _Server(
            handle,
            limits=self._limits,
            request_factory=made.request_factory,
            loop=made._loop,
            **made._kwargs,
        )


def _by(entrance: Entrance, handle: Any) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        direct = entrance(request)
        response: web.StreamResponse = await (handle(request) if direct is None else direct)
        return response

    return answer


class _Server(web.Server):
    """Counts connections per address."""

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._by_address: Counter[str] = Counter()
        self._addresses: dict[RequestHandler, str] = {}

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: RequestHandler, transport: Any) -> None:
        super().connection_made(handler, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        if address in self._limits.exempt:
            return
        self._by_address[address] += 1
        self._addresses[handler] = address
        if self._by_address[address] > self._limits.per_address:
            _log.debug("%s has too many connections; its newest was refused", address)
            transport.abort()

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        address = self._addresses.pop(handler, None)
        if address is not None:
            self._by_address[address] -= 1
            if self._by_address[address] <= 0:
                del self._by_address[address]


class _Connection(RequestHandler):
    """Answers what never reached the application in the same form as all other errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            _log.error("a request failed outside of the application", exc_info=exc)
            text = "something went wrong inside; the server goes on"
        else:
            _log.debug("not HTTP, or too large, from %s: %s", request.remote, message)
            text = "the request cannot be read: " + " ".join((message or "malformed HTTP").split())[:200]
        if request.writer.output_size > 0:
            raise ConnectionError("half an answer is out; another cannot be sent")
        response = status_response(api_error(status, text))
        response.force_close()
        return response
