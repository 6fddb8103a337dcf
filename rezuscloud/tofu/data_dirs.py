"""Owns prepared data directories: what `init` leaves, made once per set of OpenTofu providers and shared.

With an `http` backend whose addresses all come from the environment, one read-only TF_DATA_DIR serves every
tenant and every parallel run, so no run pays for an `init`. A directory is known by what it was made from; it
is made beside its place and renamed, so a half-made one is never used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rezuscloud.kit import process
from rezuscloud.plugin.types import RequiredProvider
from rezuscloud.tofu.engine import Engine

LOCK_FILE = ".terraform.lock.hcl"
INIT_TIMEOUT_S = 600.0
"""Fetching providers takes minutes on a slow line."""

_DIRECT = "provider_installation {\n  direct {}\n}\n"


class PrepareFailed(Exception):
    """The OpenTofu providers of a tenant cannot be installed. The message has the engine's own words."""


@dataclass(frozen=True)
class Prepared:
    """What a working directory is run with."""

    data_dir: Path
    lock_file: Path | None
    """To be copied beside the configuration; None when only built-in resources are used."""
    cli_config: Path


class DataDirs:
    """The prepared directories of one engine, below one root."""

    def __init__(self, root: Path, engine: Engine, mirror: Path | None) -> None:
        self._root = root.absolute()
        self._engine = engine
        self._mirror = mirror.absolute() if mirror is not None else None
        self._known: dict[str, Prepared] = {}
        self._making: dict[str, asyncio.Lock] = {}

    async def prepare(self, required: Mapping[str, RequiredProvider]) -> Prepared:
        """The directory for a set of providers; made at the first call, which may fetch them.

        For built-in resources alone, or with a mirror, nothing is fetched. Callers at the same time share one
        making. A failure is not remembered. Raises PrepareFailed and process.StartError.
        """
        name = self._name(required)
        if (known := self._known.get(name)) is not None:
            return known
        async with self._making.setdefault(name, asyncio.Lock()):
            if name not in self._known:
                place = self._root / name
                if not await asyncio.to_thread(_is_whole, place):
                    await self._make(place, required)
                lock_file = place / LOCK_FILE
                has_lock = await asyncio.to_thread(lock_file.exists)
                self._known[name] = Prepared(
                    place / "data", lock_file if has_lock else None, place / "cli.tfrc"
                )
        return self._known[name]

    def _name(self, required: Mapping[str, RequiredProvider]) -> str:
        made_from = {
            "engine": [self._engine.product, self._engine.version, str(self._engine.path)],
            "required": {name: [p.source, p.version] for name, p in sorted(required.items())},
            "mirror": str(self._mirror or ""),
        }
        return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]

    async def _make(self, place: Path, required: Mapping[str, RequiredProvider]) -> None:
        part = place.with_name(f"{place.name}.part")
        await asyncio.to_thread(self._lay_out, part, required)
        env = {
            "PATH": os.defpath,
            "HOME": str(part),
            "TF_DATA_DIR": str(part / "data"),
            "TF_CLI_CONFIG_FILE": str(part / "cli.tfrc"),
            "TF_IN_AUTOMATION": "1",
            "TF_INPUT": "0",
            "CHECKPOINT_DISABLE": "1",
        }
        argv = [str(self._engine.path), "init", "-input=false", "-no-color", "-get=false"]
        out = part / "init.log"
        async with (
            _no_state() as url,
            process.start(
                argv, env=env | {"TF_HTTP_ADDRESS": url}, cwd=part, stdout=out, stderr=out, grace_s=10
            ) as child,
        ):
            try:
                code = await asyncio.wait_for(child.wait(), INIT_TIMEOUT_S)
                why = ""
            except TimeoutError:
                code = -1
                why = f"It took longer than {INIT_TIMEOUT_S:.0f} s. "
        if code != 0:
            said = await asyncio.to_thread(out.read_text, errors="replace")
            raise PrepareFailed(
                f"the OpenTofu providers could not be installed; what exists stays as it is. {why}"
                f"The engine said: {' '.join(said.replace('│', ' ').split())[-1500:]}"
            )
        await asyncio.to_thread(_finish, part, place)

    def _lay_out(self, part: Path, required: Mapping[str, RequiredProvider]) -> None:
        _remove(part)
        part.mkdir(mode=0o700, parents=True)
        terraform: dict[str, object] = {"backend": {"http": {}}}
        if required:
            terraform["required_providers"] = {
                name: {"source": provider.source, "version": provider.version}
                for name, provider in sorted(required.items())
            }
        (part / "main.tf.json").write_text(json.dumps({"terraform": terraform}))
        (part / "cli.tfrc").write_text(self._cli_config())

    def _cli_config(self) -> str:
        if self._mirror is None:
            return _DIRECT
        path = json.dumps(str(self._mirror))
        return f"provider_installation {{\n  filesystem_mirror {{\n    path = {path}\n  }}\n}}\n"


@asynccontextmanager
async def _no_state() -> AsyncIterator[str]:
    """A state address that knows of no state: `init` asks for it once, and no tenant's must answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


def _is_whole(place: Path) -> bool:
    """False when it was never made, or when a provider that it points to has left the mirror."""
    if not place.is_dir():
        return False
    links = (path for path in (place / "data").rglob("*") if path.is_symlink())
    return all(link.exists() for link in links)


def _remove(place: Path) -> None:
    for folder, _, _ in os.walk(place):
        Path(folder).chmod(0o700)
    shutil.rmtree(place, ignore_errors=True)


def _finish(part: Path, place: Path) -> None:
    _remove(place)
    part.replace(place)
    for folder, _, names in os.walk(place / "data"):
        for name in names:
            file = Path(folder) / name
            if not file.is_symlink():
                file.chmod(0o500 if os.access(file, os.X_OK) else 0o400)
        Path(folder).chmod(0o500)
