"""apply: files, lists and standard input as one change, and errors that say where."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.cli import Cli, manifest
from tests.support.server import Server, control_plane, running, tenant, workers

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, engine_path: Path) -> AsyncIterator[Server]:
    async with running(tmp_path_factory.mktemp("server") / "data", engine_path) as up:
        yield up


@pytest.fixture
def cli(server: Server) -> Cli:
    return Cli.of(server)


async def test_files_with_several_documents_are_one_change(cli: Cli, server: Server, tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.json"
    group = control_plane()
    group["metadata"]["namespace"] = "home"
    one.write_text(manifest(tenant("home"), group))
    group = workers(1)
    group["metadata"]["namespace"] = "home"
    two.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [group]}))
    ended = await cli.run("apply", "-f", str(one), "-f", str(two), "--wait")
    assert (ended.code, ended.stdout.split("\n")) == (
        0,
        ["tenants/home applied", "nodegroups/cp applied", "nodegroups/workers applied", ""],
    )
    assert ended.stderr.splitlines()[-1] == "home: applied; all 2 machines are ready"
    assert len(await server.runs("home")) == 1


async def test_standard_input_is_a_file_too_and_the_cluster_may_be_given_aside(
    cli: Cli, server: Server
) -> None:
    text = manifest(tenant("aside", paused=True), control_plane())
    said = await cli.fails("apply", "-f", "-", stdin=text)
    assert said == (
        "Error: nothing was written: standard input, document 2 (NodeGroup cp): metadata.namespace: "
        "Required value: the tenant in which it lies\n"
    )
    await cli.ok("apply", "-f", "-", "-c", "aside", stdin=text)
    assert (await server.get("/api/v1/namespaces/aside/nodegroups/cp"))["spec"]["replicas"] == 1


async def test_all_that_is_wrong_is_told_with_its_document_and_field(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(manifest(tenant("bad"), control_plane(2), workers(-1)))
    assert (await cli.fails("apply", "-f", str(file), "-c", "bad")).splitlines() == [
        "Error: nothing was written:",
        f"  {file}, document 2 (NodeGroup cp): spec.replicas: Invalid value: 2: "
        "a control plane has an odd number of machines (1, 3, 5), so that etcd can keep a majority",
        f"  {file}, document 3 (NodeGroup workers): spec.replicas: Invalid value: -1: "
        "must be between 0 and 500",
    ]
    file.write_text(manifest(tenant("bad", bogus=1)))
    said = await cli.fails("apply", "-f", str(file))
    assert (
        said == f'Error: nothing was written: {file}, document 1 (Tenant bad): unknown field "spec.bogus"\n'
    )


async def test_what_is_no_document_is_told_with_its_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    for text, says in (
        ("a: [", "no valid YAML"),
        ("- 1", "a document must be an object"),
        ("", "no document is there in"),
        ("kind: Pod", "no kind"),
    ):
        file.write_text(text)
        said = await cli.fails("apply", "-f", str(file))
        assert says in said
        assert str(file) in said
    assert "nope.yaml cannot be read" in await cli.fails("apply", "-f", "nope.yaml")
    assert "Missing option '-f'" in await cli.fails("apply", code=2)


async def test_a_dry_run_changes_nothing(cli: Cli, server: Server) -> None:
    text = manifest(tenant("dry"), control_plane())
    out = await cli.ok("apply", "-f", "-", "-c", "dry", "--dry-run", "--wait", stdin=text)
    assert out == "tenants/dry applied (dry run)\nnodegroups/cp applied (dry run)\n"
    assert 'tenants "dry" not found' in await cli.fails("get", "cluster", "dry")
