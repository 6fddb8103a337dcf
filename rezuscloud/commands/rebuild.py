"""Owns `rezuscloud rebuild`: TF states become tenants, node groups and machines again, in an empty database.

State is the authority of the spec plane: the declaration in it carries names, uids, labels, annotations and
specs. Status is observation and comes back by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncclick as click
import orjson

from rezuscloud.commands.failure import Failure
from rezuscloud.model.errors import ApiError
from rezuscloud.model.meta import Doc
from rezuscloud.plugin.manager import PluginManager
from rezuscloud.reconcile.publish import publish_projection
from rezuscloud.resources.service import Desk, ResourceService
from rezuscloud.resources.states import StateAccess, StateBackend
from rezuscloud.settings import Settings
from rezuscloud.store.db import Store, StoreDamaged, StoreInUse
from rezuscloud.tofu.encryption import BadState, CannotOpenState, KeyRing, RootKeyError, tenant_of
from rezuscloud.tofu.projection import ProjectionError, bring_back, project


async def run_rebuild(settings: Settings, directory: Path) -> None:
    try:
        keys = KeyRing.open(settings.data_dir, settings.state_passphrase)
        async with Store.open(settings.data_dir) as store:
            if store.objects.list("Tenant"):
                raise Failure(
                    f"{settings.data_dir} already holds tenants; a rebuild needs an empty database. "
                    "Nothing was changed."
                )
            plugins = PluginManager.load(settings.plugins_blocked)
            rebuild = _Rebuild(store, keys, plugins)
            for path in _state_files(directory):
                click.echo(await rebuild.take(path))
            if not rebuild.taken:
                raise Failure(f"no TF state was found in {directory}; nothing was changed")
    except (StoreInUse, StoreDamaged, RootKeyError) as error:
        raise Failure(str(error)) from error


def _state_files(directory: Path) -> Iterator[Path]:
    yield from sorted(path for path in directory.iterdir() if path.is_file() and path.suffix != ".backup")


class _Rebuild:
    def __init__(self, store: Store, keys: KeyRing, plugins: PluginManager) -> None:
        self._store = store
        self._keys = keys
        self._plugins = plugins
        self._service = ResourceService(store, plugins.providers)
        self._states = StateBackend(self._service, store, keys)
        self.taken = 0

    async def take(self, path: Path) -> str:
        """Brings one tenant back; returns a line that tells of it. Raises Failure."""
        blob = path.read_bytes()
        try:
            state = self._open(path, blob)
            envelope = _envelope(state)
            if envelope is None:
                return f"{path.name}: holds no declaration of a tenant; left alone"
            uid = envelope["declaration"]["tenant"]["metadata"]["uid"]
            projection = project(state, tenant_uid=uid, providers=self._plugins.providers)
        except (BadState, CannotOpenState, ProjectionError) as error:
            raise Failure(f"{path.name}: {error}") from error
        tenant, groups, machines = bring_back(envelope, projection.machines)
        name = tenant["metadata"]["name"]
        try:
            await self._service.transact(lambda desk: _write(desk, tenant, groups, machines))
            access = StateAccess(
                tenant=name, tenant_uid=uid, run="rebuild", subject="rebuild", may_empty=True
            )
            await self._states.adopt(access, blob)
            version = self._store.states.current(uid)
            await self._service.transact(
                lambda desk: publish_projection(
                    desk, name, projection, state_version=version.version if version else None
                )
            )
        except ApiError as error:
            raise Failure(f"{path.name}: {error.message}") from error
        self.taken += 1
        return f"{path.name}: tenant {name} with {len(groups)} node groups and {len(machines)} machines"

    def _open(self, path: Path, blob: bytes) -> Doc:
        uid = tenant_of(blob) or path.name.partition(".")[0]
        state: Any = orjson.loads(self._keys.open_state(uid, blob))
        if not isinstance(state, dict):
            raise BadState("not an OpenTofu state: no JSON object")
        return state


def _write(desk: Desk, tenant: Doc, groups: list[Doc], machines: list[Doc]) -> None:
    for doc in (tenant, *groups, *machines):
        desk.bring_back(doc)


def _envelope(state: Doc) -> Doc | None:
    return project(state, tenant_uid="", providers={}).declaration
