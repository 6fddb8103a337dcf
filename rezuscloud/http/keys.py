"""Owns the names under which requests carry what the hallway found out, and how routes say who may pass.

It holds no logic of identity or errors: `middleware.py` fills these, handlers read them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

from aiohttp import web

from rezuscloud.access.identity import Identity

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

IDENTITY = web.RequestKey("IDENTITY", Identity)
"""Who is asking; missing on public routes."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Number of the request that is being answered; a log formatter puts it on every line."""


@dataclass(slots=True)
class Told:
    """What is known of a request: its number from the start, the rest as a handler finds it out, for the
    access log and the metrics."""

    request_id: str
    kind: str = ""
    """Plural name of the kind."""
    verb: str = ""


TOLD = web.RequestKey("TOLD", Told)


class Access(Enum):
    """Who may pass a route. A route that does not say is closed to everybody."""

    PUBLIC = "public"
    """Anybody, without a token."""
    BY_KIND = "by kind"
    """Any identity; each operation asks the policy itself, because only the path tells verb and kind."""


@dataclass(frozen=True)
class Permission:
    """Identities that may do `verb` to `kind`, whatever the tenant."""

    verb: str
    kind: str


Rule = Access | Permission


@dataclass(frozen=True)
class Route:
    """One route with its rule; the only way by which `build_app` mounts anything."""

    method: str
    path: str
    handler: Handler
    rule: Rule


Entrance = Callable[[web.Request], Awaitable[web.StreamResponse] | None]
ENTRANCE: web.AppKey[Entrance] = web.AppKey("ENTRANCE")
"""An application's own way in for requests that it recognises itself, past aiohttp's router and the cost of
it (a sixth of a small answer). None: take the usual way. `http/server.py` asks it."""

RULES: web.AppKey[dict[web.AbstractRoute, Rule]] = web.AppKey("RULES", dict)


def mount(app: web.Application, route: Route) -> None:
    """Adds the route and remembers its rule."""
    mounted = app.router.add_route(route.method, route.path, route.handler)
    app[RULES][mounted] = route.rule
