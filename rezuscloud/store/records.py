"""Owns small records that are no resources (by key, in memory and on disk), and the logs of runs (files)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from rezuscloud.store.db import Store, Transaction

LOG_CAP = 8 * 2**20
_CLOSING = b"\n--- this log has reached its limit and is not continued ---\n"
_LOCKS = "lock/"
"""Records of `states.py`."""
_UID = re.compile(r"[0-9a-f-]{8,64}")


class Records:
    """JSON values by key."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, key: str) -> Any:
        """The value, or None. Nobody may change what is returned."""
        return self._store.memory.get(("record", key))

    def put(self, tx: Transaction, key: str, value: Any) -> None:
        """Sets a value; null is the same as none."""
        if key.startswith(_LOCKS):
            raise ValueError(f"{key!r}: these records are the locks of states")
        if value is None:
            self.delete(tx, key)
            return
        raw, current = orjson.dumps(value), tx.peek(("record", key))
        if current is not None and orjson.dumps(current) == raw:
            return
        tx.stage(("record", key), orjson.loads(raw))
        tx.execute(
            "INSERT INTO records (key, value) VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            (key, raw),
        )

    def delete(self, tx: Transaction, key: str) -> None:
        """Removes a value; nothing when there is none."""
        if tx.peek(("record", key)) is not None:
            tx.stage(("record", key), None)
            tx.execute("DELETE FROM records WHERE key = ?", (key,))

    async def load(self) -> None:
        """Only at the start."""
        sql = "SELECT key, value FROM records WHERE NOT (key >= 'lock/' AND key < 'lock0')"
        for key, raw in await self._store.read(lambda c: c.execute(sql).fetchall()):
            self._store.memory["record", key] = orjson.loads(raw)


class RunLogs:
    """One append-only file a run, by its uid. No more than LOG_CAP bytes and a closing notice, mode 0600."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def append(self, uid: str, chunk: bytes) -> None:
        """Raises OSError, also when only a part could be written."""
        path = self._path(uid)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            room = LOG_CAP - os.fstat(handle).st_size
            if room <= 0:
                return
            left = memoryview(chunk if len(chunk) < room else chunk[:room] + _CLOSING)
            while left:
                left = left[os.write(handle, left) :]
        finally:
            os.close(handle)

    def read(self, uid: str, offset: int = 0, limit: int = 2**20) -> tuple[bytes, int]:
        """Up to `limit` bytes from `offset`, and the offset to go on from."""
        try:
            with self._path(uid).open("rb") as file:
                file.seek(offset)
                chunk = file.read(limit)
        except FileNotFoundError:
            return b"", offset
        return chunk, offset + len(chunk)

    def size(self, uid: str) -> int:
        try:
            return self._path(uid).stat().st_size
        except FileNotFoundError:
            return 0

    def delete(self, uid: str) -> None:
        self._path(uid).unlink(missing_ok=True)

    def _path(self, uid: str) -> Path:
        if not _UID.fullmatch(uid):
            raise ValueError(f"no uid: {uid!r}")
        return self._directory / f"{uid}.log"
