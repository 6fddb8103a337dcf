"""Owns tables: the columns of a kind over its objects, as kubectl and rezusctl print them.

Which columns there are is said in the registry. Here is decided when a client wants a table, what a cell
looks like (an age is text: clients print cells as they come), and how much of each object goes along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from rezuscloud.http.errors import JSON, json_response
from rezuscloud.model.errors import BadRequest
from rezuscloud.model.meta import Doc, parse_time, utc_now
from rezuscloud.resources.registry import Kind
from rezuscloud.store.resources import Stored

_TABLE = {"as": "Table", "v": "v1", "g": "meta.k8s.io"}
_GROUP = "meta.k8s.io/v1"
_MANY_ROWS = 200
"""From here on, drawing them takes too long for the event loop."""


def wants_table(request: web.Request) -> bool:
    """Whether a Table is the first thing in the request's Accept that we can give."""
    accept = request.headers.get("Accept", "")
    if "as=Table" not in accept:
        return False
    for accepted in accept.split(","):
        media, *parameters = (part.strip() for part in accepted.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        given.pop("q", None)
        if media == JSON and given == _TABLE:
            return True
        if media in (JSON, "application/*", "*/*") and not given:
            return False
    return False


async def table_response(
    request: web.Request, kind: Kind, items: Sequence[Stored], meta: Doc
) -> web.Response:
    """The objects as a Table. `meta` is the metadata of the list, or of a single object's version."""
    include = request.query.get("includeObject") or "Metadata"
    if include not in ("None", "Metadata", "Object"):
        raise BadRequest(
            'includeObject: unsupported value; supported values: "None", "Metadata", "Object"',
            kind=kind.plural,
        )
    if len(items) < _MANY_ROWS:
        return json_response(_draw(kind, items, meta, include))
    return json_response(await asyncio.to_thread(_draw, kind, items, meta, include))


def _draw(kind: Kind, items: Sequence[Stored], meta: Doc, include: str) -> bytes:
    now = utc_now().timestamp()
    columns = [
        {
            "name": column.name,
            "type": column.type,
            "format": column.format,
            "description": column.description,
            "priority": column.priority,
        }
        for column in kind.columns
    ]
    rows = []
    for stored in items:
        cells = [
            _age(column.read(stored.doc), now) if column.type == "date" else column.read(stored.doc)
            for column in kind.columns
        ]
        rows.append({"cells": cells, "object": _object(stored, include)})
    return orjson.dumps(
        {
            "kind": "Table",
            "apiVersion": _GROUP,
            "metadata": meta,
            "columnDefinitions": columns,
            "rows": rows,
        }
    )


def _object(stored: Stored, include: str) -> Any:
    if include == "Object":
        return orjson.Fragment(stored.raw)
    if include == "None":
        return None
    return {"kind": "PartialObjectMetadata", "apiVersion": _GROUP, "metadata": stored.doc["metadata"]}


def _age(moment: Any, now: float) -> str:
    try:
        return format_age(now - parse_time(moment).timestamp())
    except (TypeError, ValueError):
        return "<unknown>"


def format_age(seconds: float) -> str:
    """A duration as kubectl writes ages: two units at most, the coarser the older."""
    whole = int(seconds)
    if whole < 0:
        return "0s"  # clocks differ a little
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 2:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m" + _rest(whole % 60, "s")
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h" + _rest(minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d" + _rest(hours % 24, "h")
    if days < 2 * 365:
        return f"{days}d"
    if days < 8 * 365:
        return f"{days // 365}y" + _rest(days % 365, "d")
    return f"{days // 365}y"


def _rest(number: int, unit: str) -> str:
    return f"{number}{unit}" if number else ""
