"""Owns the REST face of every kind: one set of handlers, driven by the registry.

It turns paths, queries and bodies into calls of the service, and what comes back into Kubernetes' shapes. It
checks nothing of the contents and permits nothing itself: the service does both. Streams are in `watch.py`,
tables in `tables.py`, what a kind can do beyond Kubernetes' verbs in `actions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from rezuscloud.access.identity import Identity
from rezuscloud.api.paths import PREFIX, Target, read_path
from rezuscloud.api.query import is_dry_run, is_watch, read_count
from rezuscloud.api.tables import table_response, wants_table
from rezuscloud.api.watch import Watches
from rezuscloud.http.body import read_document, read_documents, read_optional, read_patch
from rezuscloud.http.errors import json_response
from rezuscloud.http.keys import IDENTITY, TOLD
from rezuscloud.model.errors import ApiError, BadRequest, NotFound
from rezuscloud.model.meta import Doc
from rezuscloud.resources.service import DropUnknown, ResourceService, scale_of
from rezuscloud.store.resources import Stored

WRITE_TIMEOUT_S = 60.0
_MAX_WARNINGS = 20

Operation = Callable[[web.Request, Target], Awaitable[web.StreamResponse]]


class Timeout(ApiError):
    """A write took too long; nobody can say whether it was done."""

    code, reason = 504, "Timeout"


class Resources:
    """The handlers. `subresources` gives, for (kind, subresource), what each method does there."""

    def __init__(
        self,
        service: ResourceService,
        watches: Watches,
        subresources: Mapping[tuple[str, str], Mapping[str, Operation]],
    ) -> None:
        self._service = service
        self._watches = watches
        self._collection: dict[str, Operation] = {"GET": self._list, "POST": self._create}
        self._object: dict[str, Operation] = {
            "GET": self._get,
            "PUT": self._replace,
            "PATCH": self._patch,
            "DELETE": self._delete,
        }
        self._status: dict[str, Operation] = {
            "GET": self._get,
            "PUT": self._replace_status,
            "PATCH": self._patch,
        }
        scale: dict[str, Operation] = {
            "GET": self._get_scale,
            "PUT": self._replace_scale,
            "PATCH": self._patch_scale,
        }
        self._subresources = {**subresources, ("NodeGroup", "scale"): scale}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request below /api/v1/ that no other route took."""
        target = read_path(request.rel_url.raw_path)
        told = request[TOLD]
        told.kind = target.kind.plural
        method = "GET" if request.method == "HEAD" else request.method
        operations = self._operations(target)
        operation = operations.get(method)
        if operation is None:
            raise web.HTTPMethodNotAllowed(request.method, sorted(operations))
        if method == "GET":
            told.verb = "get" if target.name else "list"
            return await operation(request, target)
        told.verb = _VERBS[method]
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                return await operation(request, target)
        except TimeoutError:
            raise Timeout(
                f"no answer within {WRITE_TIMEOUT_S:.0f} s; it may be done or not: look before you repeat it"
            ) from None

    def recognises(self, request: web.Request) -> bool:
        """A plain request for objects, about which no other route could say anything."""
        path = request.rel_url.raw_path
        if request.method not in _DIRECT or not path.startswith(PREFIX):
            return False
        try:
            return not read_path(path).subresource
        except NotFound:
            return False

    def _operations(self, target: Target) -> Mapping[str, Operation]:
        if target.subresource:
            if target.subresource == "status":
                return self._status
            found = self._subresources.get((target.kind.kind, target.subresource))
            if found is None:
                raise web.HTTPNotFound
            return found
        if target.name:
            return self._object
        if target.namespace is None:
            return {"GET": self._list}
        return self._collection

    # ------------------------------------------------------------ read

    async def _get(self, request: web.Request, target: Target) -> web.StreamResponse:
        if not target.subresource and is_watch(request):
            return await self._watches.serve(request, target)
        stored = self._service.get(*_names(request, target))
        if wants_table(request):
            meta = {"resourceVersion": stored.doc["metadata"]["resourceVersion"]}
            return await table_response(request, target.kind, [stored], meta)
        return json_response(stored.raw)

    async def _list(self, request: web.Request, target: Target) -> web.StreamResponse:
        if is_watch(request):
            return await self._watches.serve(request, target)
        query = request.query
        page = self._service.list(
            request[IDENTITY],
            target.kind.kind,
            target.namespace,
            labels=query.get("labelSelector", ""),
            fields=query.get("fieldSelector", ""),
            limit=read_count(request, "limit"),
            continue_=query.get("continue", ""),
        )
        meta: Doc = {"resourceVersion": str(page.version)}
        if page.continue_:
            meta["continue"] = page.continue_
        if page.remaining is not None:
            meta["remainingItemCount"] = page.remaining
        if wants_table(request):
            return await table_response(request, target.kind, page.items, meta)
        # The items are joined as they lie in memory, in one copy: encoding them again would cost ten times
        # as much.
        head = b'{"kind":"%sList","apiVersion":"v1","metadata":%s,"items":[' % (
            target.kind.kind.encode(),
            orjson.dumps(meta),
        )
        raws = [item.raw for item in page.items]
        if raws:
            raws[0] = head + raws[0]
            raws[-1] += b"]}"
            return json_response(b",".join(raws))
        return json_response(head + b"]}")

    # ------------------------------------------------------------ write

    async def _create(self, request: web.Request, target: Target) -> web.StreamResponse:
        drop = _drop_unknown(request)
        stored = await self._service.create(
            request[IDENTITY],
            target.kind.kind,
            target.namespace or "",
            await _read_object(request),
            dry_run=is_dry_run(request),
            drop=drop,
        )
        return _written(request, stored.raw, drop, status=201)

    async def _replace(self, request: web.Request, target: Target) -> web.StreamResponse:
        drop = _drop_unknown(request)
        stored = await self._service.replace(
            *_names(request, target), await _read_object(request), dry_run=is_dry_run(request), drop=drop
        )
        return _written(request, stored.raw, drop)

    async def _patch(self, request: web.Request, target: Target) -> web.StreamResponse:
        stored, drop = await self._patch_part(request, target)
        return _written(request, stored.raw, drop)

    async def _patch_part(self, request: web.Request, target: Target) -> tuple[Stored, DropUnknown | None]:
        drop = _drop_unknown(request)
        patch, content_type = await read_patch(request)
        stored = await self._service.patch(
            *_names(request, target),
            patch,
            content_type,
            subresource=target.subresource,
            dry_run=is_dry_run(request),
            drop=drop,
        )
        return stored, drop

    async def _delete(self, request: web.Request, target: Target) -> web.StreamResponse:
        options = await read_optional(request)
        doc, is_gone = await self._service.delete(
            *_names(request, target),
            preconditions=_preconditions(options),
            dry_run=is_dry_run(request) or options.get("dryRun") == ["All"],
        )
        return json_response(orjson.dumps(_gone(target, doc) if is_gone else doc))

    async def _replace_status(self, request: web.Request, target: Target) -> web.StreamResponse:
        stored = await self._service.replace_status(
            *_names(request, target), await _read_object(request), dry_run=is_dry_run(request)
        )
        return json_response(stored.raw)

    # ------------------------------------------------------------ scale

    async def _get_scale(self, request: web.Request, target: Target) -> web.StreamResponse:
        return _as_scale(self._service.get(*_names(request, target)))

    async def _replace_scale(self, request: web.Request, target: Target) -> web.StreamResponse:
        stored = await self._service.replace_scale(
            *_names(request, target), await _read_object(request), dry_run=is_dry_run(request)
        )
        return _as_scale(stored)

    async def _patch_scale(self, request: web.Request, target: Target) -> web.StreamResponse:
        stored, _ = await self._patch_part(request, target)
        return _as_scale(stored)

    # ------------------------------------------------------------ many at once

    async def apply_manifests(self, request: web.Request) -> web.StreamResponse:
        """POST /api/v1/manifests: a List (or YAML documents), stored in one transaction."""
        request[TOLD].verb = "apply"
        drop = _drop_unknown(request)
        docs: list[Doc] = []
        for document in await read_documents(request):
            if not isinstance(document, dict):
                raise BadRequest("a manifest must be an object, or a List of objects")
            is_list = str(document.get("kind", "")).endswith("List")
            items = document.get("items") if is_list else [document]
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise BadRequest("items must be a list of objects")
            docs += items
        if not docs:
            raise BadRequest("there is nothing to apply: the list has no items")
        applied = await self._service.apply_manifests(
            request[IDENTITY], docs, dry_run=is_dry_run(request), drop=drop
        )
        answer = {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": applied}
        return _written(request, orjson.dumps(answer), drop)


_DIRECT = frozenset({"GET", "PUT", "PATCH"})
"""Methods of objects that need none of what aiohttp's router knows."""
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def _names(request: web.Request, target: Target) -> tuple[Identity, str, str, str]:
    """Who asks, and the three names by which the service knows an object."""
    return request[IDENTITY], target.kind.kind, target.namespace or "", target.name


def _drop_unknown(request: web.Request) -> DropUnknown | None:
    """What `fieldValidation` says of unknown fields. Ours is Strict when nothing is said, so that a typing
    error is never silent."""
    asked = request.query.get("fieldValidation", "") if request.query_string else ""
    if asked in ("", "Strict"):
        return None
    if asked in ("Warn", "Ignore"):
        return DropUnknown()
    raise BadRequest('fieldValidation: unsupported value; supported values: "Strict", "Warn", "Ignore"')


def _written(
    request: web.Request, raw: bytes, drop: DropUnknown | None, *, status: int = 200
) -> web.Response:
    response = json_response(raw, status=status)
    if drop is not None and request.query.get("fieldValidation") == "Warn":
        for field in drop.fields[:_MAX_WARNINGS]:
            shown = field.encode("ascii", "backslashreplace").decode().replace("\\", "\\\\").replace('"', "'")
            response.headers.add("Warning", f'299 - "unknown field \\"{shown[:200]}\\""')
    return response


def _as_scale(stored: Stored) -> web.Response:
    return json_response(orjson.dumps(scale_of(stored.doc)))


def _preconditions(options: Mapping[str, Any]) -> Mapping[str, str] | None:
    asked = options.get("preconditions")
    if asked is None:
        return None
    if not isinstance(asked, dict) or not all(isinstance(value, str) for value in asked.values()):
        raise BadRequest("preconditions: expected an object with uid and resourceVersion as strings")
    return asked


async def _read_object(request: web.Request) -> dict[str, Any]:
    document = await read_document(request)
    if not isinstance(document, dict):
        raise BadRequest("expected an object with kind, metadata and spec in the body")
    return document


def _gone(target: Target, doc: Doc) -> Doc:
    meta = doc["metadata"]
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {"name": meta["name"], "kind": target.kind.plural, "uid": meta.get("uid", "")},
        "code": 200,
    }
