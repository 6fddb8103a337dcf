"""Owns which program is the engine: where it is looked for, what it is, and what it can.

Found before fetched, and never replaced in silence: a `terraform` stands in only when there is no OpenTofu,
and says so. It runs no plan (`exec.py`).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPENTOFU = "opentofu"
TERRAFORM = "terraform"
TOOLS = Path(".tools/bin/tofu")
"""Where `make tools` puts it, below the working directory or the source checkout."""

_VERSION_TIMEOUT_S = 20
_VERSION_LINE = re.compile(rb"(OpenTofu|Terraform) v(\d+\.\d+\.\d+)")


class EngineMissing(Exception):
    """No program can be the engine. The message says what to do."""


@dataclass(frozen=True)
class Engine:
    """A program that plans and applies."""

    path: Path
    product: str
    """opentofu | terraform"""
    version: str

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def can_encrypt(self) -> bool:
        """State and plan encryption with the external key provider (OpenTofu 1.10)."""
        return self.product == OPENTOFU and self.release >= (1, 10)

    @property
    def has_json_into(self) -> bool:
        """`-json-into`: human text on stdout and messages into a file (OpenTofu 1.12)."""
        return self.product == OPENTOFU and self.release >= (1, 12)


async def find_engine(explicit: Path | None) -> Engine:
    """The engine: the one named, `tofu` on PATH, what `make tools` made, or `terraform` on PATH.

    The first OpenTofu of 1.12 or newer is taken; if there is none, the first that answers. A program that was
    named is never passed over for another. Raises EngineMissing.
    """
    tried: list[str] = []
    stand_ins: list[Engine] = []
    candidates = [explicit] if explicit is not None else list(_candidates())
    for candidate in map(Path.absolute, candidates):
        engine = await _ask(candidate)
        if engine is None:
            tried.append(str(candidate))
        elif engine.has_json_into:
            return engine
        else:
            stand_ins.append(engine)
    if stand_ins:
        return stand_ins[0]
    if explicit is not None:
        raise EngineMissing(
            f"REZUSCLOUD_TOFU names {explicit}, which does not answer as OpenTofu; nothing is applied. "
            "Name the program, or leave the setting empty."
        )
    seen = f" ({', '.join(tried)} did not answer)" if tried else ""
    raise EngineMissing(
        f"no OpenTofu was found{seen}; nothing is applied. Run `make tools`, install OpenTofu 1.12 or newer, "
        "or set REZUSCLOUD_TOFU to it."
    )


def _candidates() -> Iterator[Path]:
    if on_path := shutil.which("tofu"):
        yield Path(on_path)
    checkout = Path(__file__).resolve().parent.parent.parent
    for base in dict.fromkeys((Path.cwd(), checkout)):
        if os.access(base / TOOLS, os.X_OK):
            yield base / TOOLS
    if on_path := shutil.which("terraform"):
        yield Path(on_path)


async def _ask(program: Path) -> Engine | None:
    """What a program says of itself; None when it is no engine."""
    env = {"PATH": os.defpath, "HOME": "/", "CHECKPOINT_DISABLE": "1", "TF_CLI_CONFIG_FILE": os.devnull}
    try:
        process = await asyncio.create_subprocess_exec(
            str(program),
            "version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=env,
        )
    except OSError:
        return None
    try:
        out, _ = await asyncio.wait_for(process.communicate(), _VERSION_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    # `version -json` would not tell the two products apart.
    found = _VERSION_LINE.match(out.lstrip())
    return Engine(program, found[1].decode().lower(), found[2].decode()) if found else None
