"""What a person does to runs: look, approve, deny, cancel, start again. And to TF state."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cli import Cli, until_line
from tests.support.commands import read_exports
from tests.support.server import Server, control_plane, running, workers

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path_factory.mktemp("server") / "data", engine_path) as up:
        await up.declare("home", control_plane(1), workers(1))
        await up.until_applied("home")
        yield up


@pytest.fixture
def cli(server: Server) -> Cli:
    """The cluster needs no naming: there is only one."""
    return Cli.of(server)


async def configure(server: Server, *, replicas: int = 1, **config: object) -> None:
    """One change of the workers."""
    path = "/api/v1/namespaces/home/nodegroups/workers"
    whole = {"latencyS": None, "failCreate": None, **config}
    await server.patch(path, {"spec": {"replicas": replicas, "providerConfig": whole}})


async def hold(server: Server, image: str) -> str:
    """Another image replaces machines, which waits for approval. Gives the run's name."""
    await configure(server, image=image)
    await server.until_held("home", "approval")
    return str((await server.runs("home"))[-1]["metadata"]["name"])


# ---------------------------------------------------------------- approve


async def test_approve_shows_the_plan_and_then_applies_it(cli: Cli, server: Server) -> None:
    run = await hold(server, "lab-2")
    holds = (await server.tenant("home"))["status"]["heldBy"]
    assert f"`rezusctl approve {run} -c home`" in holds[0]["message"]
    assert f"runs/{run}" in await cli.ok("get", "runs", "-o", "name")

    assert "look at it again" in await cli.fails("approve", "--plan", "another")
    ended = await cli.run("approve", run, "-c", "home", "--wait")
    assert ended.code == 0, ended
    first, machine, *_, last = ended.stdout.splitlines()
    assert first.startswith("plan ")
    assert "replaces 1 machine (workers-1)" in first
    assert machine.startswith("  replace  workers-1: ")
    assert last.startswith(f"runs/{run} approved: plan ")
    assert ended.stderr.splitlines()[-1] == "home: applied; all 2 machines are ready"
    assert f"{run} of home is Succeeded and waits for no approval" in await cli.fails("approve", run)
    assert "no run of home waits for approval" in await cli.fails("approve")


async def test_on_a_terminal_approve_asks(cli: Cli, server: Server) -> None:
    run = await hold(server, "lab-3")
    refused = await cli.on_terminal("approve", types={"Apply this plan to home? [y/N]": "n\n"})
    assert refused.code == 130
    assert (await server.runs("home"))[-1]["status"]["phase"] == "Held"
    agreed = await cli.on_terminal("approve", types={"Apply this plan to home? [y/N]": "y\n"})
    assert agreed.code == 0
    assert f"runs/{run} approved" in agreed.stdout
    await server.until_applied("home")


async def test_waiting_for_what_a_person_must_decide_fails_with_the_command_to_decide(
    cli: Cli, server: Server
) -> None:
    before = await cli.doc("get", "ng", "workers", "-c", "home", "-o", "yaml")
    before["spec"]["providerConfig"] = {"image": "lab-4"}
    said = await cli.fails("apply", "-f", "-", "--wait", stdin=json.dumps(before))
    run = (await server.runs("home"))[-1]["metadata"]["name"]
    assert f"Error: home: approval: {run} waits for approval: " in said
    assert f"`rezusctl approve {run} -c home`" in said

    assert await cli.ok("deny") == f"runs/{run} denied\n"
    held = await server.until_held("home", "pause")
    assert "`rezusctl retry -c home`" in held["message"]
    assert "no run of home waits" in await cli.fails("deny")

    retried = await cli.run("retry", "-c", "home", "--wait")
    assert "waits for approval" in retried.stderr
    await cli.ok("approve", "--wait")


# ---------------------------------------------------------------- logs, cancel


async def test_logs_are_of_the_newest_run_or_of_the_one_named(cli: Cli, server: Server) -> None:
    newest = await cli.ok("logs")
    assert "Apply complete!" in newest
    assert await cli.ok("logs", "run-1") != newest
    assert 'runs "run-99" not found' in await cli.fails("logs", "run-99")
    assert 'tenants "nope" not found' in await cli.fails("logs", "-c", "nope")


async def test_a_run_can_be_followed_and_cancelled(cli: Cli, server: Server) -> None:
    await configure(server, image="lab-4", latencyS=30, replicas=2)

    async def goes_on() -> str | None:
        newest = (await server.runs("home"))[-1]
        return newest["metadata"]["name"] if newest["status"]["phase"] == "Applying" else None

    run = await server.until(goes_on)
    async with cli.running("logs", "-f") as follow:
        await until_line(follow, "workers-2")
        assert await cli.ok("cancel") == f"runs/{run} is being cancelled\n"
        out, err = await asyncio.wait_for(follow.communicate(), 30)
    assert (follow.returncode, err) == (0, b"")
    assert b"cancelled" in out
    assert "cannot be cancelled any more" in await cli.fails("cancel", run)


async def test_a_failed_run_ends_the_waiting_with_the_engines_words(cli: Cli, server: Server) -> None:
    await configure(server, image="lab-4", failCreate="out of stock", replicas=3)
    said = await cli.fails("retry", "--wait")
    assert "Error: home: backoff: try " in said
    assert "local-exec provisioner error" in said
    assert "Output: out of stock\nmore in: rezusctl logs run-" in said
    await configure(server, image="lab-4")
    await cli.ok("retry", "--wait")


# ---------------------------------------------------------------- state


async def test_state_verbs_take_the_cluster_as_argument_or_option(cli: Cli, server: Server) -> None:
    pulled = json.loads(await cli.ok("state", "pull", "home"))
    assert pulled["version"] == 4
    assert (
        json.loads(await cli.ok("state", "pull", "-c", "home", "--version", "1"))["lineage"]
        == pulled["lineage"]
    )
    assert "home or away?" in await cli.fails("state", "pull", "home", "-c", "away", code=2)
    for words in (["home", "x"], ["x", "-c", "home"], ["x"]):
        assert "tenant home holds no lock x" in await cli.fails("state", "unlock", *words)
    assert "home has no state to recover" in await cli.fails("state", "recover", "home")
    assert 'tenants "nope" not found' in await cli.fails("state", "pull", "nope")


async def test_a_shell_can_take_what_state_env_prints(cli: Cli, server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    ended = await cli.run("state", "env", "home", "-d", str(folder))
    assert ended.stderr == f"wrote {folder / 'main.tf.json'}\n"
    env = read_exports(ended.stdout)
    assert env["TF_HTTP_ADDRESS"] == f"{server.url}/api/v1/namespaces/home/tfstate"
    assert env["TF_HTTP_PASSWORD"] == server.token
    shell = await asyncio.create_subprocess_shell(
        'eval "$TEXT"; printf %s "$TF_ENCRYPTION"',
        env={**os.environ, "TEXT": ended.stdout},
        stdout=asyncio.subprocess.PIPE,
    )
    key, _ = await shell.communicate()
    assert json.loads(key) == json.loads(env["TF_ENCRYPTION"])


async def test_a_key_is_rotated(cli: Cli) -> None:
    before = int(json.loads(await cli.ok("state", "pull"))["serial"])
    ended = await cli.run("state", "rotate-key", "home", "--wait")
    assert ended.code == 0, ended
    assert int(json.loads(await cli.ok("state", "pull"))["serial"]) > before
    (encrypted,) = [
        condition
        for condition in (await cli.doc("get", "cluster", "home", "-o", "yaml"))["status"]["conditions"]
        if condition["type"] == "Encrypted"
    ]
    assert "key k2" in encrypted["message"]
