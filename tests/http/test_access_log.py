"""The access log: one line a request, whatever is in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from rezuscloud.http.access_log import LOGGER, AccessLog, Entry


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


def _note(log: AccessLog, **changes: Any) -> None:
    fields: dict[str, Any] = {
        "time": 1796097600.25,
        "method": "GET",
        "path": "/api/v1/tenants",
        "status": 200,
        "seconds": 0.0123,
        "size": 42,
        "user": "admin",
        "address": "192.0.2.1",
        "request": "abc-1",
    }
    log.note(Entry(**(fields | changes)))


async def test_a_line_says_what_when_how_long_and_who() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    _note(log)
    log.flush()
    assert stream.getvalue() == (
        "2026-12-01T04:00:00.250Z info    http.access: GET /api/v1/tenants 200 12.3ms 42B "
        "user=admin from=192.0.2.1 request=abc-1\n"
    )


async def test_json_lines_are_json_whatever_the_path_holds() -> None:
    stream = io.StringIO()
    log = AccessLog(as_json=True, stream=stream)
    _note(log)
    _note(log, path="/\udcff\n\x1b[31m")
    log.flush()
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["method"], first["status"], first["ms"], first["request"]) == ("GET", 200, 12.3, "abc-1")
    assert second["path"].startswith("/")


async def test_a_path_cannot_forge_a_line_or_fill_the_log() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    _note(log, path="/a\nINFO forged\x1b[31m\udcff")
    _note(log, path="/" + "a" * 5000)
    log.flush()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in lines[0]
    assert len(lines[1]) < 500
    lines[0].encode()


async def test_lines_are_written_soon_without_being_asked() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    _note(log)
    assert stream.getvalue() == ""
    written = asyncio.Event()
    stream.flush = written.set  # type: ignore[method-assign]  # the log flushes when it has written
    async with asyncio.timeout(5):
        await written.wait()
    assert stream.getvalue()


async def test_many_lines_are_written_at_once() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    for _ in range(500):
        _note(log)
    assert stream.getvalue().count("\n") == 500


async def test_a_stream_that_cannot_be_written_breaks_nothing() -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    stream.close()
    _note(log)
    log.flush()


async def test_the_level_of_its_logger_silences_it(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    log = AccessLog(stream=stream)
    caplog.set_level(logging.WARNING, LOGGER)
    _note(log)
    log.flush()
    assert stream.getvalue() == ""
