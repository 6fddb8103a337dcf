"""Owns the typed view of OpenTofu's JSON stream (`-json-into`, `-json`): one line, one message.

It knows the shape of a line and nothing of processes (`exec.py`) or of machines (`plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class Message:
    """One typed line of the stream. `data` is the whole line, so fields we do not know yet are there."""

    type: str
    """`version`, `planned_change`, `change_summary`, `apply_start`, `diagnostic` …; "" on untyped lines."""
    data: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The line as a person reads it."""
        return str(self.data.get("@message", ""))

    @property
    def address(self) -> str:
        """Address of the resource that the line speaks of, or ""."""
        for key in ("change", "hook"):
            part = self.data.get(key)
            if isinstance(part, Mapping) and isinstance(part.get("resource"), Mapping):
                return str(part["resource"].get("addr", ""))
        return ""


@dataclass(frozen=True)
class Diagnostic:
    """A warning or an error of the engine. Its code snippet is left out: it may show config literals."""

    severity: str
    """error | warning"""
    summary: str
    detail: str = ""
    address: str = ""

    @classmethod
    def of(cls, message: Message) -> Diagnostic | None:
        """The diagnostic in a message of type `diagnostic`, else None."""
        part = message.data.get("diagnostic")
        if message.type != "diagnostic" or not isinstance(part, Mapping):
            return None
        return cls(
            severity=str(part.get("severity", "error")),
            summary=str(part.get("summary", "")),
            detail=str(part.get("detail", "")),
            address=str(part.get("address", "")),
        )


def parse_line(line: bytes) -> Message | None:
    """The message in one line, or None when the line is not a JSON object.

    The engine may print other text among them, and broken UTF-8: neither stops a reader.
    """
    line = line.strip()
    if not line.startswith(b"{"):
        return None
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            data = orjson.loads(line.decode("utf-8", "replace"))
        except orjson.JSONDecodeError:
            return None
    kind = data.get("type")
    return Message(type=kind if isinstance(kind, str) else "", data=data)
