"""Owns the hiding of known secrets in what a person or a log may see. It errs on hiding.

Each secret is sought in the forms in which programs print it: as it is, JSON-escaped (Python's way and Go's),
base64 (both alphabets, also inside a longer encoded text) and URL-encoded; of a secret of several lines, each
line that looks like key material too, because programs indent them. It does not guess what a secret is:
whoever hands it out, names it here.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "[hidden]"
SHORTEST_SECRET = 6
"""Shorter secrets are not sought: hiding every `1` or `admin` would only tell what they are."""

_SHORTEST_LINE = 16
_MASK = MASK.encode()


class Redactor:
    """Hides one set of secrets.

    `feed` and `flush` work on one stream of bytes and remember where it stands: use one Redactor a stream.
    `text` and `value` remember nothing.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._forms = {form for secret in secrets for form in _forms(secret) if len(form) >= SHORTEST_SECRET}
        self._held = b""
        self._hidden = 0  # so many bytes at the head of `_held` belong to a secret whose mask is out already

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes of the stream, redacted. Holds back an end that may be the beginning of a secret."""
        if not self._forms:
            return chunk
        data = self._held + chunk
        cut = self._first_open_end(data)
        out, end = self._mask(data, self._hidden, cut)
        self._held, self._hidden = data[cut:], max(end - cut, 0)
        return out

    def flush(self) -> bytes:
        """The end of the stream: what was held back. Half a secret is hidden as well."""
        begun, rest = self._held, self._held[self._hidden :]
        self._held, self._hidden = b"", 0
        # All of what is held back is how a secret begins; that the stream broke off there changes nothing.
        return _MASK if rest and len(begun) >= SHORTEST_SECRET else rest

    def text(self, value: str) -> str:
        """`value` with every secret in it replaced by MASK."""
        if not self._forms:
            return value
        data = value.encode("utf-8", "surrogatepass")
        return self._mask(data, 0, len(data))[0].decode("utf-8", "surrogatepass")

    def value(self, json_value: Any) -> Any:
        """A copy of a JSON value in which every string, keys included, is redacted."""
        if isinstance(json_value, str):
            return self.text(json_value)
        if isinstance(json_value, dict):
            return {self.value(key): self.value(item) for key, item in json_value.items()}
        if isinstance(json_value, (list, tuple)):
            return [self.value(item) for item in json_value]
        return json_value

    def _first_open_end(self, data: bytes) -> int:
        """Where the longest end of `data` begins that is how a form begins; `len(data)` when none is."""
        first = len(data)
        for form in self._forms:
            at = data.find(form[:1], max(len(data) - len(form) + 1, 0), first)
            while at >= 0 and not form.startswith(data[at:]):
                at = data.find(form[:1], at + 1, first)
            if at >= 0:
                first = at
        return first

    def _mask(self, data: bytes, hidden: int, stop: int) -> tuple[bytes, int]:
        """`data[:stop]` with the spans of secrets masked, and where the last span ends (it may pass `stop`).

        The first `hidden` bytes are left out without a mask.
        """
        parts: list[bytes] = []
        end = hidden
        for start, span_end in self._spans(data):
            if start >= stop:
                break
            if start >= end:
                parts += (data[end:start], _MASK)
            end = max(end, span_end)
        parts.append(data[end:stop])
        return b"".join(parts), end

    def _spans(self, data: bytes) -> list[tuple[int, int]]:
        """All places where a form stands, overlapping ones too, in order.

        One `find` a form: on lines of a log this is several times faster than one pattern of all forms.
        """
        spans: list[tuple[int, int]] = []
        for form in self._forms:
            at = data.find(form)
            while at >= 0:
                spans.append((at, at + len(form)))
                at = data.find(form, at + 1)
        return sorted(spans)


def _forms(secret: str) -> Iterator[bytes]:
    for text in {secret, secret.strip()}:
        if len(text) >= SHORTEST_SECRET:
            yield from _text_forms(text)
            yield from _base64_forms(text.encode("utf-8", "surrogatepass"))
    for line in map(str.strip, secret.splitlines()):
        if len(line) >= _SHORTEST_LINE and " " not in line:
            yield line.encode("utf-8", "surrogatepass")


def _text_forms(text: str) -> Iterator[bytes]:
    escaped = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    # Go escapes three signs more.
    escaped |= {
        form.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e") for form in escaped
    }
    encoded = {
        make(text, safe=safe, errors="surrogatepass") for make in (quote, quote_plus) for safe in ("", "/")
    }
    encoded |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), form) for form in encoded}
    for form in {text} | escaped | encoded:
        yield form.encode("utf-8", "surrogatepass")


def _base64_forms(raw: bytes) -> Iterator[bytes]:
    for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
        yield encode(raw)
        # Inside a longer text the secret may begin at any of three offsets of a group of three bytes. Letters
        # that it shares with its neighbours are left out; the rest is the same whatever the neighbours are.
        for offset, shared in ((0, 0), (1, 2), (2, 3)):
            yield encode(bytes(offset) + raw)[shared : (offset + len(raw)) * 8 // 6]
