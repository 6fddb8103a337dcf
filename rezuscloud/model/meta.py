"""Owns what every resource shares: metadata, conditions, names, selectors, canonical bytes.

Also the only place that translates between camelCase (the wire) and snake_case (Python).
It does not know any kind: those live beside it. Resources travel through the product as plain
JSON documents (`Doc`); the typed views of `tenant.py`, `machine.py` and `operations.py` are made from
them where code needs fields rather than bytes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

Doc = dict[str, Any]
"""A resource as JSON: apiVersion, kind, metadata, spec, status."""

API_VERSION = "v1"
DOMAIN = "rezuscloud.io"
LABEL_TENANT = f"{DOMAIN}/tenant"
LABEL_NODE_GROUP = f"{DOMAIN}/node-group"
LABEL_ROLE = f"{DOMAIN}/role"
FINALIZER_MACHINES = f"{DOMAIN}/machines"
FINALIZER_SECRETS = f"{DOMAIN}/secrets"

T = TypeVar("T")

# ---------------------------------------------------------------- time


def utc_now() -> dt.datetime:
    """The current time, aware, in UTC."""
    return dt.datetime.now(dt.UTC)


def format_time(moment: dt.datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes times."""
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> dt.datetime:
    """Reads any RFC 3339 time. Raises ValueError on anything else."""
    moment = dt.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"time without offset: {text!r}")
    return moment.astimezone(dt.UTC)


# ---------------------------------------------------------------- canonical bytes


# Made once: json.dumps makes an encoder anew at each call with such arguments.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_json(value: Any) -> bytes:
    """Equal values give equal bytes: sorted keys, no spaces, UTF-8."""
    return _CANONICAL.encode(value).encode()


def digest(value: Any) -> str:
    """Short, stable fingerprint of a JSON value (sha256, first 16 hex digits)."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:16]


# ---------------------------------------------------------------- camelCase and snake_case

_HUMP = re.compile(r"(?<=[a-z0-9])([A-Z])")


@functools.cache
def camel(snake: str) -> str:
    head, *rest = snake.split("_")
    return head + "".join(part.capitalize() for part in rest)


@functools.cache
def snake(camel_case: str) -> str:
    return _HUMP.sub(lambda m: "_" + m.group(1).lower(), camel_case)


def to_wire(value: Any) -> Any:
    """Dataclasses, enums, tuples and times as JSON values. Fields that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if item is not None:
                out[camel(field.name)] = to_wire(item)
        return out
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, dt.datetime):
        return format_time(value)
    if isinstance(value, Mapping):
        return {key: to_wire(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_wire(item) for item in value]
    return value


def from_wire(cls: type[T], data: Mapping[str, Any]) -> T:
    """Builds a dataclass from a JSON object. Unknown keys are ignored (the schema has refused them before).

    Raises KeyError if a field without default is missing.
    """
    hints = _hints(typing.cast(type, cls))
    kwargs = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = camel(field.name)
        if key in data:
            kwargs[field.name] = _read(hints[field.name], data[key])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise KeyError(key)
    return cls(**kwargs)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(hint: Any, value: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _read(next(arg for arg in typing.get_args(hint) if arg is not type(None)), value)
    if origin is tuple:
        return tuple(_read(typing.get_args(hint)[0], item) for item in value)
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return from_wire(hint, value)
        if issubclass(hint, StrEnum):
            return hint(value)
        if hint is dt.datetime:
            return parse_time(value)
    return value


# ---------------------------------------------------------------- names

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
RESERVED_TENANT_NAMES = frozenset({"default", "kube-system", "kube-public", "kube-node-lease"})


def is_dns_label(name: str) -> bool:
    """RFC 1123 label: at most 63 of [a-z0-9-], not starting or ending with '-'."""
    return _DNS_LABEL.fullmatch(name) is not None


def is_dns_subdomain(name: str) -> bool:
    """RFC 1123 subdomain: dot-separated labels, at most 253 characters."""
    return 0 < len(name) <= 253 and all(is_dns_label(part) for part in name.split("."))


def is_qualified_name(key: str) -> bool:
    """`[prefix/]name`, the form of label and annotation keys and of finalizers."""
    prefix, slash, name = key.rpartition("/")
    return (not slash or is_dns_subdomain(prefix)) and _QUALIFIED.fullmatch(name) is not None


def is_label_value(value: str) -> bool:
    return value == "" or _QUALIFIED.fullmatch(value) is not None


# ---------------------------------------------------------------- documents


def make_ref(doc: Doc) -> Doc:
    """The ObjectReference of a resource, as events and causes carry it."""
    meta = doc["metadata"]
    ref = {"kind": doc["kind"], "name": meta["name"], "apiVersion": API_VERSION}
    for key in ("namespace", "uid"):
        if meta.get(key):
            ref[key] = meta[key]
    return ref


def get_path(doc: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None where any part is missing."""
    value: Any = doc
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


# ---------------------------------------------------------------- conditions


@dataclasses.dataclass(frozen=True)
class Condition:
    """One claim about a resource. `status` is "True", "False" or "Unknown"."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int


def set_condition(conditions: Iterable[Doc], condition: Condition, now: dt.datetime) -> list[Doc]:
    """The list with this condition in it; lastTransitionTime moves only when `status` changes.

    Conditions keep their order, so an unchanged resource keeps its bytes.
    """
    new = to_wire(condition) | {"lastTransitionTime": format_time(now)}
    out, found = [], False
    for old in conditions:
        if old["type"] == condition.type:
            found = True
            if old["status"] == condition.status:
                new["lastTransitionTime"] = old["lastTransitionTime"]
            out.append(new)
        else:
            out.append(old)
    return out if found else [*out, new]


def get_condition(doc: Mapping[str, Any], type_: str) -> Doc | None:
    for condition in get_path(doc, "status.conditions") or []:
        if condition["type"] == type_:
            return typing.cast(Doc, condition)
    return None


# ---------------------------------------------------------------- selectors

Match = Callable[[Doc], bool]


class SelectorError(ValueError):
    """A selector that cannot be read; the message says where."""


_SET = re.compile(r"(?P<key>\S+)\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)")
_COMPARE = re.compile(r"(?P<key>[^=!<>\s]+)\s*(?P<op>==|=|!=|>|<)\s*(?P<value>[^=!<>]*)")


def parse_label_selector(text: str) -> Match:
    """Kubernetes label selector: `a=b,c!=d,e in (f,g),h notin (i),j,!k,l>1`. Raises SelectorError."""
    tests = [_label_test(term) for term in _split_outside_parentheses(text)]

    def matches(doc: Doc) -> bool:
        labels = doc["metadata"].get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def _label_test(term: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET.fullmatch(term):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        _check_label_key(key)
        if found["op"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _COMPARE.fullmatch(term):
        key, op, value = found["key"], found["op"], found["value"].strip()
        _check_label_key(key)
        if op in (">", "<"):
            if not re.fullmatch(r"-?\d+", value):
                raise SelectorError(f"{term!r}: {op} needs a whole number")
            number = int(value)

            def compares(labels: Mapping[str, str]) -> bool:
                have = labels.get(key, "")
                if not re.fullmatch(r"-?\d+", have):
                    return False
                return int(have) > number if op == ">" else int(have) < number

            return compares
        if not is_label_value(value):
            raise SelectorError(f"{term!r}: {value!r} is not a label value")
        if op == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    key = term.removeprefix("!")
    _check_label_key(key)
    if term.startswith("!"):
        return lambda labels: key not in labels
    return lambda labels: key in labels


def _check_label_key(key: str) -> None:
    if not is_qualified_name(key):
        raise SelectorError(f"{key!r} is not a label key")


def parse_field_selector(text: str, supported: Iterable[str]) -> Match:
    """`metadata.name=x,spec.role!=worker`. Empty terms are ignored (kr8s sends a trailing comma).

    An empty value matches an absent field. Raises SelectorError for a field outside `supported`.
    """
    allowed = frozenset(supported)
    tests: list[tuple[str, bool, str]] = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        found = re.fullmatch(r"([^=!]+?)\s*(!=|==|=)\s*(.*)", term)
        if not found:
            raise SelectorError(f"{term!r}: expected field=value or field!=value")
        field, op, value = found.groups()
        if field not in allowed:
            raise SelectorError(f"field label not supported: {field}")
        tests.append((field, op != "!=", value))

    def matches(doc: Doc) -> bool:
        for field, wanted, value in tests:
            have = get_path(doc, field)
            text_of = "" if have is None else str(have).lower() if isinstance(have, bool) else str(have)
            if (text_of == value) is not wanted:
                return False
        return True

    return matches


def _split_outside_parentheses(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    parts.append(current)
    if depth != 0:
        raise SelectorError(f"unbalanced parentheses in {text!r}")
    return [part.strip() for part in parts if part.strip()]
