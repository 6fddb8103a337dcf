"""Request bodies: counted while they arrive, refused with a position, harmless afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from rezuscloud.http import body
from rezuscloud.http.errors import json_response, to_response
from rezuscloud.http.server import listen

Post = Callable[..., Awaitable[tuple[int, Any]]]


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    async def echo(request: web.Request) -> web.Response:
        try:
            return json_response(orjson.dumps(await body.read_documents(request)))
        except Exception as error:
            return to_response(error, "test")

    app = web.Application()
    app.router.add_post("/", echo)
    async with listen(app, "127.0.0.1", 0) as listener, aiohttp.ClientSession() as session:

        async def send(data: Any, content_type: str = "application/json") -> tuple[int, Any]:
            headers = {"Content-Type": content_type}
            async with session.post(listener.url, data=data, headers=headers) as answer:
                return answer.status, await answer.json()

        yield send


async def test_json_is_read(post: Post) -> None:
    assert await post(b'{"a": [1, 2.5, "x", null]}') == (200, [{"a": [1, 2.5, "x", None]}])


@pytest.mark.parametrize("text", [b'{"a": 1,}', b"", b"[1", b"NaN", b'"\xff"', b"1e999", b"-1e999"])
async def test_malformed_json_is_a_bad_request_that_says_where(post: Post, text: bytes) -> None:
    status, answer = await post(text)
    assert (status, answer["reason"]) == (400, "BadRequest")
    assert "line 1 column" in answer["message"] or text == b""


@pytest.mark.parametrize("opened", [b"[", b'{"a":'])
async def test_deep_nesting_is_refused(post: Post, opened: bytes) -> None:
    closed = b"]" if opened == b"[" else b"}"
    for depth in (65, 1000, 100_000):
        status, answer = await post(opened * depth + b"1" + closed * depth)
        assert status == 400, answer
        assert "nest" in answer["message"] or "depth" in answer["message"]


async def test_nesting_up_to_the_limit_is_read(post: Post) -> None:
    assert (await post(b"[" * 64 + b"]" * 64))[0] == 200


async def test_a_body_above_the_limit_is_refused_when_it_is_announced(post: Post) -> None:
    status, answer = await post(b" " * (body.MAX_BYTES + 1))
    assert (status, answer["reason"]) == (413, "RequestEntityTooLarge")


async def test_a_body_above_the_limit_is_refused_when_it_streams(post: Post) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 64 * 1024

    status, answer = await post(endless())
    assert (status, answer["code"]) == (413, 413)


async def test_yaml_documents_are_read_as_json_data(post: Post) -> None:
    text = b"kind: A\nat: 2026-12-01T00:00:00Z\n---\nkind: B\nlist: [1, two]\n---\n"
    status, answer = await post(text, "application/yaml")
    assert status == 200
    assert answer == [{"kind": "A", "at": "2026-12-01T00:00:00+00:00"}, {"kind": "B", "list": [1, "two"]}]


@pytest.mark.parametrize(
    "text",
    [
        b"a: &x [1]\nb: *x\n",
        b"a: [1\n",
        b"a: " + b"[" * 500,
        b"a: " + b"[" * 70 + b"]" * 70,
        b"!!python/object/apply:os.system ['true']",
        b"a: " + b"9" * 40,
        b"1: {[a]: b}",
        b"a: \xff",
        b"\t- x",
    ],
)
async def test_dangerous_or_malformed_yaml_is_a_bad_request(post: Post, text: bytes) -> None:
    status, answer = await post(text, "application/yaml")
    assert (status, answer["reason"]) == (400, "BadRequest")


async def test_other_media_types_are_refused_with_what_is_accepted(post: Post) -> None:
    status, answer = await post(b"a=b", "application/x-www-form-urlencoded")
    assert (status, answer["reason"]) == (415, "UnsupportedMediaType")
    assert "application/json" in answer["message"]
