"""Owns what becomes of runs that nobody works on any more: the last process left them, or a turn failed.

Nothing is guessed: an engine that still works for such a run is interrupted, once, and waited for (it leaves
its state beside itself), that state is stored if nobody stored a newer one, the run's lock is released, and
the run is marked Interrupted. Then the tenant's own turn decides what is still owed.
Decision: ADR 0004.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging

from rezuscloud.kit.process import boot_id, interrupt, is_running, kill_group_of
from rezuscloud.model.errors import ApiError
from rezuscloud.model.meta import Doc, format_time, to_wire, utc_now
from rezuscloud.model.operations import RunError, RunPhase
from rezuscloud.model.tenant import HeldBy
from rezuscloud.reconcile.keys import block_for_recovery, recovery_key
from rezuscloud.reconcile.outcome import Hold
from rezuscloud.reconcile.publish import publish_holds
from rezuscloud.reconcile.rooms import Rooms
from rezuscloud.reconcile.run_dir import RunDir
from rezuscloud.resources.service import Desk
from rezuscloud.resources.states import StateAccess

log = logging.getLogger(__name__)

_POLL_S = 0.1
_OPEN = frozenset({RunPhase.PENDING, RunPhase.PLANNING, RunPhase.APPLYING, RunPhase.PROJECTING})
_WRITES_STATE = frozenset({RunPhase.APPLYING, RunPhase.PROJECTING})
"""What an interrupted *plan* leaves as its state is empty and nobody's."""


async def close_open_runs(rooms: Rooms, tenant: str, why: str, *, stopping: asyncio.Event) -> bool:
    """Brings every open run of a tenant to an end and clears away directories that no run needs. Held runs
    whose plan is still there stay held, and a state that waits for a person stays where it is.

    To be called while no run of the tenant goes on. False when `stopping` was set before it was done.
    """
    owner = rooms.tenant(tenant)
    if owner is None:
        return True
    uid = owner["metadata"]["uid"]
    runs = {doc["metadata"]["name"]: doc for doc in rooms.objects("Run", tenant)}
    phases = {name: RunPhase(doc["status"]["phase"]) for name, doc in runs.items()}
    with_dir = await asyncio.to_thread(RunDir.runs_of, rooms.runs_dir, uid)
    for name in sorted({*with_dir, *(name for name, phase in phases.items() if not phase.is_final)}):
        phase, run_dir = phases.get(name), RunDir(rooms.runs_dir, uid, name)
        if phase is RunPhase.HELD:
            if not run_dir.plan_file.is_file():
                await _mark(rooms, tenant, name, "its saved plan is gone")
            continue
        if (rooms.store.records.get(recovery_key(uid)) or {}).get("run") == name:
            if phase in _OPEN:
                await _mark(rooms, tenant, name, why)
            continue
        if not await _end_process(rooms, tenant, name, run_dir, stopping):
            return False
        if phase in _OPEN:
            await _close(rooms, tenant, uid, name, run_dir, why, adopts=phase in _WRITES_STATE)
        else:
            await asyncio.to_thread(run_dir.remove)
    return True


async def _close(
    rooms: Rooms, tenant: str, uid: str, name: str, run_dir: RunDir, why: str, *, adopts: bool
) -> None:
    is_kept = False
    if adopts and run_dir.errored_state.is_file():
        is_kept = not await _adopt(rooms, tenant, uid, name, run_dir)
    lock = rooms.store.states.lock(uid)
    if lock is not None and lock.run == name:
        await rooms.states.release_lock_of_run(tenant, uid, name, f"{name}: {why}")
    if is_kept:
        await rooms.service.transact(lambda desk: block_for_recovery(desk, rooms.store, tenant, uid, name))
    await _mark(rooms, tenant, name, why)
    if not is_kept:
        await asyncio.to_thread(run_dir.remove)


async def _end_process(rooms: Rooms, tenant: str, run: str, run_dir: RunDir, stopping: asyncio.Event) -> bool:
    """Waits for the engine that the run's record names, then ends whatever is left of its group. False when
    `stopping` was set before."""
    record = await asyncio.to_thread(run_dir.read_record) or {}
    pid, ticks = record.get("pid"), record.get("startTicks")
    if pid is None or ticks is None or record.get("bootId") != boot_id():
        return True
    if is_running(pid, ticks):
        if not record.get("interrupted"):
            # Written first: another restart must not interrupt it again, or it would throw its state away.
            await asyncio.to_thread(run_dir.write_record, record | {"interrupted": True})
            interrupt(pid, ticks)
        log.info("tenant %s: waits for the engine of %s (pid %d), which still works", tenant, run, pid)
        until = utc_now() + dt.timedelta(seconds=rooms.stop_grace_s)
        message = f"{run} was cut short and its engine still saves its state; it may take until then"
        hold = Hold(HeldBy.LOCK, message, until, who=run)
        await rooms.service.transact(lambda desk: publish_holds(desk, tenant, [hold]))
        while is_running(pid, ticks) and utc_now() < until and not stopping.is_set():  # noqa: ASYNC110 - no child of ours
            await asyncio.sleep(_POLL_S)
        if stopping.is_set():
            return False
    kill_group_of(pid, ticks)
    return True


async def _adopt(rooms: Rooms, tenant: str, uid: str, run: str, run_dir: RunDir) -> bool:
    """Stores the state that tofu left in the run's directory. False when it must be looked at by a person."""
    body = await asyncio.to_thread(run_dir.errored_state.read_bytes)
    access = StateAccess(tenant=tenant, tenant_uid=uid, run=run, subject="system", may_empty=True)
    try:
        await rooms.states.adopt(access, body)
    except ApiError as error:
        log.error("tenant %s: the state that %s left behind was refused: %s", tenant, run, error.message)
        return False
    log.info("tenant %s: stored the state that %s left behind", tenant, run)
    return True


async def _mark(rooms: Rooms, tenant: str, name: str, why: str) -> None:
    def write(desk: Desk) -> None:
        error = RunError(summary=why, hint="goes on by itself")
        changes: Doc = {
            "phase": RunPhase.INTERRUPTED.value,
            "finishedAt": format_time(desk.tx.now),
            "error": to_wire(error),
        }
        desk.set_status("Run", tenant, name, changes)
        owner = desk.set_status("Tenant", "", tenant, {"currentRun": None})
        if owner is not None:
            desk.record_event(owner, reason="RunInterrupted", message=f"{name}: {why}", warning=True)

    await rooms.service.transact(write)
