"""Owns what can be asked of tenants, runs and state versions beyond Kubernetes' verbs.

Each action declares its permission in one table, and is done by the reconciler or the state backend; what it
answers is the object as it is afterwards. It holds no rules of runs or states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import orjson
from aiohttp import web

from rezuscloud.access.identity import Identity
from rezuscloud.access.policy import authorize
from rezuscloud.api.paths import Target
from rezuscloud.http.body import read_optional
from rezuscloud.http.errors import json_response
from rezuscloud.http.keys import IDENTITY, TOLD, Permission
from rezuscloud.http.sse import Streams
from rezuscloud.model.errors import BadRequest, Cause, Invalid, NotFound
from rezuscloud.model.meta import Doc, get_path
from rezuscloud.model.operations import RunPhase
from rezuscloud.resources.service import ResourceService
from rezuscloud.store.records import RunLogs

Operation = Callable[[web.Request, Target], Awaitable[web.StreamResponse]]

_FOLLOW_POLL_S = 0.25
_LOG_CHUNK = 64 * 1024
_LOG_TYPE = "text/plain; charset=utf-8"


class Operator(Protocol):
    """What actions need of the reconciler (`reconcile/`). Errors are those of `model/errors.py`."""

    async def approve(self, identity: Identity, tenant: str, run: str, plan_id: str) -> None: ...
    async def deny(self, identity: Identity, tenant: str, run: str, plan_id: str) -> None: ...
    async def cancel(self, identity: Identity, tenant: str, run: str, force: bool = False) -> None: ...
    async def retry(self, identity: Identity, tenant: str, run: str) -> None: ...
    async def plan(self, identity: Identity, tenant: str, run: str) -> Doc: ...
    async def apply_now(self, identity: Identity, tenant: str) -> None: ...
    async def recover(self, identity: Identity, tenant: str) -> Doc: ...
    async def unlock(self, identity: Identity, tenant: str, lock_id: str) -> None: ...
    async def state_env(self, identity: Identity, tenant: str) -> Doc: ...
    async def rotate_key(self, identity: Identity, tenant: str) -> None: ...


class StateReader(Protocol):
    """What actions need of the state backend."""

    async def plain(self, tenant_uid: str, version: int | None = None) -> Doc | None: ...


class Actions:
    """The handlers, and the table that mounts them."""

    def __init__(
        self,
        service: ResourceService,
        operator: Operator,
        states: StateReader,
        logs: RunLogs,
        streams: Streams,
        is_welcome: Callable[[web.Request], Callable[[], bool]],
    ) -> None:
        self._service = service
        self._operator = operator
        self._states = states
        self._logs = logs
        self._streams = streams
        self._is_welcome = is_welcome
        self.permissions: Mapping[tuple[str, str, str], Permission] = {
            ("Tenant", "apply", "POST"): Permission("apply", "tenants"),
            ("Tenant", "recover", "POST"): Permission("recover", "tenants"),
            ("Tenant", "unlock", "POST"): Permission("unlock", "tenants"),
            ("Tenant", "rotate-key", "POST"): Permission("rotate-key", "tenants"),
            ("Tenant", "state-env", "GET"): Permission("state-env", "tenants"),
            ("Run", "approve", "POST"): Permission("approve", "runs"),
            ("Run", "deny", "POST"): Permission("deny", "runs"),
            ("Run", "cancel", "POST"): Permission("cancel", "runs"),
            ("Run", "retry", "POST"): Permission("retry", "runs"),
            ("Run", "plan", "GET"): Permission("get", "runs/plan"),
            ("Run", "log", "GET"): Permission("get", "runs/log"),
            ("StateVersion", "body", "GET"): Permission("pull", "stateversions"),
        }
        self._handlers: Mapping[str, Operation] = {
            "apply": self._apply,
            "recover": self._recover,
            "unlock": self._unlock,
            "rotate-key": self._rotate_key,
            "state-env": self._state_env,
            "approve": self._approve,
            "deny": self._deny,
            "cancel": self._cancel,
            "retry": self._retry,
            "plan": self._plan,
            "log": self._log,
            "body": self._state_body,
        }

    def table(self) -> Mapping[tuple[str, str], Mapping[str, Operation]]:
        """(kind, subresource) → method → operation, each behind its permission."""
        table: dict[tuple[str, str], dict[str, Operation]] = {}
        for (kind, name, method), permission in self.permissions.items():
            table.setdefault((kind, name), {})[method] = _guarded(permission, self._handlers[name])
        return table

    # ------------------------------------------------------------ tenants

    async def _apply(self, request: web.Request, target: Target) -> web.StreamResponse:
        await self._operator.apply_now(request[IDENTITY], target.name)
        return self._as_it_is(request, target)

    async def _recover(self, request: web.Request, target: Target) -> web.StreamResponse:
        return json_response(orjson.dumps(await self._operator.recover(request[IDENTITY], target.name)))

    async def _unlock(self, request: web.Request, target: Target) -> web.StreamResponse:
        lock_id = _text(await read_optional(request), "lockId", "Tenant", target.name)
        await self._operator.unlock(request[IDENTITY], target.name, lock_id)
        return self._as_it_is(request, target)

    async def _rotate_key(self, request: web.Request, target: Target) -> web.StreamResponse:
        await self._operator.rotate_key(request[IDENTITY], target.name)
        return self._as_it_is(request, target)

    async def _state_env(self, request: web.Request, target: Target) -> web.StreamResponse:
        return json_response(orjson.dumps(await self._operator.state_env(request[IDENTITY], target.name)))

    # ------------------------------------------------------------ runs

    async def _approve(self, request: web.Request, target: Target) -> web.StreamResponse:
        plan_id = _text(await read_optional(request), "planId", "Run", target.name)
        await self._operator.approve(request[IDENTITY], target.namespace or "", target.name, plan_id)
        return self._as_it_is(request, target)

    async def _deny(self, request: web.Request, target: Target) -> web.StreamResponse:
        plan_id = _text(await read_optional(request), "planId", "Run", target.name)
        await self._operator.deny(request[IDENTITY], target.namespace or "", target.name, plan_id)
        return self._as_it_is(request, target)

    async def _cancel(self, request: web.Request, target: Target) -> web.StreamResponse:
        force = (await read_optional(request)).get("force", False)
        if not isinstance(force, bool):
            raise Invalid.of("Run", target.name, [Cause("force", "must be true or false")])
        await self._operator.cancel(request[IDENTITY], target.namespace or "", target.name, force=force)
        return self._as_it_is(request, target)

    async def _retry(self, request: web.Request, target: Target) -> web.StreamResponse:
        await self._operator.retry(request[IDENTITY], target.namespace or "", target.name)
        return self._as_it_is(request, target)

    async def _plan(self, request: web.Request, target: Target) -> web.StreamResponse:
        plan = await self._operator.plan(request[IDENTITY], target.namespace or "", target.name)
        return json_response(await _encode(plan))

    async def _log(self, request: web.Request, target: Target) -> web.StreamResponse:
        """The run's log from byte `offset`. The answer's X-Log-Offset is where to go on; with `follow` the
        answer ends when the run has."""
        uid = self._stored(request, target)["metadata"]["uid"]
        offset = _offset(request)
        if request.query.get("follow") in ("true", "1"):
            return await self._follow(request, target, uid, offset)
        pieces, end = [], offset
        while True:
            piece, after = self._logs.read(uid, end, _LOG_CHUNK)
            if not piece:
                break
            pieces.append(piece)
            end = after
            await asyncio.sleep(0)
        return web.Response(
            body=b"".join(pieces), headers={"Content-Type": _LOG_TYPE, "X-Log-Offset": str(end)}
        )

    async def _follow(
        self, request: web.Request, target: Target, uid: str, offset: int
    ) -> web.StreamResponse:
        request[TOLD].verb = "watch"
        ended = asyncio.Event()
        async with self._streams.open(
            request,
            _LOG_TYPE,
            on_end=ended.set,
            lifetime_s=None,
            is_welcome=self._is_welcome(request),
        ) as stream:
            while not ended.is_set():
                # First the phase, then the log: what a run wrote before it ended must not be missed.
                has_ended = self._has_ended(request, target)
                piece, after = self._logs.read(uid, offset, _LOG_CHUNK)
                if piece:
                    await stream.send(piece)
                    offset = after
                elif has_ended:
                    break
                else:
                    try:
                        async with asyncio.timeout(_FOLLOW_POLL_S):
                            await ended.wait()
                    except TimeoutError:
                        continue
        return stream.response

    def _has_ended(self, request: web.Request, target: Target) -> bool:
        try:
            phase = get_path(self._stored(request, target), "status.phase")
        except NotFound:
            return True
        return phase in _FINAL

    # ------------------------------------------------------------ states

    async def _state_body(self, request: web.Request, target: Target) -> web.StreamResponse:
        identity, tenant = request[IDENTITY], target.namespace or ""
        version = self._stored(request, target)["spec"]["version"]
        uid = self._service.get(identity, "Tenant", "", tenant).doc["metadata"]["uid"]
        state = await self._states.plain(uid, version)
        if state is None:
            raise NotFound(
                f'stateversions "{target.name}" has left the history; newer ones are there',
                kind="stateversions",
                name=target.name,
            )
        return json_response(await _encode(state))

    # ------------------------------------------------------------ inside

    def _stored(self, request: web.Request, target: Target) -> Doc:
        return self._service.get(request[IDENTITY], target.kind.kind, target.namespace or "", target.name).doc

    def _as_it_is(self, request: web.Request, target: Target) -> web.Response:
        stored = self._service.get(request[IDENTITY], target.kind.kind, target.namespace or "", target.name)
        return json_response(stored.raw)


_FINAL = frozenset(phase.value for phase in RunPhase if phase.is_final)


def _guarded(permission: Permission, operation: Operation) -> Operation:
    async def guarded(request: web.Request, target: Target) -> web.StreamResponse:
        request[TOLD].verb = permission.verb
        tenant = target.namespace or target.name
        authorize(request[IDENTITY], permission.verb, permission.kind, tenant)
        return await operation(request, target)

    return guarded


def _text(body: Mapping[str, Any], field: str, kind: str, name: str) -> str:
    value = body.get(field)
    if value is None:
        raise Invalid.of(kind, name, [Cause(field, "is required", "FieldValueRequired")])
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise Invalid.of(kind, name, [Cause(field, "must be a string of 1 to 256 characters")])
    return value


def _offset(request: web.Request) -> int:
    text = request.query.get("offset", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise BadRequest("offset: expected a number of bytes")
    return int(text)


async def _encode(value: Doc) -> bytes:
    """A plan or a state may be tens of megabytes: not in the event loop."""
    return await asyncio.to_thread(orjson.dumps, value)
