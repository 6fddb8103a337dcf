"""Small resources for the store's tests, and what lies in its files."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.meta import Doc
from rezuscloud.store.db import Store

DATABASE = "rezuscloud.db"
_libc = ctypes.CDLL(None, use_errno=True)


def doc(name: str, value: Any = 0, *, kind: str = "Tenant", namespace: str = "", uid: str = "") -> Doc:
    meta: Doc = {"name": name, "uid": uid or f"uid-{kind}-{namespace}-{name}"}
    if namespace:
        meta["namespace"] = namespace
    return {"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": {"value": value}}


async def put(store: Store, *docs: Doc) -> Doc:
    """Writes them in one transaction; gives the last as it was stored."""
    return (await store.transact(lambda tx: [tx.put(each) for each in docs]))[-1]


def fingerprint(data_dir: Path, *, without: tuple[str, ...] = ("lock",)) -> dict[str, str]:
    """What each file holds. The lock names whoever came last; an index of the log holds no data."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(data_dir.iterdir())
        if path.is_file() and path.name not in without
    }


def rows(data_dir: Path, sql: str, *params: Any) -> list[Any]:
    """What another program sees in the file."""
    uri = f"{(data_dir / DATABASE).as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True)
    try:
        return connection.execute(sql, params).fetchall()
    finally:
        connection.close()


def rss_mib() -> float:
    """Memory of this process that is in use now."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[Path]:
    """A file system of its own, soon full; skips loudly where none can be mounted."""
    path.mkdir()
    if _libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, f"size={size_mib}m".encode()) != 0:
        pytest.skip(f"NOT PROVED: no tmpfs can be mounted here ({os.strerror(ctypes.get_errno())})")
    try:
        yield path
    finally:
        _libc.umount2(bytes(path), 2)  # MNT_DETACH


def fill(path: Path) -> None:
    """Takes all the space that is left, in this file."""
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC
