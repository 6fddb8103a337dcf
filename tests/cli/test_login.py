"""Who is at the keyboard, and which server is meant."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cli import Cli
from tests.support.server import PASSWORD, Server, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with running(tmp_path_factory.mktemp("server") / "data", None) as up:
        yield up


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Somebody without a login."""
    return Cli(tmp_path)


async def test_without_a_login_the_command_says_how_to_log_in(cli: Cli, server: Server) -> None:
    cli.env["REZUSCTL_SERVER"] = server.url
    said = await cli.fails("get", "clusters")
    assert said == f"Error: you are not logged in to {server.url}\nlog in with: rezusctl login\n"


async def test_a_login_is_kept_for_the_next_commands_in_a_file_for_nobody_else(
    cli: Cli, server: Server
) -> None:
    said = await cli.ok("login", "--server", f"{server.url}/", "--password-stdin", stdin=f"{PASSWORD}\n")
    assert said.startswith(f"logged in to {server.url} as admin until 20")
    assert "there are no clusters" in (await cli.run("get", "clusters")).stderr
    assert stat.S_IMODE(cli.config.stat().st_mode) == 0o600
    assert stat.S_IMODE(cli.config.parent.stat().st_mode) == 0o700
    kept = json.loads(cli.config.read_text())
    assert kept["server"] == server.url
    assert PASSWORD not in cli.config.read_text()
    shown = await cli.ok("config")
    assert server.url in shown
    assert "admin, until 20" in shown
    assert str(cli.config) in shown


async def test_a_new_login_replaces_a_config_file_that_others_could_read(cli: Cli, server: Server) -> None:
    cli.config.parent.mkdir(parents=True)
    for path in (cli.config, cli.config.with_suffix(".part")):
        path.write_text("{}")
        path.chmod(0o644)
    await cli.ok("login", "--server", server.url, "--password-stdin", stdin=PASSWORD)
    assert stat.S_IMODE(cli.config.stat().st_mode) == 0o600


async def test_a_password_is_asked_on_a_terminal_and_not_shown(cli: Cli, server: Server) -> None:
    cli.env["REZUSCTL_SERVER"] = server.url
    prompt = f"Password of admin at {server.url}: "
    ended = await cli.on_terminal("login", types={prompt: f"{PASSWORD}\n"})
    assert ended.code == 0, ended
    assert PASSWORD not in ended.stdout
    assert "there are no clusters" in (await cli.run("get", "clusters")).stderr


async def test_breaking_off_at_the_prompt_ends_with_130(cli: Cli, server: Server) -> None:
    cli.env["REZUSCTL_SERVER"] = server.url
    ended = await cli.on_terminal("login", types={"Password of": "\x03"})
    assert ended.code == 130
    assert "Traceback" not in ended.stdout


async def test_without_a_terminal_the_password_must_come_from_standard_input(cli: Cli) -> None:
    assert "use --password-stdin" in await cli.fails("login", code=2)


async def test_a_wrong_password_fails_in_words_and_keeps_nothing(cli: Cli, server: Server) -> None:
    said = await cli.fails("login", "--server", server.url, "--password-stdin", stdin="wrong\n")
    assert said == "Error: wrong username or password\n"
    assert not cli.config.exists()


async def test_a_token_of_the_environment_needs_no_login(cli: Cli, server: Server) -> None:
    cli.env |= {"REZUSCTL_SERVER": server.url, "REZUSCTL_TOKEN": f"{server.token}\n"}
    assert "providers/lab" in await cli.ok("get", "providers", "-o", "name")
    assert "a token from REZUSCTL_TOKEN" in await cli.ok("config")
    cli.env["REZUSCTL_TOKEN"] = "wrong"
    assert "log in with: rezusctl login" in await cli.fails("get", "clusters")
