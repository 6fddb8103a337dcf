"""A disk that is full, a database that cannot be trusted, a data directory that is taken."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.commands import rezuscloud, rezusctl
from tests.support.server import PASSWORD, ApiError, Server, control_plane, running, workers

DISK_MIB = 48
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, soon full."""
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={DISK_MIB}m".encode()
    if _libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, options) != 0:
        pytest.skip(f"NOT PROVED: no tmpfs can be mounted here ({os.strerror(ctypes.get_errno())})")
    try:
        yield path
    finally:
        _libc.umount2(bytes(path), 2)  # MNT_DETACH


class Filling:
    """A file that takes all the space that is left."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "filling"

    def fill(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC

    def free(self) -> None:
        self._path.unlink()


# ---------------------------------------------------------------- full


async def test_on_a_full_disk_writes_answer_507_reads_go_on_and_free_space_heals(small_disk: Path) -> None:
    filling = Filling(small_disk)
    async with running(small_disk / "data", None) as server:
        acknowledged = ["before"]
        await server.declare("before", control_plane(1))
        filling.fill()
        refused = await _write_until_refused(server, acknowledged)
        assert (refused.code, refused.body["reason"]) == (507, "InsufficientStorage")
        assert "full" in refused.body["message"]
        assert "Free some space" in refused.body["message"]

        # Reading goes on, also for who comes new, and the house says what is wrong with it.
        assert await _names(server) == sorted(acknowledged)
        with pytest.raises(ApiError) as unready:
            await server.get("/readyz")
        assert unready.value.code == 503
        assert "full" in str(unready.value.body)
        watched = await server.get("/api/v1/tenants?watch=true&sendInitialEvents=true&timeoutSeconds=1")
        assert "before" in str(watched)
        login = {"username": "admin", "password": PASSWORD}
        assert (await server.post("/api/v1/auth/login", login))["token"]

        filling.free()
        await server.declare("after", control_plane(1))
        acknowledged.append("after")
        await server.get("/readyz")
        assert await _names(server) == sorted(acknowledged)

        filling.fill()
        await _write_until_refused(server, acknowledged)
        await server.kill()
        filling.free()
        await server.start()
        assert await _names(server) == sorted(acknowledged), "nothing that was acknowledged is lost"


@pytest.mark.engine
async def test_a_disk_that_fills_up_during_an_apply_costs_no_machine(
    small_disk: Path, engine_path: Path
) -> None:
    filling = Filling(small_disk)
    async with running(small_disk / "data", engine_path) as server:
        await server.declare("personal", control_plane(1), workers(1, latencyS=2))
        await server.until(lambda: _is_applying(server))
        filling.fill()

        async def is_stored() -> bool:
            versions = (await server.get("/api/v1/namespaces/personal/stateversions"))["items"]
            return bool(versions)

        await server.until(is_stored, 60)
        filling.free()
        await server.until_applied("personal", 60)
        assert await server.machines("personal") == ["cp-1", "workers-1"]
        made = (await server.get("/api/v1/namespaces/personal/machines/workers-1"))["metadata"]["uid"]

        # A disk that was full before: no run begins, and it goes on by itself.
        filling.fill()
        with contextlib.suppress(ApiError):
            await server.patch("/api/v1/namespaces/personal/nodegroups/workers", {"spec": {"replicas": 2}})
        filling.free()
        await server.patch("/api/v1/namespaces/personal/nodegroups/workers", {"spec": {"replicas": 2}})
        await server.until_applied("personal", 60)
        kept = (await server.get("/api/v1/namespaces/personal/machines/workers-1"))["metadata"]["uid"]
        assert kept == made
        assert await server.machines("personal") == ["cp-1", "workers-1", "workers-2"]


async def _is_applying(server: Server) -> bool:
    runs = await server.runs("personal")
    return bool(runs) and runs[-1]["status"]["phase"] == "Applying"


async def _write_until_refused(server: Server, acknowledged: list[str]) -> ApiError:
    """Writes until the room that was still there is used up."""
    for number in range(2000):
        name = f"filler-{len(acknowledged)}-{number}"
        try:
            await server.declare(name, control_plane(1, tags={f"tag-{n}": "x" * 500 for n in range(50)}))
        except ApiError as error:
            return error
        acknowledged.append(name)
    raise AssertionError("the disk never was full")


async def _names(server: Server) -> list[str]:
    return sorted(item["metadata"]["name"] for item in (await server.get("/api/v1/tenants"))["items"])


# ---------------------------------------------------------------- damaged, taken


async def _stored(data_dir: Path) -> None:
    async with running(data_dir, None) as server:
        await server.declare("personal", control_plane(1))
        await server.stop()


def _zero_length(database: Path) -> None:
    database.write_bytes(b"")


def _missing(database: Path) -> None:
    database.unlink()


def _garbage(database: Path) -> None:
    database.write_bytes(os.urandom(2**16))


def _damaged_page(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[2 * 16384 : 3 * 16384] = os.urandom(16384)
    database.write_bytes(content)


def _cut_off(database: Path) -> None:
    os.truncate(database, database.stat().st_size // 2)


@pytest.mark.parametrize("damage", [_zero_length, _missing, _garbage, _damaged_page, _cut_off])
async def test_a_database_that_cannot_be_trusted_is_refused_with_words_and_left_untouched(
    tmp_path: Path, damage: object
) -> None:
    data_dir = tmp_path / "data"
    await _stored(data_dir)
    database = data_dir / "rezuscloud.db"
    assert callable(damage)
    damage(database)
    before, existed = _fingerprint(data_dir), database.exists()
    ended = await rezuscloud("serve", data_dir=data_dir)
    assert ended.code == 1, ended.stderr
    assert "rezuscloud.db cannot be used" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "rebuild --from-state" in ended.stderr
    assert _fingerprint(data_dir) == before
    assert database.exists() is existed
    rebuilt = await rezuscloud("rebuild", "--from-state", str(tmp_path), data_dir=data_dir)
    assert rebuilt.code == 1
    assert (_fingerprint(data_dir), database.exists()) == (before, existed)


def _fingerprint(data_dir: Path) -> dict[str, str]:
    """What the files hold. Not the lock, which names who came last, nor what SQLite makes for a reader."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(data_dir.iterdir())
        if path.is_file() and path.name not in ("lock", "rezuscloud.db-shm") and path.stat().st_size
    }


@contextlib.asynccontextmanager
async def _watching(server: Server) -> AsyncIterator[asyncio.Task[bytes]]:
    url = f"{server.url}/api/v1/tenants?watch=true"
    async with server.session.get(url, headers=server.headers) as stream:
        task = asyncio.create_task(stream.content.readline())
        try:
            yield task
        finally:
            task.cancel()


async def test_a_second_server_on_the_same_data_directory_ends_with_the_reason(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    async with running(data_dir, None) as server, _watching(server) as seen:
        ended = await rezuscloud("serve", data_dir=data_dir)
        assert ended.code == 1
        assert f"another RezusCloud (process {server.pid})" in ended.stderr
        assert "REZUSCLOUD_DATA_DIR" in ended.stderr
        await server.declare("personal", control_plane(1))
        assert b"personal" in await asyncio.wait_for(seen, 5), "the first one is not disturbed"
        listed = await rezusctl(server, "get", "clusters", "-o", "name")
        assert "personal" in listed.stdout
