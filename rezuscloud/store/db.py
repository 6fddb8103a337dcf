"""Owns the only writer, and what a transaction is.

Every write is a function over a `Transaction`. The writer runs waiting functions one after another in the
event loop, each over an overlay of what is committed, writes all their rows in one SQLite transaction in one
hop to the connection's thread (group commit), and only then lets anybody see or hear of them. What a row
means lies in `resources.py`, `states.py` and `records.py`; the file itself in `opening.py`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import datetime as dt
import functools
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rezuscloud.model.errors import InsufficientStorage, InternalError, Unavailable
from rezuscloud.model.events import ChangeType, ResourceEvent
from rezuscloud.model.meta import Doc, utc_now
from rezuscloud.store.opening import (
    FILE,
    PAGE_BYTES,
    Connection,
    StoreDamaged,
    StoreInUse,
    connected,
    locked,
    prepare,
)
from rezuscloud.store.records import Records, RunLogs
from rezuscloud.store.resources import (
    Change,
    ChangeLog,
    Key,
    Objects,
    Stored,
    encode,
    is_same,
    key_of,
    with_version,
)
from rezuscloud.store.states import States

__all__ = ["Store", "StoreDamaged", "StoreInUse", "Transaction"]

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUP = 50
"""How many waiting functions share one commit at the most."""
KEPT_CHANGES = 10_000
"""Changes that are kept at the least, in memory as bytes; a watch that asks for older ones starts anew."""
PRUNE_EVERY = 1_000
"""So many more may lie in the table before they are removed together."""
CHECKPOINT_BYTES = 16 * 2**20
"""Write-ahead log that may gather before it is moved into the file."""
QUIET_S = 0.5
"""So long nobody must have written before it is moved; at twice the size nobody is waited for."""
_FULL_DISK_BYTES = 2**20

Work = Callable[[sqlite3.Connection], object]


class _Pending:
    """What one transaction does to one resource; several writes of it are one change."""

    __slots__ = ("doc", "key", "type", "version")

    def __init__(self, key: Key, version: int, type_: ChangeType, doc: Doc) -> None:
        self.key = key
        self.version = version
        self.type = type_
        self.doc = doc


class _Batch:
    """What a group of transactions has done so far and nobody else may see yet."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.objects: dict[Key, Stored | None] = {}
        """As they will be; None for what was deleted."""
        self.values: dict[Hashable, Any] = {}
        self.changes: list[Change] = []
        self.work: list[Work] = []
        self.work_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.changes or self.work)

    @property
    def log_bytes(self) -> int:
        """About how much the write-ahead log grows: whole pages, two rows a change."""
        pages = 2 + 2 * len(self.changes) + len(self.work)
        return pages * PAGE_BYTES + self.work_bytes + 2 * sum(len(change.raw) for change in self.changes)

    def write(self, connection: sqlite3.Connection) -> None:
        """Makes it durable, or nothing of it. On the connection's thread."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._write_objects(connection)
            rows = [(change.version, change.type.value, change.raw) for change in self.changes]
            _execute_rows(connection, _insert_changes, rows)
            for work in self.work:
                work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _write_objects(self, connection: sqlite3.Connection) -> None:
        gone = [key for key, stored in self.objects.items() if stored is None]
        if gone:
            connection.executemany("DELETE FROM objects WHERE (kind, namespace, name) = (?, ?, ?)", gone)
        rows = [(*key, stored.raw) for key, stored in self.objects.items() if stored is not None]
        _execute_rows(connection, _upsert_objects, rows)


class Transaction:
    """What one function of the writer sees: all that is committed, all of its group, its own changes."""

    def __init__(self, store: Store, batch: _Batch) -> None:
        self.now: dt.datetime = utc_now()
        self._store = store
        self._batch = batch
        """What earlier functions of the same group left; not changed until this one is through."""
        self._version = batch.version
        self._changes: builtins.list[_Pending] = []
        self._newest: dict[Key, _Pending] = {}
        self._values: dict[Hashable, Any] = {}
        self._work: builtins.list[Work] = []
        self._work_bytes = 0

    # ------------------------------------------------------------ resources

    def get(self, kind: str, namespace: str, name: str) -> Doc | None:
        """A resource, or None. Nobody may change what is returned."""
        return self._get(Key(kind, namespace, name))

    def list(self, kind: str, namespace: str | None = None) -> list[Doc]:
        """The resources of a kind, by namespace and name; of all tenants when `namespace` is None."""
        found = self._store.objects.list(kind, namespace)
        changed = {
            key
            for layer in (self._batch.objects, self._newest)
            for key in layer
            if key.kind == kind and namespace in (None, key.namespace)
        }
        if not changed:
            return [stored.doc for stored in found]
        docs = {key: stored.doc for stored in found if (key := key_of(stored.doc)) not in changed}
        docs |= {key: doc for key in changed if (doc := self._get(key)) is not None}
        return [docs[key] for key in sorted(docs)]

    def put(self, doc: Doc) -> Doc:
        """Adds or updates a resource and returns it with its resourceVersion; an unchanged one stays as it
        is. Does not change its argument, which nobody may change afterwards."""
        key = key_of(doc)
        current = self._get(key)
        if current is not None and is_same(doc, current):
            return current
        change = self._newest.get(key)
        if change is None or change.type is ChangeType.DELETED:
            change = self._change(key, ChangeType.ADDED if current is None else ChangeType.MODIFIED, doc)
        change.doc = with_version(doc, str(change.version))
        return change.doc

    def delete(self, kind: str, namespace: str, name: str) -> Doc:
        """Removes a resource and returns its last form, under a new resourceVersion. Raises KeyError."""
        key = Key(kind, namespace, name)
        current = self._get(key)
        if current is None:
            raise KeyError(f"{kind} {namespace}/{name}")
        earlier = self._newest.get(key)
        if earlier is not None and earlier.type is ChangeType.MODIFIED:
            self._changes.remove(earlier)
        change = self._change(key, ChangeType.DELETED, current)
        change.doc = with_version(current, str(change.version))
        return change.doc

    # ------------------------------------------------------------ for the other mirrors of the store

    def stage(self, key: Hashable, value: Any) -> None:
        """Sets a value of the store's memory, for this transaction and, once committed, for all. None
        removes it."""
        self._values[key] = value

    def peek(self, key: Hashable) -> Any:
        """A value of the store's memory as this transaction sees it; None when there is none."""
        for layer in (self._values, self._batch.values):
            if key in layer:
                return layer[key]
        return self._store.memory.get(key)

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        """A statement to run at the commit. Only for the store's own rooms."""
        self._work.append(lambda connection: connection.execute(sql, params))

    def run(self, work: Work, *, size_bytes: int) -> None:
        """Something else to do at the commit, inside its transaction. Only for the store's own rooms."""
        self._work.append(work)
        self._work_bytes += size_bytes

    # ------------------------------------------------------------ inside

    def _get(self, key: Key) -> Doc | None:
        change = self._newest.get(key)
        if change is not None:
            return None if change.type is ChangeType.DELETED else change.doc
        objects = self._batch.objects
        found = objects[key] if key in objects else self._store.objects.at(key)
        return found.doc if found is not None else None

    def _change(self, key: Key, type_: ChangeType, doc: Doc) -> _Pending:
        self._version += 1
        change = _Pending(key, self._version, type_, doc)
        self._changes.append(change)
        self._newest[key] = change
        return change

    def finish(self) -> None:
        """Only for the writer: hands everything to the batch, or raises and hands over nothing."""
        objects: dict[Key, Stored | None] = {}
        changes: builtins.list[Change] = []
        for change in self._changes:
            key, stored = change.key, encode(change.doc)
            for layer in (objects, self._batch.objects):
                if key in layer:
                    before = layer[key]
                    break
            else:
                before = self._store.objects.at(key)
            objects[key] = None if change.type is ChangeType.DELETED else stored
            event = ResourceEvent(change.version, change.type, stored.doc, before.doc if before else None)
            changes.append(Change(event, stored.raw, before.raw if before else None))
        batch = self._batch
        batch.version = self._version
        batch.objects |= objects
        batch.changes += changes
        batch.values |= self._values
        batch.work += self._work
        batch.work_bytes += self._work_bytes


class _Waiting:
    """One function that waits for its turn, and who waits for it."""

    __slots__ = ("_answer", "fn")

    def __init__(self, fn: Callable[[Transaction], Any], answer: asyncio.Future[Any]) -> None:
        self.fn = fn
        self._answer: asyncio.Future[Any] | None = answer

    @property
    def is_over(self) -> bool:
        """Answered, or its caller was cancelled."""
        return self._answer is None or self._answer.done()

    def succeed(self, result: Any) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._answer is not None and not self._answer.done():
            # A future refuses StopIteration, which a careless `next()` raises.
            is_refused = isinstance(error, StopIteration)
            self._answer.set_exception(RuntimeError(repr(error)) if is_refused else error)
        # The error's frames lead back to here. Without this they would form a circle, and all that the caller
        # holds, a large state, would stay until the collector comes by.
        self._answer = None


class Store:
    """Everything that must survive. One per data directory."""

    def __init__(self, path: Path, writer: Connection, reader: Connection) -> None:
        self.path = path
        self.memory: dict[Hashable, Any] = {}
        self.objects = Objects()
        self.log = ChangeLog(KEPT_CHANGES)
        self.states = States(self)
        self.records = Records(self)
        self.run_logs = RunLogs(path.parent / "logs")
        self.degraded: str | None = None
        """Why nothing can be written at the moment, or None."""
        self.on_commit: list[Callable[[Sequence[ResourceEvent]], None]] = []
        """Called in the event loop after each commit, in order, before those who wrote are answered."""
        self.on_full: list[Callable[[], None]] = []
        """Called when a commit failed because the disk is full: who has set space aside may free it."""
        self.on_commit_timed: list[Callable[[float], None]] = []
        """Called with the seconds that each commit took."""
        self._writer = writer
        self._reader = reader
        self._waiting: deque[_Waiting] = deque()
        self._writing: asyncio.Task[None] | None = None
        """Lives while something waits, so nothing that was written stays in memory with it."""
        self._is_closing = False
        self._surplus = 0
        """Rows of the change log beyond those that are kept; negative while there are fewer."""
        self._quiet: asyncio.TimerHandle | None = None
        self._log_bytes = 0
        """About how much of the write-ahead log is not yet in the file."""

    @classmethod
    @asynccontextmanager
    async def open(cls, data_dir: Path) -> AsyncIterator[Store]:
        """The store of a data directory, for the block. Raises StoreInUse or StoreDamaged; a database that
        cannot be read is never made anew."""
        with locked(data_dir):
            await asyncio.to_thread(prepare, data_dir)
            path = data_dir / FILE
            async with (
                connected(path, read_only=False) as writer,
                connected(path, read_only=True) as reader,
            ):
                store = cls(path, writer, reader)
                await store._load()
                try:
                    yield store
                finally:
                    await store._close()

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` and makes its changes durable; returns what it returned once they are.

        `fn` runs in the event loop, so it must be quick and must not wait. What it raises is raised here and
        leaves nothing behind. Raises InsufficientStorage when the disk is full. Who is cancelled while the
        commit is under way does not learn whether it was done.
        """
        if self._is_closing:
            raise Unavailable("the server is stopping; nothing was changed", retry_after_s=2)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(fn, answer))
        self._start_writing()
        try:
            return await answer
        finally:
            del answer  # an error's frames lead back to here: see _Waiting.fail

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a query on the reading connection's thread. Only for the store's own rooms."""
        return await self._reader.run(fn)

    # ------------------------------------------------------------ the writer

    def _start_writing(self, *, moves_log: bool = False) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(moves_log), name="store writer")

    async def _write(self, moves_log: bool) -> None:
        try:
            if moves_log:
                await self._checkpoint()
            while self._waiting:
                group = [self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))]
                try:
                    await self._commit(group)
                except BaseException as error:
                    _fail(group, _broken(error))
                    raise
                del group
                if self._log_bytes >= 2 * CHECKPOINT_BYTES:
                    await self._checkpoint()
        except Exception as error:
            log.exception("the writer failed in a way nobody foresaw; the next write starts it again")
            _fail(self._waiting, _broken(error))
        finally:
            self._writing = None
            self._checkpoint_when_quiet()

    async def _commit(self, group: Iterable[_Waiting]) -> None:
        batch = _Batch(self.log.version)
        done: list[tuple[_Waiting, Any]] = []
        for waiting in group:
            if waiting.is_over:
                continue
            tx = Transaction(self, batch)
            try:
                result = waiting.fn(tx)
                tx.finish()
            except Exception as error:
                waiting.fail(error)
            else:
                done.append((waiting, result))
        if batch:
            self._prune(batch)
            started = time.perf_counter()
            try:
                await self._writer.run(batch.write)
            except Exception as error:
                _fail((waiting for waiting, _ in done), self._refuse(error))
                return
            self._committed(batch, time.perf_counter() - started)
        for waiting, result in done:
            waiting.succeed(result)

    def _committed(self, batch: _Batch, seconds: float) -> None:
        """Lets everybody see and hear of it."""
        if self.degraded is not None:
            log.info("the database can be written again")
            self.degraded = None
        self._log_bytes += batch.log_bytes
        self._surplus = len(batch.changes) + (0 if self._surplus >= PRUNE_EVERY else self._surplus)
        for key, stored in batch.objects.items():
            self.objects.set(key, stored)
        for name, value in batch.values.items():
            if value is None:
                self.memory.pop(name, None)
            else:
                self.memory[name] = value
        if batch.changes:
            for change in batch.changes:
                self.log.append(change)
            events = [change.event for change in batch.changes]
            for callback in self.on_commit:
                _tell(callback, events)
        for timed in self.on_commit_timed:
            _tell(timed, seconds)

    def _refuse(self, error: Exception) -> Exception:
        """Tells the house that a commit failed, and gives what its callers are told."""
        self.degraded = f"nothing can be written: {error}"
        log.error("a commit failed, nothing of it was stored: %s", error)
        if not self._is_full(error):
            return InternalError(
                f"the database could not be written ({error}); nothing was changed and reading goes on. "
                "Try again; the server's log tells more."
            )
        for callback in self.on_full:
            _tell(callback)
        return InsufficientStorage(
            f"the disk of the data directory is full ({error}); nothing was changed and reading goes on. "
            "Free some space and try again."
        )

    def _is_full(self, error: Exception) -> bool:
        """A full disk shows as an I/O error where SQLite extends its shared memory or its log."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_IOERR:
            disk = os.statvfs(self.path.parent)
            return disk.f_bavail * disk.f_frsize < _FULL_DISK_BYTES
        return code == sqlite3.SQLITE_FULL

    def _prune(self, batch: _Batch) -> None:
        """Shortens the log along with a write that happens anyway: an idle store writes nothing."""
        if self._surplus >= PRUNE_EVERY:
            oldest = self.log.oldest_kept

            def prune(connection: sqlite3.Connection) -> None:
                connection.execute("DELETE FROM changes WHERE version < ?", (oldest,))

            batch.work.append(prune)

    def _checkpoint_when_quiet(self) -> None:
        """Plans to move the write-ahead log into the file once it has grown and nobody writes: who came in
        the middle of it would wait."""
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if self._log_bytes >= CHECKPOINT_BYTES and not self._is_closing:
            loop = asyncio.get_running_loop()
            self._quiet = loop.call_later(QUIET_S, functools.partial(self._start_writing, moves_log=True))

    async def _checkpoint(self) -> None:
        self._log_bytes = 0
        # The next one tries again; what is committed is safe in the log.
        with contextlib.suppress(sqlite3.Error):
            await self._writer.run(self._move_log)

    def _move_log(self, connection: sqlite3.Connection) -> None:
        # A log that keeps its size is written faster; one that a large state has blown up is cut.
        is_large = self.path.with_name(f"{FILE}-wal").stat().st_size > CHECKPOINT_BYTES
        connection.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if is_large else 'PASSIVE'})").fetchall()

    # ------------------------------------------------------------ life

    async def _load(self) -> None:
        self._surplus = await self.read(self._read_resources)
        await self.states.load()
        await self.records.load()

    def _read_resources(self, connection: sqlite3.Connection) -> int:
        """Fills objects and log; gives the surplus of the log."""
        for kind, namespace, name, raw in connection.execute(
            "SELECT kind, namespace, name, doc FROM objects"
        ):
            self.objects.set(Key(kind, namespace, name), Stored.of(raw))
        newest = "SELECT version, type, doc FROM changes ORDER BY version DESC LIMIT ?"
        changes = connection.execute(newest, (KEPT_CHANGES,)).fetchall()
        last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
        self.log.load(reversed(changes), last[0] if last else 0)
        count: int = connection.execute("SELECT count(*) FROM changes").fetchone()[0]
        return count - KEPT_CHANGES

    async def _close(self) -> None:
        """What waits is still written; only then the writer ends."""
        self._is_closing = True
        if self._writing is not None:
            await self._writing
        if self._quiet is not None:
            self._quiet.cancel()
        with contextlib.suppress(sqlite3.Error):
            await self._writer.run(lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())


def _tell(callback: Callable[..., None], *args: Any) -> None:
    try:
        callback(*args)
    except Exception:
        log.exception("somebody who was told of a commit failed")


def _fail(group: Iterable[_Waiting], error: Exception) -> None:
    for waiting in group:
        waiting.fail(error)


def _broken(error: BaseException) -> InternalError:
    return InternalError(
        f"the write broke off ({error!r}) and may be done or not; look before you repeat it. The server's "
        "log tells more."
    )


# ---------------------------------------------------------------- rows

_SIZES = (1, 8, 64)
"""Rows a statement: few sizes, so that SQLite keeps them all prepared."""


def _execute_rows(
    connection: sqlite3.Connection, sql: Callable[[int], str], rows: Sequence[tuple[Any, ...]]
) -> None:
    """Many rows in one statement; rows of NULL fill it up. A statement gives the interpreter lock away
    several times and gets it back when the event loop lets go: under load that costs more than its rows."""
    for start in range(0, len(rows), _SIZES[-1]):
        part = rows[start : start + _SIZES[-1]]
        size = next(size for size in _SIZES if size >= len(part))
        params = [param for row in part for param in row]
        params += [None] * ((size - len(part)) * len(part[0]))
        connection.execute(sql(size), params)


@functools.cache
def _upsert_objects(count: int) -> str:
    return (
        f"INSERT INTO objects (kind, namespace, name, doc) {_values(4, count)} "
        "ON CONFLICT (kind, namespace, name) DO UPDATE SET doc = excluded.doc"
    )


@functools.cache
def _insert_changes(count: int) -> str:
    return f"INSERT INTO changes (version, type, doc) {_values(3, count)}"


def _values(columns: int, count: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return f"SELECT * FROM (VALUES {', '.join([row] * count)}) WHERE column1 IS NOT NULL"  # noqa: S608 - no input
