"""Owns what a start does about runs that the last process left open.

Nothing is guessed: a process that still works for such a run is waited for (it got SIGINT when we died and
saves its state beside itself), its state is stored if nobody stored a newer one, its lock is released, and
the run is marked Interrupted. Then the tenant's own turn decides what is still owed.
"""

from __future__ import annotations

import asyncio
import logging

from rezuscloud.kit.process import boot_id, is_running, kill_group_of
from rezuscloud.model.errors import ApiError
from rezuscloud.model.meta import Doc, format_time, to_wire
from rezuscloud.model.operations import RunError, RunPhase
from rezuscloud.reconcile.rooms import Rooms
from rezuscloud.reconcile.run_dir import RunDir
from rezuscloud.reconcile.tenant import recovery_key
from rezuscloud.resources.service import Desk
from rezuscloud.resources.states import StateAccess

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""How long an orphaned tofu may take to end by itself; its HTTP retries give up within a quarter of that."""

_OPEN = frozenset({RunPhase.PENDING, RunPhase.PLANNING, RunPhase.APPLYING, RunPhase.PROJECTING})


async def close_open_runs(rooms: Rooms, tenant: str) -> None:
    """Brings every open run of one tenant to an end. Held runs whose plan is still there stay held."""
    for run in [stored.doc for stored in rooms.store.objects.list("Run", tenant)]:
        phase = RunPhase(run["status"]["phase"])
        if phase in _OPEN:
            await _close(rooms, tenant, run)
        elif phase is RunPhase.HELD:
            owner = rooms.tenant(tenant)
            uid = owner["metadata"]["uid"] if owner else ""
            if not RunDir(rooms.runs_dir, uid, run["metadata"]["name"]).plan_file.is_file():
                await _mark(rooms, tenant, run, "its saved plan is gone")


async def _close(rooms: Rooms, tenant: str, run: Doc) -> None:
    owner = rooms.tenant(tenant)
    if owner is None:
        return
    uid, name = owner["metadata"]["uid"], run["metadata"]["name"]
    run_dir = RunDir(rooms.runs_dir, uid, name)
    record = await asyncio.to_thread(run_dir.read_record) or {}
    await _wait_for_process(record)
    is_kept = False
    if run_dir.errored_state.is_file():
        is_kept = not await _adopt(rooms, tenant, uid, name, run_dir)
    lock = rooms.store.states.lock(uid)
    if lock is not None and lock.run == name:
        await rooms.states.release_lock_of_run(
            tenant, uid, name, f"the server was stopped while {name} went on"
        )
    await _mark(rooms, tenant, run, "the server was stopped while it went on")
    if not is_kept:
        await asyncio.to_thread(run_dir.remove)


async def _wait_for_process(record: Doc) -> None:
    """Waits for the process that the record names, then ends whatever is left of its group."""
    pid, ticks = record.get("pid"), record.get("startTicks")
    if pid is None or ticks is None or record.get("bootId") != boot_id():
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_S
    while is_running(pid, ticks) and loop.time() < deadline:  # noqa: ASYNC110 - it is no child of ours
        await asyncio.sleep(0.1)
    kill_group_of(pid, ticks)


async def _adopt(rooms: Rooms, tenant: str, uid: str, run: str, run_dir: RunDir) -> bool:
    """Stores the state that tofu left in the run's directory. False when it must be looked at by a person."""
    body = await asyncio.to_thread(run_dir.errored_state.read_bytes)
    access = StateAccess(tenant=tenant, tenant_uid=uid, run=run, subject="system", may_empty=True)
    try:
        await rooms.states.adopt(access, body)
    except ApiError as error:
        record = {"run": run, "why": error.message}
        log.error("tenant %s: the state that %s left behind was refused: %s", tenant, run, error.message)
        await rooms.service.transact(lambda desk: rooms.store.records.put(desk.tx, recovery_key(uid), record))
        return False
    log.info("tenant %s: stored the state that %s left behind", tenant, run)
    return True


async def _mark(rooms: Rooms, tenant: str, run: Doc, why: str) -> None:
    name = run["metadata"]["name"]

    def write(desk: Desk) -> None:
        error = RunError(summary=why, hint="goes on by itself")
        desk.set_status(
            "Run",
            tenant,
            name,
            {
                "phase": RunPhase.INTERRUPTED.value,
                "finishedAt": format_time(desk.tx.now),
                "error": to_wire(error),
            },
        )
        owner = desk.set_status("Tenant", "", tenant, {"currentRun": None})
        if owner is not None:
            desk.record_event(owner, reason="RunInterrupted", message=f"{name}: {why}", warning=True)

    await rooms.service.transact(write)
