"""Owns how a refused value is worded: field paths and the sentences of Kubernetes, one `Cause` each.

It does not decide what is refused (`schemas.py`, `metadata.py`, `admission.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rezuscloud.model.errors import Cause

Path = tuple[str | int, ...]
"""Where a value stands: `("spec", "podSubnets", 0)`."""

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SHOWN_CHARS = 80


def field_path(path: Iterable[str | int]) -> str:
    """`spec.podSubnets[0]`; a key that is no plain word stands in brackets: `spec.nodeLabels[a/b]`."""
    text = ""
    for part in path:
        if isinstance(part, int) or not _PLAIN_KEY.fullmatch(part):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def invalid(path: Iterable[str | int], value: Any, why: str) -> Cause:
    return Cause(field_path(path), f"Invalid value: {_shown(value)}: {why}")


def required(path: Iterable[str | int], why: str = "") -> Cause:
    return Cause(
        field_path(path), f"Required value: {why}" if why else "Required value", "FieldValueRequired"
    )


def not_supported(path: Iterable[str | int], value: Any, supported: Sequence[str]) -> Cause:
    listed = ", ".join(f'"{item}"' for item in supported) or "none"
    return Cause(
        field_path(path),
        f"Unsupported value: {_shown(value)}: supported values: {listed}",
        "FieldValueNotSupported",
    )


def duplicate(path: Iterable[str | int], value: Any) -> Cause:
    return Cause(field_path(path), f"Duplicate value: {_shown(value)}", "FieldValueDuplicate")


def forbidden(path: Iterable[str | int], why: str) -> Cause:
    return Cause(field_path(path), f"Forbidden: {why}", "FieldValueForbidden")


def unknown_field(path: Iterable[str | int]) -> Cause:
    field = field_path(path)
    return Cause(field, f'unknown field "{field}"')


def strict_decoding_message(causes: Iterable[Cause]) -> str:
    """Kubernetes' sentence for fields that no schema knows."""
    return "strict decoding error: " + ", ".join(cause.message for cause in causes)


def within(prefix: str, cause: Cause) -> Cause:
    """The same cause inside a list of documents: `items[1].spec.replicas`."""
    field = f"{prefix}.{cause.field}" if cause.field else prefix
    message = cause.message.replace(f'unknown field "{cause.field}"', f'unknown field "{field}"')
    return replace(cause, field=field, message=message)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
