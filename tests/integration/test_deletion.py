"""DELETE waits for the destroy, says why it waits, and never gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server import ApiError, Server, control_plane, running, workers

pytestmark = pytest.mark.engine


async def is_gone(server: Server, name: str) -> bool:
    try:
        await server.tenant(name)
    except ApiError as error:
        return error.code == 404
    return False


async def test_a_destroy_that_fails_keeps_the_tenant_says_why_and_is_tried_again(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("home", control_plane(1), workers(1, failDestroy="the cloud says no"))
        await server.until_applied("home")
        doc = await server.delete("/api/v1/tenants/home")
        assert doc["metadata"]["deletionTimestamp"]
        hold = await server.until_held("home", "backoff")
        assert hold["until"]
        doc = await server.tenant("home")
        assert doc["metadata"]["finalizers"] == ["rezuscloud.io/machines", "rezuscloud.io/secrets"]
        run = (await server.runs("home"))[-1]
        assert (run["spec"]["action"], run["status"]["phase"]) == ("destroy", "Failed")
        log = await server.get(f"/api/v1/namespaces/home/runs/{run['metadata']['name']}/log")
        assert "the cloud says no" in log

        await server.patch(
            "/api/v1/namespaces/home/nodegroups/workers", {"spec": {"providerConfig": {"failDestroy": None}}}
        )
        await server.post("/api/v1/tenants/home/apply", {})
        await server.until(lambda: is_gone(server, "home"))


async def test_deleting_a_tenant_that_was_never_applied_needs_no_engine(tmp_path: Path) -> None:
    fake = tmp_path / "no-engine"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    async with running(tmp_path / "data", fake) as server:
        await server.declare("home", control_plane(1))
        await server.until_held("home", "engine")
        await server.delete("/api/v1/tenants/home")
        await server.until(lambda: is_gone(server, "home"))


async def test_a_deleted_group_goes_when_its_machines_are_gone(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("home", control_plane(1), workers(2))
        await server.until_applied("home")
        doc = await server.delete("/api/v1/namespaces/home/nodegroups/workers")
        assert doc["metadata"]["deletionTimestamp"]
        await server.until_applied("home")
        assert await server.machines("home") == ["cp-1"]
        groups = (await server.get("/api/v1/namespaces/home/nodegroups"))["items"]
        assert [group["metadata"]["name"] for group in groups] == ["cp"]


async def test_a_protected_tenant_is_not_deleted(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("home", control_plane(1), deletionProtection=True)
        with pytest.raises(ApiError) as refused:
            await server.delete("/api/v1/tenants/home")
        assert refused.value.code == 403
        assert "deletionProtection" in refused.value.body["message"]
