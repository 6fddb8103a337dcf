"""Owns the SQLite file as a file: who may use it, whether it can be trusted, its settings and migrations.

A database that cannot be used is refused and left as it is, byte for byte; nothing is ever made in its place.
What is in it is not known here (`db.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "rezuscloud.db"
MARKER = "initialised"
LOCK_FILE = "lock"
PAGE_BYTES = 16384
_NEW = f"{FILE}.new"

_UNUSABLE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_NOMEM,
    }
)
"""What says more of the disk or the rights than of the database."""


class StoreInUse(Exception):
    """Another server has this data directory."""


class StoreDamaged(Exception):
    """The database cannot be used as it is. It was left untouched."""


# ---------------------------------------------------------------- alone


@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Makes the data directory ours for the block. Raises StoreInUse."""
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
        with contextlib.suppress(OSError):  # on a full disk the lock holds, though it names nobody
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------- sound


def prepare(data_dir: Path) -> None:
    """Checks an existing database and brings its schema up to date; makes one only where none ever was.

    Raises StoreDamaged.
    """
    path, marker = data_dir / FILE, data_dir / MARKER
    log.info("SQLite %s", sqlite3.sqlite_version)
    size = path.stat().st_size if path.exists() else None
    if size == 0:
        raise StoreDamaged(_damage(path, "it is empty, which no database of ours ever is"))
    if size is None and marker.exists():
        raise StoreDamaged(_damage(path, "it is missing, though there was one"))
    migrations = _read_migrations()
    try:
        if size is None:
            _make(data_dir, migrations)
        else:
            _check(path, newest=migrations[-1][0])
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")  # a copy from a backup has lost it
                _migrate(connection, migrations)
    except sqlite3.Error as error:
        raise StoreDamaged(_refusal(path, error)) from error
    path.chmod(0o600)
    if not marker.exists():
        marker.touch(mode=0o600)
        _sync_directory(data_dir)


def _check(path: Path, *, newest: int) -> None:
    """Reads the whole database without writing: a connection that could write would, on closing, move the
    write-ahead log of a killed server into a file that is about to be refused."""
    wal = path.with_name(f"{FILE}-wal")
    has_log = wal.exists() and wal.stat().st_size > 0
    # Without a log there is nothing else to read, and not even an empty one is made.
    uri = _uri(path, "ro") if has_log else f"{_uri(path, 'ro')}&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        have = connection.execute("PRAGMA user_version").fetchone()[0]
        if have > newest:
            raise StoreDamaged(
                f"the database {path} was written by a newer RezusCloud (schema {have}, this one knows "
                f"{newest}); it was left as it is. Start that version, or restore an older backup."
            )
        answers = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
        if answers != ["ok"]:
            raise StoreDamaged(_damage(path, "; ".join(answers)))
        if have == 0:
            raise StoreDamaged(_damage(path, "it was not made by RezusCloud"))


def _make(data_dir: Path, migrations: list[tuple[int, str]]) -> None:
    """Under another name first: a start that is interrupted leaves nothing that looks like a database."""
    new = data_dir / _NEW
    for left in (new, *(data_dir / f"{_NEW}{suffix}" for suffix in ("-wal", "-shm", "-journal"))):
        left.unlink(missing_ok=True)
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        _migrate(connection, migrations)
    new.replace(data_dir / FILE)
    _sync_directory(data_dir)


def _read_migrations() -> list[tuple[int, str]]:
    return sorted(
        (int(match[1]), entry.read_text())
        for entry in files("rezuscloud.store").joinpath("migrations").iterdir()
        if (match := re.fullmatch(r"(\d{4})_\w+\.sql", entry.name))
    )


def _migrate(connection: sqlite3.Connection, migrations: list[tuple[int, str]]) -> None:
    have = connection.execute("PRAGMA user_version").fetchone()[0]
    for number, sql in migrations:
        if number > have:
            connection.executescript(f"BEGIN IMMEDIATE;\n{sql}\nPRAGMA user_version = {number};\nCOMMIT;")


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damage(path: Path, why: str) -> str:
    return (
        f"the database {path} cannot be used: {why}. It was left as it is and nothing was made in its place. "
        "Restore the data directory from a backup; or, if TF states are at hand, move the file and the "
        f"marker {MARKER!r} away and bring tenants back with `rezuscloud rebuild --from-state DIR`."
    )


def _refusal(path: Path, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or code & 0xFF not in _UNUSABLE:
        return _damage(path, str(error))
    return (
        f"the database {path} cannot be opened: {error}. Nothing in it was changed. See that the disk has "
        "free space, that the data directory belongs to the user who runs this, and that no other program "
        "has the file open; then start again."
    )


# ---------------------------------------------------------------- connections


class Connection(aiosqlite.Connection):
    """A connection on which a whole function runs in one hop to its thread."""

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """What `fn` returns or raises."""
        # The thread holds on to what it was given last until more comes. So function, result and error go in
        # a box that is emptied: a state of 64 MiB must not stay in memory.
        box: list[Any] = [fn]

        def work() -> None:
            try:
                box.append(box.pop()(self._conn))
            except BaseException as error:
                box[:] = [None, error]

        execute: Callable[..., Awaitable[None]] = self._execute
        await execute(work)
        if len(box) == 2:
            raise box.pop()
        result: T = box.pop()
        return result


@asynccontextmanager
async def connected(path: Path, *, read_only: bool) -> AsyncIterator[Connection]:
    """A connection with a thread of its own, for the block."""

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(_uri(path, "ro" if read_only else "rw"), uri=True, isolation_level=None)
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

    connection = Connection(connect, iter_chunk_size=64)
    async with connection:
        yield connection


def _uri(path: Path, mode: str) -> str:
    return f"{path.absolute().as_uri()}?mode={mode}"
