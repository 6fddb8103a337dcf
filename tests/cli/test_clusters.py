"""Clusters from one line, with the stages on the way, until they are gone again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cli import Cli
from tests.support.server import ApiError, Server, running

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> AsyncIterator[Server]:
    data_dir = tmp_path_factory.mktemp("server") / "data"
    async with running(data_dir, engine_path, REZUSCLOUD_DEBOUNCE_S="0.5") as up:
        yield up


@pytest.fixture
def cli(server: Server) -> Cli:
    return Cli.of(server)


async def test_one_line_makes_a_cluster_that_is_ready_and_another_takes_it_away(
    cli: Cli, server: Server
) -> None:
    size = ("--control-planes", "3", "--workers", "2")
    made = await cli.run("create", "cluster", "home", "--provider", "lab", *size, "--wait")
    assert (made.code, made.stdout) == (0, "tenants/home created with 3 control planes and 2 workers\n")
    stages = made.stderr.splitlines()
    assert any(line.startswith("home: debounce: waits for the changes to settle until ") for line in stages)
    assert stages[-1] == "home: applied; all 5 machines are ready"
    assert "\x1b" not in made.stderr
    assert "\r" not in made.stderr
    assert len(await server.runs("home")) == 1, "the cluster with its groups is one change"
    assert (await cli.ok("cluster", "get")).splitlines()[1].split()[:4] == ["home", "True", "True", "5/5"]

    gone = await cli.run("cluster", "delete", "home", "--wait")
    assert gone.stdout == "tenants/home is being deleted\ntenants/home is gone\n"
    assert 'tenants "home" not found' in await cli.fails("cluster", "get", "home")


async def test_on_a_terminal_the_stages_are_one_line_that_is_written_over(cli: Cli) -> None:
    ended = await cli.on_terminal("create", "cluster", "screen", "--provider", "lab", "--wait")
    assert ended.code == 0
    created, stages, *rest = ended.stdout.split("\r\n")
    assert created.startswith("tenants/screen created")
    assert stages.startswith("\r\x1b[Kscreen: ")
    assert stages.endswith("\r\x1b[Kscreen: applied; all 1 machines are ready")
    assert rest == [""]


async def test_a_narrow_terminal_cuts_the_stages_instead_of_wrapping_them(cli: Cli) -> None:
    words = ("create", "cluster", "narrow", "--provider", "lab", "--wait")
    ended = await cli.on_terminal(*words, COLUMNS="30")
    assert all(len(stage) < 30 for stage in ended.stdout.split("\r\n")[1].split("\r\x1b[K"))


async def test_create_does_not_touch_a_cluster_that_exists(cli: Cli, server: Server) -> None:
    create = ("create", "cluster", "first", "--provider", "lab")
    await cli.ok(*create)
    before = await server.tenant("first")
    said = await cli.fails(*create, "--workers", "4", "--talos-version", "v1.12.0")
    assert "cluster first already exists, and nothing was changed" in said
    assert "already exists" in await cli.fails(*create, "--dry-run")
    after = await server.tenant("first")
    assert (after["metadata"]["generation"], after["spec"]) == (
        before["metadata"]["generation"],
        before["spec"],
    )
    groups = await server.get("/api/v1/namespaces/first/nodegroups")
    assert [group["metadata"]["name"] for group in groups["items"]] == ["controlplane"]


async def test_create_writes_all_documents_or_none(cli: Cli, server: Server) -> None:
    said = await cli.fails(
        *("create", "cluster", "bad", "--provider", "nowhere"), "--control-planes", "2", "--workers", "-1"
    )
    assert said.splitlines()[0] == "Error: nothing was written:"
    assert "NodeGroup controlplane: spec.replicas: Invalid value: 2: a control plane has an odd" in said
    assert "NodeGroup workers: spec.replicas: Invalid value: -1" in said
    assert 'NodeGroup workers: spec.providerClass: Unsupported value: "nowhere"' in said
    with pytest.raises(ApiError):
        await server.tenant("bad")


async def test_a_dry_run_prints_documents_that_apply_takes(cli: Cli, server: Server) -> None:
    text = await cli.ok(
        *("cluster", "create", "dry", "--provider", "lab:small", "--workers", "1", "--endpoint", "k8s.local"),
        "--dry-run",
    )
    with pytest.raises(ApiError):
        await server.tenant("dry")
    assert "resourceVersion" not in text
    await cli.ok("apply", "-f", "-", stdin=text)
    assert (await server.tenant("dry"))["spec"]["controlPlaneEndpoint"] == "k8s.local"
    await server.until_applied("dry")
    assert await server.machines("dry") == ["controlplane-1", "workers-1"]


async def test_waiting_ends_when_the_time_is_over_and_tells_where_it_stands(cli: Cli, server: Server) -> None:
    slow = ("create", "cluster", "slow", "--provider", "lab", "--wait", "--timeout", "0")
    said = await cli.fails(*slow)
    assert "Error: slow: not done after 0 s: " in said
    assert "it goes on by itself; look with: rezusctl describe cluster slow" in said
    await server.until_applied("slow")


async def test_the_kind_is_needed_to_create(cli: Cli) -> None:
    assert "No such command 'machine'" in await cli.fails("create", "machine", "x", code=2)
