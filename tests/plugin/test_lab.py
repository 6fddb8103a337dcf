"""The lab on the real engine: what its settings do to machines that exist."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab import LabTenant

pytestmark = pytest.mark.engine


@pytest.fixture
def lab(engine_path: Path, tmp_path: Path) -> LabTenant:
    lab = LabTenant(engine_path, tmp_path)
    lab.declare({})
    assert lab.tofu("init").returncode == 0
    return lab


def _applied(lab: LabTenant) -> None:
    done = lab.tofu("apply", "-auto-approve")
    assert done.returncode == 0, done.stdout + done.stderr


def test_state_gives_back_facts_of_every_machine(lab: LabTenant) -> None:
    lab.declare({"zone": "z1"}, workers=2)
    _applied(lab)
    machines = lab.project().machines
    assert [machine.name for machine in machines] == ["cp-1", "workers-1", "workers-2"]
    for machine in machines:
        assert (machine.spec.zone, machine.spec.shape) == ("z1", "small")
        assert machine.spec.addresses[0].address.startswith("127.")
    assert len({machine.spec.addresses for machine in machines}) == 3


def test_tags_memory_and_zone_change_in_place(lab: LabTenant) -> None:
    _applied(lab)
    lab.declare({"tags": {"a": "b"}, "memoryMb": 1, "zone": "z2"})
    assert lab.machines_planned() == {"machine_cp-1": ["update"], "machine_workers-1": ["update"]}


def test_another_image_replaces_the_machines(lab: LabTenant) -> None:
    _applied(lab)
    lab.declare({"image": "lab-2"})
    replace = ["delete", "create"]
    assert lab.machines_planned() == {"machine_cp-1": replace, "machine_workers-1": replace}


def test_latency_faults_and_health_change_no_machine_that_exists(lab: LabTenant) -> None:
    _applied(lab)
    lab.declare(
        {
            "latencyS": 9,
            "failCreate": "no",
            "destroyLatencyS": 9,
            "failDestroy": "no",
            "health": {"notReady": ["cp-1"]},
        }
    )
    assert lab.machines_planned() == {}


def test_fail_create_fails_with_its_message_and_leaves_a_tainted_machine(lab: LabTenant) -> None:
    lab.declare({"failCreate": 'no capacity in ${zone}; ask "Åse"; $(touch here)'})
    done = lab.tofu("apply", "-auto-approve")
    assert done.returncode == 1
    assert 'no capacity in ${zone}; ask "Åse"; $(touch here)' in done.stdout
    assert not (lab.directory / "here").exists()
    assert {machine.name: machine.tainted for machine in lab.project().machines}["cp-1"]


def test_fail_destroy_keeps_the_machines_until_the_setting_is_gone(lab: LabTenant) -> None:
    _applied(lab)
    lab.declare({"failDestroy": "still in use"})
    done = lab.tofu("destroy", "-auto-approve")
    assert done.returncode == 1
    assert "still in use" in done.stdout
    assert len(lab.project().machines) == 2
    lab.declare({})
    assert lab.tofu("destroy", "-auto-approve").returncode == 0
    assert lab.project().machines == ()


def test_an_interrupted_creation_leaves_no_sleeping_child_behind(lab: LabTenant) -> None:
    lab.declare({"latencyS": 3600})
    tofu = subprocess.Popen(
        [lab.engine, "apply", "-auto-approve", "-no-color"],
        cwd=lab.directory,
        env=lab.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until(lambda: len(_sleepers(tofu.pid)) == 2)
        tofu.send_signal(signal.SIGINT)
        assert tofu.wait(timeout=30) == 1
        _wait_until(lambda: not _sleepers(tofu.pid))
    finally:
        if _session(tofu.pid):
            os.killpg(tofu.pid, signal.SIGKILL)
        tofu.wait(timeout=30)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "waited for 30 s"
        time.sleep(0.02)


def _session(leader: int) -> list[tuple[int, str]]:
    """(pid, command) of all processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue
            state, _, _, session = rest.split()[:4]
            if int(session) == leader and state != "Z":
                found.append((int(entry.name), command))
    return found


def _sleepers(leader: int) -> list[int]:
    return [pid for pid, command in _session(leader) if command == "sleep"]
