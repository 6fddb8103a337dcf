"""Owns the access log: one line a request, collected and written a few times a second.

It goes past `logging`: a record of that costs a third of a whole request here. So no filter or handler of
`logging` sees these lines; format and stream are given at construction. What stands in a line is fixed: no
query, no header, no token.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TextIO

import orjson

LOGGER = "rezuscloud.http.access"
_FLUSH_S = 0.2
_FLUSH_LINES = 500
_MAX_PATH = 300


class AccessLog:
    """Lines as text, or as JSON objects when `as_json`. Must be used inside a running event loop."""

    def __init__(self, *, as_json: bool = False, stream: TextIO | None = None) -> None:
        self._as_json = as_json
        self._stream = stream
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""

    def note(
        self,
        method: str,
        path: str,
        status: int,
        seconds: float,
        size: int,
        user: str,
        address: str,
        request: str,
    ) -> None:
        """One request that is over. `path` without its query; `size` in bytes."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        stamp = f"{self._stamp}.{int((now - second) * 1000):03}Z"
        if len(path) > _MAX_PATH:
            path = path[:_MAX_PATH] + "..."
        if self._as_json:
            line = _json_line(stamp, method, path, status, seconds, size, user, address, request)
        else:
            if not path.isprintable() or not path.isascii():
                path = ascii(path)[1:-1]
            line = (
                f"{stamp} INFO {LOGGER} {method} {path} {status} {seconds * 1000:.1f}ms {size}B"
                f" user={user} from={address} request={request}"
            )
        self._lines.append(line)
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_S, self.flush)

    def flush(self) -> None:
        """Writes what was collected. A stream that cannot be written loses these lines, nothing else."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._lines:
            return
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()
        stream = self._stream or sys.stderr
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            return


def _json_line(
    stamp: str,
    method: str,
    path: str,
    status: int,
    seconds: float,
    size: int,
    user: str,
    address: str,
    request: str,
) -> str:
    return orjson.dumps(
        {
            "time": stamp,
            "level": "INFO",
            "logger": LOGGER,
            "message": f"{method} {path} {status}".encode("utf-8", "backslashreplace").decode(),
            "method": method,
            "path": path.encode("utf-8", "backslashreplace").decode(),
            "status": status,
            "ms": round(seconds * 1000, 1),
            "bytes": size,
            "user": user,
            "address": address,
            "request": request,
        }
    ).decode()
