"""Owns what the server counts and how Prometheus reads it.

It counts what passes the hallway and what it is told of; it never asks a room for more than a number. Label
values come from closed sets (kinds of the registry, verbs, codes), so strangers cannot make series grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rezuscloud.model.operations import RunPhase

if TYPE_CHECKING:
    from rezuscloud.model.events import ResourceEvent

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_FINAL = frozenset(phase.value for phase in RunPhase if phase.is_final)
_LAG_INTERVAL_S = 1.0
_COUNT_AT_ONCE = 500


class Metrics:
    """One registry of its own, so that several servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "rezuscloud_http_requests",
            "Requests answered",
            ["kind", "verb", "code"],
            registry=self.registry,
        )
        self._latency = Histogram(
            "rezuscloud_http_request_seconds",
            "Seconds until a request was answered; streams are not counted",
            ["kind", "verb"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._runs = Counter("rezuscloud_runs", "Runs ended", ["outcome"], registry=self.registry)
        for phase in sorted(_FINAL):
            self._runs.labels(phase)
        self._commits = Histogram(
            "rezuscloud_store_commit_seconds",
            "Seconds of one group commit",
            buckets=_COMMIT_BUCKETS,
            registry=self.registry,
        )
        self._lag = Gauge(
            "rezuscloud_event_loop_lag_seconds",
            "How late the event loop woke, worst since the last reading",
            registry=self.registry,
        )
        # The children by their labels: looking them up in prometheus-client costs more than counting.
        # Many at once: prometheus-client is twice as fast while it is warm in the processor.
        self._uncounted: list[tuple[str, str, int, float | None]] = []
        self._known: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody looks, e.g. the depth of a queue."""
        Gauge(f"rezuscloud_{name}", help_text, registry=self.registry).set_function(read)

    def count_request(self, kind: str, verb: str, code: int, seconds: float | None) -> None:
        """One request answered. `seconds` None = a stream, whose length says nothing."""
        self._uncounted.append((kind, verb, code, seconds))
        if len(self._uncounted) >= _COUNT_AT_ONCE:
            self._count()

    def _count(self) -> None:
        for kind, verb, code, seconds in self._uncounted:
            found = self._known.get((kind, verb, code))
            if found is None:
                found = self._requests.labels(kind, verb, str(code)), self._latency.labels(kind, verb)
                self._known[kind, verb, code] = found
            found[0].inc()
            if seconds is not None:
                found[1].observe(seconds)
        self._uncounted.clear()

    def count_commit(self, seconds: float) -> None:
        self._commits.observe(seconds)

    def on_event(self, event: ResourceEvent) -> None:
        """A subscriber of the watch hub: counts runs as they end."""
        if event.kind != "Run":
            return
        phase = (event.doc.get("status") or {}).get("phase")
        before = ((event.before or {}).get("status") or {}).get("phase")
        if phase in _FINAL and before not in _FINAL and event.type != "DELETED":
            self._runs.labels(phase).inc()

    def expose(self) -> bytes:
        """The text that Prometheus reads."""
        self._count()
        text = generate_latest(self.registry)
        self._lag.set(0.0)
        return text

    @asynccontextmanager
    async def watch_loop(self) -> AsyncIterator[None]:
        """Measures the loop's lag meanwhile."""
        task = asyncio.create_task(self._measure_lag(), name="loop lag")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        worst = 0.0
        while True:
            due = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            lag = loop.time() - due
            worst = max(lag, worst * 0.9)
            self._lag.set(worst)
