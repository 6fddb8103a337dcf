"""Owns child processes: how they are started, stopped, and found again after our own death.

A child is an async context manager. It leads its own session and process group, sees only the environment
it is given, and is gone, with its whole group, when the block ends, however the block ends.

The ladder of stopping is: SIGINT to the pid alone (tofu then finishes what is in flight and saves its state;
a second signal, or one to the group, would lose that), a long grace, SIGKILL to the group.

The leader is left a zombie until the block ends. Only so is its pid sure to name *our* group when the group
is killed; once reaped, Linux may give the number to a stranger.

It does not read what a child writes: output goes to regular files, because a child that writes to a pipe
dies with the pipe's reader. It needs Linux 5.4 (pidfd).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Bound at import: between fork and exec no library may be loaded.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class StartError(Exception):
    """A program could not be started. Nothing has run."""


class Child:
    """A running child process, leader of its own group. Made by `start`.

    `pid` and `start_ticks` (field 22 of /proc/<pid>/stat), together with `boot_id()`, name it for ever.
    """

    def __init__(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        ticks = start_ticks(process.pid)
        assert ticks is not None, "a process that is not reaped has a stat file"
        self.pid = process.pid
        self.start_ticks = ticks
        self._process = process
        self._pidfd = pidfd
        self._returncode: int | None = None
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._note_exit)

    @property
    def returncode(self) -> int | None:
        """What `wait` returns, or None while the process runs."""
        return self._returncode

    async def wait(self) -> int:
        """Waits for the end of the leader. Returns its exit code, or minus the signal that killed it."""
        await self._exited.wait()
        assert self._returncode is not None
        return self._returncode

    def interrupt(self) -> None:
        """SIGINT to the leader alone. Does nothing when it has ended."""
        if self._returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGINT)

    def kill_group(self) -> None:
        """SIGKILL to the whole group, also when the leader has ended and left others behind."""
        if self._process.returncode is None:  # not reaped: the group's number is still ours
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, *, grace_s: float) -> int:
        """The ladder: SIGINT, up to `grace_s` seconds of patience, SIGKILL to the group."""
        self.interrupt()
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill_group()
            return await self.wait()

    def _note_exit(self) -> None:
        # WNOWAIT leaves the zombie, and with it the group's number, in place.
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._returncode = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._exited.set()

    async def _close(self, grace_s: float) -> None:
        try:
            if self._returncode is None:
                await self.stop(grace_s=grace_s)
        finally:
            self.kill_group()
            self._process.wait()  # dead by now, or dying by SIGKILL: this is only the reaping
            if self._returncode is None:  # our own wait was torn away by a dying event loop
                asyncio.get_running_loop().remove_reader(self._pidfd)
                self._returncode = self._process.returncode
                self._exited.set()
            os.close(self._pidfd)


@asynccontextmanager
async def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: Path | int,
    stderr: Path | int,
    pass_fds: Sequence[int] = (),
    die_with_parent: signal.Signals | None = signal.SIGINT,
    grace_s: float = 600,
) -> AsyncIterator[Child]:
    """Runs `argv` for the length of the block; leaving the block stops it by the ladder and kills its group.

    No shell and no search in PATH: `argv[0]` is absolute. `env` is all that the child sees. Files given as
    paths are appended to and made with mode 0600; standard input is empty; no core dumps; umask 077.
    `die_with_parent` is the signal that the leader gets when we die, even by SIGKILL. The kernel sends it
    when the *thread* that started the child ends (call this from the main thread's event loop), and again for
    each thread of ours that ends after that one: it is nothing for a child that counts its signals.
    Cancelling the block does not cut the ladder short.

    Raises StartError when the program cannot be started.
    """
    if not argv or not Path(argv[0]).is_absolute():
        raise ValueError(f"the program must be named by an absolute path: {argv[:1]}")
    with ExitStack() as files:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own transport reaps too early (see above)
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=_open(stdout, files),
                stderr=_open(stderr, files),
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                umask=0o077,
                preexec_fn=_prepare_child(die_with_parent),  # noqa: PLW1509 - only bound system calls in it
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(
                f"cannot start {argv[0]} in {cwd}: {error}. Nothing has run. "
                "Check that the program is there and may be executed."
            ) from error
    child = _watch(process)
    try:
        yield child
    finally:
        await _see_through(child._close(grace_s))


def _open(target: Path | int, files: ExitStack) -> int:
    if isinstance(target, int):
        return target
    descriptor = os.open(target, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    files.callback(os.close, descriptor)
    return descriptor


def _prepare_child(die_with_parent: signal.Signals | None) -> Callable[[], None]:
    """What the child does between fork and exec. Only system calls whose functions are bound beforehand."""
    parent = os.getpid()

    def prepare() -> None:
        # A server started in the background of a shell ignores SIGINT, and its children would inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if die_with_parent is not None:
            if _prctl(_PR_SET_PDEATHSIG, int(die_with_parent), 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
            if os.getppid() != parent:  # we died before the line above took effect
                os._exit(1)

    return prepare


def _watch(process: subprocess.Popen[bytes]) -> Child:
    try:
        return Child(process, os.pidfd_open(process.pid))
    except OSError as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise StartError(
            f"cannot watch {process.args!r}: {error}. It was killed at once. Linux 5.4 or newer is needed."
        ) from error


async def _see_through(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, whoever cancels us meanwhile; a cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
    task.result()


# ---------------------------------------------------------------- processes of an earlier life of ours


@cache
def boot_id() -> str:
    """The kernel's name for this boot. Pids and start ticks of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None when there is none (a zombie still is one)."""
    stat = _stat(pid)
    return None if stat is None else stat[1]


def is_running(pid: int, start_ticks: int) -> bool:
    """True while this very process lives. A zombie does not: it only waits to be reaped."""
    stat = _stat(pid)
    return stat is not None and stat[1] == start_ticks and stat[0] not in "ZX"


def interrupt(pid: int, start_ticks: int) -> None:
    """SIGINT to this very process alone; nothing happens when it has ended."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if is_running(pid, start_ticks):  # asked again: from here on the descriptor means one process
                signal.pidfd_send_signal(descriptor, signal.SIGINT)
        finally:
            os.close(descriptor)


def kill_group_of(pid: int, start_ticks: int) -> None:
    """SIGKILL to what is left of the group that this process led. For groups recorded in this boot.

    A leader that is gone may have left others behind: Linux does not reuse a pid while a group bears it.
    A leader with other start ticks is a stranger, so the old group has ended; nothing happens.
    """
    if pid <= 1:  # killpg(0) would be our own group
        return
    stat = _stat(pid)
    if stat is None or stat[1] == start_ticks:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start ticks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name in brackets may itself hold spaces and brackets
    return fields[0], int(fields[19])
