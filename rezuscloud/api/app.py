"""Owns the list of all routes of the main port, each with who may pass it, and mounts them.

It constructs handlers from rooms that exist; it makes no rooms (`main.py`) and decides nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence

from aiohttp import web

from rezuscloud.access.identity import Sessions
from rezuscloud.api.actions import Actions, Operator, StateReader
from rezuscloud.api.discovery import discovery_routes
from rezuscloud.api.health import HealthRoutes, Readiness
from rezuscloud.api.resources import Resources
from rezuscloud.api.session import SessionRoutes
from rezuscloud.api.watch import Watches
from rezuscloud.http.access_log import AccessLog
from rezuscloud.http.body import MAX_BYTES
from rezuscloud.http.keys import ENTRANCE, RULES, Access, Permission, Route, mount
from rezuscloud.http.metrics import Metrics
from rezuscloud.http.middleware import hallway
from rezuscloud.http.sse import Streams
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.watch import WatchHub
from rezuscloud.store.records import RunLogs


def build_app(
    *,
    service: ResourceService,
    hub: WatchHub,
    sessions: Sessions,
    operator: Operator,
    states: StateReader,
    logs: RunLogs,
    readiness: Readiness,
    metrics: Metrics,
    state_routes: Sequence[Route] = (),
    access_log: AccessLog | None = None,
    streams: Streams | None = None,
) -> web.Application:
    """The application of the main port.

    `operator` is the reconciler, `states` the state backend and `state_routes` what `api/tfstate.py` serves
    to operators. `readiness` names each part of the server. While the application runs it looks after its
    streams; they end when it shuts down.
    """
    streams = Streams() if streams is None else streams
    access_log = AccessLog() if access_log is None else access_log
    watches = Watches(hub, streams, sessions)
    actions = Actions(service, operator, states, logs, streams, watches.is_welcome)
    resources = Resources(service, watches, actions.table())
    session = SessionRoutes(sessions)
    health = HealthRoutes(readiness, metrics)
    metrics.gauge("watchers", "Open streams", lambda: len(streams))
    hub.subscribe(metrics.on_event)

    way_in = hallway(sessions, metrics, access_log)
    app = web.Application(middlewares=[way_in], client_max_size=MAX_BYTES)
    app[RULES] = {}
    for route in (
        Route("GET", "/healthz", health.live, Access.PUBLIC),
        Route("GET", "/livez", health.live, Access.PUBLIC),
        Route("GET", "/readyz", health.ready, Access.PUBLIC),
        Route("GET", "/version", health.version, Access.PUBLIC),
        Route("GET", "/metrics", health.metrics, Permission("get", "metrics")),
        Route("POST", "/api/v1/auth/login", session.login, Access.PUBLIC),
        Route("*", "/api/v1/auth/login", _only_post, Access.PUBLIC),
        Route("POST", "/api/v1/manifests", resources.apply_manifests, Access.BY_KIND),
        Route("*", "/api/v1/manifests", _only_post, Access.BY_KIND),
        *state_routes,
        *discovery_routes(),
        Route("*", "/api/v1/{path:.*}", resources.handle, Access.BY_KIND),
    ):
        mount(app, route)

    def enter(request: web.Request) -> Awaitable[web.StreamResponse] | None:
        if resources.recognises(request):
            return way_in.answer(request, resources.handle, Access.BY_KIND)
        return None

    app[ENTRANCE] = enter

    async def stop_streams(_: web.Application) -> None:
        streams.end_all()

    async def look_after(_: web.Application) -> AsyncIterator[None]:
        async with streams.watched(), metrics.watch_loop():
            yield
        access_log.flush()

    app.on_shutdown.append(stop_streams)
    app.cleanup_ctx.append(look_after)
    return app


async def _only_post(request: web.Request) -> web.StreamResponse:
    """Without this, another method would meet the catch-all below and be told that the path is not there."""
    raise web.HTTPMethodNotAllowed(request.method, ["POST"])
