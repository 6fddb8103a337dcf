"""Child processes: real ones, that ignore signals, leave grandchildren behind and lose their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from rezuscloud.kit.process import Child, StartError, boot_id, is_running, kill_group_of, start, start_ticks

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., AbstractAsyncContextManager[Child]]

# Says when it is ready, then ignores SIGINT; its own child does too, and writes its pid.
STUBBORN = """
trap '' INT
sleep 600 &
echo "$!" > grandchild
echo ready > ready
while :; do wait; done
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Starts a shell script in tmp_path, output to out and err."""

    @asynccontextmanager
    async def start_script(script: str, **options: object) -> AsyncIterator[Child]:
        argv: Sequence[str] = ["/bin/sh", "-c", script]
        settings: dict[str, object] = {
            "env": {"PATH": "/usr/bin:/bin"},
            "cwd": tmp_path,
            "stdout": tmp_path / "out",
            "stderr": tmp_path / "err",
            "grace_s": 5,
        }
        async with start(argv, **(settings | options)) as child:  # type: ignore[arg-type]  # options by name
            yield child

    return start_script


async def until(claim: Callable[[], bool], *, within_s: float = 10) -> None:
    async with asyncio.timeout(within_s):
        while not claim():
            await asyncio.sleep(0.005)


def number_in(path: Path) -> int | None:
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else None


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


async def grandchild_of(directory: Path) -> tuple[int, int]:
    await until(lambda: (directory / "ready").exists() and number_in(directory / "grandchild") is not None)
    pid = number_in(directory / "grandchild")
    assert pid is not None
    ticks = start_ticks(pid)
    assert ticks is not None
    return pid, ticks


async def test_a_child_answers_with_its_exit_code(run: Run) -> None:
    async with run("exit 7") as child:
        assert await child.wait() == 7
        assert child.returncode == 7


async def test_a_killed_child_answers_with_minus_the_signal(run: Run) -> None:
    async with run("kill -TERM $$") as child:
        assert await child.wait() == -signal.SIGTERM


async def test_several_may_wait_for_one_child(run: Run) -> None:
    async with run("exit 3") as child:
        assert await asyncio.gather(child.wait(), child.wait(), child.wait()) == [3, 3, 3]


async def test_output_is_appended_to_private_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").touch(mode=0o600)
    (tmp_path / "out").write_text("before\n")
    async with run("echo out; echo err >&2") as child:
        await child.wait()
    assert (tmp_path / "out").read_text() == "before\nout\n"
    assert (tmp_path / "err").read_text() == "err\n"
    assert (tmp_path / "err").stat().st_mode & 0o777 == 0o600


async def test_a_child_sees_only_what_it_is_given(run: Run, tmp_path: Path) -> None:
    """Environment, standard input, file descriptors, umask and core limit."""
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    given, held = os.pipe()
    script = "env; umask; ulimit -c; wc -c; ls /proc/self/fd | tr '\\n' ' '"
    try:
        async with run(script, env={"PATH": "/usr/bin:/bin", "ONE": "1"}, pass_fds=[given]) as child:
            assert await child.wait() == 0
    finally:
        for descriptor in (inherited, given, held):
            os.close(descriptor)
    lines = (tmp_path / "out").read_text().splitlines()
    variables = {line.partition("=")[0] for line in lines if "=" in line}
    assert variables - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "ONE"}
    assert lines[-4:-1] == ["0077", "0", "0"]
    # 0, 1, 2, the one that was passed, and the one by which ls reads the directory
    assert len(lines[-1].split()) == 5
    assert str(given) in lines[-1].split()


async def test_a_child_leads_its_own_session_and_group(run: Run) -> None:
    async with run("exec sleep 600") as child:
        assert os.getpgid(child.pid) == child.pid == os.getsid(child.pid)


async def test_sigint_is_heard_even_when_the_server_ignores_it(run: Run, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with run("exec sleep 600") as child:
            assert await child.stop(grace_s=10) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


async def test_interrupt_reaches_the_leader_alone(run: Run, tmp_path: Path) -> None:
    script = "trap 'echo interrupted; exit 0' INT; sleep 600 & echo $! > grandchild; echo > ready; wait"
    async with run(script) as child:
        pid, ticks = await grandchild_of(tmp_path)
        assert await child.stop(grace_s=10) == 0
        assert is_running(pid, ticks)
    assert (tmp_path / "out").read_text() == "interrupted\n"
    await until(lambda: not is_running(pid, ticks))


async def test_a_child_that_ignores_sigint_is_killed_with_its_group_after_the_grace(
    run: Run, tmp_path: Path
) -> None:
    async with run(STUBBORN) as child:
        pid, ticks = await grandchild_of(tmp_path)
        assert await child.stop(grace_s=0.1) == -signal.SIGKILL
        await until(lambda: not is_running(pid, ticks))


async def test_leaving_the_block_stops_the_child_and_its_grandchildren(run: Run, tmp_path: Path) -> None:
    async with run(STUBBORN, grace_s=0.1) as child:
        pid, ticks = await grandchild_of(tmp_path)
    assert child.returncode == -signal.SIGKILL
    assert not is_running(child.pid, child.start_ticks)
    await until(lambda: not is_running(pid, ticks))


async def test_grandchildren_of_a_child_that_ended_well_are_killed(run: Run, tmp_path: Path) -> None:
    async with run("sleep 600 & echo $! > grandchild; echo > ready; exit 0") as child:
        pid, ticks = await grandchild_of(tmp_path)
        assert await child.wait() == 0
        assert is_running(pid, ticks)
    await until(lambda: not is_running(pid, ticks))


async def test_kill_group_works_when_the_leader_has_ended(run: Run, tmp_path: Path) -> None:
    async with run("sleep 600 & echo $! > grandchild; echo > ready; exit 0") as child:
        pid, ticks = await grandchild_of(tmp_path)
        await child.wait()
        child.kill_group()
        await until(lambda: not is_running(pid, ticks))


async def test_signals_to_a_child_that_is_gone_do_nothing(run: Run) -> None:
    async with run("exit 0") as child:
        await child.wait()
        child.interrupt()
    child.interrupt()
    child.kill_group()
    assert await child.wait() == 0


async def test_cancelling_the_block_does_not_cut_the_grace_short(run: Run, tmp_path: Path) -> None:
    script = "trap 'sleep 0.3; echo saved; exit 0' INT; echo > ready; while :; do sleep 0.01; done"

    async def block() -> None:
        async with run(script):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await until((tmp_path / "ready").exists)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "out").read_text() == "saved\n"


async def test_an_error_in_the_block_is_the_one_that_comes_out(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        async with run("exec sleep 600") as child:
            raise ZeroDivisionError
    assert child.returncode == -signal.SIGINT


async def test_a_missing_program_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot start /nowhere/tofu .*Nothing has run"):
        async with start(["/nowhere/tofu"], env={}, cwd=tmp_path, stdout=2, stderr=2):
            pass


async def test_a_program_is_never_searched_in_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        async with start(["sh"], env={"PATH": "/bin"}, cwd=tmp_path, stdout=2, stderr=2):
            pass


async def test_nothing_stays_open_or_unreaped(run: Run) -> None:
    async with run("exit 0"):
        pass
    before = open_files()
    for _ in range(3):
        async with run("exit 0") as child:
            await child.wait()
        assert start_ticks(child.pid) != child.start_ticks
    assert open_files() == before


# ---------------------------------------------------------------- our own death

INTERMEDIATE = """
import asyncio, sys
from pathlib import Path
from rezuscloud.kit.process import start

async def main():
    here = Path(sys.argv[1])
    env = {"PATH": "/usr/bin:/bin"}
    argv = ["/bin/sh", "-c", sys.argv[2]]
    async with start(argv, env=env, cwd=here, stdout=here / "out", stderr=here / "err") as child:
        (here / "record").write_text(f"{child.pid} {child.start_ticks}\\n")
        await child.wait()

asyncio.run(main())
"""


@asynccontextmanager
async def intermediate(directory: Path, script: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A real server process between us and the child, which dies when we say so."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERMEDIATE, str(directory), textwrap.dedent(script), cwd=ROOT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def recorded(directory: Path) -> tuple[int, int]:
    record = directory / "record"
    await until(lambda: record.exists() and record.read_text().endswith("\n"))
    pid, ticks = record.read_text().split()
    return int(pid), int(ticks)


async def test_a_child_is_interrupted_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = "trap 'echo interrupted; exit 0' INT; echo > ready; while :; do sleep 0.01; done"
    async with intermediate(tmp_path, script) as parent:
        pid, ticks = await recorded(tmp_path)
        await until((tmp_path / "ready").exists)
        parent.kill()
        await parent.wait()
        await until(lambda: not is_running(pid, ticks))
    assert (tmp_path / "out").read_text() == "interrupted\n"


async def test_a_group_recorded_before_our_death_can_be_killed_afterwards(tmp_path: Path) -> None:
    async with intermediate(tmp_path, STUBBORN) as parent:
        pid, ticks = await recorded(tmp_path)
        grandchild = await grandchild_of(tmp_path)
        parent.kill()
        await parent.wait()
        assert is_running(pid, ticks)
        kill_group_of(pid, ticks)
        await until(lambda: not is_running(pid, ticks) and not is_running(*grandchild))


async def test_what_a_dead_leader_left_behind_can_be_killed_by_its_record(tmp_path: Path) -> None:
    script = "sleep 600 & echo $! > grandchild; echo > ready; trap 'exit 0' INT; while :; do sleep 0.01; done"
    async with intermediate(tmp_path, script) as parent:
        pid, ticks = await recorded(tmp_path)
        grandchild = await grandchild_of(tmp_path)
        parent.kill()
        await parent.wait()
        await until(lambda: not is_running(pid, ticks))
        assert is_running(*grandchild)
        kill_group_of(pid, ticks)
        await until(lambda: not is_running(*grandchild))


async def test_a_stranger_with_the_same_pid_is_left_alone(run: Run) -> None:
    async with run("exec sleep 600") as child:
        assert not is_running(child.pid, child.start_ticks - 1)
        kill_group_of(child.pid, child.start_ticks - 1)
        assert is_running(child.pid, child.start_ticks)


def test_a_record_that_names_no_group_kills_nobody() -> None:
    for pid in (-1, 0, 1):
        kill_group_of(pid, 0)


async def test_a_zombie_is_not_running(run: Run) -> None:
    async with run("exit 0") as child:
        await child.wait()
        assert start_ticks(child.pid) == child.start_ticks
        assert not is_running(child.pid, child.start_ticks)


def test_the_boot_has_a_name() -> None:
    assert len(boot_id()) == 36


def test_we_run_ourselves() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert is_running(os.getpid(), ticks)
