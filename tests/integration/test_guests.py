"""Plugins that are broken in every way: the house starts, tells of it, and the tenants of others go on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.commands import rezuscloud, rezusctl
from tests.support.server import ApiError, Doc, Server, control_plane, running

pytestmark = pytest.mark.engine

SECRET = "hunter2-the-guests-own-secret"

_HEAD = """
import asyncio, os, sys, time
import voluptuous as vol
from rezuscloud.plugin.hookspecs import hookimpl
from rezuscloud.plugin.types import *
SECRET = "{secret}"

class Base(Provider):
    title = "Guest"
    def config_schema(self):
        return vol.Schema({{vol.Optional("note", default=""): str}})
    def render(self, *, request):
        facts = {{m.resource_name: {{"who": self.name, "n": m.name}} for m in request.machines}}
        machines = {{name: {{"input": fact}} for name, fact in facts.items()}}
        return Fragment(resource={{"terraform_data": machines}})
    def project(self, *, resource):
        facts = resource.attributes.get("output") or resource.attributes.get("input") or {{}}
        facts = facts.get("value", facts)
        if facts.get("who") != self.name:
            return None
        name = resource.name.removeprefix("machine_")
        return MachineFacts(machine=name, provider_id=resource.attributes["id"], hostname=name)
"""
_TAIL = """
@hookimpl
def rezuscloud_register_providers():
    return [P()]
"""

LOADED: Mapping[str, str] = {
    # Their tenants can be declared; what goes wrong is told on the tenant.
    "raises": """
        class P(Base):
            name = "raises"
            def render(self, *, request):
                raise RuntimeError("the guest fell over its own feet")
    """,
    "rubbish": """
        class P(Base):
            name = "rubbish"
            def render(self, *, request):
                return {"resource": 42}
    """,
    "nomachines": """
        class P(Base):
            name = "nomachines"
            def render(self, *, request):
                return Fragment(resource={"terraform_data": {"something": {"input": object()}}})
    """,
    "exits": """
        class P(Base):
            name = "exits"
            def render(self, *, request):
                sys.exit(3)
    """,
    "hangs": """
        class P(Base):
            name = "hangs"
            def render(self, *, request):
                time.sleep(3600)
    """,
    "leaks": """
        class P(Base):
            name = "leaks"
            features = frozenset({Feature.OBSERVE})
            def render(self, *, request):
                print(SECRET)
                sys.stderr.write(SECRET + "\\n")
                sys.stdout.buffer.write(SECRET.encode())
                return super().render(request=request)
            def project(self, *, resource):
                print(SECRET, flush=True)
                return super().project(resource=resource)
            async def observe(self, *, machines):
                print(SECRET)
                return [Observation(m.machine, True, Stage.READY, "Fine") for m in machines]
    """,
    "blind": """
        class P(Base):
            name = "blind"
            features = frozenset({Feature.OBSERVE})
            def project(self, *, resource):
                raise KeyError("what is this?")
            async def observe(self, *, machines):
                return "no list"
    """,
}
FAILED: Mapping[str, tuple[str, str]] = {
    # Left out at the start; what `rezuscloud plugins` says of each.
    "importfails": ('print(SECRET); raise ValueError("broken at import")', "broken at import"),
    "nohook": ("x = 1", "implements no hook"),
    "newer": ('class P(Base):\n    name = "newer"\n    contract_version = 99', "contract version 99"),
    "noname": ("class P(Base):\n    pass", "not a DNS label"),
    "badschema": (
        'class P(Base):\n    name = "badschema"\n    def config_schema(self): return {"a": 1}',
        "not a voluptuous Schema",
    ),
    "exitsearly": ("os._exit if False else sys.exit(7)", "SystemExit"),
}


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `pip install --target` leaves it: a module and the metadata of each guest."""
    target = tmp_path_factory.mktemp("guests")
    head = _HEAD.format(secret=SECRET)
    sources = {name: dedent(text) for name, text in LOADED.items()}
    sources |= {name: text for name, (text, _) in FAILED.items()}
    for name, text in sources.items():
        tail = "" if name == "nohook" else _TAIL
        (target / f"guest_{name}.py").write_text(f"{head}\n{text}\n{tail}")
        info = target / f"guest_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: guest-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rezuscloud]\n{name} = guest_{name}\n")
    return target


async def test_the_list_of_plugins_tells_of_each_what_is_wrong(guests: Path, tmp_path: Path) -> None:
    ended = await rezuscloud("plugins", data_dir=tmp_path / "data", PYTHONPATH=str(guests))
    assert ended.code == 0, ended.stderr
    for name, (_, told) in FAILED.items():
        line = next(line for line in ended.stdout.splitlines() if line.startswith(f"{name}: "))
        assert told in line
    as_json = await rezuscloud("plugins", "-o", "json", data_dir=tmp_path / "data", PYTHONPATH=str(guests))
    status = {info["name"]: info["status"] for info in json.loads(as_json.stdout)}
    assert status == {"lab": "loaded", **dict.fromkeys(LOADED, "loaded"), **dict.fromkeys(FAILED, "failed")}
    for text in (ended, as_json):
        assert SECRET not in text.stdout + text.stderr


async def test_guests_that_fail_cost_only_their_own_tenants(
    guests: Path, tmp_path: Path, engine_path: Path
) -> None:
    settings = {"PYTHONPATH": str(guests), "REZUSCLOUD_LOG_LEVEL": "debug"}
    async with running(tmp_path / "data", engine_path, **settings) as server:
        for name in LOADED:
            await server.declare(f"of-{name}", _group(name))
        started = time.monotonic()
        await server.declare("personal", control_plane(1))
        await server.until_applied("personal")
        assert time.monotonic() - started < 8, "nobody waits for the guest that hangs"

        said = {
            "raises": "the guest fell over its own feet",
            "rubbish": "it returned a dict, not Fragment",
            "exits": "SystemExit",
            "hangs": "took longer than 10 s",
            "nomachines": "",
        }
        for name, text in said.items():
            hold = await server.until_held(f"of-{name}", "declaration")
            assert text in hold["message"]
            assert "cannot be rendered" in hold["message"]
            condition = await _condition(server, f"of-{name}", "Applied")
            assert condition["status"] == "False"
            assert text in condition["message"]
            assert await server.machines(f"of-{name}") == []

        await server.until_applied("of-leaks")
        await server.until(lambda: _is_ready(server, "of-leaks"))
        with pytest.raises(ApiError) as refused:
            await server.declare("of-importfails", _group("importfails"))
        assert refused.value.code == 422
        assert "lab" in str(refused.value.body["details"]["causes"])

        # The blind one's machine is made and its state kept: what cannot be projected is told, not lost.
        await server.until(lambda: _tells(server, "of-blind", "cannot read terraform_data.machine_cp-1"))
        versions = await server.get("/api/v1/namespaces/of-blind/stateversions")
        assert len(versions["items"]) >= 1

        # Lab tenants still go on, and the broken ones can be deleted.
        await server.patch("/api/v1/namespaces/personal/nodegroups/cp", {"spec": {"replicas": 3}})
        await server.until_applied("personal")
        await server.delete("/api/v1/tenants/of-raises")
        await server.until(lambda: _is_gone(server, "of-raises"))

        shown = await _everything(server)
        assert SECRET not in shown
    assert SECRET not in server.log_text()


async def test_a_guest_that_was_uninstalled_leaves_its_machines_alone(
    guests: Path, tmp_path: Path, engine_path: Path
) -> None:
    async with running(tmp_path / "data", engine_path, PYTHONPATH=str(guests)) as server:
        await server.declare("of-leaks", _group("leaks"))
        await server.until_applied("of-leaks")
        before = await server.machines("of-leaks")
        await server.stop()
        await server.start(PYTHONPATH="")
        await server.post("/api/v1/tenants/of-leaks/apply", {})
        await server.until(lambda: _tells(server, "of-leaks", "leaks"))
        assert await server.machines("of-leaks") == before
        described = await rezusctl(server, "describe", "cluster", "of-leaks")
        assert "leaks" in described.stdout


def _group(provider: str) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "NodeGroup",
        "metadata": {"name": "cp"},
        "spec": {
            "role": "controlplane",
            "replicas": 1,
            "providerClass": f"{provider}:small",
            "providerConfig": {},
        },
    }


async def _condition(server: Server, tenant: str, type_: str) -> Doc:
    conditions = (await server.tenant(tenant))["status"]["conditions"]
    return next(c for c in conditions if c["type"] == type_)


async def _is_ready(server: Server, tenant: str) -> bool:
    return (await _condition(server, tenant, "Ready"))["status"] == "True"


async def _tells(server: Server, tenant: str, text: str) -> bool:
    """Whether the tenant says so: in what holds it, or in a condition."""
    status = (await server.tenant(tenant))["status"]
    said = [*status.get("heldBy", []), *(c for c in status["conditions"] if c["status"] != "True")]
    return any(text in entry["message"] for entry in said)


async def _is_gone(server: Server, tenant: str) -> bool:
    try:
        await server.tenant(tenant)
    except ApiError as error:
        return error.code == 404
    return False


async def _everything(server: Server) -> str:
    """All that a person can be shown: every object, and every log of a run."""
    pieces = []
    for plural in ("tenants", "nodegroups", "machines", "runs", "events", "providers", "stateversions"):
        pieces.append(await server.get(f"/api/v1/{plural}"))
    for run in pieces[3]["items"]:
        meta = run["metadata"]
        pieces.append(await server.get(f"/api/v1/namespaces/{meta['namespace']}/runs/{meta['name']}/log"))
    return json.dumps(pieces)
