"""Owns one command of the engine: its environment, its files, its messages while they come, its end.

The engine writes to regular files that are read along: a pipe whose reader dies would kill it in the middle
of an apply. So when we are killed it can still end in good order. What to plan, and what an outcome means for
a tenant, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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

log = logging.getLogger(__name__)

POLL_S = 0.05
"""How often the files are looked at while the engine runs. Its end is noticed at once."""
MAX_LINE = 2**20
"""Longer lines of the message stream are cut out: nothing we act on is that long."""
SHOW_TIMEOUT_S = 300.0
_CHUNK = 2**14
"""Bytes a look: taking in so many must not hold the event loop, on a small machine neither."""
_FORCED_GRACE_S = 10.0
_PANIC = 11
"""The exit code of a panic in Go."""

T = TypeVar("T")
OnStarted = Callable[[Child], None]
OnMessage = Callable[[Message], None]
OnLog = Callable[[bytes], None]


class ShowFailed(Exception):
    """A saved plan cannot be shown."""


@dataclass(frozen=True)
class Invocation:
    """Everything that one command is started with. `env` is added to a nearly bare environment."""

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
    """It was asked to stop, by a person or by its time limit. It may have done its work nevertheless."""
    timed_out: bool = False
    has_errored_state: bool = False
    """It could not store its state and left it in `errored.tfstate`."""


class StopSignal:
    """The cancel button of a run, good for all its commands: once pressed, no other command is started."""

    def __init__(self) -> None:
        self.presses = 0
        self.changed = asyncio.Event()

    @property
    def is_set(self) -> bool:
        """Whether it was pressed."""
        return self.presses > 0

    def interrupt(self) -> None:
        """Stop in good order: nothing new is begun, what is going on is finished and saved."""
        self._press(1)

    def force(self) -> None:
        """Stop now: the resource in flight may be lost."""
        self._press(2)

    def _press(self, times: int) -> None:
        self.presses = max(self.presses, times)
        self.changed.set()


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
    """Plans into `out`. Return code 0: no changes, 2: changes, anything else: failed.

    It takes no lock: it writes nothing, and the apply of a plan that became stale meanwhile is refused.
    `replace` names addresses that are to be made anew. `on_started` gets the process before anything else
    happens; `on_message` and `on_log` are called while it runs, in the event loop, without secrets.

    Cancelling the task stops the engine in good order too, but nobody listens then: use `stop`.
    Raises process.StartError.
    """
    words = ["plan", "-input=false", "-no-color", "-lock=false", "-detailed-exitcode", f"-out={out}"]
    words += ["-destroy"] if destroy else []
    words += [f"-replace={address}" for address in replace]
    return await _run(inv, words, (), on_started, on_message, on_log, stop, timeout_s, outlives_us=False)


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
    """Applies exactly that plan, under the state lock. For the rest see `plan`.

    When we die it goes on, and leaves its state in `errored.tfstate`: whoever comes after us must find it by
    what `on_started` wrote down. A signal from the kernel at our death would not do: it comes once for each
    of our threads that ends, and at its second interrupt the engine throws its state away.
    """
    words = ["apply", "-input=false", "-no-color"]
    operands = (str(plan),)
    return await _run(inv, words, operands, on_started, on_message, on_log, stop, timeout_s, outlives_us=True)


async def show_plan(inv: Invocation, plan: Path) -> Doc:
    """The whole plan as JSON, secrets in clear; it never touches the disk. Raises ShowFailed."""
    await asyncio.to_thread(_put_lock_file, inv)
    with _memory_file() as out, _memory_file() as errors:
        async with process.start(
            [str(inv.engine.path), "show", "-json", "-no-color", str(plan)],
            env=_environment(inv),
            cwd=inv.cwd,
            stdout=out.fileno(),
            stderr=errors.fileno(),
            grace_s=5,
        ) as child:
            try:
                code = await asyncio.wait_for(child.wait(), SHOW_TIMEOUT_S)
            except TimeoutError as error:
                raise ShowFailed(f"the plan was not shown within {SHOW_TIMEOUT_S:.0f} s") from error
        if code != 0:
            said = _read_all(errors).decode(errors="replace").strip()
            raise ShowFailed(f"the plan cannot be shown: {Redactor(inv.secrets).text(said[-500:])}")
        return await asyncio.to_thread(lambda: dict(json.loads(_read_all(out))))


def _memory_file() -> BinaryIO:
    return os.fdopen(os.memfd_create("show"), "w+b")


def _read_all(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


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
    *,
    outlives_us: bool,
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
    ended = asyncio.Event()
    async with process.start(
        argv,
        env=_environment(inv),
        cwd=inv.cwd,
        stdout=stdout,
        stderr=files.stderr,
        die_with_parent=None if outlives_us else signal.SIGINT,
        grace_s=inv.grace_s,
    ) as child:
        on_started(child)
        following = asyncio.create_task(reader.follow(ended))
        warden = _Warden(child, stop, grace_s=inv.grace_s, timeout_s=timeout_s)
        watching = asyncio.create_task(warden.watch())
        try:
            code = await child.wait()
        finally:
            watching.cancel()
            ended.set()
            await asyncio.wait((following, watching))
        following.result()
    return Outcome(
        returncode=code,
        diagnostics=reader.diagnostics,
        changes=reader.changes,
        # SIGINT kills only before the engine listens to it, so before it has done anything.
        killed=code == _PANIC or (code < 0 and code != -signal.SIGINT),
        interrupted=stop.is_set or warden.timed_out,
        timed_out=warden.timed_out,
        has_errored_state=await asyncio.to_thread((inv.cwd / "errored.tfstate").exists),
    )


def _environment(inv: Invocation) -> dict[str, str]:
    """Built from nothing: the engine hands its whole environment on to provider plugins."""
    return {
        "TF_HTTP_RETRY_MAX": "4",
        "TF_HTTP_RETRY_WAIT_MIN": "1",
        "TF_HTTP_RETRY_WAIT_MAX": "4",
        **inv.env,
        "PATH": os.defpath,
        "HOME": str(inv.cwd),
        "TMPDIR": str(inv.cwd),
        "LANG": "C.UTF-8",
        "TF_DATA_DIR": str(inv.prepared.data_dir),
        "TF_CLI_CONFIG_FILE": str(inv.prepared.cli_config),
        "TF_IN_AUTOMATION": "1",
        "TF_INPUT": "0",
        "CHECKPOINT_DISABLE": "1",
    }


class _Warden:
    """Stops a process when told to or when its time is up, and kills its group when it will not stop."""

    def __init__(self, child: Child, stop: StopSignal, *, grace_s: float, timeout_s: float | None) -> None:
        self._child = child
        self._stop = stop
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self.timed_out = False

    async def watch(self) -> None:
        """Works until it is cancelled or has killed."""
        now = asyncio.get_running_loop().time
        deadline = None if self._timeout_s is None else now() + self._timeout_s
        sent = 0
        while True:
            while sent < max(self._stop.presses, int(self.timed_out)):
                if sent == 1:
                    await asyncio.sleep(0.1)  # two pending signals of a kind would arrive as one
                self._child.interrupt()
                sent += 1
                deadline = now() + (self._grace_s if sent == 1 else min(self._grace_s, _FORCED_GRACE_S))
            self._stop.changed.clear()
            try:
                await asyncio.wait_for(
                    self._stop.changed.wait(), None if deadline is None else deadline - now()
                )
            except TimeoutError:
                if sent > 0:
                    self._child.kill_group()
                    return
                self.timed_out = True


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
    source, target = inv.prepared.lock_file, inv.cwd / LOCK_FILE
    if source is None:
        return
    # A plan may be shown while it is applied: a file that is right is not written again under a reader.
    if not target.exists() or target.read_bytes() != source.read_bytes():
        shutil.copyfile(source, target)


class _Reader:
    """Reads a command's files along while it runs, and hands on what is in them, without secrets."""

    def __init__(self, inv: Invocation, files: _Files, on_message: OnMessage, on_log: OnLog) -> None:
        self._text = [_Tail(path, Redactor(inv.secrets)) for path in (files.stdout, files.stderr)]
        self._messages = _Tail(files.messages, None)
        self._redactor = Redactor(inv.secrets)
        self._on_message = _contain(on_message)
        self._on_log = _contain(on_log)
        self._logs_messages = not inv.engine.has_json_into
        self._line = bytearray()
        self._is_too_long = False
        self.diagnostics: list[Diagnostic] = []
        self.changes: dict[str, Any] | None = None

    async def follow(self, ended: asyncio.Event) -> None:
        """Reads until `ended` is set, and then what is left."""
        is_over = False
        while not is_over:
            is_over = ended.is_set()
            while self._read():  # noqa: ASYNC110 - a pause, not a wait: a burst of output must not hold the loop
                await asyncio.sleep(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), POLL_S)
        for tail in self._text:
            if rest := tail.flush():
                self._on_log(rest)

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
        if not self._is_clean(line):
            message = Message(message.type, self._redactor.value(message.data))
        diagnostic = Diagnostic.of(message)
        if diagnostic is not None:
            self.diagnostics.append(diagnostic)
        elif message.type == "change_summary":
            self.changes = dict(message.data.get("changes") or {})
        if self._logs_messages and message.text:
            detail = f"{diagnostic.detail}\n" if diagnostic is not None and diagnostic.detail else ""
            self._on_log(f"{message.text}\n{detail}".encode(errors="replace"))
        self._on_message(message)

    def _is_clean(self, line: bytes) -> bool:
        """True when there is surely no secret in a line. One look at all of it is twenty times faster than
        one at each string; it tells only of lines without escapes, whose strings stand there as they are."""
        if b"\\" in line:
            return False
        text = line.decode(errors="replace")
        return self._redactor.text(text) == text


def _contain(listener: Callable[[T], None]) -> Callable[[T], None]:
    """A listener that fails (say, on a full disk) is reported; the engine's work is not lost by it."""

    def call(value: T) -> None:
        try:
            listener(value)
        except Exception:
            log.exception("output of the engine could not be handed on; the engine goes on")

    return call


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
