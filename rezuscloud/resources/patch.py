"""Owns the two patch languages: merge patch (RFC 7396) and JSON patch (RFC 6902). Pure functions.

A patch never changes its arguments. What the result may hold is not decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import orjson

from rezuscloud.model.errors import BadRequest, Invalid, TooLarge, UnsupportedMediaType
from rezuscloud.model.meta import Doc

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

MAX_OPERATIONS = 1000
MAX_COPIED_BYTES = 1024 * 1024


def apply_patch(current: Doc, patch: Any, content_type: str) -> Doc:
    """`current` after the patch.

    Raises UnsupportedMediaType for other languages (strategic merge and server-side apply among them),
    BadRequest for a patch that cannot be read, Invalid (422) for one that does not fit `current`: a failed
    `test`, a path that is not there. Controllers retry on exactly that 422.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == MERGE_PATCH:
        if not isinstance(patch, dict):
            raise BadRequest("a merge patch of a resource must be a JSON object")
        merged: Doc = merge(current, patch)
        return merged
    if media_type == JSON_PATCH:
        patched = apply_operations(current, patch)
        if not isinstance(patched, dict):
            raise Invalid("the patch does not leave an object")
        return patched
    raise UnsupportedMediaType(
        f"patches of type {media_type or 'unknown'} are not understood; "
        f"accepted media types: {JSON_PATCH}, {MERGE_PATCH}"
    )


def merge(target: Any, patch: Any) -> Any:
    """RFC 7396: objects merge key by key, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def apply_operations(target: Any, operations: Any) -> Any:
    """RFC 6902: all operations in order, or none."""
    if not isinstance(operations, list):
        raise BadRequest("a JSON patch must be a list of operations")
    if len(operations) > MAX_OPERATIONS:
        raise TooLarge(f"a JSON patch may hold at most {MAX_OPERATIONS} operations")
    document = copy.deepcopy(target)
    copied = 0
    for index, operation in enumerate(operations):
        try:
            name, path = operation["op"], _pointer(operation["path"])
            if name == "add":
                document = _add(document, path, _copied(operation["value"])[0])
            elif name == "remove":
                document, _ = _remove(document, path)
            elif name == "replace":
                _get(document, path)
                document = _replace(document, path, _copied(operation["value"])[0])
            elif name == "move":
                source = _pointer(operation["from"])
                if len(path) > len(source) and path[: len(source)] == source:
                    raise _Misfit("a value cannot be moved into itself")
                document, value = _remove(document, source)
                document = _add(document, path, value)
            elif name == "copy":
                # Copies of copies grow without a large patch, so what they add is counted.
                value, size = _copied(_get(document, _pointer(operation["from"])))
                copied += size
                if copied > MAX_COPIED_BYTES:
                    raise TooLarge("the copies of this JSON patch grow beyond 1 MiB")
                document = _add(document, path, value)
            elif name == "test":
                if not _equal(_get(document, path), operation["value"]):
                    raise _Misfit("the test failed: the value is another one")
            else:
                raise BadRequest(f"operation {index} of the JSON patch: {name!r} is no operation")
        except _Misfit as misfit:
            raise Invalid(
                f"the JSON patch does not fit: operation {index} ({operation['op']} {operation['path']}): "
                f"{misfit}; nothing was changed"
            ) from None
        except (KeyError, TypeError) as missing:
            raise BadRequest(f"operation {index} of the JSON patch cannot be read: {missing}") from None
    return document


class _Misfit(Exception):
    """The patch can be read and does not fit this document."""


def _pointer(text: Any) -> list[str]:
    """RFC 6901."""
    if not isinstance(text, str) or (text and not text.startswith("/")):
        raise BadRequest(f"{text!r} is no JSON pointer: it must be empty or begin with '/'")
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _copied(value: Any) -> tuple[Any, int]:
    try:
        raw = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the JSON patch nests too deeply: {error}") from None
    return orjson.loads(raw), len(raw)


def _step(container: Any, part: str) -> Any:
    if isinstance(container, dict):
        if part not in container:
            raise _Misfit(f"there is no {part!r}")
        return container[part]
    if isinstance(container, list):
        return container[_index(container, part, len(container) - 1)]
    raise _Misfit(f"{part!r} lies below a plain value")


def _index(container: Sequence[Any], part: str, last: int) -> int:
    if not part.isascii() or not part.isdigit() or (part != "0" and part.startswith("0")) or len(part) > 9:
        raise _Misfit(f"{part!r} is no place in a list")
    if int(part) > last:
        raise _Misfit(f"the list has no place {part}")
    return int(part)


def _get(document: Any, path: Sequence[str]) -> Any:
    for part in path:
        document = _step(document, part)
    return document


def _add(document: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    container, last = _get(document, path[:-1]), path[-1]
    if isinstance(container, dict):
        container[last] = value
    elif isinstance(container, list):
        place = len(container) if last == "-" else _index(container, last, len(container))
        container.insert(place, value)
    else:
        raise _Misfit(f"{last!r} lies below a plain value")
    return document


def _replace(document: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    container, last = _get(document, path[:-1]), path[-1]
    if isinstance(container, list):
        container[int(last)] = value
    else:
        container[last] = value
    return document


def _remove(document: Any, path: Sequence[str]) -> tuple[Any, Any]:
    if not path:
        raise _Misfit("the whole document cannot be removed")
    container, last = _get(document, path[:-1]), path[-1]
    value = _step(container, last)
    if isinstance(container, list):
        del container[int(last)]
    else:
        del container[last]
    return document, value


def _equal(one: Any, other: Any) -> bool:
    """Equality of JSON: true is not 1, but 1 is 1.0."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
