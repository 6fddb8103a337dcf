"""Owns the Provider objects: what is installed beside RezusCloud, written once at each start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rezuscloud.model.meta import Condition, Doc, get_path, set_condition
from rezuscloud.plugin.manager import PluginInfo, PluginStatus
from rezuscloud.resources.desk import Desk
from rezuscloud.resources.service import ResourceService

_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


async def sync_providers(service: ResourceService, infos: Iterable[PluginInfo]) -> None:
    """Makes the Provider objects say what `infos` says: one for each provider, and one for each plugin that
    was blocked or failed. What is no longer installed is removed; what is unchanged is not written."""
    wanted = dict(_objects(infos))

    def write(desk: Desk) -> None:
        for current in desk.list("Provider"):
            if current["metadata"]["name"] not in wanted:
                desk.remove("Provider", "", current["metadata"]["name"])
        for name, (spec, (status, reason, message)) in wanted.items():
            doc = desk.put("Provider", "", name, spec=spec)
            generation = doc["metadata"]["generation"]
            loaded = Condition("Loaded", status, reason, message, generation)
            conditions = set_condition(get_path(doc, "status.conditions") or (), loaded, desk.tx.now)
            changes = {
                "observedGeneration": generation,
                "conditions": conditions,
                "error": message if reason == "Failed" else None,
            }
            desk.set_status("Provider", "", name, changes)

    await service.transact(write)


_Claim = tuple[str, str, str]


def _objects(infos: Iterable[PluginInfo]) -> Iterator[tuple[str, tuple[Doc, _Claim]]]:
    """Name → spec and claim. Loaded ones come last, so that they win a name over a plugin that failed."""
    loaded: list[tuple[str, tuple[Doc, _Claim]]] = []
    for info in infos:
        package: Doc = {"package": info.package, "version": info.version}
        for provider in info.providers:
            spec = {
                "title": provider.title,
                **package,
                "contractVersion": provider.contract_version,
                "features": [feature.value for feature in provider.features],
                "requiredProviders": [
                    {"name": name, "source": need.source, "version": need.version}
                    for name, need in sorted(provider.required_providers.items())
                ],
            }
            claim = ("True", "Loaded", f"plugin {info.name} of {info.package} {info.version} is in use")
            loaded.append((provider.name, (spec, claim)))
        if info.status is not PluginStatus.LOADED:
            name = _NOT_IN_NAMES.sub("-", info.name.lower()).strip("-")[:63].rstrip("-") or "unnamed"
            spec = {"title": info.name, **package, "features": [], "requiredProviders": []}
            if info.status is PluginStatus.BLOCKED:
                yield name, (spec, ("False", "Blocked", "blocked by the settings; it was not imported"))
            else:
                yield name, (spec, ("False", "Failed", info.error))
    yield from loaded
