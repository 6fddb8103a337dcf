"""Owns the judgement on what a person sends: what may become an object, and what an object may become.

All that is wrong is reported at once, unknown fields before values. Nothing is written here; the judge only
reads, in the same transaction as the write that follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rezuscloud.model.declaration import is_leaving
from rezuscloud.model.errors import (
    AlreadyExists,
    BadRequest,
    Cause,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TooLarge,
)
from rezuscloud.model.meta import API_VERSION, Doc, format_time, get_path
from rezuscloud.model.tenant import Role, TenantSpec
from rezuscloud.plugin.types import Provider
from rezuscloud.resources import causes
from rezuscloud.resources.causes import Path
from rezuscloud.resources.desk import Desk, initial_status
from rezuscloud.resources.metadata import (
    changed_metadata,
    check_metadata,
    check_name,
    generate_name,
    new_metadata,
)
from rezuscloud.resources.registry import Kind
from rezuscloud.resources.schemas import (
    TALOS_UPGRADE_FROM,
    Findings,
    check_spec,
    parse_version,
    provider_of,
)

MAX_OBJECT_BYTES = 1024 * 1024

_TOP_LEVEL = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})

Tenants = Mapping[str, Doc]


@dataclass
class DropUnknown:
    """Given by a caller who wants unknown fields dropped and not refused; `fields` then names them."""

    fields: list[str] = field(default_factory=list)


def own(value: Any) -> Any:
    """A private copy of a JSON value, sound enough to be stored: no foreign types, not too deep, not too big.

    Raises BadRequest and TooLarge.
    """
    try:
        raw = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the body is no JSON value that can be stored: {error}") from None
    if len(raw) > MAX_OBJECT_BYTES:
        raise TooLarge(f"{len(raw)} bytes are too many for one object; at most {MAX_OBJECT_BYTES}")
    return orjson.loads(raw)


class Admission:
    """The judge; `providers` are the installed ones, by name."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self._providers = providers

    def new(
        self, desk: Desk, kind: Kind, namespace: str, doc: Doc, drop: DropUnknown | None, *, known: Tenants
    ) -> Doc:
        """The object that `doc` asks for. `known` are tenants that this very transaction is making."""
        self._check_shape(kind, namespace, doc)
        found = self._check(kind, doc, drop)
        meta = doc["metadata"]
        name = meta.get("name")
        if name is None and isinstance(meta.get("generateName"), str):
            name = meta["name"] = generate_name(meta["generateName"])
        if name is None:
            found.append(causes.required(("metadata", "name"), "name or generateName"))
        else:
            found += check_name(kind, name)
        shown = str(name or "")
        if kind.namespaced:
            self._check_tenant(desk, kind, namespace, shown, known)
        if isinstance(name, str) and (current := desk.get(kind.kind, namespace, name)) is not None:
            raise already_exists(kind, current)
        if kind.kind == "NodeGroup":
            found += _second_control_plane(desk, namespace, doc)
        if found:
            raise Invalid.of(kind.kind, shown, found)
        return {
            "apiVersion": API_VERSION,
            "kind": kind.kind,
            "metadata": new_metadata(kind, namespace, meta, desk.tx.now),
            "spec": doc["spec"],
            "status": initial_status(kind.kind, format_time(desk.tx.now)),
        }

    def changed(self, kind: Kind, current: Doc, doc: Doc, drop: DropUnknown | None) -> Doc:
        """`current` with the metadata and spec of `doc`; its status is ignored."""
        name = current["metadata"]["name"]
        self._check_shape(kind, current["metadata"].get("namespace", ""), doc, name)
        check_version(kind, current, doc)
        if kind.writable == "system":
            return self._changed_metadata_only(kind, current, doc)
        # What was admitted once is not judged again: most writes only change metadata.
        is_same_spec = _bytes(doc.setdefault("spec", {})) == _bytes(current["spec"])
        found = self._check(kind, doc, drop, judges_spec=not is_same_spec)
        meta, more = changed_metadata(kind, current["metadata"], doc["metadata"])
        found += more
        if not is_same_spec and isinstance(doc["spec"], dict):
            found += _immutable(kind, current, doc["spec"])
        if found:
            raise Invalid.of(kind.kind, name, found)
        if _bytes(doc["spec"]) != _bytes(current["spec"]):  # again: unknown fields may have been dropped
            meta["generation"] += 1
        return {**current, "metadata": meta, "spec": doc["spec"]}

    def leaving(self, desk: Desk, kind: Kind, current: Doc) -> Doc:
        """`current` as it is once its deletion is asked. Raises Forbidden where that must not be."""
        _check_may_leave(desk, kind, current)
        meta = dict(current["metadata"])
        meta["generation"] += 1
        meta["deletionTimestamp"] = format_time(desk.tx.now)
        meta["deletionGracePeriodSeconds"] = 0
        return {**current, "metadata": meta}

    def with_status(self, kind: Kind, current: Doc, doc: Doc) -> Doc:
        """`current` with an admin's own status keys and conditions beside those of the system."""
        check_version(kind, current, doc)
        given = doc.get("status", {})
        if not isinstance(given, dict):
            raise Invalid.of(
                kind.kind,
                current["metadata"]["name"],
                [causes.invalid(("status",), given, "must be an object")],
            )
        old = current.get("status") or {}
        status = {key: value for key, value in old.items() if key in kind.status_keys}
        status |= {
            key: value for key, value in given.items() if key not in kind.status_keys and key != "conditions"
        }
        conditions = [item for item in old.get("conditions") or () if item["type"] in kind.conditions]
        conditions += _own_conditions(kind, current, given.get("conditions"))
        if conditions:
            status["conditions"] = conditions
        return {**current, "status": status}

    # ------------------------------------------------------------ the document alone

    def _check_shape(self, kind: Kind, namespace: str, doc: Doc, name: str | None = None) -> None:
        """What makes a request senseless rather than wrong. Raises BadRequest."""
        for key, expected in (("apiVersion", API_VERSION), ("kind", kind.kind)):
            given = doc.setdefault(key, expected)
            if given != expected:
                raise BadRequest(f"{key} of the object is {given!r}, but {expected!r} was asked for")
        meta = doc.setdefault("metadata", {})
        if not isinstance(meta, dict):
            raise BadRequest("metadata must be an object")
        if kind.namespaced and meta.get("namespace") not in (None, "", namespace):
            raise BadRequest(
                f"the namespace of the object ({meta['namespace']}) does not match the namespace "
                f"of the request ({namespace})"
            )
        if name is not None and meta.get("name") not in (None, name):
            raise BadRequest(
                f"the name of the object ({meta['name']}) does not match the name of the request ({name})"
            )

    def _check(
        self, kind: Kind, doc: Doc, drop: DropUnknown | None, *, judges_spec: bool = True
    ) -> list[Cause]:
        """Wrong values. Unknown fields raise BadRequest, or are removed from `doc` when `drop` is given."""
        spec = doc.setdefault("spec", {})
        findings = Findings(unknown=[(key,) for key in doc if key not in _TOP_LEVEL])
        if judges_spec:
            findings.add(check_spec(kind.kind, spec, self._providers))
        if findings.unknown and drop is None:
            unknown = [causes.unknown_field(path) for path in findings.unknown]
            raise BadRequest(causes.strict_decoding_message(unknown), causes=unknown, kind=kind.kind)
        for path in findings.unknown:
            _drop(doc, path)
            if drop is not None:
                drop.fields.append(causes.field_path(path))
        return check_metadata(doc["metadata"]) + findings.causes

    def _changed_metadata_only(self, kind: Kind, current: Doc, doc: Doc) -> Doc:
        name, meta = current["metadata"]["name"], doc["metadata"]
        if "spec" in doc and doc["spec"] != current.get("spec"):
            raise Forbidden(
                f'{kind.plural} "{name}" is forbidden: its spec is written by the system; {kind.how_made}; '
                "labels and annotations may be changed",
                kind=kind.plural,
                name=name,
            )
        found = check_metadata(meta)
        if not found:
            new, found = changed_metadata(kind, current["metadata"], meta)
            if new.get("finalizers") != current["metadata"].get("finalizers"):
                found.append(causes.forbidden(("metadata", "finalizers"), "only labels and annotations"))
        if found:
            raise Invalid.of(kind.kind, name, found)
        return {**current, "metadata": new}

    def _check_tenant(self, desk: Desk, kind: Kind, namespace: str, name: str, known: Tenants) -> None:
        tenant = desk.get("Tenant", "", namespace) or known.get(namespace)
        if tenant is None:
            raise NotFound(
                f'tenants "{namespace}" not found; create the tenant first', kind="tenants", name=namespace
            )
        if is_leaving(tenant):
            raise Forbidden(
                f'{kind.plural} "{name}" is forbidden: unable to create new content in namespace '
                f"{namespace} because it is being terminated",
                kind=kind.plural,
                name=name,
            )


# ---------------------------------------------------------------- old and new


def check_version(kind: Kind, current: Doc, doc: Doc) -> None:
    """Raises Conflict when the sender has read another version than the current one."""
    given = (doc.get("metadata") or {}).get("resourceVersion")
    if given in (None, ""):
        return
    have = current["metadata"]["resourceVersion"]
    if str(given) != have:
        name = current["metadata"]["name"]
        raise Conflict(
            f'Operation cannot be fulfilled on {kind.plural} "{name}": the object has been modified; please '
            f"apply your changes to the latest version and try again (sent {given}, current {have})",
            kind=kind.plural,
            name=name,
        )


def already_exists(kind: Kind, current: Doc) -> AlreadyExists:
    name = current["metadata"]["name"]
    why = "; it is being deleted, try again when it is gone" if is_leaving(current) else ""
    return AlreadyExists(f'{kind.plural} "{name}" already exists{why}', kind=kind.plural, name=name)


def not_found(kind: Kind, name: str) -> NotFound:
    """Kubernetes' sentence."""
    return NotFound(f'{kind.plural} "{name}" not found', kind=kind.plural, name=name)


def _immutable(kind: Kind, current: Doc, spec: Doc) -> list[Cause]:
    old = current["spec"]
    if kind.kind == "NodeGroup":
        return _immutable_group(old, spec)
    found: list[Cause] = []
    if get_path(current, "status.appliedRevision"):
        defaults = {"podSubnets": TenantSpec.pod_subnets, "serviceSubnets": TenantSpec.service_subnets}
        for key, default in defaults.items():
            if spec.get(key, list(default)) != old.get(key, list(default)):
                why = "cannot be changed once the tenant has been applied"
                found.append(causes.invalid(("spec", key), spec.get(key), why))
        found += _version_steps(current, spec)
    return found


def _immutable_group(old: Doc, spec: Doc) -> list[Cause]:
    found = []
    if "role" in spec and spec["role"] != old["role"]:
        why = f"cannot be changed (it is {old['role']}); make another node group"
        found.append(causes.invalid(("spec", "role"), spec["role"], why))
    if (new := provider_of(spec)) and new != provider_of(old):
        why = f"the provider cannot be changed (it is {provider_of(old)}); make another node group"
        found.append(causes.invalid(("spec", "providerClass"), spec["providerClass"], why))
    return found


def _version_steps(current: Doc, spec: Doc) -> list[Cause]:
    """How far versions may move at once in a cluster that runs. A change that is not yet applied may be taken
    back."""
    found: list[Cause] = []
    status = current["status"]
    owed = status.get("declaredRevision") != status.get("appliedRevision")
    for key, oldest in (("kubernetesVersion", lambda minor: minor - 1), ("talosVersion", _oldest_talos)):
        old, new = parse_version(current["spec"].get(key)), parse_version(spec.get(key))
        if old is None or new is None or old[:2] == new[:2]:
            continue
        if new[:2] < old[:2]:
            if not owed:
                why = f"is older than what runs ({old[0]}.{old[1]}); minor versions cannot be taken back"
                found.append(causes.invalid(("spec", key), spec[key], why))
        elif old[1] < oldest(new[1]):
            why = f"is too far from {old[0]}.{old[1]}; go to {new[0]}.{oldest(new[1])} or nearer first"
            found.append(causes.invalid(("spec", key), spec[key], why))
    return found


def _oldest_talos(minor: int) -> int:
    return TALOS_UPGRADE_FROM.get(minor, minor)


def _second_control_plane(desk: Desk, namespace: str, doc: Doc) -> list[Cause]:
    spec = doc["spec"]
    if not isinstance(spec, dict) or spec.get("role") != Role.CONTROLPLANE:
        return []
    for group in desk.list("NodeGroup", namespace):
        if group["spec"]["role"] == Role.CONTROLPLANE and not is_leaving(group):
            why = f'the tenant has a control-plane group already: "{group["metadata"]["name"]}"'
            return [causes.invalid(("spec", "role"), Role.CONTROLPLANE.value, why)]
    return []


def _check_may_leave(desk: Desk, kind: Kind, current: Doc) -> None:
    name, why = current["metadata"]["name"], ""
    if kind.kind == "Tenant" and current["spec"].get("deletionProtection"):
        why = "it is protected; set spec.deletionProtection to false first, then delete again"
    elif kind.kind == "NodeGroup" and current["spec"]["role"] == Role.CONTROLPLANE:
        # Without this, deleting and re-creating the group would destroy etcd as something asked for.
        tenant = desk.get("Tenant", "", current["metadata"]["namespace"])
        if tenant and not is_leaving(tenant) and get_path(tenant, "status.appliedRevision"):
            why = "it is the control plane of a tenant that has been applied; delete the tenant instead"
    if why:
        raise Forbidden(f'{kind.plural} "{name}" is forbidden: {why}', kind=kind.plural, name=name)


def _own_conditions(kind: Kind, current: Doc, given: Any) -> list[Doc]:
    """The conditions in an admin's status that are not the system's."""
    path: Path = ("status", "conditions")
    if given is None:
        return []
    if not isinstance(given, list) or not all(
        isinstance(item, dict) and isinstance(item.get("type"), str) for item in given
    ):
        why = "must be a list of conditions, each with a type"
        raise Invalid.of(kind.kind, current["metadata"]["name"], [causes.invalid(path, given, why)])
    return [item for item in given if item["type"] not in kind.conditions]


def _bytes(value: Any) -> bytes:
    """Tells true from 1 and 1 from 1.0, which Python calls equal."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _drop(doc: Any, path: Path) -> None:
    for part in path[:-1]:
        doc = doc[part]
    doc.pop(path[-1], None)
