"""Owns the decision what one tenant needs now: nothing, a run, a person's approval, or to be cleared away.

Reads the current documents at every turn, never the event that caused it. How a run goes is `run.py`; when a
turn comes is `queue.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rezuscloud.kit.process import StartError
from rezuscloud.model.declaration import Pins, active_groups, declared_machines, declared_slots, is_leaving
from rezuscloud.model.meta import FINALIZER_MACHINES, FINALIZER_SECRETS, Doc, from_wire, get_condition
from rezuscloud.model.operations import PlanSummary, RunAction, RunError, RunPhase
from rezuscloud.model.tenant import ApplyPolicy, HeldBy, Role, machine_name
from rezuscloud.plugin.manager import PluginFailed
from rezuscloud.plugin.types import RequiredProvider
from rezuscloud.reconcile.keys import block_for_recovery, key_version, key_version_record, recovery_key
from rezuscloud.reconcile.outcome import Held, Hold, RunFailed
from rezuscloud.reconcile.publish import current_revision, publish_holds, publish_projection, tenant_condition
from rezuscloud.reconcile.queue import Turn
from rezuscloud.reconcile.recovery import close_open_runs
from rezuscloud.reconcile.rooms import Rooms
from rezuscloud.reconcile.run import Run, Target, cause_of, failure, is_unlock_failure, run_name, run_number
from rezuscloud.reconcile.run_dir import RunDir
from rezuscloud.resources.service import Desk
from rezuscloud.tofu import exec as tofu
from rezuscloud.tofu.data_dirs import DataDirs
from rezuscloud.tofu.encryption import BadState, CannotOpenState, KeyHandover, raw_encryption
from rezuscloud.tofu.engine import Engine
from rezuscloud.tofu.projection import Projection, ProjectionError
from rezuscloud.tofu.render import Rendered, RenderError, render

log = logging.getLogger(__name__)

LOCK_RETRY_S = 5.0


@dataclass(frozen=True)
class _Look:
    """One tenant as it is declared right now."""

    tenant: Doc
    groups: list[Doc]
    content: Doc
    revision: str
    latest: Doc | None
    """The newest run, going on or ended."""

    @property
    def name(self) -> str:
        return str(self.tenant["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.tenant["metadata"]["uid"])

    @property
    def is_leaving(self) -> bool:
        return is_leaving(self.tenant)

    @property
    def is_owed(self) -> bool:
        """A run is needed: something else is declared than was applied, or the newest run, whatever it was
        for, did not reach its end and may have left something half done."""
        is_unfinished = self.latest is not None and (
            self.latest["status"]["phase"] != RunPhase.SUCCEEDED.value
        )
        is_other = self.revision != self.tenant["status"].get("appliedRevision")
        return self.is_leaving or is_other or is_unfinished

    @property
    def is_paused(self) -> bool:
        return bool(self.tenant["spec"].get("paused"))

    @property
    def latest_phase(self) -> RunPhase | None:
        """The newest run's phase, if that run was for exactly what is declared now."""
        run = self.latest
        if run is None or run["spec"]["revision"] != self.revision:
            return None
        if (run["spec"]["action"] == RunAction.DESTROY.value) is not self.is_leaving:
            return None
        return RunPhase(run["status"]["phase"])


class TenantReconciler:
    """Makes one tenant true per call of `step`; calls for one tenant never overlap. `active` holds the runs
    that are going on, by tenant."""

    def __init__(
        self, rooms: Rooms, *, on_settled: Callable[[str], Awaitable[None]], on_gone: Callable[[str], None]
    ) -> None:
        self._rooms = rooms
        self._on_settled = on_settled
        self._on_gone = on_gone
        self.active: dict[str, Run] = {}
        self._taken_up: set[str] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """The server goes down: what runs is interrupted and saves its state, and nothing new is begun."""
        self._stopping.set()
        for run in self.active.values():
            run.shut_down()

    async def step(self, turn: Turn) -> None:
        """One turn. Raises Held or RunFailed when the tenant could not be made true."""
        try:
            await self._step(turn)
        except ProjectionError as error:
            raise RunFailed(str(error)) from error

    async def _step(self, turn: Turn) -> None:
        tenant = self._rooms.tenant(turn.tenant)
        if tenant is None:
            self._on_gone(turn.tenant)
            return
        if not await self._clear_up(turn.tenant):
            return
        await self._catch_up(tenant)
        look = self._look(turn.tenant)
        if look is None:
            return
        if look.is_leaving and self._rooms.store.states.current(look.uid) is None:
            await self._forget(look)
            return
        wants_run = look.is_owed or turn.forced
        await self._refuse_if_blocked(look, wants_run=wants_run)
        if not (wants_run or turn.resync):
            await self.say(look.name, [])
            return
        if wants_run:
            await self._refuse_if_undecided(look, forced=turn.forced)
        elif look.is_paused:
            return
        await self._run(turn)

    async def say(self, tenant: str, holds: Sequence[Hold]) -> None:
        """Writes what holds the tenant back; writes nothing when that is already there."""
        await self._rooms.service.transact(lambda desk: publish_holds(desk, tenant, holds))

    # ------------------------------------------------------------ looking

    def _look(self, name: str) -> _Look | None:
        tenant = self._rooms.tenant(name)
        if tenant is None:
            return None
        groups = self._rooms.objects("NodeGroup", name)
        content, revision = current_revision(tenant, groups, self._rooms.objects("Machine", name))
        runs = self._rooms.objects("Run", name)
        return _Look(tenant, groups, content, revision, max(runs, key=run_number, default=None))

    async def _clear_up(self, name: str) -> bool:
        """Ends what goes on no longer: runs of an earlier life of ours, or of a turn that failed. False when
        the server goes down before that is done."""
        why = "an internal error cut it short; the server's log has the details"
        if name not in self._taken_up:
            why = "the server was stopped while it went on"
        is_done = await close_open_runs(self._rooms, name, why, stopping=self._stopping)
        self._taken_up.add(name)
        return is_done

    async def _catch_up(self, tenant: Doc) -> None:
        """Publishes the newest state if nobody has: an operator's tofu wrote it, or we were cut short."""
        name, uid = tenant["metadata"]["name"], tenant["metadata"]["uid"]
        current = self._rooms.store.states.current(uid)
        if current is None or current.version == tenant["status"].get("stateVersion"):
            return
        projection = await self._projection(uid)
        if projection is not None:
            await self._rooms.service.transact(
                lambda desk: publish_projection(desk, name, projection, state_version=current.version)
            )
            await self._on_settled(name)  # machines that no run of ours has made have not been looked at yet

    async def _projection(self, uid: str) -> Projection | None:
        return await self._rooms.projection(uid)

    # ------------------------------------------------------------ what stands in the way

    async def _refuse_if_blocked(self, look: _Look, *, wants_run: bool) -> None:
        """Raises Held for whatever stands in the way of every run of this tenant."""
        rooms = self._rooms
        if (recovery := rooms.store.records.get(recovery_key(look.uid))) is not None:
            raise Held(_state_kept_aside(look.name, recovery["run"]))
        if await rooms.engine_room.find() is None:
            await self._tell_no_engine(look)
            raise Held(Hold(HeldBy.ENGINE, rooms.engine_room.problem))  # its coming gives everybody a turn
        if wants_run and look.is_paused:
            raise Held(Hold(HeldBy.PAUSE, "spec.paused is true; set it to false to go on"))
        lock = rooms.store.states.lock(look.uid)
        if lock is not None and lock.run:
            why = f"{lock.run} ended without releasing it"
            await rooms.states.release_lock_of_run(look.name, look.uid, lock.run, why)
        elif lock is not None:
            who = str(lock.info.get("Who") or lock.holder)
            since = lock.info.get("Created") or lock.created.isoformat()
            message = (
                f"the state is locked by {who} since {since}; `rezusctl state unlock "
                f"{look.name} {lock.id}` breaks the lock if nobody works there any more"
            )
            raise Held(Hold(HeldBy.LOCK, message, who=who), retry_after_s=LOCK_RETRY_S)
        if not look.is_leaving and not _has_control_plane(look.groups):
            await self._tell_undeclared(look)
            raise Held(
                Hold(HeldBy.DECLARATION, "no control-plane node group is declared; nothing runs until one is")
            )

    async def _refuse_if_undecided(self, look: _Look, *, forced: bool) -> None:
        """Raises Held while a person has to decide about exactly what is declared now."""
        phase, latest = look.latest_phase, look.latest
        if phase is RunPhase.HELD and latest is not None:
            if latest["status"].get("approval") is not None:
                return
            summary = latest["status"]["plan"]["summary"]
            raise Held(_waits_for_approval(look.name, latest["metadata"]["name"], summary))
        if phase is RunPhase.CANCELLED and latest is not None and not forced:
            raise Held(
                _was_stopped(look.name, latest["metadata"]["name"], latest["status"].get("cancelledBy", ""))
            )

    async def _tell_no_engine(self, look: _Look) -> None:
        problem = self._rooms.engine_room.problem

        def write(desk: Desk) -> None:
            tenant_condition(desk, look.tenant, "Drifted", "Unknown", "NoEngine", problem)
            if look.is_owed:
                tenant_condition(desk, look.tenant, "Applied", "False", "NoEngine", problem)

        await self._rooms.service.transact(write)

    async def _tell_undeclared(self, look: _Look) -> None:
        message = "no control-plane node group is declared; nothing runs until one is"
        await self._rooms.service.transact(
            lambda desk: tenant_condition(desk, look.tenant, "Applied", "False", "NoControlPlane", message)
        )

    # ------------------------------------------------------------ running

    async def _run(self, turn: Turn) -> None:
        name = turn.tenant

        async def waits(why: str) -> None:
            await self.say(name, [Hold(HeldBy.CAPACITY, f"waits for a free slot: {why}")])

        async with self._rooms.slots.take(waits):
            look = self._look(name)  # again: it may have changed while it waited
            found = await self._rooms.engine_room.find()
            if look is None or found is None or self._stopping.is_set():
                return
            if look.latest_phase is RunPhase.HELD and look.latest and look.latest["status"].get("approval"):
                run = await self._resume_held(look, *found)
                if run is not None:
                    with self._going_on(run):
                        await self._drive_apply(run)
                    return
            await self._supersede_held(look)
            await self._plan_and_apply(look, turn, *found)

    async def _plan_and_apply(self, look: _Look, turn: Turn, engine: Engine, data_dirs: DataDirs) -> None:
        before = await self._projection(look.uid)
        action = RunAction.DESTROY if look.is_leaving else RunAction.APPLY
        is_quiet = not (look.is_owed or turn.forced)
        if is_quiet:
            action = RunAction.DRIFT
        handover = await self._hand_over(look.uid, engine)
        reason = (
            "delete" if look.is_leaving else "resync" if is_quiet else "request" if turn.forced else "change"
        )
        run = Run(
            rooms=self._rooms,
            engine=engine,
            data_dirs=data_dirs,
            target=Target(
                tenant=look.tenant,
                revision=look.revision,
                wanted=frozenset() if look.is_leaving else frozenset(declared_machines(look.groups)),
                action=action,
                cause=cause_of(before, look.content, by="system" if is_quiet else "user", reason=reason),
                unfinished=frozenset(m.name for m in before.machines if m.tainted) if before else frozenset(),
            ),
            name=f"run-{run_number(look.latest) + 1 if look.latest else 1}",
            number=run_number(look.latest) + 1 if look.latest else 1,
            handover=handover,
        )
        with self._going_on(run):
            if not is_quiet:
                await run.announce(RunPhase.PLANNING)
            try:
                encrypted = handover is not None and handover.may_enforce
                rendered = await self._render(look, encrypted, before)
            except (RenderError, PluginFailed) as error:
                await self._refuse_render(run, error, is_quiet)
                return
            await self._drive_plan(run, rendered, is_quiet=is_quiet)

    @contextmanager
    def _going_on(self, run: Run) -> Iterator[None]:
        """From here on the run can be stopped. One that begins while the server goes down is stopped at
        once."""
        self.active[run.tenant_name] = run
        token = run_name.set(f"{run.tenant_name}/{run.name}")
        if self._stopping.is_set():
            run.shut_down()
        try:
            yield
        finally:
            self.active.pop(run.tenant_name, None)
            run_name.reset(token)

    async def _render(self, look: _Look, encrypted: bool, before: Projection | None) -> Rendered:
        return await asyncio.to_thread(  # plugins are asked, and one may hang for a while
            render,
            look.tenant,
            active_groups(look.groups),
            content=look.content,
            pins=choose_pins(look.tenant, look.groups, before),
            providers=self._rooms.providers,
            encrypted=encrypted,
            state_providers=before.providers if before else (),
        )

    async def _hand_over(self, uid: str, engine: Engine) -> KeyHandover | None:
        """The state key for this engine and the state as it is stored. Raises Held when they do not fit."""
        rooms = self._rooms
        if not engine.can_encrypt:
            stored = rooms.store.states.current(uid)
            if stored is not None and stored.encrypted:
                message = (
                    f"the state is encrypted and {engine.product} cannot read it; `make tools` makes OpenTofu"
                )
                raise Held(Hold(HeldBy.ENGINE, message))
            return None
        current = await rooms.store.states.body(uid)
        version = key_version(rooms.store.records, uid)
        try:
            return await asyncio.to_thread(rooms.keys.hand_over, uid, version, current)
        except (BadState, CannotOpenState) as error:
            raise Held(Hold(HeldBy.RECOVERY, str(error))) from error

    async def _refuse_render(self, run: Run, error: RenderError | PluginFailed, is_quiet: bool) -> None:
        """What is declared cannot be rendered: only another declaration, or another plugin, cures that."""
        if is_quiet:
            return
        hint = "change the declaration; it is tried again at once"
        await run.end(RunPhase.FAILED, RunError(summary=str(error), hint=hint), None)
        raise Held(Hold(HeldBy.DECLARATION, f"cannot be rendered: {error}; {hint}"))

    async def _drive_plan(self, run: Run, rendered: Rendered, *, is_quiet: bool) -> None:
        try:
            outcome = await run.plan(rendered)
        except (StartError, tofu.PrepareFailed, OSError) as error:
            await self._give_up_plan(
                run, RunError(summary=str(error), hint="tried again by itself"), is_quiet
            )
            return
        if run.was_stopped:
            if is_quiet:
                await asyncio.to_thread(run.dir.remove)
            else:
                await self._stopped(run, None)
            return
        if run.summary is None or outcome.timed_out:
            await self._give_up_plan(run, failure(outcome, doing="planning"), is_quiet)
            return
        has_changes = outcome.returncode == 2
        migrates = run.handover is not None and run.handover.migrates
        if is_quiet:
            if not has_changes and not migrates:
                await self._tell_clean(run)
                return
            await self._tell_drift(run, has_changes)
        if not has_changes and not migrates:
            await run.succeed(await run.projection())
            await self._settled(run)
            return
        if self._was_overtaken(run):
            await run.end(RunPhase.SUPERSEDED, None, None)
            raise Held(
                Hold(HeldBy.DEBOUNCE, "what is wanted changed while it was planned"), retry_after_s=0.0
            )
        if why := self._needs_approval(run, has_changes):
            await run.hold(why)
            raise Held(_waits_for_approval(run.tenant_name, run.name, run.summary.summary))
        await self._drive_apply(run)

    def _was_overtaken(self, run: Run) -> bool:
        """Deletion or a pause came while it was planned. Other changes follow in a run of their own."""
        tenant = self._rooms.tenant(run.tenant_name)
        if tenant is None:
            return True
        wants_destroy = run.target.action is RunAction.DESTROY
        return is_leaving(tenant) is not wants_destroy or bool(tenant["spec"].get("paused"))

    @staticmethod
    def _needs_approval(run: Run, has_changes: bool) -> list[str]:
        """The guard: why this plan may not be applied without a person. A DELETE approves its own destroy."""
        assert run.summary is not None
        if run.target.action is RunAction.DESTROY or not has_changes:
            return []
        why = list(run.summary.guard)
        if run.target.tenant["spec"].get("applyPolicy", ApplyPolicy.AUTO) == ApplyPolicy.MANUAL:
            why.append("applyPolicy is Manual")
        return why

    async def _drive_apply(self, run: Run) -> None:
        try:
            outcome = await run.apply()
        except (StartError, tofu.PrepareFailed, OSError) as error:
            await run.end(RunPhase.FAILED, RunError(summary=str(error), hint="tried again by itself"), None)
            raise RunFailed(str(error)) from error
        await self._finish(run, outcome)

    async def _finish(self, run: Run, outcome: tofu.Outcome) -> None:
        await run.enter(RunPhase.PROJECTING)
        rooms = self._rooms
        lock = rooms.store.states.lock(run.tenant_uid)
        if lock is not None and lock.run == run.name:
            why = f"{run.name} ended without releasing it"
            await rooms.states.release_lock_of_run(run.tenant_name, run.tenant_uid, run.name, why)
        projection, unreadable = None, ""
        try:
            projection = await run.projection()
        except ProjectionError as problem:
            unreadable = str(problem)
        if outcome.has_errored_state:
            await self._block_for_recovery(run, outcome, projection)
        elif unreadable:
            hint = "what was made is safe in the stored state; it is looked at again by itself"
            await run.end(RunPhase.FAILED, RunError(summary=unreadable, hint=hint), None)
            raise RunFailed(unreadable)
        elif outcome.returncode == 0 or self._reached(run, outcome, projection):
            if run.target.action is RunAction.DESTROY:
                await run.succeed(projection)
                look = self._look(run.tenant_name)
                if look is not None:
                    await self._forget(look)
                return
            await run.succeed(projection)
            await self._settled(run)
        elif run.was_stopped:
            await self._stopped(run, projection)
        else:
            error = failure(outcome, doing="applying")
            await run.end(RunPhase.FAILED, error, projection)
            await self._settled(run)
            raise RunFailed(f"{run.name}: {error.summary}")

    @staticmethod
    def _reached(run: Run, outcome: tofu.Outcome, projection: Projection | None) -> bool:
        """A run whose only trouble was its lock did its work, whatever its exit code says."""
        errors = [d for d in outcome.diagnostics if d.severity == "error"]
        if not errors or not all(is_unlock_failure(d) for d in errors) or projection is None:
            return False
        envelope = projection.declaration
        return envelope is not None and envelope["declaredRevision"] == run.target.revision

    async def _stopped(self, run: Run, projection: Projection | None) -> None:
        """A person cancelled it, or the server is going down."""
        if run.is_shutdown:
            error = RunError(summary="the server was stopped", hint="goes on when the server is back")
            await run.end(RunPhase.INTERRUPTED, error, projection)
            return
        await self._rooms.service.transact(
            lambda desk: desk.set_status("Run", run.tenant_name, run.name, {"cancelledBy": run.cancelled_by})
        )
        await run.end(RunPhase.CANCELLED, RunError(summary=f"cancelled by {run.cancelled_by}"), projection)
        raise Held(_was_stopped(run.tenant_name, run.name, run.cancelled_by))

    async def _give_up_plan(self, run: Run, error: RunError, is_quiet: bool) -> None:
        if is_quiet:
            await asyncio.to_thread(run.dir.remove)
            tenant = self._rooms.tenant(run.tenant_name)
            if tenant is not None:
                await self._rooms.service.transact(
                    lambda desk: tenant_condition(
                        desk, tenant, "Drifted", "Unknown", "CheckFailed", error.summary
                    )
                )
            return
        await run.end(RunPhase.FAILED, error, None)
        raise RunFailed(f"{run.name}: {error.summary}")

    async def _block_for_recovery(
        self, run: Run, outcome: tofu.Outcome, projection: Projection | None
    ) -> None:
        """tofu could not store its state with us and left it in the run's directory: nothing may run before
        it is stored, or the state would fork."""
        store = self._rooms.store
        await self._rooms.service.transact(
            lambda desk: block_for_recovery(desk, store, run.tenant_name, run.tenant_uid, run.name)
        )
        error = failure(outcome, doing="storing the state")
        await run.end(RunPhase.FAILED, error, projection, keep_dir=True)
        raise Held(_state_kept_aside(run.tenant_name, run.name))

    # ------------------------------------------------------------ held plans

    async def _resume_held(self, look: _Look, engine: Engine, data_dirs: DataDirs) -> Run | None:
        """The approved run, ready to be applied; None when its plan is no longer there."""
        assert look.latest is not None
        latest = look.latest
        name = latest["metadata"]["name"]
        run_dir = RunDir(self._rooms.runs_dir, look.uid, name)
        record = await asyncio.to_thread(run_dir.read_record)
        if record is None or not run_dir.plan_file.is_file():
            return None
        return Run(
            rooms=self._rooms,
            engine=engine,
            data_dirs=data_dirs,
            target=Target(
                tenant=look.tenant,
                revision=look.revision,
                wanted=frozenset(record["wanted"]),
                action=RunAction(latest["spec"]["action"]),
                cause=latest["spec"]["cause"],
            ),
            name=name,
            number=run_number(latest),
            uid=latest["metadata"]["uid"],
            summary=from_wire(PlanSummary, latest["status"]["plan"]),
            required={key: RequiredProvider(*value) for key, value in record["required"].items()},
            handover=await self._hand_over(look.uid, engine),
        )

    async def show_plan(self, tenant: str, run: str) -> Doc | None:
        """The changes of a held plan, secrets masked; None when the run holds none."""
        look, found = self._look(tenant), await self._rooms.engine_room.find()
        if look is None or found is None or look.latest is None or look.latest["metadata"]["name"] != run:
            return None
        if look.latest["status"]["phase"] != RunPhase.HELD.value:
            return None
        held = await self._resume_held(look, *found)
        return await held.show_plan() if held is not None else None

    async def operator_kit(self, tenant: str) -> Doc:
        """Files and environment for an operator's own tofu. Addresses are paths of this server."""
        look, found = self._look(tenant), await self._rooms.engine_room.find()
        assert look is not None
        before = await self._projection(look.uid)
        stored = self._rooms.store.states.current(look.uid)
        encrypted = (stored is None or stored.encrypted) and found is not None and found[0].can_encrypt
        rendered = await self._render(look, encrypted, before)
        path = f"/api/v1/namespaces/{tenant}/tfstate"
        env = {"TF_HTTP_ADDRESS": path, "TF_HTTP_LOCK_ADDRESS": path, "TF_HTTP_UNLOCK_ADDRESS": path}
        if encrypted:
            version = key_version(self._rooms.store.records, look.uid)
            env["TF_ENCRYPTION"] = raw_encryption(self._rooms.keys.key(look.uid, version))
        return {"env": env, "files": {name: text.decode() for name, text in rendered.files.items()}}

    async def _supersede_held(self, look: _Look) -> None:
        """A plan that waits for approval is void once another run starts."""
        for run in self._rooms.objects("Run", look.name):
            if run["status"]["phase"] != RunPhase.HELD.value:
                continue
            name = run["metadata"]["name"]
            await self._rooms.service.transact(
                lambda desk, name=name: desk.set_status(  # type: ignore[misc] # default binds the loop's value
                    "Run", look.name, name, {"phase": RunPhase.SUPERSEDED.value}
                )
            )
            await asyncio.to_thread(RunDir(self._rooms.runs_dir, look.uid, name).remove)

    # ------------------------------------------------------------ telling

    async def _tell_clean(self, run: Run) -> None:
        """The world is as declared. Leaves no trace when that was known already."""
        await asyncio.to_thread(run.dir.remove)
        tenant = self._rooms.tenant(run.tenant_name)
        known = get_condition(tenant, "Drifted") if tenant else None
        if tenant is not None and (known is None or known["status"] != "False"):
            await self._rooms.service.transact(
                lambda desk: tenant_condition(
                    desk, tenant, "Drifted", "False", "AsDeclared", "the world is as declared"
                )
            )

    async def _tell_drift(self, run: Run, has_changes: bool) -> None:
        """Reports drift before anything repairs it."""
        await run.announce(RunPhase.PLANNING)
        if not has_changes or not run.touches_world:
            return
        assert run.summary is not None
        message = f"the world is not as declared; to repair it a run {run.summary.summary}"

        def write(desk: Desk) -> None:
            tenant = desk.tx.get("Tenant", "", run.tenant_name)
            if tenant is not None:
                tenant_condition(desk, tenant, "Drifted", "True", "Drift", message)
                desk.record_event(tenant, reason="DriftDetected", message=message, warning=True)

        await self._rooms.service.transact(write)

    async def _settled(self, run: Run) -> None:
        await self._on_settled(run.tenant_name)

    async def _forget(self, look: _Look) -> None:
        """Everything is destroyed: drops state, keys, logs and the objects, and lets the tenant go."""
        store = self._rooms.store
        logs = [run["metadata"]["uid"] for run in self._rooms.objects("Run", look.name)]

        def write(desk: Desk) -> None:
            store.states.drop(desk.tx, look.uid)
            for key in (recovery_key(look.uid), key_version_record(look.uid)):
                if store.records.get(key) is not None:
                    store.records.delete(desk.tx, key)
            for group in desk.tx.list("NodeGroup", look.name):
                desk.remove("NodeGroup", look.name, group["metadata"]["name"])
            desk.clear_finalizers("Tenant", "", look.name, FINALIZER_MACHINES, FINALIZER_SECRETS)

        await self._rooms.service.transact(write)
        for uid in logs:
            store.run_logs.delete(uid)
        await asyncio.to_thread(RunDir.remove_tenant, self._rooms.runs_dir, look.uid)
        log.info("tenant %s is gone", look.name)


def _waits_for_approval(tenant: str, run: str, summary: str) -> Hold:
    return Hold(HeldBy.APPROVAL, f"{run} waits for approval: {summary}; `rezusctl approve {run} -c {tenant}`")


def _was_stopped(tenant: str, run: str, who: str) -> Hold:
    message = f"{run} was stopped by {who}; a change of the spec or `rezusctl retry -c {tenant}` goes on"
    return Hold(HeldBy.PAUSE, message, who=who)


def _state_kept_aside(tenant: str, run: str) -> Hold:
    message = (
        f"the state of {run} could not be stored and is kept beside it; nothing is applied until "
        f"`rezusctl state recover {tenant}` has stored it"
    )
    return Hold(HeldBy.RECOVERY, message)


def _has_control_plane(groups: list[Doc]) -> bool:
    return any(group["spec"]["role"] == Role.CONTROLPLANE.value for group in active_groups(groups))


def choose_pins(tenant: Doc, groups: list[Doc], before: Projection | None) -> Pins:
    """What TF state has pinned stays; the rest is chosen now, from what is declared."""
    slots = declared_slots(groups)
    if before is not None and before.declaration is not None:
        pinned = before.declaration["pins"]
        return Pins(pinned["contract"], pinned["bootstrapMachine"], slots)
    control_plane = next(
        (
            g["metadata"]["name"]
            for g in active_groups(groups)
            if g["spec"]["role"] == Role.CONTROLPLANE.value
        ),
        "",
    )
    major, minor, *_ = tenant["spec"]["talosVersion"].removeprefix("v").split(".")
    return Pins(f"v{major}.{minor}", machine_name(control_plane, 1) if control_plane else "", slots)
