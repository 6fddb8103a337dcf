"""Owns nothing: one frozen bundle of the lower rooms that a reconcile step works with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rezuscloud.model.meta import Doc
from rezuscloud.plugin.types import Provider
from rezuscloud.reconcile.slots import RunSlots
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.states import StateBackend
from rezuscloud.store.db import Store
from rezuscloud.tofu.data_dirs import DataDirs
from rezuscloud.tofu.encryption import KeyRing
from rezuscloud.tofu.engine import Engine, EngineMissing, find_engine
from rezuscloud.tofu.projection import Projection, project

log = logging.getLogger(__name__)


class EngineRoom:
    """The engine, looked for at the start and, while it is missing, again whenever it is needed."""

    def __init__(self, explicit: Path | None, data_dirs: Path, mirror: Path | None) -> None:
        self._explicit = explicit
        self._data_dirs_root = data_dirs
        self._mirror = mirror
        self._found: tuple[Engine, DataDirs] | None = None
        self.problem = "not looked for yet"

    @property
    def engine(self) -> Engine | None:
        return self._found[0] if self._found else None

    async def find(self) -> tuple[Engine, DataDirs] | None:
        """The engine with its prepared data directories, or None; `problem` then says what to do."""
        if self._found is None:
            try:
                engine = await find_engine(self._explicit)
            except EngineMissing as missing:
                self.problem = str(missing)
                return None
            self._found = (engine, DataDirs(self._data_dirs_root, engine, self._mirror))
            self.problem = ""
            log.info("engine: %s %s at %s", engine.product, engine.version, engine.path)
            if not engine.can_encrypt:
                log.warning("%s is only a stand-in: TF state is not encrypted", engine.product)
        return self._found


@dataclass(frozen=True)
class Rooms:
    service: ResourceService
    store: Store
    states: StateBackend
    keys: KeyRing
    engine_room: EngineRoom
    providers: Mapping[str, Provider]
    slots: RunSlots
    runs_dir: Path
    """Working directories of runs: `<tenant uid>/<run name>`, 0700."""
    state_url: Callable[[str], str]
    """Tenant uid → address of its state on the runners' own listener."""
    run_timeout_s: float
    stop_grace_s: float

    def tenant(self, name: str) -> Doc | None:
        found = self.store.objects.get("Tenant", "", name)
        return found.doc if found else None

    async def projection(self, tenant_uid: str) -> Projection | None:
        """What the newest state says; None when there is none. Raises ProjectionError."""
        state = await self.states.plain(tenant_uid)
        if state is None:
            return None
        # Plugins are asked, and one may hang for a while: not in the event loop.
        return await asyncio.to_thread(project, state, tenant_uid=tenant_uid, providers=self.providers)

    def objects(self, kind: str, tenant: str) -> list[Doc]:
        return [stored.doc for stored in self.store.objects.list(kind, tenant)]
