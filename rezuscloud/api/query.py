"""Owns the reading of query parameters that several handlers understand.

Anything odd is a BadRequest: guessing could do what was only asked about.
"""

from __future__ import annotations

from aiohttp import web

from rezuscloud.http.sse import wants_events
from rezuscloud.model.errors import BadRequest

_TRUE = frozenset({"true", "1"})
_FALSE = frozenset({"", "false", "0"})


def read_flag(request: web.Request, name: str) -> bool:
    """`true`, `1`, `false`, `0`; absent or empty = false."""
    value = request.query.get(name, "").lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise BadRequest(f"{name}: expected true or false, not {value[:40]!r}")


def read_count(request: web.Request, name: str) -> int:
    """A whole number ≥ 0; 0 when it is absent or empty."""
    text = request.query.get(name, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadRequest(f"{name}: expected a whole number, not {text[:40]!r}")
    return int(text)


def is_watch(request: web.Request) -> bool:
    """A stream was asked for: by `watch=true`, or by accepting events."""
    return bool(request.query_string and read_flag(request, "watch")) or wants_events(request)


def is_dry_run(request: web.Request) -> bool:
    """`dryRun=All`: everything is checked, nothing is stored."""
    if not request.query_string:
        return False
    values = request.query.getall("dryRun", [])
    if any(value != "All" for value in values):
        raise BadRequest('dryRun: unsupported value; supported values: "All"')
    return bool(values)
