"""Owns OpenTofu's HTTP state backend as a protocol: GET, POST, LOCK and UNLOCK of one tenant's state.

Two doors, one set of handlers: the runners' own listener on loopback, with a credential per run, and the main
port for operators with a tofu of their own. Who asks is settled from the headers, before any body is read.

tofu repeats what failed by 5xx or a broken connection, and takes every other answer as final: so a
deliberate "no" is always 4xx, and each verb may be repeated. It takes 404 for "no state yet" and would create
everything again, so nothing here ever answers 404. It shows people the code of a refused upload but not the
reason, which is why refusals are also recorded on the tenant. What is refused is decided in
`resources/states.py`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from rezuscloud.http.body import read_optional
from rezuscloud.http.errors import RequestTimeout, json_response
from rezuscloud.http.keys import IDENTITY, TOLD, Access, Handler, Route
from rezuscloud.model.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    TooLarge,
    Unauthorized,
)
from rezuscloud.resources.states import StateAccess, StateBackend
from rezuscloud.store.states import LockHeld

_log = logging.getLogger(__name__)

_SILENCE_S = 60.0
"""An upload that brings nothing for so long is given up."""
_MIB = 1024 * 1024
_ALLOW = "GET, POST, LOCK, UNLOCK"
_PATHS = ("/api/v1/namespaces/{tenant}/tfstate", "/api/v1/tenants/{tenant}/tfstate")

Verb = Callable[[web.Request, StateAccess], Awaitable[web.StreamResponse]]


def loopback_app(backend: StateBackend, *, max_bytes: int) -> web.Application:
    """The runners' own listener: `/state/{tenant uid}`, Basic with the run's credential.

    Every other path is forbidden rather than not found. `max_bytes` bounds one state.
    """
    verbs = _Verbs(backend, max_bytes)

    async def handle(request: web.Request) -> web.StreamResponse:
        access = _run_access(backend, request)
        if access.tenant_uid != request.match_info.get("tenant_uid"):
            raise Forbidden("this credential is for the state of another tenant")
        return await verbs.answer(request, access)

    app = web.Application(middlewares=[_plain_errors])
    app.router.add_route("*", "/state/{tenant_uid}", handle)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def operator_routes(backend: StateBackend, *, max_bytes: int) -> list[Route]:
    """The same on the main port, for whoever brings a tofu: Basic with any user and the token as password."""
    verbs = _Verbs(backend, max_bytes)

    async def handle(request: web.Request) -> web.StreamResponse:
        told = request[TOLD]
        told.kind, told.verb = "tenants/tfstate", request.method.lower()
        access = backend.operator_access(request[IDENTITY], request.match_info["tenant"])
        return await verbs.answer(request, access)

    methods = ("GET", "POST", "LOCK", "UNLOCK", "DELETE")
    return [Route(method, path, handle, Access.BY_KIND) for path in _PATHS for method in methods]


def _run_access(backend: StateBackend, request: web.Request) -> StateAccess:
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            username, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise Unauthorized("the Basic credentials cannot be read") from None
        if access := backend.authenticate_run(username, password):
            return access
    raise Unauthorized("only a run that is going on may come here; its credential ends with it")


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except ApiError as error:
        response = _refusal(error)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        _log.error("%s %s failed", request.method, request.path, exc_info=error)
        response = _refusal(InternalError("something went wrong inside; the stored state is as it was"))
    response.headers["Server"] = ""
    return response


def _refusal(error: ApiError) -> web.Response:
    response = web.Response(text=f"{error.message}\n", status=error.code)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.code == 401:
        response.headers["WWW-Authenticate"] = 'Basic realm="rezuscloud state", charset="UTF-8"'
    return response


class _Verbs:
    """What each verb does for somebody who may come in."""

    def __init__(self, backend: StateBackend, max_bytes: int) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._verbs: dict[str, Verb] = {
            "GET": self._get,
            "POST": self._post,
            "LOCK": self._lock,
            "UNLOCK": self._unlock,
        }

    async def answer(self, request: web.Request, access: StateAccess) -> web.StreamResponse:
        """The answer to one request. Raises ApiError."""
        verb = self._verbs.get(request.method)
        if verb is not None:
            return await verb(request, access)
        response = _refusal(
            MethodNotAllowed(
                "TF state is never purged over HTTP, nothing was changed: delete the tenant, "
                "and its state goes when its machines are gone"
            )
        )
        response.headers["Allow"] = _ALLOW
        return response

    async def _get(self, request: web.Request, access: StateAccess) -> web.StreamResponse:
        body = await self._backend.read(access)
        return web.Response(status=204) if body is None else json_response(body)

    async def _post(self, request: web.Request, access: StateAccess) -> web.StreamResponse:
        lock_id = request.query.get("ID")
        try:
            self._backend.check_lock(access, lock_id)
            body = await _receive(request, self._max_bytes)
            promised = request.headers.get("Content-MD5")
            await self._backend.write(access, lock_id, body, md5_base64=promised)
        except ApiError as error:
            if error.code < 500:
                await self._backend.record_refusal(access, error)
            raise
        return web.Response()

    async def _lock(self, request: web.Request, access: StateAccess) -> web.StreamResponse:
        try:
            await self._backend.lock(access, await read_optional(request))
        except LockHeld as held:
            return json_response(orjson.dumps(held.lock.info), status=423)
        return web.Response()

    async def _unlock(self, request: web.Request, access: StateAccess) -> web.StreamResponse:
        # OpenTofu before 1.10 and terraform send no body when a person forces a lock open.
        lock_id: Any = (await read_optional(request)).get("ID", "")
        if not isinstance(lock_id, str):
            raise BadRequest("ID must be a text")
        await self._backend.unlock(access, lock_id)
        return web.Response()


async def _receive(request: web.Request, max_bytes: int) -> bytes:
    """The body, counted while it arrives. Raises TooLarge as soon as it is too large, or RequestTimeout."""
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_SILENCE_S) as silence:
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
                silence.reschedule(loop.time() + _SILENCE_S)
    except TimeoutError:
        raise RequestTimeout(f"the upload stood still for {_SILENCE_S:.0f} s; nothing was stored") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the upload cannot be read; nothing was stored ({error})") from None
    return b"".join(chunks)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the state is larger than {max_bytes / _MIB:g} MiB and was not stored; the stored one is as it was. "
        "Raise REZUSCLOUD_STATE_MAX_MIB, or split the tenant."
    )
