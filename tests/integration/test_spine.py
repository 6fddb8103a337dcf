"""From a declaration to a real apply to what everybody sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.server import ApiError, control_plane, running, workers

pytestmark = pytest.mark.engine


async def test_a_declared_tenant_becomes_machines_that_are_ready(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(3), workers(2))
        await server.until_applied("personal")
        assert await server.machines("personal") == ["cp-1", "cp-2", "cp-3", "workers-1", "workers-2"]

        async def is_ready() -> bool:
            conditions = (await server.tenant("personal"))["status"]["conditions"]
            return {c["type"]: c["status"] for c in conditions}.get("Ready") == "True"

        await server.until(is_ready)
        conditions = {c["type"]: c for c in (await server.tenant("personal"))["status"]["conditions"]}
        assert {t: c["status"] for t, c in conditions.items()} == {
            "Applied": "True",
            "Ready": "True",
            "Reachable": "True",
            "Drifted": "False",
            "Encrypted": "True",
        }
        (run,) = await server.runs("personal")
        assert run["status"]["phase"] == "Succeeded"
        assert run["status"]["plan"]["machines"][0] == {
            "name": "cp-1",
            "action": "add",
            "reason": "it is declared and not there yet",
        }


async def test_scaling_down_removes_the_highest_slot_without_asking(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(3))
        await server.until_applied("personal")
        await server.patch("/api/v1/namespaces/personal/nodegroups/workers", {"spec": {"replicas": 1}})
        await server.until_applied("personal")
        assert await server.machines("personal") == ["cp-1", "workers-1"]
        run = (await server.runs("personal"))[-1]
        assert (run["status"]["plan"]["risk"], run["status"]["plan"]["destroys"]) == ("removes", 2)


async def test_a_replacement_waits_for_approval_of_exactly_its_plan(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1))
        await server.until_applied("personal")
        path = "/api/v1/namespaces/personal/nodegroups/workers"
        await server.patch(path, {"spec": {"providerConfig": {"image": "lab-2"}}})
        await server.until_held("personal", "approval")
        run = (await server.runs("personal"))[-1]
        name, plan = run["metadata"]["name"], run["status"]["plan"]
        assert (run["status"]["phase"], plan["risk"]) == ("Held", "dangerous")
        before = (await server.get("/api/v1/namespaces/personal/machines/workers-1"))["metadata"]["uid"]

        with pytest.raises(ApiError) as refused:
            await server.post(f"/api/v1/namespaces/personal/runs/{name}/approve", {"planId": "another"})
        assert refused.value.code == 409
        detail = await server.get(f"/api/v1/namespaces/personal/runs/{name}/plan")
        assert any(c["address"] == "terraform_data.machine_workers-1" for c in detail["resource_changes"])

        await server.post(f"/api/v1/namespaces/personal/runs/{name}/approve", {"planId": plan["id"]})
        await server.until_applied("personal")
        after = (await server.get("/api/v1/namespaces/personal/machines/workers-1"))["metadata"]["uid"]
        assert after != before


async def test_a_deleted_tenant_is_destroyed_and_leaves_nothing(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1))
        await server.until_applied("personal")
        doc = await server.delete("/api/v1/tenants/personal")
        assert doc["metadata"]["deletionTimestamp"]

        async def is_gone() -> bool:
            try:
                await server.tenant("personal")
            except ApiError as error:
                return error.code == 404
            return False

        await server.until(is_gone)
        for kind in ("nodegroups", "machines", "runs", "stateversions"):
            assert (await server.get(f"/api/v1/{kind}"))["items"] == []
        assert list((tmp_path / "data" / "runs").iterdir()) == []
        assert list((tmp_path / "data" / "logs").iterdir()) == []


async def test_every_step_reaches_a_watcher_in_order(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        phases: list[str] = []

        async def watch() -> None:
            url = f"{server.url}/api/v1/runs?watch=true"
            async with server.session.get(url, headers=server.headers) as stream:
                async for line in stream.content:
                    phase = json.loads(line)["object"]["status"]["phase"]
                    if not phases or phases[-1] != phase:
                        phases.append(phase)
                    if phase == "Succeeded":
                        return

        watching = asyncio.create_task(watch())
        await server.declare("personal", control_plane(1))
        await asyncio.wait_for(watching, 30)
        assert phases == ["Planning", "Applying", "Projecting", "Succeeded"]


async def test_pausing_an_applied_tenant_leaves_it_ready_and_starts_no_run(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1))
        await server.until_applied("personal")
        for paused in (True, False):
            await server.patch("/api/v1/tenants/personal", {"spec": {"paused": paused}})
            doc = await server.until_applied("personal")
            assert {c["type"]: c["status"] for c in doc["status"]["conditions"]}["Applied"] == "True"
        assert len(await server.runs("personal")) == 1
