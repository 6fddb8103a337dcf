"""Owns the reading of request bodies: counted while they arrive, then parsed as JSON or YAML.

What leaves here is plain JSON data of harmless depth. It does not know schemas (`resources/`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import yaml
from aiohttp import web

from rezuscloud.http.errors import RequestTimeout
from rezuscloud.model.errors import BadRequest, TooLarge, UnsupportedMediaType

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 64
"""Deeper than any resource; shallow enough for every recursive reader behind us."""
READ_TIMEOUT_S = 30.0
_IN_THREAD_BYTES = 64 * 1024
"""Above this, parsing could hold the event loop too long."""
_JSON_TYPES = frozenset({"application/json", "application/octet-stream"})
_YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml"})
_PATCH_TYPES = frozenset({"application/merge-patch+json", "application/json-patch+json"})


async def read_bytes(request: web.Request, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The whole body. Raises TooLarge as soon as more than `max_bytes` have come (or were announced)."""
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    if not request.body_exists:
        return b""
    if request.content.is_eof():  # a small one has come with its head: nothing to wait for
        whole = request.content.read_nowait()
        if len(whole) > max_bytes:
            raise _too_large(max_bytes)
        return whole
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {READ_TIMEOUT_S:.0f} s") from None
    return bytes(body)


async def read_document(request: web.Request) -> Any:
    """One JSON value or YAML document. Raises BadRequest with the position of what cannot be read."""
    documents = await read_documents(request)
    if len(documents) != 1:
        raise BadRequest(f"expected one document in the body, found {len(documents)}")
    return documents[0]


async def read_documents(request: web.Request) -> list[Any]:
    """All documents of the body: one of JSON, any number of YAML. A missing Content-Type means JSON."""
    is_yaml = request.content_type in _YAML_TYPES
    if not is_yaml and request.content_type not in _JSON_TYPES:
        raise UnsupportedMediaType(
            f"cannot read a body of type {request.content_type!r}; send application/json or application/yaml"
        )
    body = await read_bytes(request)
    parse = _parse_yaml if is_yaml else _parse_json
    if is_yaml or len(body) > _IN_THREAD_BYTES:
        return await asyncio.to_thread(parse, body)
    return parse(body)


async def read_patch(request: web.Request) -> tuple[Any, str]:
    """A patch and its media type: RFC 7396 or RFC 6902. Others raise UnsupportedMediaType."""
    if request.content_type not in _PATCH_TYPES:
        raise UnsupportedMediaType(
            f"{request.content_type!r} is not supported here; send one of: {', '.join(sorted(_PATCH_TYPES))}"
        )
    body = await read_bytes(request)
    if len(body) > _IN_THREAD_BYTES:
        return (await asyncio.to_thread(_parse_json, body))[0], request.content_type
    return _parse_json(body)[0], request.content_type


async def read_optional(request: web.Request) -> dict[str, Any]:
    """A JSON object, or {} when there is no body."""
    if not request.body_exists:
        return {}
    body = await read_bytes(request)
    if not body.strip():
        return {}
    value = _parse_json(body)[0]
    if not isinstance(value, dict):
        raise BadRequest("expected a JSON object in the body")
    return value


def _parse_json(body: bytes) -> list[Any]:
    if not body:
        raise BadRequest("the body is empty; expected JSON")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    _check_depth(value)
    return [value]


def _parse_yaml(body: bytes) -> list[Any]:
    try:
        text = body.decode()
        depth = 0
        # First pass: events only, without building anything. Aliases could make a small text huge.
        for event in yaml.parse(text, Loader=_YAML_LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise BadRequest(f"YAML aliases are not accepted{_at(event.start_mark)}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep")
        values = [value for value in yaml.load_all(text, Loader=_YAML_LOADER) if value is not None]
        # Through JSON once: times become strings, and what JSON cannot say is refused.
        return [orjson.loads(orjson.dumps(value)) for value in values]
    except yaml.MarkedYAMLError as error:
        raise BadRequest(f"the body is not YAML: {error.problem}{_at(error.problem_mark)}") from None
    except yaml.YAMLError as error:
        raise BadRequest(f"the body is not YAML: {error}") from None
    except (UnicodeDecodeError, ValueError, RecursionError, orjson.JSONEncodeError) as error:
        raise BadRequest(f"the body is YAML that JSON cannot say: {error}") from None


_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C one is ten times as fast; both build plain data only."""


def _at(mark: Any) -> str:
    return f": line {mark.line + 1} column {mark.column + 1}" if mark else ""


def _check_depth(value: Any) -> None:
    # Level by level: a comprehension a level is fast, and no recursion can run out of stack.
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the request body is larger than {max_bytes} bytes")
