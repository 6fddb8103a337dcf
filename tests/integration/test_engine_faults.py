"""The real engine dies, hangs, fails, is stopped or missing; tenants are paused, and the world drifts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path

import pytest

import rezuscloud
from rezuscloud.kit.process import is_running, start_ticks
from tests.support.gate import engine_pid, processes_in, run_dirs
from tests.support.server import ApiError, Doc, Server, control_plane, running, workers

pytestmark = pytest.mark.engine

PACKAGE = Path(rezuscloud.__file__).parent
TENANT = "/api/v1/tenants/personal"
RUNS = "/api/v1/namespaces/personal/runs"
GROUPS = "/api/v1/namespaces/personal/nodegroups"


# ---------------------------------------------------------------- the engine dies or hangs


async def test_an_engine_that_is_killed_fails_its_run_and_the_next_run_brings_it_right(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=60))
        pid = await _applying(server)
        await server.until(lambda: _makes_slowly(server))
        os.kill(pid, signal.SIGKILL)
        run = await _ended(server, "run-1")
        assert run["status"]["phase"] == "Failed"
        assert "killed while applying" in run["status"]["error"]["summary"]
        assert run["status"]["error"]["hint"]
        assert not processes_in(server.data_dir / "runs")
        assert "StateUnlocked" in await _reasons(server)
        await server.patch(f"{GROUPS}/workers", {"spec": {"providerConfig": {"latencyS": 0}}})
        await _is_right(server, ["cp-1", "workers-1"])


async def test_an_engine_that_hangs_is_killed_after_its_time_and_fails_its_run(
    tmp_path: Path, engine_path: Path
) -> None:
    times = {"REZUSCLOUD_RUN_TIMEOUT_S": "2", "REZUSCLOUD_STOP_GRACE_S": "2"}
    async with running(tmp_path / "data", engine_path, **times) as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=60))
        pid = await _applying(server)
        os.kill(pid, signal.SIGSTOP)
        run = await _ended(server, "run-1")
        assert run["status"]["phase"] == "Failed"
        assert "took too long" in run["status"]["error"]["summary"]
        assert "REZUSCLOUD_RUN_TIMEOUT_S" in run["status"]["error"]["hint"]
        assert not processes_in(server.data_dir / "runs")
        await server.until_held("personal", "backoff")
        await server.patch(f"{GROUPS}/workers", {"spec": {"providerConfig": {"latencyS": 0}}})
        await _is_right(server, ["cp-1", "workers-1"])


async def test_an_engine_that_takes_too_long_saves_what_it_has_and_fails_its_run(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_RUN_TIMEOUT_S="2") as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=60))
        run = await _ended(server, "run-1")
        assert run["status"]["phase"] == "Failed"
        assert "took too long" in run["status"]["error"]["summary"]
        assert "cp-1" in await server.machines("personal")
        await server.until_held("personal", "backoff")


# ---------------------------------------------------------------- the server stops


async def test_a_server_that_is_stopped_during_an_apply_saves_its_state_and_goes_on_later(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=3))
        pid = await _applying(server)
        await server.until(lambda: _makes_slowly(server))
        assert await server.stop() == 0
        assert not is_running(pid, start_ticks(pid) or 0)
        assert not run_dirs(server.data_dir)
        await server.start()
        run = (await server.runs("personal"))[0]
        assert run["status"]["phase"] == "Interrupted"
        assert "stopped" in run["status"]["error"]["summary"]
        assert run["status"]["stateAfter"] >= 1
        kept = await server.get("/api/v1/namespaces/personal/machines/cp-1")
        await _is_right(server, ["cp-1", "workers-1"])
        again = await server.get("/api/v1/namespaces/personal/machines/cp-1")
        assert again["metadata"]["uid"] == kept["metadata"]["uid"]
        assert [run["status"]["phase"] for run in await server.runs("personal")] == [
            "Interrupted",
            "Succeeded",
        ]


async def test_a_server_that_is_stopped_begins_no_run_that_waited_for_a_slot(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_MAX_RUNS="1") as server:
        await server.declare("personal", control_plane(1, latencyS=3))
        await _applying(server)
        await server.declare("other", control_plane(1))
        hold = await server.until_held("other", "capacity")
        assert "limit" in hold["message"]
        assert await server.stop() == 0
        await server.start()
        await _is_right(server, ["cp-1"])
        await server.until_applied("other")
        assert [run["status"]["phase"] for run in await server.runs("other")] == ["Succeeded"]


async def test_a_server_that_is_stopped_during_a_clean_check_says_nothing_of_it(
    tmp_path: Path, engine_path: Path
) -> None:
    slow = tmp_path / "slow-engine"
    slow.write_text(f'#!/bin/sh\n[ -e "{tmp_path}/slow" ] && [ "$1" = plan ] && exec sleep 60\n')
    slow.write_text(slow.read_text() + f'exec "{engine_path}" "$@"\n')
    slow.chmod(0o755)
    async with running(tmp_path / "data", slow, REZUSCLOUD_RESYNC_S="5") as server:
        await server.declare("personal", control_plane(1))
        await server.until_applied("personal")
        (tmp_path / "slow").touch()
        await server.until(lambda: _engine(server))
        before = await server.tenant("personal")
        assert await server.stop() == 0
        assert not run_dirs(server.data_dir)
        (tmp_path / "slow").unlink()
        await server.start(REZUSCLOUD_RESYNC_S="0")
        after = await server.tenant("personal")
        assert after["status"]["lastRun"] == before["status"]["lastRun"] == "run-1"
        assert _conditions(after)["Applied"]["status"] == "True"


# ---------------------------------------------------------------- a person stops a run


async def test_a_cancelled_apply_saves_what_it_has_and_waits_for_a_person(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=60))
        await _applying(server)
        await server.until(lambda: _makes_slowly(server))
        await server.post(f"{RUNS}/run-1/cancel", {})
        run = await _ended(server, "run-1")
        assert (run["status"]["phase"], run["status"]["cancelledBy"]) == ("Cancelled", "admin")
        assert "cp-1" in await server.machines("personal")
        hold = await server.until_held("personal", "pause")
        assert (hold["who"], "run-1" in hold["message"]) == ("admin", True)
        assert not processes_in(server.data_dir / "runs")
        with pytest.raises(ApiError) as refused:
            await server.post(f"{RUNS}/run-1/cancel", {})
        assert refused.value.code == 409
        await server.patch(f"{GROUPS}/workers", {"spec": {"providerConfig": {"latencyS": 0}}})
        await _is_right(server, ["cp-1", "workers-1"])


async def test_a_forced_cancel_ends_an_engine_that_does_not_end_by_itself(
    tmp_path: Path, engine_path: Path
) -> None:
    """The provisioner ignores the engine's wish to end, as a slow cloud does."""
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_STOP_GRACE_S="2") as server:
        await server.declare("personal", control_plane(1, latencyS=60))
        pid = await _applying(server)
        os.kill(pid, signal.SIGSTOP)
        await server.post(f"{RUNS}/run-1/cancel", {"force": True})
        run = await _ended(server, "run-1")
        assert run["status"]["phase"] == "Cancelled"
        assert not processes_in(server.data_dir / "runs")
        await server.patch(f"{GROUPS}/cp", {"spec": {"providerConfig": {"latencyS": 0}}})
        await _is_right(server, ["cp-1"])


async def test_a_cancelled_held_run_ends_and_a_retry_plans_anew(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), applyPolicy="Manual")
        await server.until_held("personal", "approval")
        await server.post(f"{RUNS}/run-1/cancel", {})
        run = await _ended(server, "run-1")
        assert (run["status"]["phase"], run["status"]["cancelledBy"]) == ("Cancelled", "admin")
        await server.until_held("personal", "pause")
        assert not run_dirs(server.data_dir)
        assert _conditions(await server.tenant("personal"))["Applied"]["reason"] == "Cancelled"
        with pytest.raises(ApiError) as refused:
            await server.post(f"{RUNS}/run-1/approve", {"planId": run["status"]["plan"]["id"]})
        assert refused.value.code == 409
        await server.post(f"{RUNS}/run-1/retry", {})
        await server.until_held("personal", "approval")
        plan = (await server.get(f"{RUNS}/run-2"))["status"]["plan"]["id"]
        await server.post(f"{RUNS}/run-2/approve", {"planId": plan})
        await _is_right(server, ["cp-1"])


async def test_a_change_that_is_taken_back_voids_the_plan_that_was_held_for_it(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1))
        await server.until_applied("personal")
        await server.patch(f"{GROUPS}/workers", {"spec": {"providerConfig": {"image": "lab-2"}}})
        await server.until_held("personal", "approval")
        await server.patch(f"{GROUPS}/workers", {"spec": {"providerConfig": {"image": None}}})
        await server.until(lambda: _phases_are(server, "Succeeded", "Superseded", "Succeeded"))
        await _is_right(server, ["cp-1", "workers-1"])


# ---------------------------------------------------------------- no engine


async def test_without_an_engine_the_server_says_so_and_applies_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "data", Path("/bin/true")) as server:
        with pytest.raises(ApiError) as unready:
            await server.get("/readyz")
        assert unready.value.code == 503
        (part,) = [part for part in unready.value.body["parts"] if part["name"] == "engine"]
        assert (part["ready"], "REZUSCLOUD_TOFU" in part["message"]) == (False, True)
        await server.declare("personal", control_plane(1))
        hold = await server.until_held("personal", "engine")
        assert "/bin/true" in hold["message"]
        applied = _conditions(await server.tenant("personal"))["Applied"]
        assert (applied["status"], applied["reason"]) == ("False", "NoEngine")
        assert await server.runs("personal") == []


async def test_an_engine_that_comes_later_is_found_without_a_restart(
    tmp_path: Path, engine_path: Path
) -> None:
    """A copy of the package, so that the checkout's own `.tools` is not beside it."""
    shutil.copytree(PACKAGE, tmp_path / "lib/rezuscloud")
    programs = tmp_path / "bin"
    programs.mkdir()
    elsewhere = {"PATH": str(programs), "PYTHONPATH": str(tmp_path / "lib")}
    async with running(tmp_path / "data", None, **elsewhere) as server:
        with pytest.raises(ApiError) as unready:
            await server.get("/readyz")
        (part,) = [part for part in unready.value.body["parts"] if part["name"] == "engine"]
        assert "make tools" in part["message"]
        await server.declare("personal", control_plane(1))
        await server.until_held("personal", "engine")
        (programs / "tofu").symlink_to(engine_path)
        await _is_right(server, ["cp-1"])
        assert (await server.get("/readyz"))["status"] == "ready"


# ---------------------------------------------------------------- creation fails


async def test_a_failed_creation_is_told_in_the_engines_words_and_cured_by_a_change(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1, failCreate="no capacity in lab-a"))
        run = await _ended(server, "run-1")
        error = run["status"]["error"]
        assert run["status"]["phase"] == "Failed"
        assert "no capacity in lab-a" in error["detail"]
        assert error["address"] == "terraform_data.machine_workers-1"
        assert error["hint"]
        hold = await server.until_held("personal", "backoff")
        assert "try 1 failed" in hold["message"]
        assert datetime.fromisoformat(hold["until"]) > datetime.fromisoformat(hold["since"])
        half_made = await server.get("/api/v1/namespaces/personal/machines/workers-1")
        await server.patch(f"{GROUPS}/workers", {"spec": {"providerConfig": {"failCreate": None}}})
        await _is_right(server, ["cp-1", "workers-1"])
        runs = await server.runs("personal")
        assert [run["status"]["phase"] for run in runs] == ["Failed", "Succeeded"]
        assert runs[1]["status"]["plan"]["guard"] == []
        made = await server.get("/api/v1/namespaces/personal/machines/workers-1")
        assert made["metadata"]["uid"] != half_made["metadata"]["uid"]


async def test_a_failed_change_that_is_taken_back_leaves_no_half_made_machine(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1))
        before = await server.until_applied("personal")
        config = {"replicas": 2, "providerConfig": {"failCreate": "no capacity"}}
        await server.patch(f"{GROUPS}/workers", {"spec": config})
        await _ended(server, "run-2")
        assert "workers-2" in await server.machines("personal")
        config = {"replicas": 1, "providerConfig": {"failCreate": None}}
        await server.patch(f"{GROUPS}/workers", {"spec": config})
        await _is_right(server, ["cp-1", "workers-1"])
        after = await server.tenant("personal")
        assert after["status"]["declaredRevision"] == before["status"]["declaredRevision"]


# ---------------------------------------------------------------- pause


async def test_a_paused_tenant_is_left_alone_until_it_is_not_paused(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), paused=True)
        await server.until_held("personal", "pause")
        await server.post(f"{TENANT}/apply", {})
        await server.until_held("personal", "pause")
        assert await server.runs("personal") == []
        await server.patch(TENANT, {"spec": {"paused": False}})
        await _is_right(server, ["cp-1"])


async def test_a_pause_during_a_run_lets_it_end_and_holds_what_comes_after(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1, latencyS=1))
        await _applying(server)
        await server.patch(TENANT, {"spec": {"paused": True}})
        await server.post(GROUPS, workers(1))
        hold = await server.until_held("personal", "pause")
        assert "spec.paused" in hold["message"]
        (run,) = await server.runs("personal")
        assert run["status"]["phase"] == "Succeeded"
        assert await server.machines("personal") == ["cp-1"]
        await server.patch(TENANT, {"spec": {"paused": False}})
        await _is_right(server, ["cp-1", "workers-1"])


# ---------------------------------------------------------------- drift


async def test_drift_is_reported_before_it_is_repaired(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_RESYNC_S="5") as server:
        await server.declare("personal", control_plane(1), workers(1))
        await server.until_applied("personal")
        lost = await server.get("/api/v1/namespaces/personal/machines/workers-1")
        told: list[tuple[str, list[str]]] = []

        async def watch() -> None:
            async for tenant in _watch(server, "tenants"):
                told.append((_conditions(tenant)["Drifted"]["status"], await server.machines("personal")))
                if told[-1] == ("False", ["cp-1", "workers-1"]) and ("True", ["cp-1"]) in told:
                    return

        watching = asyncio.create_task(watch())
        await _remove_from_state(server, engine_path, tmp_path, "terraform_data.machine_workers-1")
        await asyncio.wait_for(watching, 30)
        await _is_right(server, ["cp-1", "workers-1"])
        run = (await server.runs("personal"))[-1]
        assert (run["spec"]["action"], run["spec"]["cause"]["reason"]) == ("drift", "resync")
        assert "DriftDetected" in await _reasons(server)
        made = await server.get("/api/v1/namespaces/personal/machines/workers-1")
        assert made["metadata"]["uid"] != lost["metadata"]["uid"]


async def test_a_clean_resync_leaves_no_row(tmp_path: Path, engine_path: Path) -> None:
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_RESYNC_S="5") as server:
        await server.declare("personal", control_plane(1))
        await server.until_applied("personal")
        await server.until(lambda: _is_ready(server))
        before = await server.get("/api/v1/tenants")
        await server.until(lambda: _engine(server))
        await server.until(lambda: _is_idle(server))
        after = await server.get("/api/v1/tenants")
        assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


# ---------------------------------------------------------------- edits


async def test_edits_of_two_groups_during_a_run_end_in_one_further_run(
    tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path) as server:
        await server.declare("personal", control_plane(1, latencyS=1), workers(1))
        await _applying(server)
        await server.patch(f"{GROUPS}/workers", {"spec": {"replicas": 2}})
        await server.patch(f"{GROUPS}/cp", {"spec": {"providerConfig": {"zone": "lab-b"}}})
        await _is_right(server, ["cp-1", "workers-1", "workers-2"])
        runs = await server.runs("personal")
        assert [run["status"]["phase"] for run in runs] == ["Succeeded", "Succeeded"]
        changed = {item["name"] for item in runs[1]["spec"]["cause"]["objects"]}
        assert changed == {"cp", "workers"}
        assert (await server.get("/api/v1/namespaces/personal/machines/cp-1"))["spec"]["zone"] == "lab-b"


# ---------------------------------------------------------------- what is seen from outside


async def _engine(server: Server) -> int | None:
    return engine_pid(server.data_dir)


async def _applying(server: Server) -> int:
    """The pid of the engine that applies the first run."""

    async def check() -> int | None:
        run = (await server.get(f"{RUNS}/run-1")) if await server.runs("personal") else None
        began = any((path / "tfplan").exists() for path in run_dirs(server.data_dir))
        if run is None or run["status"]["phase"] != "Applying" or not began:
            return None
        pid = engine_pid(server.data_dir)
        return pid if pid is not None and "apply" in processes_in(server.data_dir).get(pid, "") else None

    pid: int = await server.until(check)
    return pid


async def _makes_slowly(server: Server) -> bool:
    """The engine makes the slow machine right now."""
    return any("sleep" in words for words in processes_in(server.data_dir / "runs").values())


async def _ended(server: Server, name: str) -> Doc:
    async def check() -> Doc | None:
        runs = {run["metadata"]["name"]: run for run in await server.runs("personal")}
        run = runs.get(name)
        return run if run and run["status"].get("finishedAt") else None

    run: Doc = await server.until(check)
    return run


async def _phases_are(server: Server, *phases: str) -> bool:
    return [run["status"]["phase"] for run in await server.runs("personal")] == list(phases)


async def _is_right(server: Server, machines: list[str]) -> None:
    """Everything declared is made exactly once, and nothing is left over."""

    async def check() -> bool:
        runs = await server.runs("personal")
        return bool(runs) and runs[-1]["status"]["phase"] == "Succeeded"

    tenant = await server.until_applied("personal", timeout_s=40)
    await server.until(check)
    assert _conditions(tenant)["Applied"]["status"] == "True"
    assert await server.machines("personal") == machines
    versions = (await server.get("/api/v1/namespaces/personal/stateversions"))["items"]
    newest = max(item["spec"]["version"] for item in versions)
    state = await server.get(f"/api/v1/namespaces/personal/stateversions/v{newest}/body")
    instances = [(r["name"], i) for r in state["resources"] for i in r["instances"]]
    assert sorted(name for name, _ in instances) == sorted(
        ["declaration", *(f"machine_{m}" for m in machines)]
    )
    assert not any("status" in instance or "deposed" in instance for _, instance in instances)
    await server.request("LOCK", f"{TENANT}/tfstate", {"ID": "probe"})  # refused while anybody holds it
    await server.request("UNLOCK", f"{TENANT}/tfstate", {"ID": "probe"})
    await server.until(lambda: _is_idle(server))


async def _is_idle(server: Server) -> bool:
    return not run_dirs(server.data_dir) and not processes_in(server.data_dir / "runs")


async def _is_ready(server: Server) -> bool:
    tenant = await server.tenant("personal")
    return bool(_conditions(tenant).get("Ready", {}).get("status") == "True")


async def _reasons(server: Server) -> set[str]:
    return {event["reason"] for event in (await server.get("/api/v1/namespaces/personal/events"))["items"]}


def _conditions(doc: Doc) -> dict[str, Doc]:
    return {condition["type"]: condition for condition in doc["status"].get("conditions", [])}


async def _watch(server: Server, plural: str) -> AsyncIterator[Doc]:
    url = f"{server.url}/api/v1/{plural}?watch=true"
    async with server.session.get(url, headers=server.headers) as stream:
        async for line in stream.content:
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED"):
                yield event["object"]


async def _remove_from_state(server: Server, engine: Path, folder: Path, address: str) -> None:
    """What an operator does with a tofu of their own (`rezusctl state env`)."""
    kit = await server.get(f"{TENANT}/state-env")
    place = folder / "operator"
    place.mkdir()
    for name, text in kit["files"].items():
        (place / name).write_text(text)
    env = {key: f"{server.url}{value}" if value[0] == "/" else value for key, value in kit["env"].items()}
    env |= {"TF_HTTP_USERNAME": "admin", "TF_HTTP_PASSWORD": server.token, "HOME": str(place)}
    for words in (["init", "-input=false"], ["state", "rm", address]):
        process = await asyncio.create_subprocess_exec(
            str(engine), *words, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
