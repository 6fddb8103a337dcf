"""Owns the access log: one line a request, collected and written a few times a second.

It goes past `logging`: a record of that costs a third of a whole request here. So no filter or handler of
`logging` sees these lines; form and stream are given at construction, and of the logger `LOGGER` only the
level counts. What stands in a line is fixed: no query, no header, no token.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from functools import lru_cache
from typing import NamedTuple, TextIO

import orjson

LOGGER = "rezuscloud.http.access"
_logger = logging.getLogger(LOGGER)
_FLUSH_S = 0.2
_FLUSH_LINES = 500
_MAX_PATH = 300


class Entry(NamedTuple):
    """One request that is over."""

    time: float
    """When it was over, Unix time."""
    method: str
    path: str
    """Without the query."""
    status: int
    seconds: float
    size: int
    """Bytes of the answer's body."""
    user: str
    address: str
    request: str


class AccessLog:
    """Lines as text, or as JSON objects when `as_json`. Must be used inside a running event loop."""

    def __init__(self, *, as_json: bool = False, stream: TextIO | None = None) -> None:
        self._form = _json if as_json else _text
        self._stream = stream
        self._entries: list[Entry] = []
        self._timer: asyncio.TimerHandle | None = None

    def note(self, entry: Entry) -> None:
        """Remembers one request for the next writing, unless the level of `LOGGER` is above INFO."""
        if not _logger.isEnabledFor(logging.INFO):
            return
        self._entries.append(entry)
        if len(self._entries) >= _FLUSH_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Writes what was collected. A stream that cannot be written loses these lines, nothing else."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._entries:
            return
        lines = [self._form(entry) for entry in self._entries]
        self._entries.clear()
        stream = self._stream or sys.stderr
        try:
            stream.write("\n".join(lines) + "\n")
            stream.flush()
        except (OSError, ValueError):
            return


def _stamp(moment: float) -> str:
    second = int(moment)
    return f"{_second(second)}.{int((moment - second) * 1000):03}Z"


@lru_cache(maxsize=4)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _short(path: str) -> str:
    if len(path) > _MAX_PATH:
        path = path[:_MAX_PATH] + "..."
    if path.isascii() and path.isprintable():
        return path
    return ascii(path)[1:-1]


def _text(entry: Entry) -> str:
    return (
        f"{_stamp(entry.time)} info    http.access: {entry.method} {_short(entry.path)} {entry.status}"
        f" {entry.seconds * 1000:.1f}ms {entry.size}B"
        f" user={entry.user} from={entry.address} request={entry.request}"
    )


def _json(entry: Entry) -> str:
    path = _short(entry.path)
    return orjson.dumps(
        {
            "time": _stamp(entry.time),
            "level": "info",
            "logger": LOGGER,
            "message": f"{entry.method} {path} {entry.status}",
            "method": entry.method,
            "path": path,
            "status": entry.status,
            "ms": round(entry.seconds * 1000, 1),
            "bytes": entry.size,
            "user": entry.user,
            "address": entry.address,
            "request": entry.request,
        }
    ).decode()
