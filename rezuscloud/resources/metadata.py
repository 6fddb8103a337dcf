"""Owns metadata: what people may write in it, what is ours in it, and how the two become one.

Ours are name, namespace, uid, generation, the timestamps, owner references, and every finalizer under
`rezuscloud.io/`. Clients send back what they have read, so ours is ignored in what they send, silently;
metadata that nobody knows is dropped the same way.
"""

from __future__ import annotations

import datetime as dt
import secrets
import uuid
from collections.abc import Iterable
from typing import Any

from rezuscloud.model.errors import Cause
from rezuscloud.model.meta import (
    DOMAIN,
    LABEL_NODE_GROUP,
    LABEL_ROLE,
    LABEL_TENANT,
    RESERVED_TENANT_NAMES,
    Doc,
    format_time,
    is_dns_label,
    is_label_value,
    is_qualified_name,
)
from rezuscloud.resources import causes
from rezuscloud.resources.registry import Kind

SYSTEM_LABELS = (LABEL_TENANT, LABEL_NODE_GROUP, LABEL_ROLE)
MAX_ANNOTATION_BYTES = 256 * 1024
MAX_GROUP_NAME = 59
"""Machine names are group, hyphen, slot (up to three digits), and must fit a DNS label of 63."""

_SUFFIX_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_CHARS = 5


def check_metadata(meta: Doc) -> list[Cause]:
    """All that is wrong with what a person wrote in labels, annotations and finalizers."""
    return [*_label_causes(meta), *_annotation_causes(meta), *_finalizer_causes(meta)]


def check_name(kind: Kind, name: Any) -> list[Cause]:
    """All that is wrong with the name of a new object."""
    path = ("metadata", "name")
    if not isinstance(name, str) or not is_dns_label(name):
        return [
            causes.invalid(path, name, "must be 1 to 63 of a-z, 0-9 and '-', not starting or ending with '-'")
        ]
    if kind.kind == "Tenant" and name in RESERVED_TENANT_NAMES:
        return [causes.invalid(path, name, "is reserved: Kubernetes clients use this name themselves")]
    if kind.kind == "NodeGroup" and len(name) > MAX_GROUP_NAME:
        why = f"must be no more than {MAX_GROUP_NAME} characters: machine names add the slot to it"
        return [causes.invalid(path, name, why)]
    return []


def generate_name(prefix: str) -> str:
    """`generateName` with five random characters behind it, as Kubernetes does."""
    suffix = "".join(secrets.choice(_SUFFIX_ALPHABET) for _ in range(_SUFFIX_CHARS))
    return prefix[: 63 - _SUFFIX_CHARS] + suffix


def new_metadata(kind: Kind, namespace: str, submitted: Doc, now: dt.datetime) -> Doc:
    """Metadata of a new object; `submitted` holds its name and has been checked."""
    meta: Doc = {"name": submitted["name"]}
    if isinstance(submitted.get("generateName"), str):
        meta["generateName"] = submitted["generateName"]
    if namespace:
        meta["namespace"] = namespace
    meta |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": format_time(now)}
    for key in ("labels", "annotations"):
        if submitted.get(key):
            meta[key] = submitted[key]
    if finalizers := [*kind.finalizers, *_foreign(submitted.get("finalizers"))]:
        meta["finalizers"] = finalizers
    return meta


def changed_metadata(kind: Kind, current: Doc, submitted: Doc) -> tuple[Doc, list[Cause]]:
    """The current metadata with a person's labels, annotations and finalizers, and what cannot be so."""
    found: list[Cause] = []
    labels = dict(submitted.get("labels") or {})
    if kind.writable == "system":
        labels = _keep_system_labels(current.get("labels") or {}, labels, found)
    annotations = submitted.get("annotations") or {}
    finalizers = [*_ours(current.get("finalizers")), *_foreign(submitted.get("finalizers"))]
    if current.get("deletionTimestamp"):
        added = sorted(set(finalizers) - set(current.get("finalizers") or ()))
        if added:
            why = f"no finalizer can be added while the object is being deleted: {', '.join(added)}"
            found.append(causes.forbidden(("metadata", "finalizers"), why))
    meta = dict(current)
    for key, value in (("labels", labels), ("annotations", annotations), ("finalizers", finalizers)):
        if value:
            meta[key] = value
        else:
            meta.pop(key, None)
    return meta, found


def merged_metadata(current: Doc, submitted: Doc) -> Doc:
    """What a manifest means for an object that exists: its labels and annotations are set, others stay."""
    merged = dict(submitted)
    for key in ("labels", "annotations"):
        given = submitted.get(key)
        if given is None or isinstance(given, dict):
            merged[key] = {**(current.get(key) or {}), **(given or {})}
    merged["finalizers"] = list(current.get("finalizers") or [])
    return merged


def _keep_system_labels(current: Doc, labels: Doc, found: list[Cause]) -> Doc:
    kept = {key: current[key] for key in SYSTEM_LABELS if key in current}
    for key in SYSTEM_LABELS:
        if key in labels and labels[key] != kept.get(key):
            why = f"label {key} is written by the system"
            found.append(causes.forbidden(("metadata", "labels", key), why))
    return {**kept, **{key: value for key, value in labels.items() if key not in SYSTEM_LABELS}}


def _ours(finalizers: Iterable[str] | None) -> list[str]:
    return [item for item in finalizers or () if item.startswith(f"{DOMAIN}/")]


def _foreign(finalizers: Iterable[str] | None) -> list[str]:
    return list(dict.fromkeys(item for item in finalizers or () if not item.startswith(f"{DOMAIN}/")))


def _label_causes(meta: Doc) -> Iterable[Cause]:
    labels = meta.get("labels")
    if labels is None:
        return
    if not isinstance(labels, dict):
        yield causes.invalid(("metadata", "labels"), labels, "must be an object of strings")
        return
    for key, value in labels.items():
        path = ("metadata", "labels", key)
        if not is_qualified_name(key):
            yield causes.invalid(path, key, "is no label key: [prefix/]name, name up to 63 characters")
        elif not isinstance(value, str):
            yield causes.invalid(path, value, "must be a string (in YAML, put it in quotes)")
        elif not is_label_value(value):
            yield causes.invalid(
                path,
                value,
                "is no label value: up to 63 of [A-Za-z0-9-_.], alphanumeric at both ends",
            )


def _annotation_causes(meta: Doc) -> Iterable[Cause]:
    annotations = meta.get("annotations")
    if annotations is None:
        return
    if not isinstance(annotations, dict):
        yield causes.invalid(("metadata", "annotations"), annotations, "must be an object of strings")
        return
    size = 0
    for key, value in annotations.items():
        path = ("metadata", "annotations", key)
        if not is_qualified_name(key.lower()):
            yield causes.invalid(path, key, "is no annotation key: [prefix/]name, name up to 63 characters")
        if isinstance(value, str):
            size += len(key.encode()) + len(value.encode())
        else:
            yield causes.invalid(path, value, "must be a string (in YAML, put it in quotes)")
    if size > MAX_ANNOTATION_BYTES:
        yield causes.invalid(
            ("metadata", "annotations"), f"{size} bytes", f"all together at most {MAX_ANNOTATION_BYTES} bytes"
        )


def _finalizer_causes(meta: Doc) -> Iterable[Cause]:
    finalizers = meta.get("finalizers")
    if finalizers is None:
        return
    if not isinstance(finalizers, list):
        yield causes.invalid(("metadata", "finalizers"), finalizers, "must be a list of names")
        return
    for index, name in enumerate(finalizers):
        if not isinstance(name, str) or "/" not in name or not is_qualified_name(name):
            yield causes.invalid(
                ("metadata", "finalizers", index), name, "must be a qualified name: domain/name"
            )
