"""What a path means, and what is no path at all."""

from __future__ import annotations

import pytest

from rezuscloud.api.paths import read_path
from rezuscloud.model.errors import NotFound


@pytest.mark.parametrize(
    ("path", "kind", "namespace", "name", "subresource"),
    [
        ("tenants", "Tenant", "", "", ""),
        ("tenants/", "Tenant", "", "", ""),
        ("tenants/a", "Tenant", "", "a", ""),
        ("tenants/a/status", "Tenant", "", "a", "status"),
        ("tenants/a/apply", "Tenant", "", "a", "apply"),
        ("tenants/a/nodegroups", "NodeGroup", "a", "", ""),
        ("namespaces/a/nodegroups", "NodeGroup", "a", "", ""),
        ("namespaces/a/nodegroups/", "NodeGroup", "a", "", ""),
        ("namespaces/a/nodegroups/w", "NodeGroup", "a", "w", ""),
        ("tenants/a/nodegroups/w/scale", "NodeGroup", "a", "w", "scale"),
        ("namespaces/a/events/w-1.17f", "Event", "a", "w-1.17f", ""),
        ("nodegroups", "NodeGroup", None, "", ""),
        ("machines", "Machine", None, "", ""),
        ("providers/lab", "Provider", "", "lab", ""),
        ("namespaces/%61/nodegroups/%77", "NodeGroup", "a", "w", ""),
    ],
)
def test_a_path_is_read(path: str, kind: str, namespace: str | None, name: str, subresource: str) -> None:
    target = read_path("/api/v1/" + path)
    assert (target.kind.kind, target.namespace, target.name, target.subresource) == (
        kind,
        namespace,
        name,
        subresource,
    )


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "nothing",
        "namespaces",
        "namespaces/a",
        "namespaces/a/tenants",
        "namespaces/a/nothing",
        "machines/m",
        "tenants/a/status/x",
        "tenants//nodegroups",
        "tenants/a/nodegroups//scale",
        "tenants/a//",
        "namespaces/a/nodegroups/w/scale/x",
        "namespaces/..%2f..%2fetc/nodegroups/passwd",
        "namespaces/a/nodegroups/..%2f..%2fetc%2fpasswd",
        "namespaces/a/nodegroups/..",
        "namespaces/../nodegroups/x",
        "tenants/%2e%2e",
        "tenants/a%00",
        "tenants/a%0a",
        "tenants/UPPER",
        "tenants/-a",
        "tenants/a%252fb",
        "tenants/%ff",
        "tenants/ä",
        "tenants/" + "a" * 300,
        "namespaces/" + "a" * 64 + "/nodegroups",
        "x" * 5000,
    ],
)
def test_everything_else_is_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        read_path("/api/v1/" + path)
