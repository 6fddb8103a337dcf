"""Owns TF states as bytes: versions, serial and lineage, and who holds the lock. Bodies stay on disk.

It knows nothing of ciphers, HTTP or who may do what.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from rezuscloud.model.errors import Conflict, InternalError
from rezuscloud.model.meta import Doc, format_time, parse_time

if TYPE_CHECKING:
    from rezuscloud.store.db import Store, Transaction

KEPT = 30


@dataclass(frozen=True)
class StateMeta:
    """One accepted state. `version` counts per tenant; `serial` and `lineage` are OpenTofu's."""

    version: int
    serial: int
    lineage: str
    sha256: str
    size_bytes: int
    encrypted: bool
    key_id: str
    run: str
    created: dt.datetime
    resource_count: int | None


@dataclass(frozen=True)
class Lock:
    """The lock of one tenant's state. `info` is the LockInfo as it came; `run` is empty for an operator's."""

    id: str
    info: Doc
    holder: str
    run: str
    created: dt.datetime


class LockHeld(Exception):
    """Somebody else holds the lock."""

    def __init__(self, lock: Lock) -> None:
        super().__init__(f"the state is locked by {lock.info.get('Who') or lock.holder}")
        self.lock = lock


class States:
    """States and locks of all tenants, by tenant uid."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # ------------------------------------------------------------ reading

    def current(self, tenant_uid: str, tx: Transaction | None = None) -> StateMeta | None:
        """The newest version, as committed, or as a transaction sees it."""
        key = ("state", tenant_uid)
        found: StateMeta | None = tx.peek(key) if tx is not None else self._store.memory.get(key)
        return found

    def lock(self, tenant_uid: str, tx: Transaction | None = None) -> Lock | None:
        key = ("lock", tenant_uid)
        found: Lock | None = tx.peek(key) if tx is not None else self._store.memory.get(key)
        return found

    async def body(self, tenant_uid: str, version: int | None = None) -> bytes | None:
        """The bytes of a version (the newest when None), or None.

        Raises InternalError when the newest is not there though it was stored: "no state" would have the
        engine make everything anew.
        """
        current = self.current(tenant_uid)
        if version is None:
            if current is None:
                return None
            version = current.version
        sql = "SELECT body FROM states WHERE tenant_uid = ? AND version = ?"
        row = await self._store.read(lambda c: c.execute(sql, (tenant_uid, version)).fetchone())
        if row is not None:
            return bytes(row[0])
        if current is not None and version == current.version and self.current(tenant_uid) == current:
            raise InternalError(
                f"state version {version} is missing in the database, though it was stored; nothing is "
                "planned or applied with it. Restore the data directory from a backup."
            )
        return None

    async def history(self, tenant_uid: str) -> list[StateMeta]:
        """The kept versions, oldest first."""
        sql = "SELECT meta FROM states WHERE tenant_uid = ? ORDER BY version"
        rows = await self._store.read(lambda c: c.execute(sql, (tenant_uid,)).fetchall())
        return [_read_meta(row[0]) for row in rows]

    # ------------------------------------------------------------ writing

    def accept(
        self,
        tx: Transaction,
        tenant_uid: str,
        body: bytes,
        *,
        serial: int,
        lineage: str,
        sha256: str,
        encrypted: bool,
        key_id: str,
        run: str,
        lock_id: str | None,
        resource_count: int | None,
        keep: int = KEPT,
    ) -> tuple[StateMeta, bool]:
        """Stores a state as the next version; False when it is the newest one once more.

        Raises Conflict when the lock is not held under `lock_id`, the lineage is another one than that of a
        stored state, or the serial is lower than the stored one.
        """
        held = self.lock(tenant_uid, tx)
        if held is None or held.id != lock_id:
            raise Conflict("the state lock is not held under this ID; take the lock first")
        current = self.current(tenant_uid, tx)
        if current is not None:
            if current.sha256 == sha256 and current.serial == serial:
                return current, False
            if lineage != current.lineage and current.resource_count != 0:
                raise Conflict(
                    f"this state has another lineage ({lineage}) than the stored one ({current.lineage}): it "
                    "belongs to something else; the stored state is unchanged"
                )
            if serial < current.serial and lineage == current.lineage:
                raise Conflict(
                    f"this state is older (serial {serial}) than the stored one (serial {current.serial}); "
                    "the stored state is unchanged"
                )
        meta = StateMeta(
            version=current.version + 1 if current else 1,
            serial=serial,
            lineage=lineage,
            sha256=sha256,
            size_bytes=len(body),
            encrypted=encrypted,
            key_id=key_id,
            run=run,
            created=tx.now.replace(microsecond=0),
            resource_count=resource_count,
        )
        tx.stage(("state", tenant_uid), meta)
        tx.run(lambda connection: _insert(connection, tenant_uid, meta, body), size_bytes=len(body))
        tx.execute(
            "DELETE FROM states WHERE tenant_uid = ? AND version <= ?", (tenant_uid, meta.version - keep)
        )
        return meta, True

    def take_lock(self, tx: Transaction, tenant_uid: str, lock: Lock) -> None:
        """Takes the lock; by the id that holds it, it is taken already. Raises LockHeld."""
        held = self.lock(tenant_uid, tx)
        if held is not None:
            if held.id != lock.id:
                raise LockHeld(held)
            return
        lock = replace(lock, created=lock.created.replace(microsecond=0))
        tx.stage(("lock", tenant_uid), lock)
        value = {
            "id": lock.id,
            "info": lock.info,
            "holder": lock.holder,
            "run": lock.run,
            "created": format_time(lock.created),
        }
        tx.execute(
            "INSERT INTO records (key, value) VALUES (?, ?)", (_lock_key(tenant_uid), orjson.dumps(value))
        )

    def release_lock(self, tx: Transaction, tenant_uid: str, lock_id: str) -> bool:
        """Releases the lock; False when it is not held under this id."""
        held = self.lock(tenant_uid, tx)
        if held is None or held.id != lock_id:
            return False
        tx.stage(("lock", tenant_uid), None)
        tx.execute("DELETE FROM records WHERE key = ?", (_lock_key(tenant_uid),))
        return True

    def drop(self, tx: Transaction, tenant_uid: str) -> None:
        """Forgets all versions and the lock."""
        if self.current(tenant_uid, tx) is not None:
            tx.stage(("state", tenant_uid), None)
            tx.execute("DELETE FROM states WHERE tenant_uid = ?", (tenant_uid,))
        if (held := self.lock(tenant_uid, tx)) is not None:
            self.release_lock(tx, tenant_uid, held.id)

    async def load(self) -> None:
        """Only at the start."""

        def read(connection: sqlite3.Connection) -> tuple[list[Any], list[Any]]:
            newest = (
                "SELECT tenant_uid, meta FROM states WHERE (tenant_uid, version) IN "
                "(SELECT tenant_uid, max(version) FROM states GROUP BY tenant_uid)"
            )
            locks = "SELECT key, value FROM records WHERE key >= 'lock/' AND key < 'lock0'"
            return connection.execute(newest).fetchall(), connection.execute(locks).fetchall()

        metas, locks = await self._store.read(read)
        for tenant_uid, raw in metas:
            self._store.memory["state", tenant_uid] = _read_meta(raw)
        for key, raw in locks:
            value = orjson.loads(raw)
            value["created"] = parse_time(value["created"])
            self._store.memory["lock", key.removeprefix("lock/")] = Lock(**value)


def _insert(connection: sqlite3.Connection, tenant_uid: str, meta: StateMeta, body: bytes) -> None:
    """Writes the body into a row made before: as a parameter it would be copied, and the prepared statement
    would keep the copy."""
    row = connection.execute(
        "INSERT INTO states (tenant_uid, version, meta, body) VALUES (?, ?, ?, zeroblob(?))",
        (tenant_uid, meta.version, _write_meta(meta), len(body)),
    ).lastrowid
    assert row is not None
    with connection.blobopen("states", "body", row) as blob:
        blob.write(body)


def _lock_key(tenant_uid: str) -> str:
    return f"lock/{tenant_uid}"


def _write_meta(meta: StateMeta) -> bytes:
    return orjson.dumps({**meta.__dict__, "created": format_time(meta.created)})


def _read_meta(raw: bytes) -> StateMeta:
    value = orjson.loads(raw)
    return StateMeta(**{**value, "created": parse_time(value["created"])})
