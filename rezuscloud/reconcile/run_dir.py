"""Owns the working directory of one run: its files, its plan, its record, and what a failed upload leaves.

The record (`run.json`) tells a later start of the server which process worked here and with what, so that a
run cut short can be cleared up or a held plan be applied.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


class RunDir:
    """`<root>/<tenant uid>/<run name>`, 0700. Methods block on small file I/O."""

    def __init__(self, root: Path, tenant_uid: str, run: str) -> None:
        self.path = root / tenant_uid / run
        self.plan_file = self.path / "tfplan"
        self.errored_state = self.path / "errored.tfstate"
        self._record = self.path / "run.json"
        self._reserve = self.path / "reserve"

    def create(self, files: Mapping[str, bytes], record: Mapping[str, Any]) -> None:
        """Makes the directory anew with these files. Left-overs of the same name are removed first."""
        self.remove()
        self.path.mkdir(mode=0o700, parents=True)
        for name, content in files.items():
            _write(self.path / name, content)
        self.write_record(record)

    def write_record(self, record: Mapping[str, Any]) -> None:
        part = self._record.with_suffix(".part")
        _write(part, json.dumps(record).encode())
        part.replace(self._record)

    def read_record(self) -> dict[str, Any] | None:
        """The record, or None when there is none or it cannot be read."""
        try:
            record = json.loads(self._record.read_bytes())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def reserve(self, size_bytes: int) -> None:
        """Sets space on the disk aside, for a state that must be stored however full the disk gets. Raises
        OSError when there is not so much."""
        fd = os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            os.close(fd)

    def free_reserve(self) -> None:
        self._reserve.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @staticmethod
    def runs_of(root: Path, tenant_uid: str) -> list[str]:
        """Names of the runs of a tenant that have a directory."""
        folder = root / tenant_uid
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    @staticmethod
    def remove_other_tenants(root: Path, tenant_uids: Collection[str]) -> None:
        """Removes what is left of tenants that are gone."""
        for path in root.iterdir() if root.is_dir() else ():
            if path.name not in tenant_uids:
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def remove_tenant(root: Path, tenant_uid: str) -> None:
        shutil.rmtree(root / tenant_uid, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
