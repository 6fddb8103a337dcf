"""get, describe, scale, watch and delete, on one cluster of a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cli import REZUSCTL, Cli, interrupt, until_line
from tests.support.server import Server, control_plane, running, workers

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, engine_path: object) -> AsyncIterator[Server]:
    async with running(tmp_path_factory.mktemp("server") / "data", engine_path) as up:  # type: ignore[arg-type] # a Path
        await up.declare("home", control_plane(1), workers(2))
        await up.patch("/api/v1/tenants/home", {"metadata": {"labels": {"env": "home"}}})
        await up.declare("empty", paused=True)
        await up.until_applied("home")
        await Cli.of(up).ok("retry", "-c", "home", "--wait")
        yield up


@pytest.fixture
def cli(server: Server) -> Cli:
    return Cli.of(server)


# ---------------------------------------------------------------- get


@pytest.mark.parametrize("word", ["clusters", "cluster", "tenants", "tenant", "Tenant", "tn"])
async def test_a_kind_is_found_by_each_of_its_names(cli: Cli, word: str) -> None:
    assert await cli.ok("get", word, "-o", "name") == "tenants/empty\ntenants/home\n"


async def test_an_unknown_kind_is_wrong_usage_and_tells_which_there_are(cli: Cli) -> None:
    said = await cli.fails("get", "pods", code=2)
    assert "there is no kind 'pods'; there are: clusters, events, machines" in said


async def test_what_is_not_there_fails_with_1(cli: Cli) -> None:
    assert await cli.fails("get", "cluster", "nope") == 'Error: tenants "nope" not found\n'
    assert "nodegroups 'no/../pe' not found" in await cli.fails("get", "ng", "no/../pe", "-c", "home")


async def test_a_table_shows_the_servers_columns_and_a_wide_one_all_of_them(cli: Cli) -> None:
    head, *rows = (await cli.ok("get", "clusters")).splitlines()
    assert head.split() == [
        *("NAME", "READY", "APPLIED", "MACHINES", "KUBERNETES", "TALOS", "HELD", "AGE"),
    ]
    assert [row.split()[:4] for row in rows] == [
        ["empty", "False", "False", "0/0"],
        ["home", "True", "True", "3/3"],
    ]
    wide = await cli.ok("get", "machine", "workers-1", "-c", "home", "-o", "wide")
    assert wide.split()[:10] == [
        *("NAME", "ROLE", "STAGE", "READY", "ADDRESS", "GROUP", "PROVIDER", "ID", "TALOS", "KUBERNETES"),
    ]


async def test_without_a_cluster_it_lists_all_of_them_and_says_in_which_each_lies(cli: Cli) -> None:
    head, *rows = (await cli.ok("get", "machines")).splitlines()
    assert head.split()[:2] == ["CLUSTER", "NAME"]
    assert [row.split()[:2] for row in rows] == [
        ["home", "cp-1"],
        ["home", "workers-1"],
        ["home", "workers-2"],
    ]
    assert (await cli.ok("get", "machines", "-c", "home")).startswith("NAME")


async def test_an_object_of_a_cluster_needs_to_be_told_in_which_unless_there_is_only_one(cli: Cli) -> None:
    said = await cli.fails("get", "nodegroup", "workers", code=2)
    assert "say which cluster with -c NAME; there are: empty, home" in said


async def test_documents_come_as_json_and_yaml(cli: Cli) -> None:
    as_json = json.loads(await cli.ok("get", "ng", "workers", "-c", "home", "-o", "json"))
    assert as_json["spec"]["replicas"] == 2
    assert await cli.doc("get", "ng", "workers", "-c", "home", "-o", "yaml") == as_json
    listed = await cli.doc("get", "ng", "-c", "home", "-o", "yaml")
    assert (listed["kind"], len(listed["items"])) == ("NodeGroupList", 2)


async def test_labels_select(cli: Cli) -> None:
    assert await cli.ok("get", "clusters", "-l", "env=home", "-o", "name") == "tenants/home\n"
    assert "there are no clusters" in (await cli.run("get", "clusters", "-l", "env=work")).stderr
    assert "cannot be read" in await cli.fails("get", "clusters", "-l", "env=(")
    assert "not both" in await cli.fails("get", "cluster", "home", "-l", "env=home", code=2)


async def test_an_empty_list_is_no_failure_but_a_cluster_that_is_not_there_is(cli: Cli) -> None:
    ended = await cli.run("get", "machines", "-c", "empty")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "", "there are no machines in empty\n")
    assert await cli.fails("get", "machines", "-c", "nope") == 'Error: tenants "nope" not found\n'


async def test_a_reader_that_goes_away_gets_no_traceback(cli: Cli) -> None:
    script = f"{REZUSCTL} get events -o json | head -1; {REZUSCTL} logs -c home | head -1 >/dev/null"
    shell = await asyncio.create_subprocess_shell(
        script, env=cli.env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await shell.communicate()
    assert (out, err) == (b"{\n", b"")


async def test_colours_are_only_for_a_terminal_that_wants_them(cli: Cli) -> None:
    assert "\x1b[1m" in (await cli.on_terminal("get", "clusters")).stdout
    assert "\x1b" not in (await cli.on_terminal("get", "clusters", NO_COLOR="1")).stdout
    assert "\x1b" not in await cli.ok("get", "clusters")


# ---------------------------------------------------------------- describe


async def test_describe_shows_spec_status_conditions_and_events(cli: Cli) -> None:
    shown = await cli.ok("describe", "cluster", "home")
    assert shown.startswith("Kind: Tenant\n\nMetadata:\n  name: home\n")
    for text in (
        "\nSpec:\n  talosVersion: v1.13.9\n",
        "\nStatus:\n",
        "\nConditions:\nTYPE",
        "\nEvents:\nLAST SEEN",
    ):
        assert text in shown
    events = shown.partition("Events:\n")[2].splitlines()[1:]
    assert any("Applied" in event and "run-1: adds 3 machines" in event for event in events)
    same = await cli.ok("cluster", "describe", "home")
    assert same.partition("Events:")[0] == shown.partition("Events:")[0]  # events bear ages
    assert 'runs "run-9" not found' in await cli.fails("describe", "run", "run-9", "-c", "home")


# ---------------------------------------------------------------- watch


async def test_a_watch_shows_what_is_there_and_then_each_change(cli: Cli, server: Server) -> None:
    async with cli.running("watch", "clusters", "empty") as watch:
        assert (await until_line(watch, "ADDED")).startswith("ADDED     Tenant empty")
        await server.patch("/api/v1/tenants/empty", {"metadata": {"labels": {"seen": "yes"}}})
        assert (await until_line(watch, "MODIFIED")).startswith("MODIFIED  Tenant empty")
        ended = await interrupt(watch)
    assert (ended.code, ended.stderr.strip()) == (130, "")


async def test_a_watch_ends_when_its_time_is_over(cli: Cli) -> None:
    out = await asyncio.wait_for(cli.ok("watch", "machines", "-c", "home", "--timeout", "1"), 10)
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["ADDED", "Machine", f"home/{name}"] for name in ("cp-1", "workers-1", "workers-2")
    ]


async def test_a_watch_goes_on_when_the_server_has_been_started_anew(cli: Cli, server: Server) -> None:
    address = server.url.removeprefix("http://")
    async with cli.running("watch", "clusters", "empty") as watch:
        await until_line(watch, "ADDED")
        await server.stop()
        await server.start(REZUSCLOUD_ADDR=address)
        await server.patch("/api/v1/tenants/empty", {"metadata": {"labels": {"seen": "again"}}})
        assert "Tenant empty" in await until_line(watch, "MODIFIED")
        ended = await interrupt(watch)
    assert ended.code == 130
    assert "trying again for 30 s" in ended.stderr
    assert "ADDED" not in ended.stdout, "it goes on where it was"


# ---------------------------------------------------------------- scale and delete


async def test_a_group_is_scaled_and_deleted(cli: Cli, server: Server) -> None:
    assert (
        await cli.ok("scale", "workers", "--replicas", "1", "-c", "home")
        == "nodegroups/workers scaled to 1\n"
    )
    await server.until_applied("home")
    assert await server.machines("home") == ["cp-1", "workers-1"]
    assert "spec.replicas" in await cli.fails("scale", "workers", "--replicas", "-1", "-c", "home")

    out = await cli.ok("delete", "nodegroup", "workers", "-c", "home", "--wait")
    assert out == "nodegroups/workers is being deleted\nnodegroups/workers is gone\n"
    assert await server.machines("home") == ["cp-1"]
    assert "not found" in await cli.fails("delete", "ng", "workers", "-c", "home")
