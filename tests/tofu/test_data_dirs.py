"""Prepared data directories: made once, without the network, shared, and never half there."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from rezuscloud.plugin.types import RequiredProvider
from rezuscloud.tofu.data_dirs import DataDirs, PrepareFailed
from rezuscloud.tofu.engine import Engine, find_engine

pytestmark = pytest.mark.engine

NAPTIME = {"naptime": RequiredProvider("registry.opentofu.org/example/naptime", "~> 1.2")}


@pytest.fixture
async def engine(engine_path: Path, tmp_path: Path) -> Engine:
    """The real engine behind a script that writes down each start of it in `starts`."""
    counter = tmp_path / "engine"
    counter.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/starts\nexec {engine_path} "$@"\n')
    counter.chmod(0o755)
    found = await find_engine(counter)
    (tmp_path / "starts").unlink()
    return found


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A provider mirror with one program in it, which is never started here."""
    put_in_mirror(tmp_path / "mirror", "1.2.3")
    return tmp_path / "mirror"


def put_in_mirror(mirror: Path, version: str) -> Path:
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    folder = mirror / f"registry.opentofu.org/example/naptime/{version}/linux_{arch}"
    folder.mkdir(parents=True)
    program = folder / f"terraform-provider-naptime_v{version}"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return folder


def starts(tmp_path: Path) -> list[str]:
    record = tmp_path / "starts"
    return record.read_text().split() if record.exists() else []


async def test_built_in_resources_alone_need_no_mirror_no_registry_and_no_lock_file(
    engine: Engine, tmp_path: Path
) -> None:
    prepared = await DataDirs(tmp_path / "dirs", engine, tmp_path / "there-is-none").prepare({})
    assert prepared.lock_file is None
    assert (prepared.data_dir / "terraform.tfstate").is_file()
    assert prepared.cli_config.is_file()


async def test_a_directory_is_made_once_and_found_again_after_a_restart(
    engine: Engine, tmp_path: Path
) -> None:
    dirs = DataDirs(tmp_path / "dirs", engine, None)
    first = await dirs.prepare({})
    assert await dirs.prepare({}) == first
    assert await DataDirs(tmp_path / "dirs", engine, None).prepare({}) == first
    assert starts(tmp_path) == ["init"]


async def test_callers_at_the_same_time_share_one_making(engine: Engine, tmp_path: Path) -> None:
    dirs = DataDirs(tmp_path / "dirs", engine, None)
    found = await asyncio.gather(*(dirs.prepare({}) for _ in range(20)))
    assert len(set(found)) == 1
    assert starts(tmp_path) == ["init"]


async def test_what_is_prepared_is_read_only_and_only_ours(engine: Engine, tmp_path: Path) -> None:
    prepared = await DataDirs(tmp_path / "dirs", engine, None).prepare({})
    paths = [prepared.data_dir, *prepared.data_dir.rglob("*")]
    assert all(path.is_symlink() or path.stat().st_mode & 0o277 == 0 for path in paths)
    assert prepared.data_dir.parent.stat().st_mode & 0o077 == 0


async def test_a_provider_from_the_mirror_is_linked_and_pinned_by_a_lock_file(
    engine: Engine, tmp_path: Path, mirror: Path
) -> None:
    prepared = await DataDirs(tmp_path / "dirs", engine, mirror).prepare(NAPTIME)
    assert prepared.lock_file is not None
    assert '"1.2.3"' in prepared.lock_file.read_text()
    assert "h1:" in prepared.lock_file.read_text()
    (program,) = prepared.data_dir.glob("providers/registry.opentofu.org/example/naptime/1.2.3/*/*")
    assert program.name == "terraform-provider-naptime_v1.2.3"


async def test_another_set_of_providers_gets_another_directory(
    engine: Engine, tmp_path: Path, mirror: Path
) -> None:
    dirs = DataDirs(tmp_path / "dirs", engine, mirror)
    assert (await dirs.prepare({})).data_dir != (await dirs.prepare(NAPTIME)).data_dir


async def test_a_provider_that_cannot_be_had_fails_in_the_engines_words_and_is_tried_again(
    engine: Engine, tmp_path: Path
) -> None:
    dirs = DataDirs(tmp_path / "dirs", engine, tmp_path / "late")
    with pytest.raises(PrepareFailed, match="example/naptime"):
        await dirs.prepare(NAPTIME)
    put_in_mirror(tmp_path / "late", "1.2.3")
    assert (await dirs.prepare(NAPTIME)).lock_file is not None


async def test_a_directory_whose_provider_has_left_the_mirror_is_made_anew(
    engine: Engine, tmp_path: Path, mirror: Path
) -> None:
    first = await DataDirs(tmp_path / "dirs", engine, mirror).prepare(NAPTIME)
    shutil.rmtree(mirror)
    put_in_mirror(mirror, "1.2.4")
    again = await DataDirs(tmp_path / "dirs", engine, mirror).prepare(NAPTIME)
    assert again == first
    assert again.lock_file is not None
    assert '"1.2.4"' in again.lock_file.read_text()
    assert starts(tmp_path) == ["init", "init"]


async def test_left_overs_of_a_broken_off_making_do_no_harm(engine: Engine, tmp_path: Path) -> None:
    first = await DataDirs(tmp_path / "dirs", engine, None).prepare({})
    place = first.data_dir.parent
    place.rename(place.with_name(f"{place.name}.part"))
    again = await DataDirs(tmp_path / "dirs", engine, None).prepare({})
    assert again == first
    assert [path.name for path in (tmp_path / "dirs").iterdir()] == [place.name]


async def test_a_cancelled_caller_leaves_the_making_to_the_next_one(engine: Engine, tmp_path: Path) -> None:
    dirs = DataDirs(tmp_path / "dirs", engine, None)
    first, second = (asyncio.create_task(dirs.prepare({})) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).data_dir.is_dir()
