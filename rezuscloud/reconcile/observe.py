"""Owns the status plane: asks providers how machines are, remembers when, and writes only what changed.

Observation is best effort and never enters TF state. `observedAt` lives in memory; a row is written only when
something else changed, so that an idle house writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from rezuscloud.model.machine import Address, Stage
from rezuscloud.model.meta import Doc, format_time, utc_now
from rezuscloud.model.tenant import Role
from rezuscloud.plugin.manager import PluginFailed
from rezuscloud.plugin.types import Feature, Observation, ObserveTarget, Provider
from rezuscloud.reconcile.publish import publish_observations
from rezuscloud.resources.service import ResourceService
from rezuscloud.store.db import Store

log = logging.getLogger(__name__)

WATCHED_EVERY_S = 15.0
IDLE_EVERY_S = 60.0
TIMEOUT_S = 10.0
_TICK_S = 5.0


class Observer:
    """Keeps observations of all tenants fresh: each 15 s while somebody looks, else each 60 s."""

    def __init__(
        self,
        service: ResourceService,
        store: Store,
        providers: Mapping[str, Provider],
        *,
        is_watched: Callable[[], bool],
    ) -> None:
        self._service = service
        self._store = store
        self._providers = providers
        self._is_watched = is_watched
        self._looked_at = 0.0
        self._refreshed: dict[str, float] = {}
        self._in_flight: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Somebody looks: for a minute observations are refreshed more often."""
        self._looked_at = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Refreshes what is due, for ever."""
        while True:
            now = asyncio.get_running_loop().time()
            is_watched = self._is_watched() or (self._looked_at and now - self._looked_at < IDLE_EVERY_S)
            every_s = WATCHED_EVERY_S if is_watched else IDLE_EVERY_S
            tenants = {
                str(stored.doc["metadata"]["namespace"]) for stored in self._store.objects.list("Machine")
            }
            for gone in self._refreshed.keys() - tenants:
                del self._refreshed[gone]
            due = [t for t in sorted(tenants) if now - self._refreshed.get(t, -every_s) >= every_s]
            await asyncio.gather(*(self.refresh(tenant) for tenant in due))
            await asyncio.sleep(_TICK_S)

    async def refresh(self, tenant: str) -> None:
        """Observes one tenant's machines now. Callers at the same time share one observation."""
        task = self._in_flight.get(tenant)
        if task is None:
            task = asyncio.create_task(self._refresh(tenant), name=f"observe:{tenant}")
            self._in_flight[tenant] = task
            task.add_done_callback(lambda _: self._in_flight.pop(tenant, None))
        await asyncio.shield(task)

    async def close(self) -> None:
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refresh(self, tenant: str) -> None:
        self._refreshed[tenant] = asyncio.get_running_loop().time()
        by_provider: dict[str, list[Doc]] = defaultdict(list)
        for stored in self._store.objects.list("Machine", tenant):
            by_provider[stored.doc["spec"]["provider"]].append(stored.doc)
        seen: list[Observation] = []
        for name, machines in sorted(by_provider.items()):
            provider = self._providers.get(name)
            if provider is None:
                seen += _unknown(machines, "ProviderMissing", f"the provider {name} is not installed")
            elif Feature.OBSERVE in provider.features:
                seen += await self._ask(provider, tenant, machines)
        if not seen:
            return
        await self._service.transact(lambda desk: publish_observations(desk, tenant, seen))
        now = format_time(utc_now())
        for observation in seen:
            if observation.ready is not None:
                self._store.objects.touch("Machine", tenant, observation.machine, {"observedAt": now})

    async def _ask(self, provider: Provider, tenant: str, machines: Sequence[Doc]) -> list[Observation]:
        targets = [self._target(tenant, machine) for machine in machines]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answers = await provider.observe(machines=targets)
            known = {answer.machine: answer for answer in answers}
        except (PluginFailed, TimeoutError) as error:
            log.warning("tenant %s: %s could not say how its machines are: %s", tenant, provider.name, error)
            return list(_unknown(machines, "ObserveFailed", str(error) or f"no answer in {TIMEOUT_S:g} s"))
        return [
            known.get(machine["metadata"]["name"])
            or next(iter(_unknown([machine], "NoAnswer", f"{provider.name} did not mention it")))
            for machine in machines
        ]

    def _target(self, tenant: str, machine: Doc) -> ObserveTarget:
        spec = machine["spec"]
        group = self._store.objects.get("NodeGroup", tenant, spec["nodeGroup"])
        return ObserveTarget(
            tenant=tenant,
            machine=machine["metadata"]["name"],
            provider_id=spec["providerId"],
            role=Role(spec["role"]),
            addresses=tuple(Address(a["type"], a["address"]) for a in spec.get("addresses", [])),
            config=(group.doc["spec"].get("providerConfig") or {}) if group else {},
        )


def _unknown(machines: Iterable[Doc], reason: str, message: str) -> Iterable[Observation]:
    for machine in machines:
        yield Observation(machine["metadata"]["name"], None, Stage.UNKNOWN, reason, message)
