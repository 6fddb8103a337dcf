"""Tables on the wire, as kubectl and rezusctl ask for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rezuscloud.api.tables import format_age
from rezuscloud.resources.registry import REGISTRY
from tests.support.api import TENANT, Api, placed, serve

TABLE = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
GROUPS = "/api/v1/namespaces/personal/nodegroups"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        items = [TENANT, placed("cp", role="controlplane", replicas=1), placed("workers")]
        await running.ok("POST", "/api/v1/manifests", {"kind": "List", "items": items})
        yield running


async def test_a_list_comes_as_rows_with_the_columns_of_its_kind(api: Api) -> None:
    table = await api.ok("GET", GROUPS, headers=TABLE)
    assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    assert table["metadata"]["resourceVersion"]
    assert table["columnDefinitions"][0] == {
        "name": "Name",
        "type": "string",
        "format": "name",
        "description": "",
        "priority": 0,
    }
    assert [column["name"] for column in table["columnDefinitions"]] == [
        column.name for column in REGISTRY.kind("NodeGroup").columns
    ]
    names, roles, replicas, *_, ages = zip(*(row["cells"] for row in table["rows"]), strict=True)
    assert (names, roles, replicas) == (("cp", "workers"), ("controlplane", "worker"), (1, 2))
    assert all(age.removesuffix("s").isdigit() for age in ages)
    first = table["rows"][0]["object"]
    assert (first["kind"], first["apiVersion"]) == ("PartialObjectMetadata", "meta.k8s.io/v1")
    assert (first["metadata"]["name"], first["metadata"]["namespace"]) == ("cp", "personal")
    assert "spec" not in first


async def test_one_object_comes_as_a_table_of_one_row(api: Api) -> None:
    table = await api.ok("GET", f"{GROUPS}/cp", headers=TABLE)
    assert [row["cells"][0] for row in table["rows"]] == ["cp"]
    assert table["metadata"]["resourceVersion"] == table["rows"][0]["object"]["metadata"]["resourceVersion"]


@pytest.mark.parametrize("kind", list(REGISTRY), ids=lambda kind: kind.plural)
async def test_every_kind_has_a_table_of_cells_that_print_as_they_are(api: Api, kind: object) -> None:
    table = await api.ok("GET", f"/api/v1/{kind.plural}", headers=TABLE)  # type: ignore[attr-defined] # a Kind
    for row in table["rows"]:
        assert len(row["cells"]) == len(table["columnDefinitions"])
        assert all(cell is None or isinstance(cell, str | int | bool) for cell in row["cells"])


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json;as=Table;v=v1;g=meta.k8s.io", "Table"),
        ("application/json; as=Table; g=meta.k8s.io; v=v1", "Table"),
        (
            "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io",
            "Table",
        ),
        ("application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io,application/json", "NodeGroupList"),
        ("application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json", "NodeGroupList"),
        ("application/json,application/json;as=Table;v=v1;g=meta.k8s.io", "NodeGroupList"),
        ("application/json;as=Table", "NodeGroupList"),
        ("*/*", "NodeGroupList"),
    ],
)
async def test_the_first_form_that_a_client_accepts_and_we_have_is_taken(
    api: Api, accept: str, kind: str
) -> None:
    assert (await api.ok("GET", GROUPS, headers={"Accept": accept}))["kind"] == kind


async def test_rows_hold_as_much_of_the_object_as_was_asked(api: Api) -> None:
    whole = await api.ok("GET", f"{GROUPS}?includeObject=Object", headers=TABLE)
    assert whole["rows"][0]["object"]["spec"]["role"] == "controlplane"
    none = await api.ok("GET", f"{GROUPS}?includeObject=None", headers=TABLE)
    assert none["rows"][0]["object"] is None
    wrong = await api.call("GET", f"{GROUPS}?includeObject=Some", headers=TABLE)
    assert (wrong.status, wrong.json["kind"]) == (400, "Status")


async def test_selectors_and_pages_hold_for_tables(api: Api) -> None:
    page = await api.ok("GET", f"{GROUPS}?limit=1", headers=TABLE)
    assert page["metadata"]["remainingItemCount"] == 1
    rest = await api.ok("GET", f"{GROUPS}?limit=1&continue={page['metadata']['continue']}", headers=TABLE)
    assert [row["cells"][0] for row in rest["rows"]] == ["workers"]
    none = await api.ok("GET", f"{GROUPS}?fieldSelector=metadata.name=x", headers=TABLE)
    assert none["rows"] == []


async def test_an_error_stays_a_status(api: Api) -> None:
    answer = await api.call("GET", f"{GROUPS}/nope", headers=TABLE)
    assert (answer.status, answer.json["kind"]) == (404, "Status")


async def test_many_rows_are_all_there(api: Api) -> None:
    for number in range(250):
        await api.put_system("Machine", "personal", f"m-{number:03}", {"role": "worker"}, {"ready": True})
    table = await api.ok("GET", "/api/v1/machines", headers=TABLE)
    assert [row["cells"][0] for row in table["rows"]] == [f"m-{number:03}" for number in range(250)]


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (-3, "0s"),
        (0.9, "0s"),
        (45, "45s"),
        (119, "119s"),
        (120, "2m"),
        (5 * 60 + 7, "5m7s"),
        (12 * 60 + 7, "12m"),
        (179 * 60, "179m"),
        (3 * 3600, "3h"),
        (3 * 3600 + 12 * 60, "3h12m"),
        (8 * 3600 + 59 * 60, "8h"),
        (47 * 3600, "47h"),
        (48 * 3600, "2d"),
        (51 * 3600, "2d3h"),
        (9 * 86400 + 3600, "9d"),
        (700 * 86400, "700d"),
        (3 * 365 * 86400 + 40 * 86400, "3y40d"),
        (9 * 365 * 86400 + 40 * 86400, "9y"),
    ],
)
def test_ages_are_written_as_kubectl_does(seconds: float, age: str) -> None:
    assert format_age(seconds) == age
