"""Owns the one SQLite file: opening it safely, its settings and migrations, and the only writer.

Every write is a function over a `Transaction`. One task runs waiting functions one after another in the event
loop, each over an overlay of what is committed, writes all their rows in one SQLite transaction in one hop to
the connection's thread (group commit), and only then lets anybody see or hear of them. What a row means lies
in `resources.py`, `states.py` and `records.py`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import datetime as dt
import errno
import fcntl
import logging
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, cast

import aiosqlite

from rezuscloud.model.errors import InsufficientStorage, InternalError, Unavailable
from rezuscloud.model.events import ChangeType, ResourceEvent
from rezuscloud.model.meta import Doc, utc_now
from rezuscloud.store.records import Records, RunLogs
from rezuscloud.store.resources import (
    MISSING,
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

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "rezuscloud.db"
MARKER = "initialised"
LOCK_FILE = "lock"
GROUP = 50
"""How many waiting functions share one commit at the most."""
KEPT_CHANGES = 20_000
"""Rows of the change log that are kept; a watch that asks for older ones starts anew."""
_PRUNE_EVERY = 1_000
_CHECKPOINT_BYTES = 4 * 2**20
_TRUNCATE_BYTES = 16 * 2**20
_VERSION = "version"
"""Key of an overlay under which the newest version given lies."""

Statement = tuple[str, Sequence[Any]]
_UPSERT = (
    "INSERT INTO objects (kind, namespace, name, doc) VALUES (?, ?, ?, ?) "
    "ON CONFLICT DO UPDATE SET doc = excluded.doc"
)
_DELETE = "DELETE FROM objects WHERE kind = ? AND namespace = ? AND name = ?"
_LOG = "INSERT INTO changes (version, type, doc) VALUES (?, ?, ?)"

_FULL = ("full", "disk i/o error")


class StoreInUse(Exception):
    """Another server has this data directory."""


class StoreDamaged(Exception):
    """The database cannot be used as it is. It was left untouched."""


class _Change:
    """What one transaction does to one resource; several writes of it are one change."""

    __slots__ = ("before", "doc", "key", "type", "version")

    def __init__(self, key: Key, version: int, type_: ChangeType, doc: Doc, before: Doc | None) -> None:
        self.key = key
        self.version = version
        self.type = type_
        self.doc = doc
        self.before = before


class Transaction:
    """What one function of the writer sees: all that is committed, all of its group, its own changes."""

    def __init__(self, store: Store, staged: dict[Hashable, Any]) -> None:
        self.now: dt.datetime = utc_now()
        self._store = store
        self._staged = staged
        """What earlier functions of the same group left; seen, not changed, until this one is through."""
        self._version = cast(int, staged.get(_VERSION) or store.log.version)
        self._own: dict[Hashable, Any] = {}
        self._changes: builtins.list[_Change] = []
        self._newest: dict[Key, _Change] = {}
        self._statements: builtins.list[Statement] = []

    # ------------------------------------------------------------ resources

    def get(self, kind: str, namespace: str, name: str) -> Doc | None:
        """A resource, or None. Nobody may change what is returned."""
        key = Key(kind, namespace, name)
        if (change := self._newest.get(key)) is not None:
            return None if change.type is ChangeType.DELETED else change.doc
        if key in self._staged:
            staged: Stored = self._staged[key]
            return None if staged is MISSING else staged.doc
        found = self._store.objects.get(kind, namespace, name)
        return found.doc if found is not None else None

    def list(self, kind: str, namespace: str | None = None) -> list[Doc]:
        """The resources of a kind, by namespace and name; of all tenants when `namespace` is None."""
        found = self._store.objects.list(kind, namespace)
        changed = {
            key
            for layer in (self._staged, self._newest)
            for key in layer
            if isinstance(key, Key) and key.kind == kind and namespace in (None, key.namespace)
        }
        if not changed:
            return [stored.doc for stored in found]
        docs = {key: stored.doc for stored in found if (key := key_of(stored.doc)) not in changed}
        docs |= {key: doc for key in changed if (doc := self.get(*key)) is not None}
        return [docs[key] for key in sorted(docs)]

    def put(self, doc: Doc) -> Doc:
        """Adds or updates a resource and returns it with its resourceVersion; an unchanged one stays as it
        is. Does not change its argument, which nobody may change afterwards."""
        key = key_of(doc)
        current = self.get(*key)
        if current is not None and is_same(doc, current):
            return current
        change = self._newest.get(key)
        if change is None or change.type is ChangeType.DELETED:
            type_ = ChangeType.ADDED if current is None else ChangeType.MODIFIED
            change = self._add_change(key, type_, doc, current)
        change.doc = with_version(doc, str(change.version))
        return change.doc

    def delete(self, kind: str, namespace: str, name: str) -> Doc:
        """Removes a resource and returns its last form, under a new resourceVersion. Raises KeyError."""
        key = Key(kind, namespace, name)
        current = self.get(*key)
        if current is None:
            raise KeyError(f"{kind} {namespace}/{name}")
        change = self._newest.get(key)
        if change is not None and change.type is ChangeType.MODIFIED:
            self._changes.remove(change)
            current, before = change.doc, change.before
        else:
            before = current
        change = self._add_change(key, ChangeType.DELETED, current, before)
        change.doc = with_version(current, str(change.version))
        return change.doc

    # ------------------------------------------------------------ for the other mirrors of the store

    def stage(self, key: Hashable, value: Any) -> None:
        """Sets a value of the store's memory, for this transaction and, once committed, for all."""
        self._own[key] = value

    def peek(self, key: Hashable) -> Any:
        """A value of the store's memory as this transaction sees it; None when there is none."""
        for layer in (self._own, self._staged, self._store.memory):
            if key in layer:
                return layer[key]
        return None

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        """A statement to run at the commit. Only for the store's own rooms."""
        self._statements.append((sql, params))

    # ------------------------------------------------------------ inside

    def _add_change(self, key: Key, type_: ChangeType, doc: Doc, before: Doc | None) -> _Change:
        self._version += 1
        change = _Change(key, self._version, type_, doc, before)
        self._changes.append(change)
        self._newest[key] = change
        return change

    def finish(
        self,
    ) -> tuple[dict[Hashable, Any], builtins.list[Statement], builtins.list[ResourceEvent]]:
        """Only for the writer: what this transaction stages, its statements and its events."""
        staged, statements, events = self._own, self._statements, []
        for change in self._changes:
            stored = encode(change.doc)
            if change.type is ChangeType.DELETED:
                staged[change.key] = MISSING
                statements.append((_DELETE, tuple(change.key)))
            else:
                staged[change.key] = stored
                statements.append((_UPSERT, (*change.key, stored.raw)))
            statements.append((_LOG, (change.version, change.type.value, stored.raw)))
            events.append(ResourceEvent(change.version, change.type, change.doc, change.before))
        if self._changes:
            staged[_VERSION] = self._version
        return staged, statements, events


class _Connection(aiosqlite.Connection):
    """A connection on which a whole function runs in one hop to its thread."""

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        run: Callable[..., Awaitable[T]] = self._execute
        return await run(lambda: fn(self._conn))


class _Waiting:
    """One function that waits for its turn, and who waits for it."""

    __slots__ = ("answer", "fn")

    def __init__(self, fn: Callable[[Transaction], Any], answer: asyncio.Future[Any]) -> None:
        self.fn = fn
        self.answer = answer


class Store:
    """Everything that must survive. One per data directory."""

    def __init__(self, path: Path, writer: _Connection, reader: _Connection) -> None:
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
        self._queue: asyncio.Queue[_Waiting | None] = asyncio.Queue()
        self._is_closing = False
        self._since_prune = 0
        self._unchecked = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, data_dir: Path) -> AsyncIterator[Store]:
        """The store of a data directory, for the block. Raises StoreInUse or StoreDamaged; a database that
        cannot be read is never made anew."""
        with _locked(data_dir):
            path = data_dir / FILE
            await asyncio.to_thread(_prepare, path, data_dir / MARKER)
            async with (
                _connection(path, read_only=False) as writer,
                _connection(path, read_only=True) as reader,
            ):
                store = cls(path, writer, reader)
                await store._load()
                task = asyncio.create_task(store._write_for_ever(), name="store writer")
                try:
                    yield store
                finally:
                    await store._close(task)

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` and makes its changes durable; returns what it returned once they are.

        `fn` runs in the event loop, so it must be quick and must not wait. What it raises is raised here and
        leaves nothing behind. Raises InsufficientStorage when the disk is full.
        """
        if self._is_closing:
            raise Unavailable("the server is stopping; nothing was changed", retry_after_s=2)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Waiting(fn, answer))
        return await answer

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a query on the reading connection's thread. Only for the store's own rooms."""
        return await self._reader.run(fn)

    # ------------------------------------------------------------ the writer

    async def _write_for_ever(self) -> None:
        while True:
            first = await self._queue.get()
            if first is None:
                return
            group = [first]
            is_last = False
            while len(group) < GROUP and not self._queue.empty():
                following = self._queue.get_nowait()
                if is_last := following is None:
                    break
                group.append(following)
            await self._commit(group)
            if is_last:
                return

    async def _commit(self, group: Sequence[_Waiting]) -> None:
        staged: dict[Hashable, Any] = {}
        statements: list[Statement] = []
        events: list[ResourceEvent] = []
        done: list[tuple[_Waiting, Any]] = []
        for waiting in group:
            if waiting.answer.cancelled():
                continue
            tx = Transaction(self, staged)
            try:
                result = waiting.fn(tx)
            except Exception as error:
                waiting.answer.set_exception(error)
                continue
            own, own_statements, own_events = tx.finish()
            staged.update(own)
            statements += own_statements
            events += own_events
            done.append((waiting, result))
        if statements:
            self._prune(statements, len(events), staged)
            try:
                await self._flush(statements)
            except sqlite3.Error as error:
                self._fail(done, error)
                return
        self._publish(staged, events)
        for waiting, result in done:
            if not waiting.answer.done():
                waiting.answer.set_result(result)
        await self._checkpoint(statements)

    async def _checkpoint(self, statements: Sequence[Statement]) -> None:
        """Moves the write-ahead log into the file once it has grown, when nobody waits for an answer."""
        self._unchecked += sum(
            len(param) for _, params in statements for param in params if isinstance(param, bytes)
        )
        if self._unchecked < _CHECKPOINT_BYTES:
            return
        mode = "TRUNCATE" if self._unchecked >= _TRUNCATE_BYTES else "PASSIVE"
        self._unchecked = 0
        with contextlib.suppress(sqlite3.Error):  # the next one tries again; the log itself is safe
            await self._writer.run(lambda c: c.execute(f"PRAGMA wal_checkpoint({mode})").fetchall())

    async def _flush(self, statements: Sequence[Statement]) -> None:
        started = time.perf_counter()
        await self._writer.run(lambda connection: _run_all(connection, statements))
        self.degraded = None
        for callback in self.on_commit_timed:
            callback(time.perf_counter() - started)

    def _fail(self, done: Sequence[tuple[_Waiting, Any]], error: sqlite3.Error) -> None:
        is_full = any(word in str(error).lower() for word in _FULL)
        self.degraded = f"nothing can be written: {error}"
        log.error("a commit failed, nothing of it was stored: %s", error)
        for callback in self.on_full if is_full else ():
            callback()
        for waiting, _ in done:
            if not waiting.answer.done():
                waiting.answer.set_exception(
                    InsufficientStorage(
                        f"the disk of the data directory is full ({error}); nothing was changed and reading "
                        "goes on. Free some space and try again."
                    )
                    if is_full
                    else InternalError(
                        f"the database could not be written ({error}); nothing was changed and reading goes "
                        "on. Try again; the server's log tells more."
                    )
                )

    def _publish(self, staged: dict[Hashable, Any], events: Sequence[ResourceEvent]) -> None:
        for key, value in staged.items():
            if isinstance(key, Key):
                self.objects.set(key, None if value is MISSING else value)
            elif key != _VERSION:
                self.memory[key] = value
        if events:
            self.log.extend(events)
            for callback in self.on_commit:
                try:
                    callback(events)
                except Exception:
                    log.exception("somebody who was told of a commit failed")

    def _prune(self, statements: list[Statement], events: int, staged: dict[Hashable, Any]) -> None:
        """Shortens the log along with a write that happens anyway: an idle store writes nothing."""
        self._since_prune += events
        if self._since_prune >= _PRUNE_EVERY:
            self._since_prune = 0
            oldest = staged.get(_VERSION, self.log.version) - KEPT_CHANGES
            statements.append(("DELETE FROM changes WHERE version <= ?", (oldest,)))

    # ------------------------------------------------------------ life

    async def _load(self) -> None:
        def read(connection: sqlite3.Connection) -> tuple[list[Any], list[Any], int]:
            objects = connection.execute("SELECT kind, namespace, name, doc FROM objects").fetchall()
            newest = "SELECT version, type, doc FROM changes ORDER BY version DESC LIMIT ?"
            changes = connection.execute(newest, (KEPT_CHANGES,)).fetchall()
            last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'changes'").fetchone()
            return objects, changes, last[0] if last else 0

        objects, changes, last = await self.read(read)
        for kind, namespace, name, raw in objects:
            self.objects.set(Key(kind, namespace, name), Stored.of(raw))
        self.log.load(reversed(changes), last)
        await self.states.load()
        await self.records.load()

    async def _close(self, task: asyncio.Task[None]) -> None:
        """What waits is still written; only then the writer ends."""
        self._is_closing = True
        self._queue.put_nowait(None)
        await task
        with contextlib.suppress(sqlite3.Error):
            await self._writer.run(lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())


def _run_all(connection: sqlite3.Connection, statements: Sequence[Statement]) -> None:
    try:
        connection.execute("BEGIN IMMEDIATE")
        for sql, params in statements:
            connection.execute(sql, params)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# ---------------------------------------------------------------- opening


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StoreInUse(
                f"another RezusCloud (process {pid}) uses the data directory {data_dir}; stop it, or give "
                "this one a directory of its own with REZUSCLOUD_DATA_DIR"
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _prepare(path: Path, marker: Path) -> None:
    """Checks an existing database and brings its schema up to date; makes one only where none ever was."""
    existed = marker.exists()
    if existed and (not path.exists() or path.stat().st_size == 0):
        raise StoreDamaged(_damage(path, "it is missing or empty, though there was one"))
    if not existed and path.exists() and path.stat().st_size == 0:
        raise StoreDamaged(_damage(path, "it is empty, which no database of ours ever is"))
    log.info("SQLite %s", sqlite3.sqlite_version)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            if path.stat().st_size == 0:
                connection.execute("PRAGMA page_size = 16384")
            else:
                _check(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            _migrate(connection, path)
    except sqlite3.DatabaseError as error:
        raise StoreDamaged(_damage(path, str(error))) from error
    path.chmod(0o600)
    if not existed:
        marker.touch(mode=0o600)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    answers = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if answers != ["ok"]:
        raise StoreDamaged(_damage(path, "; ".join(str(answer) for answer in answers)))


def _damage(path: Path, why: str) -> str:
    return (
        f"the database {path} cannot be used: {why}. It was left as it is and nothing was made in its place. "
        "Restore the data directory from a backup; or, if TF states are at hand, move the file and the "
        f"marker {MARKER!r} away and bring tenants back with `rezuscloud rebuild --from-state DIR`."
    )


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    migrations = sorted(
        (int(match[1]), entry.read_text())
        for entry in files("rezuscloud.store").joinpath("migrations").iterdir()
        if (match := re.fullmatch(r"(\d{4})_\w+\.sql", entry.name))
    )
    have = connection.execute("PRAGMA user_version").fetchone()[0]
    newest = migrations[-1][0]
    if have > newest:
        raise StoreDamaged(
            f"the database {path} was written by a newer RezusCloud (schema {have}, this one knows "
            f"{newest}); it was left as it is. Start that version, or restore an older backup."
        )
    for number, sql in migrations:
        if number > have:
            connection.executescript(f"BEGIN IMMEDIATE;\n{sql}\nPRAGMA user_version = {number};\nCOMMIT;")


@asynccontextmanager
async def _connection(path: Path, *, read_only: bool) -> AsyncIterator[_Connection]:
    def connect() -> sqlite3.Connection:
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=64)
        for pragma in (
            "foreign_keys = ON",
            "busy_timeout = 5000",
            "trusted_schema = OFF",
            "synchronous = FULL",
            "wal_autocheckpoint = 0",  # in the middle of a large commit its caller would wait for it
            f"query_only = {'ON' if read_only else 'OFF'}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    connection = _Connection(connect, iter_chunk_size=64)
    async with connection:
        yield connection
