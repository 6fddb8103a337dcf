"""Commands of the real engine: what they see, what they tell while they run, and how they are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.kit.process import Child, is_running
from rezuscloud.tofu import exec as tofu
from rezuscloud.tofu.data_dirs import DataDirs
from rezuscloud.tofu.engine import find_engine
from rezuscloud.tofu.messages import Message
from tests.support.state_stub import StateStub, state_stub

pytestmark = pytest.mark.engine


@dataclass
class Workshop:
    """One working directory, a state backend, and all that its commands have told."""

    inv: tofu.Invocation
    backend: StateStub
    messages: list[Message] = field(default_factory=list)
    log: bytearray = field(default_factory=bytearray)
    child: Child | None = None
    stop: tofu.StopSignal = field(default_factory=tofu.StopSignal)
    on_message: Callable[[Message], None] = lambda message: None
    timeout_s: float | None = None

    @property
    def cwd(self) -> Path:
        return self.inv.cwd

    @property
    def plan_file(self) -> Path:
        return self.cwd / "tfplan"

    @property
    def text(self) -> str:
        return self.log.decode(errors="replace")

    @property
    def types(self) -> list[str]:
        return [message.type for message in self.messages]

    def write(self, resources: Mapping[str, Any]) -> None:
        """The whole configuration: terraform_data resources by name."""
        config = {"terraform": {"backend": {"http": {}}}, "resource": {"terraform_data": resources}}
        (self.cwd / "main.tf.json").write_text(json.dumps(config, indent=1))

    def _take(self, message: Message) -> None:
        self.messages.append(message)
        self.on_message(message)

    def _note(self, child: Child) -> None:
        self.child = child

    @property
    def _listeners(self) -> dict[str, Any]:
        return {
            "on_started": self._note,
            "on_message": self._take,
            "on_log": self.log.extend,
            "stop": self.stop,
            "timeout_s": self.timeout_s,
        }

    async def plan(self, **options: Any) -> tofu.Outcome:
        return await tofu.plan(self.inv, out=self.plan_file, **options, **self._listeners)

    async def apply(self) -> tofu.Outcome:
        return await tofu.apply(self.inv, plan=self.plan_file, **self._listeners)

    async def change(self) -> tofu.Outcome:
        """Plan, which must find changes, and apply."""
        planned = await self.plan()
        assert planned.returncode == 2, self.text
        return await self.apply()

    @property
    def is_gone(self) -> bool:
        """Nothing is left of the engine's whole process group. What was killed needs a moment to die."""
        deadline = time.monotonic() + 5
        while not (is_gone := self._is_gone_now()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_gone

    def _is_gone_now(self) -> bool:
        assert self.child is not None
        groups = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                groups.append((int(fields[2]), fields[0]))
        return not is_running(self.child.pid, self.child.start_ticks) and not any(
            group == self.child.pid and state not in "ZX" for group, state in groups
        )


def running(command: str) -> dict[str, Any]:
    """A resource whose creation runs a shell command."""
    return {"provisioner": {"local-exec": {"command": command}}}


def once(message_type: str, act: Callable[[], None]) -> Callable[[Message], None]:
    """Acts at the first message of a type."""
    seen = []

    def look(message: Message) -> None:
        if message.type == message_type and not seen:
            seen.append(message)
            act()

    return look


@pytest.fixture(scope="module")
def dirs_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dirs")


@pytest.fixture
async def shop(engine_path: Path, dirs_root: Path, tmp_path: Path) -> AsyncIterator[Workshop]:
    async with open_workshop(engine_path, dirs_root, tmp_path) as opened:
        yield opened


@asynccontextmanager
async def open_workshop(program: Path, dirs_root: Path, cwd: Path) -> AsyncIterator[Workshop]:
    engine = await find_engine(program)
    prepared = await DataDirs(dirs_root, engine, None).prepare({})
    async with state_stub() as backend:
        env = backend.env | {"TF_HTTP_RETRY_MAX": "1"}
        inv = tofu.Invocation(engine=engine, prepared=prepared, cwd=cwd, env=env, grace_s=20)
        yield Workshop(inv, backend)


# ---------------------------------------------------------------- plan and apply


async def test_a_change_is_planned_and_applied_without_init(shop: Workshop) -> None:
    shop.write({"a": {"input": "1"}})
    planned = await shop.plan()
    assert (planned.returncode, planned.killed, planned.interrupted) == (2, False, False)
    assert planned.changes is not None
    assert (planned.changes["add"], planned.changes["remove"]) == (1, 0)
    assert shop.backend.requests == {"GET": 1}
    applied = await shop.apply()
    assert applied.returncode == 0
    assert applied.changes is not None
    assert applied.changes["operation"] == "apply"
    assert list(shop.backend.resources) == ["terraform_data.a"]
    assert shop.backend.lock is None
    assert {"planned_change", "apply_start", "apply_complete"} <= set(shop.types)
    assert "Creation complete" in shop.text
    assert shop.is_gone


async def test_the_prepared_directory_is_not_written_to(shop: Workshop) -> None:
    def look() -> list[tuple[str, int, int]]:
        paths = sorted(shop.inv.prepared.data_dir.parent.rglob("*"))
        return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    before = look()
    shop.write({"a": {}})
    await shop.change()
    assert look() == before
    assert not (shop.cwd / ".terraform").exists()


async def test_a_plan_without_changes_says_so(shop: Workshop) -> None:
    shop.write({"a": {}})
    await shop.change()
    planned = await shop.plan()
    assert planned.returncode == 0
    assert "planned_change" not in shop.types[shop.types.index("apply_complete") :]


async def test_a_destroy_plan_removes_everything(shop: Workshop) -> None:
    shop.write({"a": {}, "b": {}})
    await shop.change()
    planned = await shop.plan(destroy=True)
    assert planned.changes is not None
    assert (planned.returncode, planned.changes["remove"]) == (2, 2)
    assert (await shop.apply()).returncode == 0
    assert shop.backend.resources == {}


async def test_a_replacement_can_be_asked_for(shop: Workshop) -> None:
    shop.write({"a": {}, "b": {}})
    await shop.change()
    planned = await shop.plan(replace=["terraform_data.a"])
    assert planned.changes is not None
    assert (planned.changes["add"], planned.changes["remove"]) == (1, 1)


async def test_a_stale_plan_is_refused(shop: Workshop) -> None:
    shop.write({"a": {}})
    await shop.plan()
    shutil.copy(shop.plan_file, shop.cwd / "first")
    await shop.apply()
    shutil.copy(shop.cwd / "first", shop.plan_file)
    refused = await shop.apply()
    assert refused.returncode == 1
    assert refused.diagnostics[0].summary == "Saved plan is stale"


async def test_a_saved_plan_is_shown_and_leaves_no_trace(shop: Workshop) -> None:
    shop.write({"a": {"input": "1"}})
    await shop.plan()
    before = set(shop.cwd.iterdir())
    first, second = await asyncio.gather(*(tofu.show_plan(shop.inv, shop.plan_file) for _ in range(2)))
    assert first["resource_changes"][0]["change"]["actions"] == ["create"]
    assert first == second
    assert set(shop.cwd.iterdir()) == before


async def test_what_is_no_plan_cannot_be_shown(shop: Workshop) -> None:
    shop.plan_file.write_text("rubbish")
    with pytest.raises(tofu.ShowFailed, match="cannot be shown"):
        await tofu.show_plan(shop.inv, shop.plan_file)


async def test_wrong_configuration_fails_with_a_diagnostic(shop: Workshop) -> None:
    shop.write({"a": {"inputt": 1}})
    failed = await shop.plan()
    assert failed.returncode == 1
    assert [(each.severity, each.summary) for each in failed.diagnostics] == [
        ("error", "Extraneous JSON object property")
    ]


async def test_a_failing_command_of_a_resource_is_a_diagnostic_with_its_address(shop: Workshop) -> None:
    shop.write({"a": {}, "b": running("echo no luck >&2; exit 3")})
    failed = await shop.change()
    assert failed.returncode == 1
    assert not failed.killed
    (diagnostic,) = failed.diagnostics
    assert diagnostic.summary == "local-exec provisioner error"
    assert diagnostic.address == "terraform_data.b"
    assert "exit status 3" in diagnostic.detail
    assert shop.backend.resources["terraform_data.b"]["status"] == "tainted"
    assert shop.backend.lock is None


async def test_a_lock_of_somebody_else_fails_the_apply_and_stays(shop: Workshop) -> None:
    shop.write({"a": {}})
    await shop.plan()
    theirs = {"ID": "5b1a", "Who": "somebody@desk", "Operation": "OperationTypeApply"}
    shop.backend.lock = theirs
    failed = await shop.apply()
    assert failed.returncode == 1
    assert failed.diagnostics[0].summary == "Error acquiring the state lock"
    assert "somebody@desk" in failed.diagnostics[0].detail
    assert shop.backend.lock == theirs
    assert "POST" not in shop.backend.requests


# ---------------------------------------------------------------- what is seen while it runs


async def test_messages_and_log_arrive_while_it_runs(shop: Workshop) -> None:
    # The command goes on only when its own beginning has been reported.
    go = shop.cwd / "go"
    shop.write({"a": running(f"echo hello; until [ -e {go} ]; do sleep 0.02; done")})
    shop.on_message = once("provision_progress", go.touch)
    applied = await asyncio.wait_for(shop.change(), 20)
    assert applied.returncode == 0
    assert "hello" in shop.text


async def test_secrets_are_in_neither_log_nor_messages(shop: Workshop) -> None:
    secret = 'p4ss"word/with<signs'
    shop.inv = replace(
        shop.inv, env={**shop.inv.env, "REZ_SECRET": secret, "TF_HTTP_PASSWORD": secret}, secrets=(secret,)
    )
    shop.write({"a": running('echo "<$REZ_SECRET>"; printf %s "$REZ_SECRET" | base64; exit 1')})
    failed = await shop.change()
    assert failed.returncode == 1
    told = shop.text + repr(shop.messages) + repr(failed.diagnostics)
    assert "<[hidden]>" in told
    for form in ("p4ss", "word/with", "cDRzcyJ3b3JkL3dpdGg8c2lnbnM="):
        assert form not in told


# The real engine takes many seconds to print as much; what matters here is only the file that it leaves.
LONG_LINES = """\
import sys
(path,) = (word.removeprefix("-json-into=") for word in sys.argv if word.startswith("-json-into="))
with open(path, "w") as file:
    for size in (2**20 - 100, 3 * 2**20, 5):
        file.write('{"type": "outputs", "@message": "%s"}\\n' % ("x" * size))
    file.write('not JSON\\n{"type": "change_summary", "changes": {"add": 7}}\\n{"type": "cut o')
sys.stdout.buffer.write(b"\\xff broken")
"""


async def test_a_line_of_more_than_a_mebibyte_is_left_out_and_the_rest_still_comes(shop: Workshop) -> None:
    script = shop.cwd / "engine"
    script.write_text(f"#!{sys.executable}\n{LONG_LINES}")
    script.chmod(0o755)
    shop.inv = replace(shop.inv, engine=replace(shop.inv.engine, path=script))
    outcome = await shop.apply()
    assert outcome.changes == {"add": 7}
    assert [len(each.text) for each in shop.messages] == [2**20 - 100, 5, 0]
    assert shop.text == "\ufffd broken"


async def test_a_burst_of_output_does_not_hold_the_event_loop(shop: Workshop) -> None:
    shop.inv = replace(shop.inv, secrets=tuple(f"secret-number-{each}-of-many" for each in range(5)))
    shop.write(
        {"a": running('i=0; while [ $i -lt 5000 ]; do echo "\\"line\\" $i of a burst"; i=$((i+1)); done')}
    )
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()  # what this thread worked, whatever else the machine does
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    ticking = asyncio.create_task(tick())
    applied = await shop.change()
    ticking.cancel()
    assert applied.returncode == 0
    assert shop.types.count("provision_progress") > 5000
    assert longest < 0.05


async def test_a_listener_that_fails_does_not_fail_the_run(
    shop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    def full(message: Message) -> None:
        raise OSError("disk full")

    shop.write({"a": {}})
    shop.on_message = full
    assert (await shop.change()).returncode == 0
    assert list(shop.backend.resources) == ["terraform_data.a"]
    assert "disk full" in caplog.text


async def test_the_environment_is_made_from_nothing(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REZ_CANARY", "ours")
    monkeypatch.setenv("TF_CLI_ARGS", "-nonsense")
    shop.inv = replace(shop.inv, env={**shop.inv.env, "CLOUD_TOKEN": "given", "TF_DATA_DIR": "/nowhere"})
    shop.write({"a": running("env > seen; umask >> seen")})
    assert (await shop.change()).returncode == 0
    *lines, umask = (shop.cwd / "seen").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines)
    assert "REZ_CANARY" not in seen
    assert seen["CLOUD_TOKEN"] == "given"
    assert seen["TF_DATA_DIR"] == str(shop.inv.prepared.data_dir)
    assert seen["HOME"] == seen["TMPDIR"] == str(shop.cwd)
    assert seen["TF_HTTP_RETRY_MAX"] == "1", "the caller may choose how patient it is"
    assert seen["TF_HTTP_RETRY_WAIT_MAX"] == "4"
    assert umask == "0077"


# ---------------------------------------------------------------- stopping


async def test_an_interrupted_apply_saves_its_state_and_unlocks(shop: Workshop) -> None:
    shop.write({"a": {}, "b": running("sleep 60") | {"depends_on": ["terraform_data.a"]}})
    shop.on_message = once("provision_start", shop.stop.interrupt)
    stopped = await shop.change()
    assert stopped.interrupted
    assert not stopped.killed
    assert stopped.returncode == 1
    assert set(shop.backend.resources) == {"terraform_data.a", "terraform_data.b"}
    assert shop.backend.resources["terraform_data.b"]["status"] == "tainted"
    assert shop.backend.requests["UNLOCK"] == 1
    assert shop.backend.lock is None
    assert shop.is_gone, "the shell's own child would live on"


async def test_force_ends_an_apply_whose_upload_hangs(shop: Workshop) -> None:
    shop.write({"a": {}})
    shop.backend.hang_writes = True
    shop.backend.on_write = shop.stop.force
    began = time.monotonic()
    stopped = await shop.change()
    assert stopped.interrupted
    assert stopped.returncode != 0
    assert time.monotonic() - began < 15
    assert shop.is_gone


async def test_an_engine_that_does_not_stop_within_its_grace_is_killed(shop: Workshop) -> None:
    shop.inv = replace(shop.inv, grace_s=0.3)
    shop.write({"a": {}})
    shop.backend.hang_writes = True
    shop.backend.on_write = shop.stop.interrupt
    killed = await shop.change()
    assert (killed.returncode, killed.killed, killed.interrupted) == (-signal.SIGKILL, True, True)
    assert shop.is_gone


async def test_a_time_limit_interrupts_and_says_so(shop: Workshop) -> None:
    shop.write({"a": running("sleep 60")})
    await shop.plan()
    shop.timeout_s = 0.5
    stopped = await shop.apply()
    assert (stopped.timed_out, stopped.interrupted, stopped.killed) == (True, True, False)
    assert not shop.stop.is_set, "nobody has cancelled it"
    assert shop.backend.lock is None
    assert shop.is_gone


async def test_a_stop_before_the_start_runs_nothing(shop: Workshop) -> None:
    shop.write({"a": {}})
    shop.stop.interrupt()
    stopped = await shop.plan()
    assert stopped.interrupted
    assert stopped.returncode == 1
    assert shop.child is None
    assert not shop.backend.requests


async def test_an_interrupt_at_the_very_start_is_no_violent_end(shop: Workshop) -> None:
    shop.write({"a": {}})

    def interrupt_at_once(child: Child) -> None:
        child.interrupt()
        shop.stop.interrupt()

    listeners = shop._listeners | {"on_started": interrupt_at_once}
    stopped = await tofu.plan(shop.inv, out=shop.plan_file, **listeners)
    assert stopped.interrupted
    assert not stopped.killed


async def test_a_killed_engine_is_told_from_a_failed_one_and_leaves_nobody_behind(shop: Workshop) -> None:
    shop.write({"a": {}, "b": running("sleep 60") | {"depends_on": ["terraform_data.a"]}})

    def kill() -> None:
        assert shop.child is not None
        os.kill(shop.child.pid, signal.SIGKILL)

    shop.on_message = once("provision_start", kill)
    killed = await shop.change()
    assert (killed.returncode, killed.killed, killed.interrupted) == (-signal.SIGKILL, True, False)
    assert not killed.has_errored_state
    assert shop.backend.lock is not None, "nobody else can release it"
    assert "apply_start" in shop.types
    assert shop.is_gone


async def test_a_cancelled_task_still_lets_the_engine_save_its_state(shop: Workshop) -> None:
    shop.write({"a": {}, "b": running("sleep 60") | {"depends_on": ["terraform_data.a"]}})
    await shop.plan()
    begun = asyncio.Event()
    shop.on_message = once("provision_start", begun.set)
    task = asyncio.create_task(shop.apply())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "terraform_data.a" in shop.backend.resources
    assert shop.backend.lock is None
    assert shop.is_gone


# ---------------------------------------------------------------- a state that is not taken


@pytest.mark.parametrize("code", [500, 413, 409])
async def test_a_refused_state_is_kept_aside_and_reported(shop: Workshop, code: int) -> None:
    shop.write({"a": {"input": "1"}})
    shop.backend.refuse_writes_with = code
    failed = await shop.change()
    assert failed.returncode == 1
    assert failed.has_errored_state
    assert not failed.killed
    assert shop.backend.state is None
    assert shop.backend.lock is None, "it unlocks though nothing was stored"
    kept = json.loads((shop.cwd / "errored.tfstate").read_text())
    assert kept["resources"][0]["name"] == "a"
    assert any("persist state" in each.summary for each in failed.diagnostics)


async def test_an_interrupted_plan_leaves_no_state_behind(shop: Workshop) -> None:
    shop.write({"a": {}})
    listeners = shop._listeners
    for delay_s in (0.02, 0.04, 0.06):
        stop = tofu.StopSignal()
        asyncio.get_running_loop().call_later(delay_s, stop.interrupt)
        outcome = await tofu.plan(shop.inv, out=shop.plan_file, **(listeners | {"stop": stop}))
        assert not outcome.has_errored_state
    assert shop.backend.state is None


# ---------------------------------------------------------------- the stand-in


async def test_terraform_stands_in_for_plan_and_apply(dirs_root: Path, tmp_path: Path) -> None:
    program = shutil.which("terraform")
    if program is None:
        pytest.skip("NOT PROVED: there is no terraform here")
    async with open_workshop(Path(program), dirs_root, tmp_path) as shop:
        shop.write(
            {"a": running("echo hello"), "b": running("exit 3") | {"depends_on": ["terraform_data.a"]}}
        )
        failed = await shop.change()
        assert failed.returncode == 1
        assert {"planned_change", "apply_start", "apply_errored"} <= set(shop.types)
        assert failed.diagnostics[0].address == "terraform_data.b"
        assert "hello" in shop.text
        assert "exit status 3" in shop.text
        assert set(shop.backend.resources) == {"terraform_data.a", "terraform_data.b"}
        shop.write({"a": {}, "b": {}})
        assert (await shop.change()).returncode == 0
        assert (await tofu.show_plan(shop.inv, shop.plan_file))["format_version"].startswith("1.")
        assert (await shop.plan()).returncode == 0


# ---------------------------------------------------------------- speed


@pytest.mark.slow
async def test_watching_a_command_costs_next_to_nothing(shop: Workshop) -> None:
    async def bare(*words: str) -> None:
        argv = [str(shop.inv.engine.path), *words]
        env = tofu._environment(shop.inv)
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=shop.cwd, env=env, stdout=asyncio.subprocess.DEVNULL
        )
        await process.wait()

    async def measure(number: int, plan: Callable[[], Any], apply: Callable[[], Any]) -> float:
        shop.write({"a": {"input": str(number)}})
        began = time.perf_counter()
        await plan()
        await apply()
        return time.perf_counter() - began

    common = ("-input=false", "-no-color")
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(7):
        times["ours"].append(await measure(2 * number, shop.plan, shop.apply))
        times["bare"].append(
            await measure(
                2 * number + 1,
                lambda: bare("plan", *common, "-lock=false", "-out=tfplan"),
                lambda: bare("apply", *common, "tfplan"),
            )
        )
    ours, plain = (statistics.median(times[name]) for name in ("ours", "bare"))
    print(f"bare {plain * 1e3:.1f} ms, ours {ours * 1e3:.1f} ms")
    # Two polls too many would already cost 100 ms. Measured on a quiet machine: under 10.
    assert ours - plain < 0.05
