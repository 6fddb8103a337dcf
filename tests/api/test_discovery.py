"""What this server speaks and which kinds it has, as clients find out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rezuscloud.resources.registry import REGISTRY
from tests.support.api import Api, serve


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        yield running


@pytest.mark.parametrize("slash", ["", "/"])
async def test_there_is_one_group_and_one_version_with_and_without_a_slash(api: Api, slash: str) -> None:
    versions = await api.ok("GET", f"/api{slash}?timeout=32s")
    assert (versions["kind"], versions["versions"]) == ("APIVersions", ["v1"])
    groups = await api.ok("GET", f"/apis{slash}")
    assert (groups["kind"], groups["groups"]) == ("APIGroupList", [])
    resources = await api.ok("GET", f"/api/v1{slash}")
    assert (resources["kind"], resources["groupVersion"]) == ("APIResourceList", "v1")


async def test_every_kind_is_listed_with_its_names_scope_and_verbs(api: Api) -> None:
    listed = {entry["name"]: entry for entry in (await api.ok("GET", "/api/v1"))["resources"]}
    assert {name for name in listed if "/" not in name} == {kind.plural for kind in REGISTRY}
    assert listed["nodegroups"] == {
        "name": "nodegroups",
        "singularName": "nodegroup",
        "namespaced": True,
        "kind": "NodeGroup",
        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        "shortNames": ["ng"],
        "categories": ["rezuscloud"],
    }
    assert listed["machines"]["verbs"] == ["get", "list", "patch", "update", "watch"]
    assert listed["tenants"]["namespaced"] is False


async def test_subresources_are_listed_beside_their_kind(api: Api) -> None:
    listed = {entry["name"]: entry for entry in (await api.ok("GET", "/api/v1"))["resources"]}
    scale = listed["nodegroups/scale"]
    assert (scale["kind"], scale["group"], scale["version"]) == ("Scale", "autoscaling", "v1")
    assert listed["tenants/status"]["verbs"] == ["get", "patch", "update"]
    assert "events/status" not in listed


async def test_discovery_is_only_for_who_is_known(api: Api) -> None:
    for path in ("/api", "/apis", "/api/v1"):
        assert (await api.call("GET", path, token=None)).status == 401
