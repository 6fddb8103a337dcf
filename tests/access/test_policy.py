"""Who may do what, and how a refusal reads."""

from __future__ import annotations

import pytest

from rezuscloud.access.identity import SYSTEM, Identity
from rezuscloud.access.policy import authorize
from rezuscloud.model.errors import Forbidden


def _who(role: str) -> Identity:
    return Identity("jane", "Jane", role=role, via="token")


@pytest.mark.parametrize(
    ("role", "allowed", "refused"),
    [
        ("view", ["get", "list", "watch"], ["create", "delete", "apply", "approve", "unlock", "pull"]),
        (
            "edit",
            ["get", "create", "patch", "delete", "apply", "approve", "cancel"],
            ["unlock", "pull", "use"],
        ),
        ("admin", ["get", "create", "unlock", "pull", "state-env"], []),
        ("system", ["get", "unlock"], []),
        ("nonsense", [], ["get", "list"]),
    ],
)
def test_each_role_may_do_what_the_table_says(role: str, allowed: list[str], refused: list[str]) -> None:
    for verb in allowed:
        authorize(_who(role), verb, "tenants", None)
    for verb in refused:
        with pytest.raises(Forbidden):
            authorize(_who(role), verb, "tenants", None)


def test_a_refusal_says_who_what_and_where_as_kubernetes_does() -> None:
    with pytest.raises(Forbidden) as refused:
        authorize(_who("view"), "delete", "nodegroups", "personal")
    assert refused.value.message == (
        'nodegroups is forbidden: User "jane" cannot delete resource "nodegroups" '
        'in API group "" in the namespace "personal"'
    )
    with pytest.raises(Forbidden, match="at the cluster scope"):
        authorize(_who("view"), "create", "tenants", None)


def test_the_system_may_do_everything() -> None:
    authorize(SYSTEM, "anything", "runs", "personal")
