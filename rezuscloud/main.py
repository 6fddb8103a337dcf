"""Builds the house bottom up, opens it, and closes it top down. It knows every room and decides nothing.

Order of closing: no new requests, running tofu processes are interrupted and save their state, then the
runners' state listener, the bus and the store. The state listener outlives every tofu.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rezuscloud.access.identity import Sessions
from rezuscloud.api.app import build_app
from rezuscloud.api.health import PartState, Readiness
from rezuscloud.api.tfstate import loopback_app, operator_routes
from rezuscloud.bus.client import Bus
from rezuscloud.bus.server import TASK as NATS_TASK
from rezuscloud.bus.server import NatsServer, run_server
from rezuscloud.http.access_log import AccessLog
from rezuscloud.http.keys import request_id
from rezuscloud.http.metrics import Metrics
from rezuscloud.http.server import Listener, listen
from rezuscloud.kit.tasks import TaskSupervisor
from rezuscloud.model.meta import format_time, utc_now
from rezuscloud.plugin.manager import PluginManager
from rezuscloud.reconcile.observe import Observer
from rezuscloud.reconcile.reconciler import Reconciler
from rezuscloud.reconcile.rooms import EngineRoom, Rooms
from rezuscloud.reconcile.run import run_name
from rezuscloud.reconcile.slots import RunSlots, default_limit
from rezuscloud.resources.providers import sync_providers
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.states import StateBackend
from rezuscloud.resources.watch import WatchHub
from rezuscloud.settings import Settings
from rezuscloud.store.db import Store
from rezuscloud.tofu.encryption import KeyRing

log = logging.getLogger(__name__)

_RUNNERS_PORT = "runners-port"


@dataclass(frozen=True)
class Server:
    """A server that is up. `first_password` is set once, at the first start without a given password."""

    listener: Listener
    first_password: str | None


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Server]:
    """The whole server, up for the block. Raises what the rooms raise when they cannot be built."""
    async with AsyncExitStack() as stack:
        enter, later = stack.enter_async_context, stack.push_async_callback
        store = await enter(Store.open(settings.data_dir))
        keys = await asyncio.to_thread(KeyRing.open, settings.data_dir, settings.state_passphrase)
        plugins = await asyncio.to_thread(PluginManager.load, settings.plugins_blocked)
        sessions = Sessions(store.records, store, settings.data_dir / "session.key")
        stack.callback(sessions.close)
        first_password = await sessions.ensure_admin(settings.admin_password)

        tasks = TaskSupervisor()
        later(tasks.close)
        nats, bus = await _open_bus(settings, tasks, stack)
        service = ResourceService(store, plugins.providers)
        await sync_providers(service, plugins.describe())
        hub = WatchHub(store, bus)
        tasks.start("watch", hub.run)

        max_bytes = settings.state_max_mib * 2**20
        states = StateBackend(service, store, keys)
        runners_door = await _open_runners_door(store, loopback_app(states, max_bytes=max_bytes), stack)
        stack.callback(states.close)

        engine_room = EngineRoom(settings.tofu, settings.data_dir / "engine", settings.provider_mirror)
        if await engine_room.find() is None:
            log.error("no engine: %s", engine_room.problem)
        rooms = Rooms(
            service=service,
            store=store,
            states=states,
            keys=keys,
            engine_room=engine_room,
            providers=plugins.providers,
            slots=RunSlots(settings.max_runs or default_limit()),
            runs_dir=settings.data_dir / "runs",
            state_url=lambda uid: f"{runners_door.url}/state/{uid}",
            run_timeout_s=settings.run_timeout_s,
            stop_grace_s=settings.stop_grace_s,
        )
        observer = Observer(service, store, plugins.providers, is_watched=lambda: hub.watchers > 0)
        reconciler = Reconciler(
            rooms,
            observer,
            debounce_s=settings.debounce_s,
            debounce_cap_s=settings.debounce_cap_s,
            resync_s=settings.resync_s,
        )
        hub.subscribe(reconciler.on_event)
        later(reconciler.close)

        metrics = Metrics()
        metrics.gauge("queue_depth", "Tenants that wait for their turn", lambda: reconciler.queue.depth)
        metrics.gauge("runs_active", "Runs that go on right now", lambda: rooms.slots.active)
        store.on_commit_timed.append(metrics.count_commit)
        app = build_app(
            service=service,
            hub=hub,
            sessions=sessions,
            operator=reconciler,
            states=states,
            logs=store.run_logs,
            state_routes=operator_routes(states, max_bytes=max_bytes),
            readiness=_readiness(store, bus, nats, tasks, engine_room),
            metrics=metrics,
            access_log=AccessLog(as_json=settings.log_format == "json"),
        )
        listener = await enter(listen(app, settings.host, settings.port))
        tasks.start("observer", observer.run)
        await reconciler.start()
        yield Server(listener, first_password)
        log.info("stopping: running tofu processes are interrupted and save their state")
        states.drain()


async def _open_runners_door(store: Store, app: web.Application, stack: AsyncExitStack) -> Listener:
    """The runners' own listener, on the port that it had before. So an engine that outlived the last server
    is told at once that its credential is void, and leaves its state beside its run; at a closed door it
    would knock for a minute."""
    known = int(store.records.get(_RUNNERS_PORT) or 0)
    try:
        door = await stack.enter_async_context(listen(app, "127.0.0.1", known))
    except OSError:
        if not known:
            raise
        door = await stack.enter_async_context(listen(app, "127.0.0.1", 0))
    if door.port != known:
        await store.transact(lambda tx: store.records.put(tx, _RUNNERS_PORT, door.port))
    return door


async def _open_bus(
    settings: Settings, tasks: TaskSupervisor, stack: AsyncExitStack
) -> tuple[NatsServer | None, Bus]:
    if settings.nats_url is not None:
        return None, await stack.enter_async_context(Bus.connect(settings.nats_url))
    nats = await stack.enter_async_context(run_server(settings.data_dir / "nats", tasks))
    return nats, await stack.enter_async_context(Bus.connect(nats.url, token=nats.token))


def _readiness(
    store: Store, bus: Bus, nats: NatsServer | None, tasks: TaskSupervisor, engine_room: EngineRoom
) -> Readiness:
    """Each part by name. Without the bus everything still works here, so it never makes us unready."""

    def background() -> PartState:
        failed = [t for t in tasks.describe() if t["state"] == "failed" and t["name"] != NATS_TASK]
        return PartState(not failed, "; ".join(f"{t['name']}: {t['last_error']}" for t in failed))

    def engine() -> PartState:
        found = engine_room.engine
        if found is None:
            return PartState(False, engine_room.problem)
        stand_in = "" if found.can_encrypt else "; it is a stand-in that cannot encrypt TF state"
        return PartState(True, f"{found.product} {found.version}{stand_in}")

    def bus_state() -> PartState:
        if bus.is_connected:
            return PartState(True)
        which = "nats-server is being restarted" if nats else "the NATS cluster is away"
        return PartState(True, f"{which}; changes reach watchers of this server all the same")

    return {
        "store": lambda: PartState(store.degraded is None, store.degraded or ""),
        "tasks": background,
        "engine": engine,
        "bus": bus_state,
    }


# ---------------------------------------------------------------- one process


async def serve(settings: Settings, *, announce: Callable[[Server], None]) -> None:
    """Runs the server until SIGTERM or SIGINT, and then until every tofu has saved its state."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as server:
        announce(server)
        await stop.wait()
    log.info("stopped")


# ---------------------------------------------------------------- log


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = (
            f"{format_time(utc_now())} {record.levelname.lower():7} {record.name.removeprefix('rezuscloud.')}"
        )
        context = "".join(f" {key}={value}" for key, value in _context(record).items())
        text = f"{head}: {record.getMessage()}{context}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": format_time(utc_now()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | _context(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _context(record: logging.LogRecord) -> dict[str, str]:
    found = {"request": request_id.get(), "run": run_name.get()}
    found |= getattr(record, "fields", {})
    return {key: str(value) for key, value in found.items() if value not in ("", None)}


def set_up_logging(settings: Settings) -> None:
    """One handler on standard error, in the chosen form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if settings.log_format == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("rezuscloud").setLevel(settings.log_level.upper())
