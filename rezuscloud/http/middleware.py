"""Owns the one middleware that every request passes: its id, who asks, whether the route is open to them,
errors as Status, safe headers, the access log and the counts.

One, because each further layer costs a tenth of the throughput. Nothing passes by default: a route without a
rule is closed, and a path without a route is told only to those who have proved who they are.
It does not know kinds or verbs; handlers tell them in `TOLD`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import logging
import secrets
import time
from typing import Protocol

from aiohttp import web

from rezuscloud.access.identity import Identity
from rezuscloud.access.policy import authorize
from rezuscloud.http.access_log import AccessLog, Entry
from rezuscloud.http.errors import add_safe_headers, to_response
from rezuscloud.http.keys import (
    IDENTITY,
    RULES,
    TOLD,
    Access,
    Handler,
    Permission,
    Rule,
    Told,
    request_id,
)
from rezuscloud.http.metrics import Metrics
from rezuscloud.model.errors import Forbidden, Unauthorized

_log = logging.getLogger(__name__)
_QUIET = frozenset({"/healthz", "/livez", "/readyz", "/metrics"})
"""Asked every few seconds for ever: logged only when something is wrong."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "LOCK", "UNLOCK"})
_CLIENT_GONE = 499


class Verifier(Protocol):
    """What the hallway needs of `access.identity.Sessions`."""

    def verify(self, token: str) -> Identity: ...


class Hallway:
    """What every request passes. An instance is a middleware of aiohttp; `answer` is the same for a handler
    that was found without aiohttp's router."""

    __middleware_version__ = 1

    def __init__(self, verifier: Verifier, metrics: Metrics, access_log: AccessLog) -> None:
        self._verifier = verifier
        self._metrics = metrics
        self._access_log = access_log
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers what aiohttp's router has found, under the rule of its route."""
        return await self.answer(request, handler, request.app[RULES].get(request.match_info.route))

    async def answer(self, request: web.Request, handler: Handler, rule: Rule | None) -> web.StreamResponse:
        """Lets the request pass to its handler if the rule says so, and makes an answer of whatever comes
        back. `rule` None: nobody passes."""
        started = time.perf_counter()
        number = f"{self._prefix}-{next(self._numbers):x}"
        request_id.set(number)
        told = request[TOLD] = Told(number)
        status = _CLIENT_GONE
        response: web.StreamResponse | None = None
        is_stream = False
        try:
            try:
                if rule is not Access.PUBLIC:
                    self._admit(request, rule)
                response = await handler(request)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception as error:
                if request.writer.output_size > 0:
                    # Half an answer is out: all that is left is not to let it look whole.
                    _log.error("request %s failed while it was answered", number, exc_info=error)
                    _abort(request)
                    raise ConnectionResetError("answer broken off") from error
                response = to_response(error, number)
            status = response.status
            is_stream = response.prepared
            if not is_stream:
                response.headers["X-Request-Id"] = number
                add_safe_headers(response.headers)
            return response
        finally:
            seconds = time.perf_counter() - started
            method = request.method
            verb = told.verb or (method.lower() if method in _METHODS else "other")
            self._metrics.count_request(told.kind or "none", verb, status, None if is_stream else seconds)
            _note(self._access_log, request, status, seconds, response, is_stream)

    def _admit(self, request: web.Request, rule: Rule | None) -> None:
        """Returns when the request may go on to its handler."""
        identity = request[IDENTITY] = authenticate(request, self._verifier)
        if rule is Access.BY_KIND:
            return
        match = request.match_info
        if isinstance(rule, Permission):
            authorize(identity, rule.verb, rule.kind, match.get("tenant"))
        elif match.http_exception is None:
            _log.error("%s %s declares no rule, so it is closed", request.method, request.path)
            raise Forbidden("nobody may use this path: it declares no rule; please report this")


def hallway(verifier: Verifier, metrics: Metrics, access_log: AccessLog) -> Hallway:
    """The hallway of one application."""
    return Hallway(verifier, metrics, access_log)


def authenticate(request: web.Request, verifier: Verifier) -> Identity:
    """Who asks, from the headers alone, before any body is read.

    `Bearer TOKEN`, or `Basic` with any user and the token as password (kubectl over http, tofu).
    Raises Unauthorized.
    """
    header = request.headers.get("Authorization")
    if header is None:
        raise Unauthorized("who are you? Log in at /api/v1/auth/login and send the token as Bearer token")
    if header.startswith("Bearer "):
        return verifier.verify(header[7:])
    scheme, _, value = header.partition(" ")
    scheme = scheme.lower()
    if scheme == "bearer":
        token = value.strip()
    elif scheme == "basic":
        try:
            token = base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise Unauthorized("the Basic credentials cannot be read") from None
    else:
        raise Unauthorized("only Bearer and Basic are understood in Authorization")
    return verifier.verify(token)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _note(
    access_log: AccessLog,
    request: web.Request,
    status: int,
    seconds: float,
    response: web.StreamResponse | None,
    is_stream: bool,
) -> None:
    path = request.rel_url.raw_path
    if path in _QUIET and status < 400:
        return
    size = 0
    if is_stream:
        size = request.writer.output_size
    elif isinstance(response, web.Response) and isinstance(response.body, bytes):
        size = len(response.body)
    identity = request.get(IDENTITY)
    access_log.note(
        Entry(
            time.time(),
            request.method,
            path,
            status,
            seconds,
            size,
            identity.subject if identity is not None else "-",
            request.remote or "-",
            request[TOLD].request_id,
        )
    )
