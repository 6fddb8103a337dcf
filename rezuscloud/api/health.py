"""Owns what machines ask about the server itself: is it alive, is it ready, which version, which numbers.

It asks each part and judges nothing: a part says for itself whether it works.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web

import rezuscloud
from rezuscloud.http.errors import json_response
from rezuscloud.http.metrics import Metrics

_TEXT = "text/plain; charset=utf-8"
_KUBERNETES_MINOR = "36"
"""The Kubernetes API that we speak; kubectl compares it with its own version."""


@dataclass(frozen=True)
class PartState:
    """How one part of the server is. `message` says what is wrong and what to do, or what it is doing."""

    is_ready: bool
    message: str = ""


Readiness = Mapping[str, Callable[[], PartState]]
"""Name of each part → asks it; must not block."""


class HealthRoutes:
    """The handlers outside of /api."""

    def __init__(self, readiness: Readiness, metrics: Metrics) -> None:
        self._readiness = readiness
        self._metrics = metrics
        version = rezuscloud.__version__
        self._version = orjson.dumps(
            {
                "major": "1",
                "minor": _KUBERNETES_MINOR,
                "gitVersion": f"v1.{_KUBERNETES_MINOR}.0+rezuscloud.{version}",
                "platform": f"{platform.system().lower()}/{platform.machine()}",
                "rezuscloud": version,
            }
        )

    async def live(self, request: web.Request) -> web.Response:
        """The process answers: that is all."""
        return web.Response(body=b"ok", headers={"Content-Type": _TEXT})

    async def ready(self, request: web.Request) -> web.Response:
        """Each part by name; 503 while any is not ready. `?verbose` gives lines for people."""
        states = {name: ask() for name, ask in self._readiness.items()}
        is_ready = all(state.is_ready for state in states.values())
        status = 200 if is_ready else 503
        if "verbose" in request.query:
            lines = [
                f"[{'+' if state.is_ready else '-'}]{name} {state.message or 'ok'}"
                for name, state in states.items()
            ]
            lines.append(f"readyz check {'passed' if is_ready else 'failed'}")
            return web.Response(
                body="\n".join(lines).encode(), status=status, headers={"Content-Type": _TEXT}
            )
        parts = [
            {"name": name, "ready": state.is_ready, "message": state.message}
            for name, state in states.items()
        ]
        body = {"status": "ready" if is_ready else "not ready", "parts": parts}
        return json_response(orjson.dumps(body), status=status)

    async def version(self, request: web.Request) -> web.Response:
        return json_response(self._version)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text format."""
        return web.Response(
            body=self._metrics.expose(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )
