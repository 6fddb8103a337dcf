"""Owns one run: plan → guard → apply of exactly that plan → what TF state then says.

The truth of a run is the state versions that its engine sent us, not its exit code. A run writes its own Run
object and the tenant's Applied condition; whether and when there is a run at all is decided in `tenant.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rezuscloud.kit.process import Child, boot_id
from rezuscloud.model.meta import Doc, digest, format_time, to_wire, utc_now
from rezuscloud.model.operations import PlanSummary, RunAction, RunError, RunPhase
from rezuscloud.model.tenant import HeldBy
from rezuscloud.plugin.types import RequiredProvider
from rezuscloud.reconcile.outcome import Held, Hold
from rezuscloud.reconcile.publish import publish_projection, refresh_tenant, tenant_condition
from rezuscloud.reconcile.rooms import Rooms
from rezuscloud.reconcile.run_dir import RunDir
from rezuscloud.resources.service import Desk
from rezuscloud.tofu import exec as tofu
from rezuscloud.tofu.data_dirs import DataDirs
from rezuscloud.tofu.encryption import KeyHandover
from rezuscloud.tofu.engine import Engine
from rezuscloud.tofu.messages import Diagnostic, Message
from rezuscloud.tofu.plan import masked_changes, summarize
from rezuscloud.tofu.projection import Projection
from rezuscloud.tofu.render import DECLARATION, Rendered

log = logging.getLogger(__name__)

run_name: ContextVar[str] = ContextVar("run_name", default="")
"""The run that this task works on, as `tenant/run`: a log formatter puts it on every line."""

PROGRESS_EVERY_S = 1.0
KEPT_RUNS = 50
_RESERVE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Target:
    """What a run is to make true: read once at its start, never from an event."""

    tenant: Doc
    revision: str
    wanted: frozenset[str]
    action: RunAction
    cause: Doc
    unfinished: frozenset[str] = frozenset()
    """Machines whose creation did not finish: making them anew loses nothing."""


@dataclass
class Run:
    """One run while it is going on. `name` is empty until it has an object (a quiet check has none)."""

    rooms: Rooms
    engine: Engine
    data_dirs: DataDirs
    target: Target
    name: str
    number: int
    uid: str = ""
    stop: tofu.StopSignal = field(default_factory=tofu.StopSignal)
    cancelled_by: str = ""
    is_shutdown: bool = False
    summary: PlanSummary | None = None
    touches_world: bool = False
    """The plan changes more than the declaration in TF state."""
    required: Mapping[str, RequiredProvider] = field(default_factory=dict)
    handover: KeyHandover | None = None
    """The state key, lent to the engine while it works; None when it cannot encrypt."""
    _early_log: list[bytes] = field(default_factory=list)
    _progress: Progress | None = None

    @property
    def tenant_name(self) -> str:
        return str(self.target.tenant["metadata"]["name"])

    @property
    def tenant_uid(self) -> str:
        return str(self.target.tenant["metadata"]["uid"])

    @property
    def was_stopped(self) -> bool:
        """A person or the end of the server stopped it; not its time limit, which is a failure of its own."""
        return bool(self.cancelled_by) or self.is_shutdown

    def shut_down(self) -> None:
        """The server is going down: the engine saves its state and ends."""
        self.is_shutdown = True
        self.stop.interrupt()

    @property
    def dir(self) -> RunDir:
        return RunDir(self.rooms.runs_dir, self.tenant_uid, self.name)

    # ------------------------------------------------------------ the object

    async def announce(self, phase: RunPhase) -> None:
        """Makes the Run object; from here on everybody sees the run."""

        def write(desk: Desk) -> Doc:
            _forget_old_runs(desk, self.rooms, self.tenant_name)
            doc = desk.put(
                "Run",
                self.tenant_name,
                self.name,
                spec={
                    "action": self.target.action.value,
                    "cause": self.target.cause,
                    "revision": self.target.revision,
                },
                status={
                    "phase": phase.value,
                    "engine": f"{self.engine.product} {self.engine.version}",
                    "startedAt": format_time(desk.tx.now),
                },
            )
            desk.set_status("Tenant", "", self.tenant_name, {"heldBy": [], "currentRun": self.name})
            self._set_applied(desk, "Planning", f"{self.name} is planning")
            return doc

        doc = await self.rooms.service.transact(write)
        self.uid = doc["metadata"]["uid"]
        for chunk in self._early_log:
            self.rooms.store.run_logs.append(self.uid, chunk)
        self._early_log.clear()

    def say(self, line: str) -> None:
        """Adds a line of ours to the run's log."""
        self._append_log(f"--- {format_time(utc_now())} {line}\n".encode())

    def _append_log(self, chunk: bytes) -> None:
        if self.uid:
            try:
                self.rooms.store.run_logs.append(self.uid, chunk)
            except OSError as error:  # a run must come to its end, on a full disk too
                log.warning("%d bytes are missing in the log of %s: %s", len(chunk), self.name, error)
        else:
            self._early_log.append(chunk)

    def _set_applied(self, desk: Desk, reason: str, message: str, *, status: str = "False") -> None:
        tenant = desk.tx.get("Tenant", "", self.tenant_name)
        if tenant is not None:
            # The generation that this run works on, which may be older than what is declared by now.
            generation = self.target.tenant["metadata"]["generation"]
            desk.set_status("Tenant", "", self.tenant_name, {"observedGeneration": generation})
            tenant_condition(
                desk,
                tenant | {"metadata": self.target.tenant["metadata"]},
                "Applied",
                status,
                reason,
                message,
            )

    # ------------------------------------------------------------ plan

    async def plan(self, rendered: Rendered) -> tofu.Outcome:
        """Plans in a directory of its own. `summary` is set when the plan is good."""
        self.required = rendered.required
        await asyncio.to_thread(self.dir.create, rendered.files, self._record())
        messages: list[Message] = []
        with self._invocation(await self.data_dirs.prepare(self.required)) as invocation:
            outcome = await tofu.plan(
                invocation,
                out=self.dir.plan_file,
                destroy=self.target.action is RunAction.DESTROY,
                on_started=self._note_process,
                on_message=messages.append,
                on_log=self._append_log,
                stop=self.stop,
                timeout_s=self.rooms.run_timeout_s,
            )
        if outcome.returncode in (0, 2):
            self.summary = summarize(
                messages,
                plan_id=await asyncio.to_thread(_plan_id, self.dir.plan_file),
                wanted=self.target.wanted,
                unfinished=self.target.unfinished,
                destroy=self.target.action is RunAction.DESTROY,
            )
            self.touches_world = any(
                message.type == "planned_change" and message.address != DECLARATION for message in messages
            )
            self.say(f"plan {self.summary.id}: {self.summary.summary}")
        return outcome

    async def hold(self, why: Sequence[str]) -> None:
        """Keeps the plan for a person to approve."""
        assert self.summary is not None
        summary = self.summary
        self.say("held for approval: " + "; ".join(why))

        def write(desk: Desk) -> None:
            run = desk.set_status(
                "Run", self.tenant_name, self.name, {"phase": RunPhase.HELD.value, "plan": to_wire(summary)}
            )
            desk.set_status("Tenant", "", self.tenant_name, {"currentRun": None})
            self._set_applied(desk, "Held", f"{self.name} waits for approval: {'; '.join(why)}")
            if run is not None:
                desk.record_event(
                    run, reason="Held", message=f"{summary.summary}: {'; '.join(why)}", warning=True
                )

        await self.rooms.service.transact(write)

    # ------------------------------------------------------------ apply

    async def apply(self) -> tofu.Outcome:
        """Applies exactly the plan in the run's directory."""
        assert self.summary is not None
        summary = self.summary

        def begin(desk: Desk) -> None:
            now = desk.tx.get("Run", self.tenant_name, self.name)
            if now is None or RunPhase(now["status"]["phase"]).is_final:
                why = f"{self.name} was stopped before it applied anything"
                raise Held(Hold(HeldBy.PAUSE, why), retry_after_s=0.0)
            run = desk.set_status(
                "Run",
                self.tenant_name,
                self.name,
                {
                    "phase": RunPhase.APPLYING.value,
                    "plan": to_wire(summary),
                    "progress": {"done": 0, "total": summary.changes},
                    "stateBefore": self._state_version(),
                },
            )
            desk.set_status("Tenant", "", self.tenant_name, {"heldBy": [], "currentRun": self.name})
            self._set_applied(desk, "Applying", f"{self.name}: {summary.summary}")
            if run is not None:
                desk.record_event(run, reason="Applying", message=summary.summary)

        await self._reserve_space()
        await self.rooms.service.transact(begin)
        self._progress = Progress(total=summary.changes)
        reporter = asyncio.create_task(self._report_progress(self._progress))
        try:
            with self._invocation(await self.data_dirs.prepare(self.required)) as invocation:
                return await tofu.apply(
                    invocation,
                    plan=self.dir.plan_file,
                    on_started=self._note_process,
                    on_message=self._progress.read,
                    on_log=self._append_log,
                    stop=self.stop,
                    timeout_s=self.rooms.run_timeout_s,
                )
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)

    async def _reserve_space(self) -> None:
        """What an apply makes is remembered by its state alone: none begins without room for that state."""
        current = self.rooms.store.states.current(self.tenant_uid)
        size = _RESERVE_BYTES + 8 * (current.size_bytes if current else 0)
        try:
            await asyncio.to_thread(self.dir.reserve, size)
        except OSError as error:
            raise tofu.PrepareFailed(
                f"the disk of the data directory has no {size // 2**20} MiB left, so nothing is applied: the "
                f"state of what is made might be lost. Free some space. ({error.strerror})"
            ) from error

    def free_reserve(self) -> None:
        """The disk is full: gives the state the room that was set aside for it."""
        self.dir.free_reserve()

    async def _report_progress(self, progress: Progress) -> None:
        """Writes progress at most once a second, and only when there is some."""
        told = progress.to_wire()
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            now = progress.to_wire()
            if now != told:
                told = now
                await self.rooms.service.transact(
                    lambda desk, now=now: desk.set_status(  # type: ignore[misc] # default binds the loop's value
                        "Run", self.tenant_name, self.name, {"progress": now}
                    )
                )

    async def show_plan(self) -> Doc:
        """The saved plan's changes, with what is sensitive masked."""
        with self._invocation(await self.data_dirs.prepare(self.required)) as invocation:
            return masked_changes(await tofu.show_plan(invocation, self.dir.plan_file))

    async def enter(self, phase: RunPhase) -> None:
        """Shows that the run has come to this phase."""
        await self.rooms.service.transact(
            lambda desk: desk.set_status("Run", self.tenant_name, self.name, {"phase": phase.value})
        )

    # ------------------------------------------------------------ end

    async def projection(self) -> Projection | None:
        """What the newest state says, or None when there is no state."""
        return await self.rooms.projection(self.tenant_uid)

    async def succeed(self, projection: Projection | None) -> None:
        """Publishes machines, run and tenant as one change."""
        summary = self.summary
        message = summary.summary if summary else "nothing to do"
        self.say("done")

        def write(desk: Desk) -> None:
            if projection is not None:
                publish_projection(desk, self.tenant_name, projection, state_version=self._state_version())
            changes: dict[str, Any] = {
                "phase": RunPhase.SUCCEEDED.value,
                "stateAfter": self._state_version(),
                "finishedAt": format_time(desk.tx.now),
                "progress": None,
                "error": None,
            }
            if summary is not None:
                changes["plan"] = to_wire(summary)
            run = desk.set_status("Run", self.tenant_name, self.name, changes)
            tenant = desk.tx.get("Tenant", "", self.tenant_name)
            if tenant is None:
                return
            desk.set_status("Tenant", "", self.tenant_name, {"currentRun": None, "lastRun": self.name})
            self._set_applied(desk, "Applied", f"{self.name}: {message}", status="True")
            refresh_tenant(desk, self.tenant_name)  # more may have been declared meanwhile
            tenant_condition(desk, tenant, "Encrypted", *self._encrypted())
            tenant_condition(desk, tenant, "Drifted", "False", "AsDeclared", "the world is as declared")
            if run is not None:
                desk.record_event(tenant, reason="Applied", message=f"{self.name}: {message}")

        await self.rooms.service.transact(write)
        await asyncio.to_thread(self.dir.remove)

    async def end(
        self,
        phase: RunPhase,
        error: RunError | None,
        projection: Projection | None,
        *,
        keep_dir: bool = False,
    ) -> None:
        """Ends the run short of its aim, and still publishes what TF state says of machines."""
        reason = {RunPhase.FAILED: "Failed", RunPhase.CANCELLED: "Cancelled"}.get(phase, phase.value)
        text = f"{error.summary}" + (f" ({error.address})" if error.address else "") if error else ""
        message = f"{self.name}: {text or reason.lower()}"
        self.say(f"{phase.value.lower()}: {text}" if text else phase.value.lower())

        def write(desk: Desk) -> None:
            if projection is not None:
                publish_projection(desk, self.tenant_name, projection, state_version=self._state_version())
            changes: dict[str, Any] = {
                "phase": phase.value,
                "stateAfter": self._state_version(),
                "finishedAt": format_time(desk.tx.now),
            }
            if error is not None:
                changes["error"] = to_wire(error)
            if self.summary is not None:
                changes["plan"] = to_wire(self.summary)
            run = desk.set_status("Run", self.tenant_name, self.name, changes)
            desk.set_status("Tenant", "", self.tenant_name, {"currentRun": None, "lastRun": self.name})
            self._set_applied(desk, reason, message)
            if run is not None:
                regarding = desk.tx.get("Tenant", "", self.tenant_name) or run
                desk.record_event(regarding, reason=f"Run{reason}", message=message, warning=True)

        await self.rooms.service.transact(write)
        if not keep_dir:
            await asyncio.to_thread(self.dir.remove)

    # ------------------------------------------------------------ inside

    @contextmanager
    def _invocation(self, prepared: tofu.Prepared) -> Iterator[tofu.Invocation]:
        """What tofu is started with: an address and a credential for this run alone, and the state key."""
        rooms = self.rooms
        may_empty = self.target.action is RunAction.DESTROY
        credential = rooms.states.issue(self.tenant_name, self.tenant_uid, self.name, may_empty=may_empty)
        url = rooms.state_url(self.tenant_uid)
        env = {
            "TF_HTTP_ADDRESS": url,
            "TF_HTTP_LOCK_ADDRESS": url,
            "TF_HTTP_UNLOCK_ADDRESS": url,
            "TF_HTTP_USERNAME": credential.username,
            "TF_HTTP_PASSWORD": credential.password,
        }
        try:
            with self.handover or nullcontext() as handover:
                if handover is not None:
                    env["TF_ENCRYPTION"] = handover.tf_encryption
                secrets = (credential.password, *(handover.secrets if handover is not None else ()))
                yield tofu.Invocation(
                    engine=self.engine,
                    prepared=prepared,
                    cwd=self.dir.path,
                    env=env,
                    secrets=secrets,
                    grace_s=rooms.stop_grace_s,
                )
        finally:
            rooms.states.revoke(credential)

    def _record(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "action": self.target.action.value,
            "wanted": sorted(self.target.wanted),
            "required": {name: [p.source, p.version] for name, p in self.required.items()},
        }

    def _note_process(self, child: Child) -> None:
        """Writes down which process works here, so that a later start of ours can find it. A tiny file."""
        self.dir.write_record(
            self._record() | {"pid": child.pid, "startTicks": child.start_ticks, "bootId": boot_id()}
        )

    def _state_version(self) -> int | None:
        current = self.rooms.store.states.current(self.tenant_uid)
        return current.version if current else None

    def _encrypted(self) -> tuple[str, str, str]:
        current = self.rooms.store.states.current(self.tenant_uid)
        if current is None:
            return "Unknown", "NoState", "there is no TF state yet"
        if current.encrypted:
            return "True", "Encrypted", f"TF state is encrypted with key {current.key_id}"
        return "False", "EngineCannotEncrypt", f"{self.engine.product} writes TF state in clear"


def failure(outcome: tofu.Outcome, *, doing: str) -> RunError:
    """What a person is told of a failed plan or apply: the engine's first error and what to do."""
    errors = [d for d in outcome.diagnostics if d.severity == "error"]
    if outcome.timed_out:
        return RunError(
            summary=f"the engine took too long {doing} and was stopped",
            detail=errors[0].summary if errors else "",
            hint="what it had saved is kept; REZUSCLOUD_RUN_TIMEOUT_S sets how long a run may take",
        )
    if outcome.killed:
        return RunError(
            summary=f"the engine was killed while {doing}",
            hint="what it had not yet saved is unknown; the next run compares with the world first",
        )
    if not errors:
        if outcome.interrupted:
            return RunError(summary=f"interrupted while {doing}")
        return RunError(
            summary=f"the engine ended with code {outcome.returncode} while {doing}", hint="see the log"
        )
    first = errors[0]
    more = f" (and {len(errors) - 1} more errors in the log)" if len(errors) > 1 else ""
    return RunError(
        summary=first.summary + more,
        detail=first.detail[:4000],
        address=first.address or "",
        hint=_cure(errors),
    )


_CURES = (
    (
        "message authentication failed",
        "the state key does not fit: was the root key or the passphrase changed?",
    ),
    (
        "Error acquiring the state lock",
        "somebody else holds the state lock; `rezusctl describe cluster` shows who",
    ),
    ("requires auth", "the run's credential was refused; retry, and report it if it comes back"),
    ("Failed to query available provider packages", "the OpenTofu provider cannot be fetched from here"),
    ("Failed to persist state", "the state is kept beside the run; `rezusctl state recover` stores it"),
)


def _cure(errors: Sequence[Diagnostic]) -> str:
    text = "\n".join(f"{error.summary}\n{error.detail}" for error in errors)
    return next(
        (cure for sign, cure in _CURES if sign in text), "see the log; a change of the spec is tried at once"
    )


@dataclass
class Progress:
    """How far an apply has come, from its messages."""

    total: int
    done: int = 0
    current: str | None = None

    def read(self, message: Message) -> None:
        hook = message.data.get("hook") or {}
        resource = (hook.get("resource") or {}).get("resource_name", "")
        name = str(resource).removeprefix("machine_")
        if message.type == "apply_start":
            self.current = f"{hook.get('action', 'apply')} {name}"
        elif message.type in ("apply_complete", "apply_errored"):
            self.done += 1

    def to_wire(self) -> Doc:
        doc: Doc = {"done": min(self.done, self.total), "total": self.total}
        return doc | {"current": self.current} if self.current else doc


def _plan_id(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _forget_old_runs(desk: Desk, rooms: Rooms, tenant: str) -> None:
    """Keeps the newest runs of a tenant, so that history is bounded."""
    runs = sorted(desk.tx.list("Run", tenant), key=run_number)
    for run in runs[: max(0, len(runs) - KEPT_RUNS + 1)]:
        if RunPhase(run["status"]["phase"]).is_final:
            desk.remove("Run", tenant, run["metadata"]["name"])
            rooms.store.run_logs.delete(run["metadata"]["uid"])


def run_number(run: Doc) -> int:
    """Runs are named `run-<n>`, counting up within a tenant."""
    return int(run["metadata"]["name"].removeprefix("run-"))


def is_unlock_failure(diagnostic: Diagnostic) -> bool:
    """The state was saved and only its lock was not released: the run did its work."""
    return "unlock" in diagnostic.summary.lower() or "releasing the state lock" in diagnostic.summary.lower()


def cause_of(before: Projection | None, content: Doc, *, by: str, reason: str) -> Doc:
    """Which objects differ from the declaration in TF state, and who asked."""
    old = (before.declaration or {}).get("declaration", {}) if before else {}
    objects: list[Doc] = []
    if old.get("tenant") != content["tenant"]:
        objects.append({"kind": "Tenant", "name": content["tenant"]["metadata"]["name"]})
    was = {g["metadata"]["name"]: digest(g) for g in old.get("nodeGroups", [])}
    now = {g["metadata"]["name"]: digest(g) for g in content["nodeGroups"]}
    objects += [
        {"kind": "NodeGroup", "name": name}
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]
    return {"reason": reason, "by": by, "objects": objects}
