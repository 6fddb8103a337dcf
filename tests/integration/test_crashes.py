"""The server is killed (SIGKILL, as by a power cut) at eight points of a run, and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.kit.process import is_running, start_ticks
from tests.support.gate import engine_pid, gated, processes_in, run_dirs
from tests.support.server import Doc, Server, control_plane, running, workers

pytestmark = pytest.mark.engine

TENANT = "/api/v1/tenants/personal"
RUNS = "/api/v1/namespaces/personal/runs"


async def test_killed_before_the_debounce_ends_it_applies_what_it_had_acknowledged(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_DEBOUNCE_S="30") as server:
        await server.declare("personal", control_plane(1), workers(1))
        before = await _acknowledged(server)
        await server.kill()
        await server.start()
        await _is_whole(server, before, ["cp-1", "workers-1"])
        assert await _phases(server) == ["Succeeded"]


async def test_killed_while_it_plans_it_plans_again(tmp_path: Path, engine_path: Path) -> None:
    async with gated(engine_path, tmp_path) as gate, running(tmp_path / "data", gate.engine) as server:
        read = gate.hold("GET")
        await server.declare("personal", control_plane(1), workers(1))
        await read.arrived()
        before = await _acknowledged(server)
        assert await _phases(server) == ["Planning"]
        await server.kill()
        read.release()
        await server.start()
        await _is_whole(server, before, ["cp-1", "workers-1"])
        assert await _phases(server) == ["Interrupted", "Succeeded"]
        await _tells_of_the_interruption(server, "run-1")


async def test_killed_while_a_plan_waits_for_approval_it_still_waits_and_can_be_approved(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), applyPolicy="Manual")
        await server.until_held("personal", "approval")
        before = await _acknowledged(server)
        (held,) = await server.runs("personal")
        await server.kill()
        await server.start()
        await server.until_held("personal", "approval")
        assert await server.runs("personal") == [held]
        await server.post(f"{RUNS}/run-1/approve", {"planId": held["status"]["plan"]["id"]})
        await _is_whole(server, before, ["cp-1"])
        assert await _phases(server) == ["Succeeded"]


async def test_killed_when_an_apply_has_just_begun_it_applies_again(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        seen = asyncio.create_task(_until_run(server, lambda run: run["status"]["phase"] == "Applying"))
        await server.declare("personal", control_plane(1, latencyS=1), workers(2))
        await seen
        before = await _acknowledged(server)
        await server.kill()
        await server.start()
        await _is_whole(server, before, ["cp-1", "workers-1", "workers-2"])
        assert await _phases(server) == ["Interrupted", "Succeeded"]
        await _tells_of_the_interruption(server, "run-1")


async def test_killed_after_the_first_machine_was_made_it_keeps_that_machine(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=3))
        made = await server.until(lambda: _made(server, "machine_cp-1"))
        before = await _acknowledged(server)
        await server.kill()
        await server.start()
        resources = await _is_whole(server, before, ["cp-1", "workers-1"])
        assert resources["machine_cp-1"] == made
        assert await _phases(server) == ["Interrupted", "Succeeded"]
        await _tells_of_the_interruption(server, "run-1")


async def test_killed_between_an_accepted_state_and_its_unlock_it_frees_the_lock(
    tmp_path: Path, engine_path: Path
) -> None:
    async with gated(engine_path, tmp_path) as gate, running(tmp_path / "data", gate.engine) as server:
        unlock = gate.hold("UNLOCK")
        await server.declare("personal", control_plane(1), workers(1))
        await unlock.arrived()
        before = await _acknowledged(server)
        accepted = (await server.get("/api/v1/namespaces/personal/stateversions"))["items"]
        assert len(accepted) == 1
        await server.kill()
        unlock.release()
        await server.start()
        await _is_whole(server, before, ["cp-1", "workers-1"])
        assert (await server.get("/api/v1/namespaces/personal/stateversions"))["items"] == accepted
        assert (await _phases(server))[0] == "Interrupted"
        await _tells_of_the_interruption(server, "run-1")
        assert "StateUnlocked" in await _reasons(server)


async def test_killed_after_the_engine_ended_and_before_projection_it_shows_what_was_made(
    tmp_path: Path, engine_path: Path
) -> None:
    async with gated(engine_path, tmp_path) as gate, running(tmp_path / "data", gate.engine) as server:
        unlock = gate.hold("UNLOCK")
        await server.declare("personal", control_plane(1), workers(1))
        await unlock.arrived()
        before = await _acknowledged(server)
        await unlock.pass_on()
        pid = engine_pid(server.data_dir)
        assert pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        unlock.answer()
        await server.until(lambda: _has_ended(pid))
        await server.kill()
        await server.start()
        await _is_whole(server, before, ["cp-1", "workers-1"])
        assert (await _phases(server))[0] == "Interrupted"
        await _tells_of_the_interruption(server, "run-1")


async def test_killed_right_after_success_it_has_nothing_to_do(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        seen = asyncio.create_task(_until_run(server, lambda run: run["status"]["phase"] == "Succeeded"))
        await server.declare("personal", control_plane(1), workers(1))
        before = await _acknowledged(server)
        await seen
        await server.kill()
        await server.start()
        await _is_whole(server, before, ["cp-1", "workers-1"])
        assert await _phases(server) == ["Succeeded"]


async def test_a_change_waits_for_the_engine_of_the_dead_server_however_often_that_is_killed(
    tmp_path: Path, engine_path: Path
) -> None:
    """The engine hangs in its upload, so it lives through two deaths of the server. It is interrupted only
    once: at a second time it would throw its state away."""
    async with gated(engine_path, tmp_path) as gate, running(tmp_path / "data", gate.engine) as server:
        upload = gate.hold("POST")
        await server.declare("personal", control_plane(1), workers(1))
        await upload.arrived()
        made = await _made(server, "machine_cp-1")
        pid = engine_pid(server.data_dir)
        for replicas in (2, 3):
            await server.kill()
            await server.start()
            path = "/api/v1/namespaces/personal/nodegroups/workers"
            await server.patch(path, {"spec": {"replicas": replicas}})
            hold = await server.until_held("personal", "lock")
            assert (hold["who"], "still saves its state" in hold["message"]) == ("run-1", True)
            assert hold["until"]
            assert (await _phases(server), engine_pid(server.data_dir)) == (["Applying"], pid)
        before = await _acknowledged(server)
        upload.release()
        machines = ["cp-1", "workers-1", "workers-2", "workers-3"]
        resources = await _is_whole(server, before, machines)
        assert resources["machine_cp-1"] == made
        assert await _phases(server) == ["Interrupted", "Succeeded"]


async def test_a_start_clears_away_directories_that_no_run_needs(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1))
        tenant = await server.until_applied("personal")
        await server.kill()
        for stale in (
            f"{tenant['metadata']['uid']}/run-1",
            f"{tenant['metadata']['uid']}/run-2",
            "gone/run-1",
        ):
            (server.data_dir / "runs" / stale).mkdir(parents=True)
        await server.start()
        await server.until(lambda: _is_clean(server))
        assert [path.name for path in (server.data_dir / "runs").iterdir()] == [tenant["metadata"]["uid"]]


# ---------------------------------------------------------------- what is seen from outside


async def _acknowledged(server: Server) -> dict[str, Doc]:
    """What was answered with 200 or 201, by name."""
    groups = (await server.get("/api/v1/namespaces/personal/nodegroups"))["items"]
    docs = [await server.tenant("personal"), *groups]
    return {doc["metadata"]["name"]: doc for doc in docs}


async def _is_whole(server: Server, before: dict[str, Doc], machines: list[str]) -> dict[str, str]:
    """All that was acknowledged is there, and everything declared is made exactly once; nothing is left over.

    Gives the resources in TF state, name → id.
    """
    await server.until_applied("personal", timeout_s=60)
    after = await _acknowledged(server)
    for name, doc in before.items():
        assert after[name]["spec"] == doc["spec"]
        assert after[name]["metadata"]["uid"] == doc["metadata"]["uid"]
        assert after[name]["metadata"]["generation"] == doc["metadata"]["generation"]
    assert await server.machines("personal") == machines

    state = await _state(server)
    instances = [
        (resource["name"], instance) for resource in state["resources"] for instance in resource["instances"]
    ]
    assert sorted(name for name, _ in instances) == sorted(
        ["declaration", *(f"machine_{m}" for m in machines)]
    )
    assert not any("status" in instance or "deposed" in instance for _, instance in instances)

    probe = {"ID": "probe"}
    await server.request("LOCK", f"{TENANT}/tfstate", probe)  # refused while anybody holds the lock
    await server.request("UNLOCK", f"{TENANT}/tfstate", probe)
    await server.until(lambda: _is_clean(server))
    return {name: instance["attributes"]["id"] for name, instance in instances}


async def _is_clean(server: Server) -> bool:
    return not run_dirs(server.data_dir) and not processes_in(server.data_dir / "runs")


async def _state(server: Server) -> Doc:
    versions = (await server.get("/api/v1/namespaces/personal/stateversions"))["items"]
    newest = max(item["spec"]["version"] for item in versions)
    state: Doc = await server.get(f"/api/v1/namespaces/personal/stateversions/v{newest}/body")
    return state


async def _phases(server: Server) -> list[str]:
    return [run["status"]["phase"] for run in await server.runs("personal")]


async def _reasons(server: Server) -> set[str]:
    return {event["reason"] for event in (await server.get("/api/v1/namespaces/personal/events"))["items"]}


async def _tells_of_the_interruption(server: Server, run: str) -> None:
    status = (await server.get(f"{RUNS}/{run}"))["status"]
    assert "the server was stopped" in status["error"]["summary"]
    assert status["error"]["hint"]
    assert status["finishedAt"]
    assert "RunInterrupted" in await _reasons(server)


async def _until_run(server: Server, is_it: Callable[[Doc], bool]) -> Doc:
    """The first version of a run for which `is_it` holds, from the watch: no polling comes between."""
    url = f"{server.url}/api/v1/runs?watch=true"
    async with asyncio.timeout(30), server.session.get(url, headers=server.headers) as stream:
        async for line in stream.content:
            doc: Doc = json.loads(line)["object"]
            if doc["kind"] == "Run" and "status" in doc and is_it(doc):
                return doc
    raise AssertionError("the watch ended")


async def _made(server: Server, resource: str) -> str | None:
    """The id of a resource that the engine has just made, from its own account of it."""
    for path in (server.data_dir / "runs").glob("*/*/messages.jsonl"):
        for line in path.read_text().splitlines():
            message: dict[str, Any] = json.loads(line)
            hook = message.get("hook", {})
            if message["type"] == "apply_complete" and hook["resource"]["resource_name"] == resource:
                return str(hook["id_value"])
    return None


async def _has_ended(pid: int) -> bool:
    """Ended, though perhaps not yet noticed by its parent."""
    return not is_running(pid, start_ticks(pid) or 0)
