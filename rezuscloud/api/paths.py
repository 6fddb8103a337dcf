"""Owns the reading of resource paths: which kind, tenant, name and subresource a path means.

Segments are cut before they are decoded, and names are checked before anybody uses them, so nothing that
looks like a path can hide in a name. It does not know what may be done there (`resources.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from rezuscloud.http.errors import NO_SUCH_PATH
from rezuscloud.model.errors import NotFound
from rezuscloud.model.meta import is_dns_label, is_dns_subdomain
from rezuscloud.resources.registry import REGISTRY, Kind

PREFIX = "/api/v1/"
_SCOPES = frozenset({"namespaces", "tenants"})
_MAX_PATH = 2048


@dataclass(frozen=True, slots=True)
class Target:
    """What a path means. `namespace` is "" for a cluster-scoped kind and None for all tenants; `name` is ""
    for the collection."""

    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""


@lru_cache(maxsize=2048)
def read_path(raw_path: str) -> Target:
    """Reads a path below /api/v1/, as it came over the wire. Raises NotFound for everything else."""
    if len(raw_path) > _MAX_PATH:
        raise NotFound(NO_SUCH_PATH)
    parts = raw_path.removeprefix(PREFIX).removesuffix("/").split("/")
    if "%" in raw_path:
        parts = [unquote(part) for part in parts]
    if len(parts) >= 3 and parts[0] in _SCOPES:
        kind = REGISTRY.by_plural(parts[2])
        if kind is not None and kind.namespaced:
            tenant = parts[1]
            if not is_dns_label(tenant):
                raise NotFound(f"no tenant can be named {tenant[:80]!r}", kind="tenants")
            return _target(kind, tenant, parts[3:])
    kind = REGISTRY.by_plural(parts[0])
    if kind is None:
        raise NotFound(NO_SUCH_PATH)
    if kind.namespaced:
        if len(parts) > 1:
            raise NotFound(NO_SUCH_PATH)
        return Target(kind, None)
    return _target(kind, "", parts[1:])


def _target(kind: Kind, namespace: str, rest: list[str]) -> Target:
    if not rest:
        return Target(kind, namespace)
    if len(rest) > 2 or not all(rest):
        raise NotFound(NO_SUCH_PATH)
    name = rest[0]
    if not is_dns_subdomain(name):
        raise NotFound(f"{kind.plural} {name[:80]!r} not found: nothing can have this name", kind=kind.plural)
    return Target(kind, namespace, name, rest[1] if len(rest) == 2 else "")
