"""Which program is the engine: found in order, asked what it is, and missed with words that help."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rezuscloud.tofu import engine as engine_room
from rezuscloud.tofu.engine import Engine, EngineMissing, find_engine


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any engine: PATH has one empty folder, and nothing was made by `make tools`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine_room, "__file__", str(tmp_path / "rezuscloud/tofu/engine.py"))
    return tmp_path


def program(path: Path, says: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n[ \"$1\" = version ] || exit 9\nprintf '%s\\n' '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.engine
async def test_the_real_opentofu_says_what_it_is(engine_path: Path) -> None:
    engine = await find_engine(engine_path)
    assert engine.product == "opentofu"
    assert engine.release >= (1, 12)
    assert engine.can_encrypt
    assert engine.has_json_into
    assert engine.path == engine_path


async def test_a_named_program_goes_before_all_others(place: Path) -> None:
    program(place / "bin/tofu", "OpenTofu v1.13.0")
    named = program(place / "mine", "OpenTofu v1.12.6")
    assert await find_engine(named) == Engine(named, "opentofu", "1.12.6")


async def test_a_named_program_that_is_no_engine_is_not_replaced_by_another(place: Path) -> None:
    program(place / "bin/tofu", "OpenTofu v1.13.0")
    for named in (place / "nowhere", program(place / "ls", "some other thing"), place):
        with pytest.raises(EngineMissing, match=r"REZUSCLOUD_TOFU names .*nothing is applied"):
            await find_engine(named)


async def test_tofu_on_path_goes_before_what_make_tools_made(place: Path) -> None:
    made = program(place / ".tools/bin/tofu", "OpenTofu v1.12.6")
    assert (await find_engine(None)).path == made
    on_path = program(place / "bin/tofu", "OpenTofu v1.12.7")
    assert (await find_engine(None)).path == on_path


async def test_an_old_tofu_on_path_is_passed_over_for_a_newer_one(place: Path) -> None:
    old = program(place / "bin/tofu", "OpenTofu v1.9.1")
    assert (await find_engine(None)).path == old
    made = program(place / ".tools/bin/tofu", "OpenTofu v1.12.6")
    assert (await find_engine(None)).path == made


async def test_terraform_stands_in_only_when_there_is_no_opentofu(place: Path) -> None:
    stand_in = program(place / "bin/terraform", "Terraform v1.11.4\non linux_amd64")
    engine = await find_engine(None)
    assert engine == Engine(stand_in, "terraform", "1.11.4")
    assert not engine.can_encrypt
    assert not engine.has_json_into
    program(place / "bin/tofu", "OpenTofu v1.9.1")
    assert (await find_engine(None)).product == "opentofu"


async def test_a_pre_release_counts_as_its_version(place: Path) -> None:
    program(place / "bin/tofu", "OpenTofu v1.13.0-rc1")
    assert (await find_engine(None)).release == (1, 13)


async def test_no_engine_at_all_says_what_to_do(place: Path) -> None:
    with pytest.raises(EngineMissing, match="make tools"):
        await find_engine(None)
    program(place / "bin/tofu", "broken", code=1)
    with pytest.raises(EngineMissing, match=r"bin/tofu did not answer"):
        await find_engine(None)


async def test_the_engine_is_asked_without_our_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REZ_CANARY", "ours")
    asked = place / "bin/tofu"
    asked.write_text('#!/bin/sh\nenv > "${0%/*}/seen"\necho OpenTofu v1.12.6\n')
    asked.chmod(0o755)
    await find_engine(None)
    assert "REZ_CANARY" not in (place / "bin/seen").read_text()
    assert os.environ["REZ_CANARY"] == "ours"
