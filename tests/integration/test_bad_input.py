"""Documents that are wrong in every way: each is refused with its fields named, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.server import Doc, Server, control_plane, running, tenant, workers

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANTS = "/api/v1/tenants"
GROUPS = "/api/v1/namespaces/personal/nodegroups"
MANIFESTS = "/api/v1/manifests"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    async with running(tmp_path_factory.mktemp("house") / "data", None) as server:
        await server.declare("personal", control_plane(1), paused=True)
        await server.until_held("personal", "pause")
        yield server


def _tenant(**spec: Any) -> str:
    return json.dumps(tenant("new", **spec))


def _group(**spec: Any) -> str:
    doc = workers(1)
    return json.dumps(doc | {"spec": doc["spec"] | spec})


def _named(name: Any, **meta: Any) -> str:
    return json.dumps(tenant("x") | {"metadata": {"name": name} | meta})


def _list(*items: Any) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _nested(depth: int, leaf: str = "1") -> str:
    return '{"a":' * depth + leaf + "}" * depth


def _with_group(**spec: Any) -> Doc:
    doc = workers(1)
    return doc | {
        "metadata": doc["metadata"] | {"namespace": "personal"},
        "spec": doc["spec"] | spec,
    }


BAD: list[tuple[str, str, str, int, str]] = [
    # What it is, where it goes, the body, the code, and a field that must be named ("" for none).
    ("not JSON", TENANTS, '{"kind":', 400, ""),
    ("nothing", TENANTS, "", 400, ""),
    ("a number", TENANTS, "42", 400, ""),
    ("a list", TENANTS, "[]", 400, ""),
    ("null", TENANTS, "null", 400, ""),
    ("NaN", GROUPS, _group().replace('"replicas": 1', '"replicas": NaN'), 400, ""),
    ("infinity", GROUPS, _group().replace('"replicas": 1', '"replicas": 1e999'), 400, ""),
    ("nested too deep", TENANTS, _tenant().replace('"v1.36.3"', _nested(100)), 400, ""),
    ("nested far too deep", TENANTS, _nested(150_000), 400, ""),
    ("too large", TENANTS, _tenant(note="x" * 2**21), 413, ""),
    ("another kind", TENANTS, json.dumps(tenant("new") | {"kind": "Machine"}), 400, ""),
    ("an unknown field", TENANTS, json.dumps(tenant("new") | {"extra": 1}), 400, "extra"),
    ("an unknown field of spec", TENANTS, _tenant(talosversion="v1.13.9"), 400, "spec.talosversion"),
    ("spec is a list", TENANTS, json.dumps(tenant("new") | {"spec": []}), 422, "spec"),
    ("spec is a text", TENANTS, json.dumps(tenant("new") | {"spec": "x"}), 422, "spec"),
    ("metadata is a list", TENANTS, json.dumps(tenant("new") | {"metadata": []}), 400, ""),
    ("no name", TENANTS, json.dumps(tenant("new") | {"metadata": {}}), 422, "metadata.name"),
    ("a bad name", TENANTS, _named("No_Good"), 422, "metadata.name"),
    ("a name of another type", TENANTS, _named(7), 422, "metadata.name"),
    ("a long name", TENANTS, _named("x" * 64), 422, "metadata.name"),
    ("a reserved name", TENANTS, _named("default"), 422, "metadata.name"),
    ("labels are a list", TENANTS, _named("new", labels=["a"]), 422, "metadata.labels"),
    ("a label of another type", TENANTS, _named("new", labels={"a": 1}), 422, "metadata.labels.a"),
    ("huge annotations", TENANTS, _named("new", annotations={"a": "x" * 300_000}), 422,
     "metadata.annotations"),
    ("a version of another type", TENANTS, _tenant(talosVersion=1.13), 422, "spec.talosVersion"),
    ("versions that do not fit", TENANTS, _tenant(kubernetesVersion="v1.20.0"), 422,
     "spec.kubernetesVersion"),
    ("a subnet that is none", TENANTS, _tenant(podSubnets=["10.0.0.0/40"]), 422, "spec.podSubnets[0]"),
    ("subnets nested wrong", TENANTS, _tenant(podSubnets=[["10.0.0.0/16"]]), 422, "spec.podSubnets[0]"),
    ("a flag as text", TENANTS, _tenant(paused="yes"), 422, "spec.paused"),
    ("replicas as text", GROUPS, _group(replicas="3"), 422, "spec.replicas"),
    ("replicas as a flag", GROUPS, _group(replicas=True), 422, "spec.replicas"),
    ("replicas below zero", GROUPS, _group(replicas=-1), 422, "spec.replicas"),
    ("very many replicas", GROUPS, _group(replicas=10**30), 422, "spec.replicas"),
    ("a fraction of a machine", GROUPS, _group(replicas=1.5), 422, "spec.replicas"),
    ("another role", GROUPS, _group(role="boss"), 422, "spec.role"),
    ("a second control plane", GROUPS, _group(role="controlplane"), 422, "spec.role"),
    ("no such provider", GROUPS, _group(providerClass="moon:base"), 422, "spec.providerClass"),
    ("a provider of another type", GROUPS, _group(providerClass={"a": 1}), 422, "spec.providerClass"),
    ("config is a text", GROUPS, _group(providerConfig="x"), 422, "spec.providerConfig"),
    ("config unknown", GROUPS, _group(providerConfig={"zones": 1}), 400, "spec.providerConfig.zones"),
    ("config nested wrong", GROUPS, _group(providerConfig={"tags": {"a": [1]}}), 422,
     "spec.providerConfig.tags.a"),
    ("config deep inside", GROUPS, _group(providerConfig={"health": {"notReady": [1]}}), 422,
     "spec.providerConfig.health.notReady[0]"),
    ("taints nested wrong", GROUPS, _group(nodeTaints=[{"key": "a", "effect": "Never"}]), 422,
     "spec.nodeTaints[0].effect"),
    ("a list without items", MANIFESTS, json.dumps({"apiVersion": "v1", "kind": "List"}), 400, ""),
    ("one bad item of three", MANIFESTS, _list(tenant("one"), tenant("two"), _with_group(replicas="3")), 422,
     "items[2].spec.replicas"),
    ("an item that is no object", MANIFESTS, _list(tenant("one"), 7), 400, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "code", "field"), [pytest.param(*row[1:], id=row[0]) for row in BAD]
)
async def test_bad_input_is_refused_with_its_field_and_nothing_is_written(
    server: Server, path: str, body: str, code: int, field: str
) -> None:
    before = await _version(server)
    headers = server.headers | {"Content-Type": "application/json"}
    async with server.session.post(f"{server.url}{path}", data=body, headers=headers) as answer:
        status = json.loads(await answer.read())
    assert answer.status == code, status
    assert (status["kind"], status["code"], status["status"]) == ("Status", code, "Failure")
    assert status["message"]
    if field:
        causes = status["details"]["causes"]
        assert field in [cause["field"] for cause in causes], causes
        assert all(cause["message"] and cause["reason"] for cause in causes)
    assert await _version(server) == before


async def test_of_a_key_given_twice_the_document_says_nothing_unsure(server: Server) -> None:
    """JSON leaves open which one counts: whichever is taken, it is judged like any other value."""
    body = _group().replace('"replicas": 1', '"replicas": 1, "replicas": "many"')
    before = await _version(server)
    headers = server.headers | {"Content-Type": "application/json"}
    async with server.session.post(f"{server.url}{GROUPS}", data=body, headers=headers) as answer:
        assert answer.status == 422
    assert await _version(server) == before


async def _version(server: Server) -> str:
    """The newest version of the store: it would count up with every write."""
    listed: Doc = await server.get("/api/v1/tenants")
    return str(listed["metadata"]["resourceVersion"])


async def test_the_file_on_disk_holds_no_trace_of_what_was_refused(server: Server) -> None:
    names = [item["metadata"]["name"] for item in (await server.get("/api/v1/tenants"))["items"]]
    assert names == ["personal"]
    await server.kill()
    await server.start()
    assert (await server.get("/api/v1/nodegroups"))["items"][0]["metadata"]["name"] == "cp"
    assert len((await server.get("/api/v1/nodegroups"))["items"]) == 1
