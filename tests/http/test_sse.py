"""Streams: they end in good order, say that they live, and drop who does not read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from rezuscloud.http.errors import to_response
from rezuscloud.http.keys import TOLD, Told
from rezuscloud.http.server import Limits, Listener, listen
from rezuscloud.http.sse import Streams, event, wants_events


@dataclass
class _Feed:
    """An application with one stream that sends what is put into `queue`."""

    streams: Streams
    lifetime_s: float | None = None
    is_welcome: Callable[[], bool] = lambda: True
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        request[TOLD] = Told("test")
        try:
            async with self.streams.open(
                request,
                "text/event-stream",
                on_end=lambda: self.queue.put_nowait(None),
                lifetime_s=self.lifetime_s,
                is_welcome=self.is_welcome,
                beat=lambda: b": heartbeat\n\n",
            ) as stream:
                while (data := await self.queue.get()) is not None:
                    await stream.send(data)
            return stream.response
        finally:
            self.ended.set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Listener]:
        app = web.Application()
        app.router.add_get("/", self.handle)

        async def stop(_: web.Application) -> None:
            self.streams.end_all()

        async def look(_: web.Application) -> AsyncIterator[None]:
            async with self.streams.watched():
                yield

        app.on_shutdown.append(stop)
        app.cleanup_ctx.append(look)
        async with listen(app, "127.0.0.1", 0, limits=Limits(shutdown_s=5)) as listener:
            yield listener


@asynccontextmanager
async def _read(listener: Listener) -> AsyncIterator[aiohttp.StreamReader]:
    async with aiohttp.ClientSession() as session, session.get(listener.url) as answer:
        assert answer.status == 200
        yield answer.content


def test_an_event_is_written_as_the_standard_says() -> None:
    assert event(b"{}", type_="ADDED", id_=7) == b"id: 7\nevent: ADDED\ndata: {}\n\n"
    assert event(b"", id_=7) == b"id: 7\n\n"


async def test_what_is_sent_arrives_at_once_and_silence_brings_heartbeats() -> None:
    feed = _Feed(Streams(heartbeat_s=0.1, look_s=0.02))
    async with feed.serve() as listener, _read(listener) as content:
        feed.queue.put_nowait(b"data: one\n\n")
        assert await content.readuntil(b"\n\n") == b"data: one\n\n"
        assert await content.readuntil(b"\n\n") == b": heartbeat\n\n"
        assert len(feed.streams) == 1
        feed.queue.put_nowait(None)
        await asyncio.wait_for(feed.ended.wait(), 5)


async def test_a_stream_ends_in_good_order_when_its_time_is_over() -> None:
    feed = _Feed(Streams(), lifetime_s=0.1)
    async with feed.serve() as listener, _read(listener) as content:
        assert await content.read() == b""
    assert len(feed.streams) == 0


async def test_a_stream_ends_in_good_order_when_its_token_is_no_longer_good() -> None:
    welcome = [True]
    feed = _Feed(Streams(heartbeat_s=0.05, look_s=0.02), is_welcome=lambda: welcome[0])
    async with feed.serve() as listener, _read(listener) as content:
        assert await content.readuntil(b"\n\n") == b": heartbeat\n\n"
        welcome[0] = False
        await asyncio.wait_for(content.read(), 5)


async def test_streams_end_in_good_order_when_the_server_stops() -> None:
    feed = _Feed(Streams())
    started = time.monotonic()
    async with aiohttp.ClientSession() as session:
        async with feed.serve() as listener:
            answer = await session.get(listener.url)
        assert await answer.content.read() == b""
    assert time.monotonic() - started < 3


async def test_a_client_that_goes_away_is_forgotten() -> None:
    feed = _Feed(Streams(look_s=0.02))
    async with feed.serve() as listener:
        async with _read(listener):
            assert len(feed.streams) == 1
        await asyncio.wait_for(feed.ended.wait(), 5)
        assert len(feed.streams) == 0


async def test_a_client_that_never_reads_is_dropped_and_its_buffer_stays_small() -> None:
    feed = _Feed(Streams(look_s=0.05, stall_s=0.5))
    async with feed.serve() as listener:
        reader, writer = await asyncio.open_connection(listener.host, listener.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport of a socket has it
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(4000):
            feed.queue.put_nowait(b"x" * 16 * 1024)
        await asyncio.wait_for(feed.ended.wait(), 15)
        assert len(feed.streams) == 0
        sent = 4000 - feed.queue.qsize()
        assert sent * 16 * 1024 < 12 * 1024 * 1024, "the kernel's and our buffers took more than they may"
        del reader
        writer.close()


async def test_a_slow_client_that_goes_on_reading_is_kept() -> None:
    feed = _Feed(Streams(look_s=0.05, stall_s=0.5))
    size = 6 * 1024 * 1024
    async with feed.serve() as listener, _read(listener) as content:
        for _ in range(size // 65536):
            feed.queue.put_nowait(b"x" * 65536)
        feed.queue.put_nowait(None)
        received = 0
        while chunk := await content.read(256 * 1024):
            received += len(chunk)
            await asyncio.sleep(0.05)
        assert received == size


async def test_streams_are_bounded_in_number() -> None:
    feed = _Feed(Streams(limit=1))
    app = web.Application()

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await feed.handle(request)
        except Exception as error:
            return to_response(error, "test")

    app.router.add_get("/", handle)
    async with listen(app, "127.0.0.1", 0) as listener, _read(listener):
        async with aiohttp.ClientSession() as session, session.get(listener.url) as answer:
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "10"
        feed.streams.end_all()


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json, text/event-stream;q=0.9"])
async def test_events_are_wanted_when_the_client_accepts_them(accept: str) -> None:

    assert wants_events(make_mocked_request("GET", "/", headers={"Accept": accept}))
    assert not wants_events(make_mocked_request("GET", "/", headers={"Accept": "*/*"}))
