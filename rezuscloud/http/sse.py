"""Owns answers without an end: watches and followed logs, as JSON lines, Server-Sent Events or plain text.

It keeps a list of all open streams and looks at each once a second: ends those whose time is over, whose
token is no longer good or whose client has gone, sends heartbeats, and drops clients that do not read. So a
stream itself needs no timers, and a thousand cost little. It does not know what is sent (`api/`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from multidict import CIMultiDict

from rezuscloud.http.errors import add_safe_headers
from rezuscloud.http.keys import TOLD
from rezuscloud.model.errors import TooManyRequests

_log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
_LOOK_S = 1.0
_HIGH_WATER = 32 * 1024
_KERNEL_BUFFER = 128 * 1024


class Stream:
    """One open answer. Only its own handler sends; `end` may be called by anybody, more than once."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        *,
        on_end: Callable[[], None],
        is_welcome: Callable[[], bool],
        beat: Callable[[], bytes],
        beat_s: float,
        check_s: float,
        stall_s: float,
    ) -> None:
        self._request = request
        self.response = response
        self._on_end = on_end
        self._is_welcome = is_welcome
        self._beat = beat
        self._beat_s = beat_s
        self._check_s = check_s
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._asked_at = self._moved_at = self._loop.time()
        self._arrived = 0
        self.has_ended = False

    async def send(self, data: bytes) -> None:
        """Sends at once, and waits while the client does not read. Raises ConnectionError when it is gone."""
        await self.response.write(data)
        self._sent_at = self._loop.time()
        if self._request.protocol.writing_paused:
            await self._request.writer.drain()

    def end(self) -> None:
        """Asks the handler to finish: an orderly end, after which the client may come back."""
        if not self.has_ended:
            self.has_ended = True
            self._on_end()

    def drop(self) -> None:
        """Ends it for a client that does not keep up; one that does not read at all is cut off."""
        self.end()
        transport = self._request.transport
        if transport is not None and self._request.protocol.writing_paused:
            transport.abort()

    async def look(self, now: float) -> None:
        """What is due now. Never waits for the client."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            self.end()
            return
        waiting = transport.get_write_buffer_size()
        arrived = self._request.writer.output_size - waiting
        if waiting == 0 or arrived != self._arrived:
            self._arrived, self._moved_at = arrived, now
        elif now - self._moved_at >= self._stall_s:
            _log.info(
                "request %s: the client has not read for %.0f s and was dropped",
                self._request[TOLD].request_id,
                now - self._moved_at,
            )
            self.end()
            transport.abort()
            return
        if self.has_ended:
            return
        if now - self._asked_at >= self._check_s:
            self._asked_at = now
            if not self._is_welcome():
                self.end()
                return
        if now - self._sent_at >= self._beat_s and waiting == 0:
            self._sent_at = now
            if beat := self._beat():
                with suppress(ConnectionError):
                    await self.response.write(beat)


class Streams:
    """All open streams of one server. `limit` bounds them; times are in seconds."""

    def __init__(
        self,
        *,
        heartbeat_s: float = 15.0,
        bookmark_s: float = 60.0,
        stall_s: float = 20.0,
        limit: int = 4000,
        look_s: float = _LOOK_S,
    ) -> None:
        self.heartbeat_s = heartbeat_s
        self.bookmark_s = bookmark_s
        self._stall_s = stall_s
        self._limit = limit
        self._look_s = look_s
        self._open: set[Stream] = set()
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(
        self,
        request: web.Request,
        content_type: str,
        *,
        on_end: Callable[[], None],
        lifetime_s: float | None,
        is_welcome: Callable[[], bool],
        beat: Callable[[], bytes] = bytes,
        beat_s: float | None = None,
    ) -> AsyncIterator[Stream]:
        """Starts the answer, keeps it listed, and finishes it in good order.

        `on_end` must make the handler's loop stop; it is called at the latest after `lifetime_s`, and when
        `is_welcome`, asked now and then, says no. `beat` gives what is sent into a silence of `beat_s`. A
        client that goes away in between is no error. Raises TooManyRequests above the limit.
        """
        if len(self._open) >= self._limit or self._is_closing:
            raise TooManyRequests("too many open streams; try again later", retry_after_s=10)
        headers: CIMultiDict[str] = CIMultiDict({"Content-Type": content_type})
        headers["X-Request-Id"] = request[TOLD].request_id
        headers["X-Accel-Buffering"] = "no"  # a proxy in between must not collect events
        add_safe_headers(headers)
        stream = Stream(
            request,
            web.StreamResponse(headers=headers),
            on_end=on_end,
            is_welcome=is_welcome,
            beat=beat,
            beat_s=beat_s or self.heartbeat_s,
            check_s=self.heartbeat_s,
            stall_s=self._stall_s,
        )
        _bound_buffers(request)
        timer = None
        if lifetime_s is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, lifetime_s), stream.end)
        self._open.add(stream)
        try:
            await stream.response.prepare(request)
            with suppress(ConnectionError):
                yield stream
                await stream.response.write_eof()
        finally:
            self._open.discard(stream)
            if timer is not None:
                timer.cancel()

    def end_all(self) -> None:
        """The server stops: every stream ends in good order, and none begins any more."""
        self._is_closing = True
        for stream in list(self._open):
            stream.end()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks after the streams meanwhile."""
        task = asyncio.create_task(self._look(), name="streams")
        try:
            yield
        finally:
            self.end_all()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._look_s)
            for stream in list(self._open):
                try:
                    await stream.look(loop.time())
                except Exception:
                    _log.exception("a stream could not be looked after, so it ends")
                    stream.end()


def event(data: bytes, *, type_: str = "", id_: int | str = "") -> bytes:
    """One Server-Sent Event. `data` must be one line (JSON is)."""
    lines = []
    if id_ != "":
        lines.append(b"id: %s\n" % str(id_).encode())
    if type_:
        lines.append(b"event: %s\n" % type_.encode())
    if data:
        lines.append(b"data: %s\n" % data)
    return b"".join(lines) + b"\n"


def wants_events(request: web.Request) -> bool:
    """The client asked for Server-Sent Events."""
    return EVENT_STREAM in request.headers.get("Accept", "")


def _bound_buffers(request: web.Request) -> None:
    """A client that does not read shall be noticed early and cost little, here and in the kernel."""
    transport = request.transport
    if transport is None:
        return
    transport.set_write_buffer_limits(high=_HIGH_WATER)
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER)
