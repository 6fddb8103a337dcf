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
TOKEN = web.RequestKey("TOKEN", str)
"""The token that proved it, for streams that ask again. Never logged."""
REQUEST_ID = web.RequestKey("REQUEST_ID", str)

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The same for code that has no request at hand: a log formatter puts it on every line."""


@dataclass(slots=True)
class Told:
    """What a handler knows of its request and the access log and the metrics want to know."""

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


RULES: web.AppKey[dict[web.AbstractRoute, Rule]] = web.AppKey("RULES", dict)


def mount(app: web.Application, route: Route) -> None:
    """Adds the route and remembers its rule."""
    mounted = app.router.add_route(route.method, route.path, route.handler)
    app[RULES][mounted] = route.rule
