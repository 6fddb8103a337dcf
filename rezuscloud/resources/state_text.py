"""Owns the reading of a TF state's text (format version 4): what the state backend must know of it, and all
of it as JSON.

Resources are read one by one: a state may have tens of MB, and one call of a JSON parser over all of it would
hold the interpreter, and so the event loop, for as long as it takes. It knows nothing of machines
(`tofu/projection.py`) and judges nothing (`states.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rezuscloud.model.errors import BadRequest
from rezuscloud.model.meta import Doc

_FORMAT_VERSION = 4
_READ_WHOLE_BYTES = 1024 * 1024
_BLANK = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_PAYLOAD = re.compile(rb'"encrypted_data"\s*:\s*"')


@dataclass(frozen=True)
class StateFacts:
    """What a state says of itself."""

    serial: int
    lineage: str
    engine_version: str
    resource_count: int
    """Managed resources. Data sources do not count: nothing is lost with them."""


def read_facts(plain: bytes) -> StateFacts:
    """The facts of a plain state. Raises BadRequest when it is none, or lacks serial or lineage.

    Up to 1 MiB every byte is read. Of a larger text all but the resources is: each upload waits for this, and
    only their number is asked for.
    """
    if len(plain) > _READ_WHOLE_BYTES:
        try:
            return _facts(*_leap(_Text(plain.decode())))
        except (ValueError, RecursionError, BadRequest):
            # Not laid out as tofu does it. Reading all of it gives the right answer, or the right complaint.
            pass
    count = 0

    def visit(resource: Any) -> None:
        nonlocal count
        count += isinstance(resource, dict) and resource.get("mode") != "data"

    return _facts(_parse(plain, visit), count)


def _facts(top: Doc, resource_count: int) -> StateFacts:
    serial, lineage, version = top.get("serial"), top.get("lineage"), top.get("version")
    if type(serial) is not int or serial < 0 or not isinstance(lineage, str) or not lineage:
        raise BadRequest("this is no TF state: it needs a number as serial and a text as lineage")
    if version != _FORMAT_VERSION:
        raise BadRequest(f"this is no TF state of format version {_FORMAT_VERSION}: it says {version!r}")
    return StateFacts(serial, lineage, str(top.get("terraform_version", "")), resource_count)


def decode_state(plain: bytes) -> Doc:
    """The whole state as JSON; `resources` is always a list. Raises BadRequest when it cannot be read."""
    resources: list[Any] = []
    doc = _parse(plain, resources.append)
    doc["resources"] = resources
    return doc


def without_payload(body: bytes) -> bytes:
    """What an encrypted state tells without its ciphertext: still JSON, and short enough to be looked at for
    nothing. Empty for a state that is not encrypted.
    """
    if b'"encryption_version"' not in body:
        return b""
    found = _PAYLOAD.search(body)
    if found is None:
        return body
    end = body.find(b'"', found.end())  # base64 has nothing to escape
    return body if end < 0 else body[: found.end()] + body[end:]


class _Text:
    """A JSON text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        self._at = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr] # it matches nothing too
        return self._text[self._at : self._at + 1]

    def take(self, *allowed: str) -> str:
        """Reads one character that must be among `allowed`."""
        found = self.peek()
        if found not in allowed:
            raise json.JSONDecodeError(f"expected {' or '.join(allowed)}", self._text, self._at)
        self._at += 1
        return found

    def end(self) -> None:
        """Nothing may follow."""
        if self.peek():
            raise json.JSONDecodeError("extra data", self._text, self._at)

    def value(self) -> Any:
        """Reads one JSON value."""
        self.peek()
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return value

    def leap(self, closing: str, before: str, counted: Sequence[str]) -> int:
        """Goes behind the last `closing` that stands before the last `before`, or before the end, and counts
        what stands in between."""
        start = self._at
        limit = self._text.rfind(before, start)
        end = self._text.rfind(closing, start, limit if limit >= 0 else len(self._text))
        if end < 0:
            raise json.JSONDecodeError(f"expected {closing}", self._text, start)
        self._at = end + len(closing)
        return sum(self._text.count(each, start, end) for each in counted)


def _parse(plain: bytes, visit: Callable[[Any], None]) -> Doc:
    """The top level without `resources`, each of which is shown to `visit` as it is read."""

    def read(text: _Text) -> None:
        text.take("[")
        if text.peek() == "]":
            text.take("]")
            return
        mark = ","
        while mark == ",":
            visit(text.value())
            mark = text.take(",", "]")

    try:
        return _read_top(_Text(plain.decode()), read)
    except json.JSONDecodeError as error:
        raise BadRequest(f"this is no TF state: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"this is no TF state: {type(error).__name__}") from None


def _leap(text: _Text) -> tuple[Doc, int]:
    """The top level without `resources`, and how many of these there are, told by what each begins with."""
    count = 0

    def leap(text: _Text) -> None:
        nonlocal count
        text.take("[")
        if text.peek() == "]":
            text.take("]")
            return
        count += text.leap("]", '"check_results"', ('"mode":"managed"', '"mode": "managed"'))

    return _read_top(text, leap), count


def _read_top(text: _Text, read_resources: Callable[[_Text], None]) -> Doc:
    top: Doc = {}
    text.take("{")
    mark = ","
    while mark == ",":
        key = text.value()
        if not isinstance(key, str):
            raise ValueError("a key is no text")
        text.take(":")
        if key == "resources" and text.peek() != "n":
            read_resources(text)
        else:
            top[key] = text.value()
        mark = text.take(",", "}")
    text.end()
    return top
