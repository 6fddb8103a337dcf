"""Owns the engine room as a whole: routes events to the queue, and is the door for what people ask.

It decides nothing about a tenant (`tenant.py`) and nothing about time (`queue.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rezuscloud.access.identity import Identity
from rezuscloud.access.policy import authorize
from rezuscloud.model.declaration import is_leaving
from rezuscloud.model.errors import BadRequest, Conflict, NotFound
from rezuscloud.model.events import ChangeType, ResourceEvent
from rezuscloud.model.meta import Doc, format_time, get_path
from rezuscloud.model.operations import RunPhase
from rezuscloud.model.tenant import HeldBy
from rezuscloud.plugin.manager import PluginFailed
from rezuscloud.reconcile.keys import end_recovery, key_version, key_version_record, recovery_key
from rezuscloud.reconcile.observe import Observer
from rezuscloud.reconcile.publish import lift_holds, publish_projection, tenant_condition
from rezuscloud.reconcile.queue import ApplyQueue
from rezuscloud.reconcile.rooms import Rooms
from rezuscloud.reconcile.run_dir import RunDir
from rezuscloud.reconcile.tenant import TenantReconciler
from rezuscloud.resources.service import Desk
from rezuscloud.resources.states import StateAccess
from rezuscloud.tofu.projection import ProjectionError
from rezuscloud.tofu.render import RenderError

log = logging.getLogger(__name__)

_PARTIAL_PROJECTION_S = 1.0
_ENGINE_RETRY_S = 2.0
_ENDED_BY_A_REQUEST = (HeldBy.DEBOUNCE, HeldBy.BACKOFF, HeldBy.PAUSE, HeldBy.DECLARATION, HeldBy.ENGINE)
"""What a request for a run ends, or looks at anew."""


class Reconciler:
    """Start it, feed it events, ask it; `close` interrupts what runs and waits until its state is saved."""

    def __init__(
        self, rooms: Rooms, observer: Observer, *, debounce_s: float, debounce_cap_s: float, resync_s: float
    ) -> None:
        self._rooms = rooms
        self._observer = observer
        self._tenants = TenantReconciler(rooms, on_settled=observer.refresh, on_gone=self._gone)
        self.queue = ApplyQueue(
            self._tenants.step,
            self._tenants.say,
            quiet_s=debounce_s,
            cap_s=debounce_cap_s,
            resync_s=resync_s,
        )
        self._background: set[asyncio.Task[None]] = set()
        self._is_closing = False
        rooms.states.on_accepted.append(self._state_accepted)
        rooms.store.on_full.append(self._disk_is_full)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Takes up what the last process left, tenant by tenant, without holding up the start."""
        tenants = [stored.doc["metadata"] for stored in self._rooms.store.objects.list("Tenant")]
        await asyncio.to_thread(
            RunDir.remove_other_tenants, self._rooms.runs_dir, {meta["uid"] for meta in tenants}
        )
        for meta in tenants:
            self.queue.wake(meta["name"])
        if self._rooms.engine_room.engine is None:
            self._spawn(self._await_engine())

    async def close(self) -> None:
        """Interrupts running tofu processes, lets them save their state, and ends all lanes."""
        self._is_closing = True
        self._tenants.stop()
        await self.queue.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._observer.close()

    async def _await_engine(self) -> None:
        """Looks for an engine until there is one; then every tenant gets its turn."""
        while await self._rooms.engine_room.find() is None:  # noqa: ASYNC110 - nobody tells when it comes
            await asyncio.sleep(_ENGINE_RETRY_S)
        for stored in self._rooms.store.objects.list("Tenant"):
            self.queue.wake(stored.doc["metadata"]["name"])

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _gone(self, tenant: str) -> None:
        self.queue.forget(tenant)

    # ------------------------------------------------------------ what happens elsewhere

    def on_event(self, event: ResourceEvent) -> None:
        """Every change of a tenant comes by here; only a change of what is wanted makes it due."""
        if event.kind != "Tenant" or self._is_closing:
            return
        name = event.doc["metadata"]["name"]
        if event.type is ChangeType.DELETED:
            self.queue.wake(name)  # its turn finds nothing and closes the lane
            return
        before, now = event.before, event.doc
        if before is not None and is_leaving(now) and not is_leaving(before):
            self.queue.wake(name)
        elif before is None or _wanted(before) != _wanted(now):
            self.queue.changed(name)

    def _state_accepted(self, tenant: str, uid: str, run: str) -> None:
        """A state was stored. Our runs project at their end; a long apply also shows what it has so far."""
        if self._is_closing:
            return
        if run:
            self._spawn(self._project_later(tenant, uid, run))
        else:
            self.queue.wake(tenant)

    def _disk_is_full(self) -> None:
        for run in self._tenants.active.values():
            run.free_reserve()

    async def _project_later(self, tenant: str, uid: str, run: str) -> None:
        await asyncio.sleep(_PARTIAL_PROJECTION_S)
        active = self._tenants.active.get(tenant)
        current = self._rooms.store.states.current(uid)
        if active is None or active.name != run or current is None:
            return
        try:
            projection = await self._rooms.projection(uid)
        except ProjectionError as error:  # told at the end of the run
            log.warning("tenant %s: %s has made machines that cannot be shown yet: %s", tenant, run, error)
            return
        if projection is not None:
            await self._rooms.service.transact(
                lambda desk: publish_projection(desk, tenant, projection, state_version=current.version)
            )

    # ------------------------------------------------------------ what people ask

    async def approve(self, identity: Identity, tenant: str, run: str, plan_id: str) -> None:
        """Lets a held run apply exactly the plan it holds. Raises Conflict when it holds another plan."""
        authorize(identity, "approve", "runs", tenant)

        def write(desk: Desk) -> None:
            doc = self._held_run(desk, tenant, run, plan_id)
            approval = {"by": identity.subject, "at": format_time(desk.tx.now), "planId": plan_id}
            desk.set_status("Run", tenant, run, {"approval": approval})
            lift_holds(desk, tenant, HeldBy.APPROVAL)
            desk.record_event(doc, reason="Approved", message=f"{identity.subject} approved plan {plan_id}")

        await self._rooms.service.transact(write)
        self.queue.wake(tenant)

    async def deny(self, identity: Identity, tenant: str, run: str, plan_id: str) -> None:
        """Ends a held run; nothing is applied until the declaration changes or a retry is asked."""
        authorize(identity, "deny", "runs", tenant)

        def write(desk: Desk) -> None:
            doc = self._held_run(desk, tenant, run, plan_id)
            desk.record_event(doc, reason="Denied", message=f"{identity.subject} denied plan {plan_id}")
            self._write_cancelled(desk, tenant, run, identity)

        await self._rooms.service.transact(write)
        self.queue.wake(tenant)

    async def cancel(self, identity: Identity, tenant: str, run: str, force: bool = False) -> None:
        """Stops a run. A running tofu is interrupted and saves its state; `force` interrupts it again, which
        may lose the resource in flight."""
        authorize(identity, "cancel", "runs", tenant)
        phase = RunPhase(self._run(tenant, run)["status"]["phase"])
        active = self._tenants.active.get(tenant)
        if active is not None and active.name == run:
            active.cancelled_by = identity.subject
            active.stop.force() if force else active.stop.interrupt()
        elif phase is RunPhase.HELD:
            await self._rooms.service.transact(
                lambda desk: self._write_cancelled(desk, tenant, run, identity)
            )
            self.queue.wake(tenant)
        elif phase.is_final:
            raise Conflict(f"{run} is {phase.value} and cannot be cancelled any more", kind="runs", name=run)
        else:
            why = f"{run} was cut short and ends by itself; its engine has been interrupted already"
            raise Conflict(why, kind="runs", name=run)

    async def retry(self, identity: Identity, tenant: str, run: str) -> None:
        """Starts a new run for what is declared now."""
        authorize(identity, "retry", "runs", tenant)
        doc = self._run(tenant, run)
        if not RunPhase(doc["status"]["phase"]).is_final:
            raise Conflict(f"{run} has not ended yet; cancel it first", kind="runs", name=run)
        await self.apply_now(identity, tenant)

    async def apply_now(self, identity: Identity, tenant: str) -> None:
        """Runs without waiting for the debounce or a backoff, also when nothing seems to be owed."""
        authorize(identity, "apply", "tenants", tenant)
        self._tenant(tenant)
        await self._rooms.service.transact(lambda desk: lift_holds(desk, tenant, *_ENDED_BY_A_REQUEST))
        self.queue.wake(tenant, forced=True)

    async def recover(self, identity: Identity, tenant: str) -> Doc:
        """Stores the state that a run could not store, and lets the tenant go on."""
        authorize(identity, "recover", "tenants", tenant)
        rooms = self._rooms
        doc = self._tenant(tenant)
        uid = doc["metadata"]["uid"]
        record = rooms.store.records.get(recovery_key(uid))
        if record is None:
            raise Conflict(f"tenant {tenant} has no state to recover; nothing is blocked by one")
        run_dir = RunDir(rooms.runs_dir, uid, record["run"])
        is_there = run_dir.errored_state.is_file()
        if is_there:
            body = await asyncio.to_thread(run_dir.errored_state.read_bytes)
            access = StateAccess(
                tenant=tenant, tenant_uid=uid, run=record["run"], subject=identity.subject, may_empty=True
            )
            try:
                await rooms.states.adopt(access, body)
            except (BadRequest, Conflict) as error:
                raise Conflict(
                    f"the state that {record['run']} left behind cannot be stored: {error.message} It is "
                    f"{run_dir.errored_state}. If it is worthless, move it away and recover once more: then "
                    "the tenant goes on from the state that is stored."
                ) from error

        def write(desk: Desk) -> Doc:
            end_recovery(desk, rooms.store, uid, record["run"])
            lift_holds(desk, tenant, HeldBy.RECOVERY)
            owner = desk.tx.get("Tenant", "", tenant)
            assert owner is not None
            deed = "stored" if is_there else "lets the tenant go on without"
            message = f"{identity.subject} {deed} the state that {record['run']} had left behind"
            desk.record_event(owner, reason="StateRecovered", message=message)
            return owner

        doc = await rooms.service.transact(write)
        await asyncio.to_thread(run_dir.remove)
        self.queue.wake(tenant)
        return doc

    async def unlock(self, identity: Identity, tenant: str, lock_id: str) -> None:
        """Breaks the state lock with this id. Raises Conflict when another lock, or none, is held."""
        authorize(identity, "unlock", "tenants", tenant)
        rooms = self._rooms
        uid = self._tenant(tenant)["metadata"]["uid"]
        active = self._tenants.active.get(tenant)
        lock = rooms.store.states.lock(uid)
        if lock is None or lock.id != lock_id:
            raise Conflict(
                f"tenant {tenant} holds no lock {lock_id}" + (f"; its lock is {lock.id}" if lock else "")
            )
        if active is not None and lock.run == active.name:
            raise Conflict(f"the lock belongs to {active.name}, which is going on; cancel that run instead")

        def write(desk: Desk) -> None:
            rooms.store.states.release_lock(desk.tx, uid, lock_id)
            lift_holds(desk, tenant, HeldBy.LOCK)
            owner = desk.tx.get("Tenant", "", tenant)
            assert owner is not None
            desk.record_event(
                owner, reason="LockBroken", message=f"{identity.subject} broke lock {lock_id}", warning=True
            )

        await rooms.service.transact(write)
        self.queue.wake(tenant)

    async def rotate_key(self, identity: Identity, tenant: str) -> None:
        """Makes a new state key the current one and starts the run that re-encrypts the state with it."""
        authorize(identity, "rotate-key", "tenants", tenant)
        rooms = self._rooms
        doc = self._tenant(tenant)
        uid = doc["metadata"]["uid"]
        version = key_version(rooms.store.records, uid) + 1
        await rooms.service.transact(
            lambda desk: rooms.store.records.put(desk.tx, key_version_record(uid), version)
        )
        await self.apply_now(identity, tenant)

    async def plan(self, identity: Identity, tenant: str, run: str) -> Doc:
        """The whole plan of a held run, as `tofu show -json` tells it."""
        authorize(identity, "get", "runs/plan", tenant)
        self._run(tenant, run)
        detail = await self._tenants.show_plan(tenant, run)
        if detail is None:
            raise NotFound(
                f"{run} holds no plan; only a run that waits for approval does", kind="runs", name=run
            )
        return detail

    async def state_env(self, identity: Identity, tenant: str) -> Doc:
        """What an operator's own tofu needs for this tenant: configuration, addresses, state key."""
        authorize(identity, "state-env", "tenants", tenant)
        self._tenant(tenant)
        try:
            return await self._tenants.operator_kit(tenant)
        except (ProjectionError, RenderError, PluginFailed) as error:
            raise Conflict(f"tenant {tenant} cannot be rendered: {error}") from error

    # ------------------------------------------------------------ inside

    def _tenant(self, name: str) -> Doc:
        doc = self._rooms.tenant(name)
        if doc is None:
            raise NotFound(f'tenants "{name}" not found', kind="tenants", name=name)
        return doc

    def _run(self, tenant: str, name: str) -> Doc:
        stored = self._rooms.store.objects.get("Run", tenant, name)
        if stored is None:
            raise NotFound(f'runs "{name}" not found', kind="runs", name=name)
        return stored.doc

    @staticmethod
    def _held_run(desk: Desk, tenant: str, run: str, plan_id: str) -> Doc:
        doc = desk.tx.get("Run", tenant, run)
        if doc is None:
            raise NotFound(f'runs "{run}" not found', kind="runs", name=run)
        phase = doc["status"]["phase"]
        if phase != RunPhase.HELD.value:
            raise Conflict(f"{run} is {phase} and waits for no approval", kind="runs", name=run)
        held = get_path(doc, "status.plan.id")
        if held != plan_id:
            raise Conflict(f"{run} holds plan {held}, not {plan_id}; look at it again", kind="runs", name=run)
        return doc

    @staticmethod
    def _write_cancelled(desk: Desk, tenant: str, run: str, identity: Identity) -> None:
        desk.set_status(
            "Run",
            tenant,
            run,
            {
                "phase": RunPhase.CANCELLED.value,
                "cancelledBy": identity.subject,
                "finishedAt": format_time(desk.tx.now),
            },
        )
        doc = desk.tx.get("Tenant", "", tenant)
        if doc is not None:
            message = f"{run}: {identity.subject} stopped it before anything was applied"
            tenant_condition(desk, doc, "Applied", "False", "Cancelled", message)


def _wanted(tenant: Doc) -> tuple[Any, ...]:
    """What must change for a tenant to be due; of its status only the revision is such a change."""
    return (
        get_path(tenant, "status.declaredRevision"),
        get_path(tenant, "spec.paused"),
        get_path(tenant, "spec.applyPolicy"),
    )
