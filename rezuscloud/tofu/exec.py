"""Owns one command of the engine: its environment, its files, its messages while they come, its end.

The engine writes to regular files that are read along: a pipe whose reader dies would kill it in the middle
of an apply. So when we are killed it can still end in good order. What to plan, and what an outcome means for
a tenant, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rezuscloud.kit import process
from rezuscloud.kit.process import Child
from rezuscloud.kit.redact import Redactor
from rezuscloud.model.meta import Doc
from rezuscloud.tofu.data_dirs import LOCK_FILE, DataDirs, Prepared, PrepareFailed
from rezuscloud.tofu.engine import Engine
from rezuscloud.tofu.messages import Diagnostic, Message, parse_line

__all__ = [
    "DataDirs",
    "Invocation",
    "Outcome",
    "PrepareFailed",
    "Prepared",
    "ShowFailed",
    "StopSignal",
    "apply",
    "plan",
    "show_plan",
]

POLL_S = 0.05
MAX_LINE = 2**20
"""Longer lines of the message stream are cut out: nothing we act on is that long."""
_CHUNK = 2**18
_FORCED_GRACE_S = 10.0

OnStarted = Callable[[Child], None]
OnMessage = Callable[[Message], None]
OnLog = Callable[[bytes], None]


class ShowFailed(Exception):
    """A saved plan cannot be shown."""


@dataclass(frozen=True)
class Invocation:
    """Everything that one command is started with. `env` is added to a bare environment."""

    engine: Engine
    prepared: Prepared
    cwd: Path
    env: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    grace_s: float = 600.0
    """How long an interrupted engine may take to save its state before it is killed, in seconds."""


@dataclass
class Outcome:
    """How a command ended. Its exit code proves little: a failed unlock fails a run that is saved."""

    returncode: int
    diagnostics: list[Diagnostic] = field(default_factory=list)
    changes: dict[str, Any] | None = None
    """The last change summary: add, change, remove …"""
    killed: bool = False
    """It ended by a signal or by a panic, so nothing that it had not saved is known."""
    interrupted: bool = False
    timed_out: bool = False
    has_errored_state: bool = False
    """It could not store its state and left it in `errored.tfstate`."""


class StopSignal:
    """The cancel button of a run; pressed once it interrupts, `force` presses twice."""

    def __init__(self) -> None:
        self._presses = 0
        self._pressed = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._presses > 0

    def interrupt(self) -> None:
        """Stop in good order: nothing new is begun, what is going on is finished and saved."""
        self._press(1)

    def force(self) -> None:
        """Stop now: the resource in flight may be lost."""
        self._press(2)

    def _press(self, times: int) -> None:
        self._presses = max(self._presses, times)
        self._pressed.set()

    async def watch(self, child: Child, grace_s: float) -> None:
        """Hands presses on to a process, and kills its group when it takes longer than its grace."""
        sent = 0
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            while sent < self._presses:
                child.interrupt()
                sent += 1
                deadline = loop.time() + (grace_s if sent == 1 else min(grace_s, _FORCED_GRACE_S))
                if sent < self._presses:
                    await asyncio.sleep(0.1)  # two signals at once would count as one
            self._pressed.clear()
            try:
                left = None if deadline is None else max(0.0, deadline - loop.time())
                await asyncio.wait_for(self._pressed.wait(), left)
            except TimeoutError:
                child.kill_group()
                return


async def plan(
    inv: Invocation,
    *,
    out: Path,
    destroy: bool = False,
    replace: Sequence[str] = (),
    on_started: OnStarted,
    on_message: OnMessage,
    on_log: OnLog,
    stop: StopSignal,
    timeout_s: float | None,
) -> Outcome:
    """Plans into `out`. Return code 0: no changes, 2: changes, 1: failed.

    It takes no lock: it writes nothing, and the apply of a plan that became stale meanwhile is refused.
    """
    words = ["plan", "-input=false", "-no-color", "-lock=false", "-detailed-exitcode", f"-out={out}"]
    words += ["-destroy"] if destroy else []
    words += [f"-replace={address}" for address in replace]
    return await _run(inv, words, (), on_started, on_message, on_log, stop, timeout_s)


async def apply(
    inv: Invocation,
    *,
    plan: Path,
    on_started: OnStarted,
    on_message: OnMessage,
    on_log: OnLog,
    stop: StopSignal,
    timeout_s: float | None,
) -> Outcome:
    """Applies exactly that plan, under the state lock."""
    words = ["apply", "-input=false", "-no-color"]
    return await _run(inv, words, (str(plan),), on_started, on_message, on_log, stop, timeout_s)


async def show_plan(inv: Invocation, plan: Path) -> Doc:
    """The whole plan as JSON, secrets included. Raises ShowFailed."""
    await asyncio.to_thread(_put_lock_file, inv)
    out, errors = inv.cwd / "show.json", inv.cwd / "show.log"
    out.unlink(missing_ok=True)
    argv = [str(inv.engine.path), "show", "-json", "-no-color", str(plan)]
    async with process.start(
        argv, env=_environment(inv), cwd=inv.cwd, stdout=out, stderr=errors, grace_s=5
    ) as child:
        code = await child.wait()
    try:
        if code != 0:
            said = await asyncio.to_thread(errors.read_text, errors="replace")
            raise ShowFailed(f"the plan cannot be shown: {Redactor(inv.secrets).text(said.strip()[-500:])}")
        shown = json.loads(await asyncio.to_thread(out.read_bytes))
    finally:
        out.unlink(missing_ok=True)
    return dict(shown)


# ---------------------------------------------------------------- one process


async def _run(
    inv: Invocation,
    words: Sequence[str],
    operands: Sequence[str],
    on_started: OnStarted,
    on_message: OnMessage,
    on_log: OnLog,
    stop: StopSignal,
    timeout_s: float | None,
) -> Outcome:
    if stop.is_set:
        return Outcome(returncode=1, interrupted=True)
    files = await asyncio.to_thread(_clear_files, inv)
    reader = _Reader(inv, files, on_message, on_log)
    if inv.engine.has_json_into:
        argv = [str(inv.engine.path), *words, f"-json-into={files.messages}", *operands]
        stdout = files.stdout
    else:
        argv = [str(inv.engine.path), *words, "-json", *operands]
        stdout = files.messages
    timed_out = False
    async with process.start(
        argv, env=_environment(inv), cwd=inv.cwd, stdout=stdout, stderr=files.stderr, grace_s=inv.grace_s
    ) as child:
        on_started(child)
        following = asyncio.create_task(reader.follow())
        watching = asyncio.create_task(stop.watch(child, inv.grace_s))
        try:
            try:
                await asyncio.wait_for(child.wait(), timeout_s)
            except TimeoutError:
                timed_out = True
                stop.interrupt()
            code = await child.wait()
        finally:
            for task in (following, watching):
                task.cancel()
            await asyncio.gather(following, watching, return_exceptions=True)
    await reader.drain()
    return Outcome(
        returncode=code,
        diagnostics=reader.diagnostics,
        changes=reader.changes,
        killed=code < 0 or code == 11,
        interrupted=stop.is_set,
        timed_out=timed_out,
        has_errored_state=await asyncio.to_thread((inv.cwd / "errored.tfstate").exists),
    )


def _environment(inv: Invocation) -> dict[str, str]:
    """Built from nothing: the engine hands its whole environment on to provider plugins."""
    return {
        "PATH": os.defpath,
        "HOME": str(inv.cwd),
        "TMPDIR": str(inv.cwd),
        "LANG": "C.UTF-8",
        "TF_DATA_DIR": str(inv.prepared.data_dir),
        "TF_CLI_CONFIG_FILE": str(inv.prepared.cli_config),
        "TF_IN_AUTOMATION": "1",
        "TF_INPUT": "0",
        "TF_HTTP_RETRY_MAX": "4",
        "TF_HTTP_RETRY_WAIT_MIN": "1",
        "TF_HTTP_RETRY_WAIT_MAX": "4",
        "CHECKPOINT_DISABLE": "1",
        **inv.env,
    }


@dataclass(frozen=True)
class _Files:
    stdout: Path
    stderr: Path
    messages: Path


def _clear_files(inv: Invocation) -> _Files:
    _put_lock_file(inv)
    files = _Files(*(inv.cwd / name for name in ("stdout.log", "stderr.log", "messages.jsonl")))
    for path in (files.stdout, files.stderr, files.messages):
        path.unlink(missing_ok=True)
    return files


def _put_lock_file(inv: Invocation) -> None:
    if inv.prepared.lock_file is not None:
        shutil.copyfile(inv.prepared.lock_file, inv.cwd / LOCK_FILE)


class _Reader:
    """Reads a command's files along while it runs, and hands on what is in them, without secrets."""

    def __init__(self, inv: Invocation, files: _Files, on_message: OnMessage, on_log: OnLog) -> None:
        self._text = [_Tail(path, Redactor(inv.secrets)) for path in (files.stdout, files.stderr)]
        self._messages = _Tail(files.messages, None)
        self._redactor = Redactor(inv.secrets)
        self._on_message = on_message
        self._on_log = on_log
        self._logs_messages = not inv.engine.has_json_into
        self._line = bytearray()
        self._is_too_long = False
        self.diagnostics: list[Diagnostic] = []
        self.changes: dict[str, Any] | None = None

    async def follow(self) -> None:
        """Reads until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._catch_up()

    async def drain(self) -> None:
        """Reads what is left after the end."""
        await self._catch_up()
        for tail in self._text:
            if rest := tail.flush():
                self._on_log(rest)

    async def _catch_up(self) -> None:
        while self._read():  # noqa: ASYNC110 - a pause, not a wait: a burst of output must not hold the loop
            await asyncio.sleep(0)

    def _read(self) -> bool:
        """One bounded piece of each file; False when there was nothing new."""
        found = False
        for tail in self._text:
            raw, shown = tail.read()
            found = found or bool(raw)
            if shown:
                self._on_log(shown)
        raw, _ = self._messages.read()
        if raw:
            self._take_lines(raw)
        return found or bool(raw)

    def _take_lines(self, chunk: bytes) -> None:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._line += line
            if not self._is_too_long and len(self._line) <= MAX_LINE:
                self._take(bytes(self._line))
            self._line.clear()
            self._is_too_long = False
        self._line += rest
        if len(self._line) > MAX_LINE:
            self._line.clear()
            self._is_too_long = True

    def _take(self, line: bytes) -> None:
        message = parse_line(line)
        if message is None:
            return
        message = Message(message.type, self._redactor.value(message.data))
        if (diagnostic := Diagnostic.of(message)) is not None:
            self.diagnostics.append(diagnostic)
        elif message.type == "change_summary":
            self.changes = dict(message.data.get("changes") or {})
        if self._logs_messages and message.text:
            self._on_log(f"{message.text}\n".encode())
        self._on_message(message)


class _Tail:
    """One file that grows."""

    def __init__(self, path: Path, redactor: Redactor | None) -> None:
        self._path = path
        self._redactor = redactor
        self._offset = 0

    def read(self) -> tuple[bytes, bytes]:
        """What is new, as it is and as it may be shown."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read(_CHUNK)
        except FileNotFoundError:
            return b"", b""
        self._offset += len(raw)
        return raw, self._redactor.feed(raw) if self._redactor is not None and raw else b""

    def flush(self) -> bytes:
        return self._redactor.flush() if self._redactor is not None else b""
