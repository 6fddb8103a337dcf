"""Owns the one question of RBAC: may this identity do this verb to this kind in this tenant?

One documented table, asked as the first line of each service method. It does not find out who is asking
(`identity.py`), and it never looks at HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rezuscloud.model.errors import Forbidden

READ = frozenset({"get", "list", "watch"})
WRITE = frozenset({"create", "update", "patch", "delete"})
OPERATE = frozenset({"apply", "approve", "deny", "cancel", "retry"})
"""What a person does to runs; everything else that is not listed here is for admins."""

ROLES: Mapping[str, frozenset[str] | None] = {
    "view": READ,
    "edit": READ | WRITE | OPERATE,
    "admin": None,
    "system": None,
}
"""Role → the verbs it may use on every kind; None means all. A role that is not here may do nothing."""


class Asker(Protocol):
    """The part of an identity that a decision needs."""

    @property
    def subject(self) -> str: ...
    @property
    def role(self) -> str: ...


def is_allowed(identity: Asker, verb: str) -> bool:
    """The table's answer."""
    verbs = ROLES.get(identity.role, frozenset())
    return verbs is None or verb in verbs


def authorize(identity: Asker, verb: str, kind: str, tenant: str | None) -> None:
    """Returns when `identity` may do `verb`; raises Forbidden with Kubernetes' sentence when not.

    `kind` is the plural name of the kind, or a subresource as `runs/log`; `tenant` is None for what lies in
    no tenant or spans all of them. Roles are not yet bound to tenants, so it only completes the sentence.
    """
    if is_allowed(identity, verb):
        return
    scope = f'in the namespace "{tenant}"' if tenant else "at the cluster scope"
    raise Forbidden(
        f'{kind} is forbidden: User "{identity.subject}" cannot {verb} resource "{kind}" '
        f'in API group "" {scope}',
        kind=kind,
    )
