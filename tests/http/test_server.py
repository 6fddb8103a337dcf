"""The listening socket: what is slow, idle, too much or not HTTP at all."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from rezuscloud.http.server import Limits, Listener, listen


async def _hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


def _app() -> web.Application:
    app = web.Application()
    app.router.add_get("/", _hello)
    return app


async def _talk(listener: Listener, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT",
    ],
    ids=["silent", "half a header", "idle after a request", "half a second request"],
)
async def test_a_connection_without_a_complete_request_is_closed(data: bytes) -> None:
    async with listen(_app(), "127.0.0.1", 0, limits=Limits(idle_s=0.3)) as listener:
        answer = await _talk(listener, data)
    assert answer.count(b"hello") == (1 if b"\r\n\r\n" in data else 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: 1\r\n" % n for n in range(200)) + b"\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad Header\r\n\r\n",
    ],
    ids=["TLS", "long header", "many headers", "CL and TE", "no colon"],
)
async def test_what_is_not_http_gets_a_status_and_no_server_name(data: bytes) -> None:
    async with listen(_app(), "127.0.0.1", 0) as listener:
        head, _, body = (await _talk(listener, data)).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert b"aiohttp" not in head
    assert b"Python" not in head
    status = json.loads(body)
    assert (status["kind"], status["code"], status["reason"]) == ("Status", 400, "BadRequest")


async def test_one_address_cannot_take_all_connections() -> None:
    limits = Limits(per_address=2, exempt=frozenset())
    async with listen(_app(), "127.0.0.1", 0, limits=limits) as listener:
        kept = [await asyncio.open_connection(listener.host, listener.port) for _ in range(2)]
        reader, writer = await asyncio.open_connection(listener.host, listener.port)
        try:
            refused = await asyncio.wait_for(reader.read(), 5)
        except ConnectionResetError:
            refused = b""
        assert refused == b""
        writer.close()
        for _, each in kept:
            each.close()
            await each.wait_closed()
        async with aiohttp.ClientSession() as session, session.get(listener.url) as answer:
            assert answer.status == 200
