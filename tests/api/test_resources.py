"""The REST face of every kind, over a real socket and a real store."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.api import TENANT, Api, group, placed, serve


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        yield running


@pytest.fixture
async def tenant(api: Api) -> dict[str, Any]:
    made: dict[str, Any] = await api.ok("POST", "/api/v1/tenants", TENANT)
    return made


GROUPS = "/api/v1/namespaces/personal/nodegroups"


# ---------------------------------------------------------------- the life of an object


async def test_an_object_is_created_read_replaced_patched_and_deleted(api: Api) -> None:
    created = await api.call("POST", "/api/v1/tenants", TENANT)
    assert created.status == 201
    assert created.json["metadata"]["generation"] == 1
    group_made = await api.call("POST", GROUPS, group("workers"))
    assert group_made.status == 201

    read = await api.ok("GET", GROUPS + "/workers")
    assert read == group_made.json

    read["spec"]["replicas"] = 3
    replaced = await api.call("PUT", GROUPS + "/workers", read)
    assert (replaced.status, replaced.json["metadata"]["generation"]) == (200, 2)

    patched = await api.call(
        "PATCH",
        GROUPS + "/workers",
        {"spec": {"replicas": 4}},
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert (patched.status, patched.json["spec"]["replicas"]) == (200, 4)
    patched = await api.call(
        "PATCH",
        GROUPS + "/workers",
        [{"op": "replace", "path": "/spec/replicas", "value": 1}],
        headers={"Content-Type": "application/json-patch+json"},
    )
    assert patched.json["spec"]["replicas"] == 1

    deleted = await api.call("DELETE", GROUPS + "/workers")
    assert deleted.status == 200
    assert deleted.json["kind"] == "NodeGroup"
    assert deleted.json["metadata"]["deletionTimestamp"]
    again = await api.ok("DELETE", GROUPS + "/workers")
    assert again == deleted.json
    await api.release("NodeGroup", "personal", "workers")
    assert (await api.call("GET", GROUPS + "/workers")).status == 404


async def test_deleting_what_nothing_holds_answers_a_success_status(api: Api, tenant: dict[str, Any]) -> None:
    made = await api.ok("POST", GROUPS, group("workers"))
    await api.release("NodeGroup", "personal", "workers")
    answer = await api.ok("DELETE", GROUPS + "/workers", {"propagationPolicy": "Background"})
    assert (answer["kind"], answer["status"], answer["code"]) == ("Status", "Success", 200)
    assert answer["details"] == {"name": "workers", "kind": "nodegroups", "uid": made["metadata"]["uid"]}


async def test_both_spellings_of_a_tenants_things_are_one(api: Api, tenant: dict[str, Any]) -> None:
    made = await api.ok("POST", "/api/v1/tenants/personal/nodegroups", group("workers"))
    assert await api.ok("GET", GROUPS + "/workers") == made
    assert await api.ok("GET", "/api/v1/tenants/personal/nodegroups/workers") == made


# ---------------------------------------------------------------- lists


async def test_a_list_holds_the_objects_and_its_version(api: Api, tenant: dict[str, Any]) -> None:
    await api.ok("POST", GROUPS, group("b", tier="web"))
    await api.ok("POST", GROUPS, group("a", tier="db"))
    listed = await api.ok("GET", GROUPS)
    assert (listed["kind"], listed["apiVersion"]) == ("NodeGroupList", "v1")
    assert int(listed["metadata"]["resourceVersion"]) > 0
    assert [item["metadata"]["name"] for item in listed["items"]] == ["a", "b"]
    assert [item["kind"] for item in listed["items"]] == ["NodeGroup", "NodeGroup"]
    everywhere = await api.ok("GET", "/api/v1/nodegroups")
    assert everywhere["items"] == listed["items"]


async def test_an_empty_list_has_items(api: Api) -> None:
    assert (await api.ok("GET", "/api/v1/machines"))["items"] == []


async def test_selectors_choose_and_bad_ones_are_refused(api: Api, tenant: dict[str, Any]) -> None:
    await api.ok("POST", GROUPS, group("a", tier="db"))
    await api.ok("POST", GROUPS, group("b", tier="web"))

    async def names(query: str) -> list[str]:
        listed = await api.ok("GET", f"{GROUPS}?{query}")
        return [item["metadata"]["name"] for item in listed["items"]]

    assert await names("labelSelector=tier%3Dweb") == ["b"]
    assert await names("labelSelector=tier%20in%20(web,db)") == ["a", "b"]
    assert await names("fieldSelector=metadata.name%3Da,") == ["a"]
    assert await names("labelSelector=tier%3Ddb&fieldSelector=spec.role%3Dworker") == ["a"]
    for query in ("labelSelector=a%20in%20(", "fieldSelector=spec.nothing%3Dx", "limit=-1", "limit=x"):
        answer = await api.call("GET", f"{GROUPS}?{query}")
        assert (answer.status, answer.json["reason"]) == (400, "BadRequest"), query


async def test_pages_continue_and_keep_the_first_pages_version(api: Api, tenant: dict[str, Any]) -> None:
    for name in "abcde":
        await api.ok("POST", GROUPS, group(name))
    first = await api.ok("GET", f"{GROUPS}?limit=2")
    assert first["metadata"]["remainingItemCount"] == 3
    second = await api.ok("GET", f"{GROUPS}?limit=2&continue={first['metadata']['continue']}")
    third = await api.ok("GET", f"{GROUPS}?limit=2&continue={second['metadata']['continue']}")
    pages = [first, second, third]
    assert [item["metadata"]["name"] for page in pages for item in page["items"]] == list("abcde")
    assert len({page["metadata"]["resourceVersion"] for page in pages}) == 1
    assert "continue" not in third["metadata"]


# ---------------------------------------------------------------- refusals


async def test_what_is_not_there_says_so_as_kubernetes_does(api: Api) -> None:
    answer = await api.call("GET", "/api/v1/tenants/nobody")
    assert answer.status == 404
    assert answer.json["message"] == 'tenants "nobody" not found'
    assert answer.json["details"] == {"name": "nobody", "kind": "tenants"}


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/api/v1/nodegroups", "GET"),
        ("DELETE", GROUPS, "GET,POST"),
        ("PATCH", "/api/v1/tenants", "GET,POST"),
        ("POST", "/api/v1/tenants/personal", "DELETE,GET,PATCH,PUT"),
        ("POST", "/api/v1/tenants/personal/status", "GET,PATCH,PUT"),
        ("GET", "/api/v1/tenants/personal/apply", "POST"),
        ("GET", "/api/v1/manifests", "POST"),
        ("GET", "/api/v1/auth/login", "POST"),
        ("POST", "/healthz", "GET"),
    ],
)
async def test_a_method_that_does_not_fit_is_not_allowed_and_says_what_is(
    api: Api, method: str, path: str, allow: str
) -> None:
    answer = await api.call(method, path)
    assert (answer.status, answer.json["reason"]) == (405, "MethodNotAllowed")
    assert answer.headers["Allow"] == allow


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/v1/nothing",
        "/api/v1/tenants/personal/nothing",
        "/api/v1/namespaces/personal/nodegroups/..%2f..%2fetc%2fpasswd",
        "/api/v2/tenants",
        "/../../etc/passwd",
    ],
)
async def test_unknown_paths_are_a_not_found_status(api: Api, path: str) -> None:
    answer = await api.call("GET", path)
    assert (answer.status, answer.json["kind"], answer.json["reason"]) == (404, "Status", "NotFound")
    assert answer.json["message"]


async def test_wrong_values_are_invalid_with_their_fields_and_nothing_is_written(
    api: Api, tenant: dict[str, Any]
) -> None:
    before = api.store.log.version
    answer = await api.call("POST", GROUPS, group("workers", replicas=-1))
    assert (answer.status, answer.json["reason"]) == (422, "Invalid")
    assert answer.json["details"]["causes"][0]["field"] == "spec.replicas"
    unknown = group("workers")
    unknown["spec"]["replica"] = 1
    answer = await api.call("POST", GROUPS, unknown)
    assert (answer.status, answer.json["reason"]) == (400, "BadRequest")
    assert 'unknown field "spec.replica"' in answer.json["message"]
    assert api.store.log.version == before


async def test_unknown_fields_are_dropped_with_a_warning_when_asked(api: Api, tenant: dict[str, Any]) -> None:
    unknown = group("workers")
    unknown["spec"]["replica"] = 1
    answer = await api.call("POST", GROUPS + "?fieldValidation=Warn", unknown)
    assert answer.status == 201
    assert answer.headers["Warning"] == '299 - "unknown field \\"spec.replica\\""'
    assert "replica" not in answer.json["spec"]
    answer = await api.call("PUT", GROUPS + "/workers?fieldValidation=Ignore", unknown)
    assert answer.status == 200
    assert "Warning" not in answer.headers
    assert (await api.call("PUT", GROUPS + "/workers?fieldValidation=No", unknown)).status == 400


async def test_a_stale_version_conflicts(api: Api, tenant: dict[str, Any]) -> None:
    made = await api.ok("POST", GROUPS, group("workers"))
    made["spec"]["replicas"] = 5
    await api.ok("PUT", GROUPS + "/workers", made)
    made["spec"]["replicas"] = 6
    answer = await api.call("PUT", GROUPS + "/workers", made)
    assert (answer.status, answer.json["reason"]) == (409, "Conflict")
    answer = await api.call(
        "DELETE", GROUPS + "/workers", {"preconditions": {"uid": "another", "resourceVersion": "1"}}
    )
    assert (answer.status, answer.json["reason"]) == (409, "Conflict")
    assert (await api.call("DELETE", GROUPS + "/workers", {"preconditions": 3})).status == 400
    answer = await api.call("POST", GROUPS, group("workers"))
    assert (answer.status, answer.json["reason"]) == (409, "AlreadyExists")


async def test_the_systems_kinds_are_read_only_and_say_what_to_do(api: Api, tenant: dict[str, Any]) -> None:
    answer = await api.call(
        "POST", "/api/v1/namespaces/personal/machines", {"kind": "Machine", "metadata": {"name": "x"}}
    )
    assert (answer.status, answer.json["reason"]) == (403, "Forbidden")
    assert "NodeGroup" in answer.json["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b"3", b'"x"', b"{", b"null"])
async def test_a_body_that_is_no_object_is_a_bad_request(api: Api, body: bytes) -> None:
    answer = await api.call("POST", "/api/v1/tenants", body)
    assert (answer.status, answer.json["reason"]) == (400, "BadRequest")


async def test_huge_numbers_and_deep_nesting_are_refused_not_fatal(api: Api, tenant: dict[str, Any]) -> None:
    for spec in (b'{"replicas":1e308}', b'{"replicas":' + b"9" * 4000 + b"}", b'{"x":' * 500):
        closing = b"}" * 500 if spec.endswith(b'{"x":') else b""
        body = b'{"kind":"NodeGroup","metadata":{"name":"w"},"spec":' + spec
        body += b"1" + closing if closing else b""
        answer = await api.call("POST", GROUPS, body + b"}")
        assert answer.status in (400, 422), answer.body


async def test_too_large_a_body_is_refused(api: Api) -> None:
    answer = await api.call("POST", "/api/v1/tenants", b" " * (1024 * 1024 + 1))
    assert (answer.status, answer.json["reason"]) == (413, "RequestEntityTooLarge")


async def test_other_patches_are_an_unsupported_media_type(api: Api, tenant: dict[str, Any]) -> None:
    for content_type in ("application/strategic-merge-patch+json", "application/apply-patch+yaml"):
        answer = await api.call(
            "PATCH", "/api/v1/tenants/personal", {}, headers={"Content-Type": content_type}
        )
        assert (answer.status, answer.json["reason"]) == (415, "UnsupportedMediaType")
        assert "application/merge-patch+json" in answer.json["message"]


# ---------------------------------------------------------------- forms and modes


async def test_yaml_is_accepted(api: Api) -> None:
    text = (
        b"kind: Tenant\nmetadata: {name: personal}\n"
        b"spec:\n  talosVersion: v1.13.9\n  kubernetesVersion: v1.36.3\n"
        b"  controlPlaneEndpoint: api.example.org\n"
    )
    answer = await api.call("POST", "/api/v1/tenants", text, headers={"Content-Type": "application/yaml"})
    assert answer.status == 201, answer.body


async def test_a_dry_run_shows_the_result_and_stores_nothing(api: Api, tenant: dict[str, Any]) -> None:
    before = api.store.log.version
    answer = await api.call("POST", GROUPS + "?dryRun=All", group("workers"))
    assert (answer.status, answer.json["metadata"]["name"]) == (201, "workers")
    changed = tenant | {"spec": tenant["spec"] | {"paused": True}}
    shown = await api.ok("PUT", "/api/v1/tenants/personal?dryRun=All", changed)
    assert (shown["spec"]["paused"], shown["metadata"]["generation"]) == (True, 2)
    assert (await api.ok("DELETE", "/api/v1/tenants/personal?dryRun=All"))["metadata"]["name"] == "personal"
    await api.ok("DELETE", "/api/v1/tenants/personal", {"dryRun": ["All"]})
    await api.ok("POST", "/api/v1/manifests?dryRun=All", {"kind": "List", "items": [placed("workers")]})
    assert api.store.log.version == before
    assert (await api.call("POST", GROUPS + "?dryRun=Some", group("workers"))).status == 400


async def test_a_list_of_manifests_is_stored_in_one_transaction(api: Api) -> None:
    items = [placed("workers"), TENANT, placed("control", role="controlplane", replicas=3)]
    answer = await api.ok("POST", "/api/v1/manifests", {"kind": "List", "items": items})
    assert answer["kind"] == "List"
    assert [item["metadata"]["name"] for item in answer["items"]] == ["workers", "personal", "control"]
    assert await api.ok("GET", GROUPS + "/workers") == answer["items"][0]
    before = api.store.log.version
    broken = [placed("more"), placed("bad", replicas=-2)]
    answer = await api.call("POST", "/api/v1/manifests", {"kind": "List", "items": broken})
    assert answer.status == 422
    assert api.store.log.version == before
    for wrong in ({"kind": "List", "items": "x"}, {"kind": "List", "items": [3]}, [], {"kind": "List"}):
        assert (await api.call("POST", "/api/v1/manifests", wrong)).status == 400


async def test_yaml_documents_are_manifests_too(api: Api) -> None:
    text = "\n---\n".join(json.dumps(doc) for doc in (TENANT, placed("workers"))).encode()
    answer = await api.call("POST", "/api/v1/manifests", text, headers={"Content-Type": "application/yaml"})
    assert (answer.status, len(answer.json["items"])) == (200, 2)


async def test_status_is_a_subresource(api: Api, tenant: dict[str, Any]) -> None:
    told = tenant | {"status": {"note": "mine"}, "spec": tenant["spec"] | {"paused": True}}
    answer = await api.ok("PUT", "/api/v1/tenants/personal/status", told)
    assert answer["status"]["note"] == "mine"
    assert "paused" not in answer["spec"]
    answer = await api.ok(
        "PATCH",
        "/api/v1/tenants/personal/status",
        {"status": {"note": "other"}},
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert answer["status"]["note"] == "other"
    assert await api.ok("GET", "/api/v1/tenants/personal/status") == answer


async def test_a_node_group_scales(api: Api, tenant: dict[str, Any]) -> None:
    await api.ok("POST", GROUPS, group("workers"))
    scale = await api.ok("GET", GROUPS + "/workers/scale")
    assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 2)
    scaled = await api.ok(
        "PATCH",
        GROUPS + "/workers/scale",
        {"spec": {"replicas": 5}},
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert (scaled["kind"], scaled["spec"]["replicas"]) == ("Scale", 5)
    scaled["spec"]["replicas"] = 4
    assert (await api.ok("PUT", GROUPS + "/workers/scale", scaled))["spec"]["replicas"] == 4
    assert (await api.ok("GET", GROUPS + "/workers"))["spec"]["replicas"] == 4


async def test_head_answers_as_get_without_a_body(api: Api, tenant: dict[str, Any]) -> None:
    answer = await api.call("HEAD", "/api/v1/tenants/personal")
    assert (answer.status, answer.body) == (200, b"")


async def test_without_a_token_nothing_is_told(api: Api, tenant: dict[str, Any]) -> None:
    for path in ("/api/v1/tenants/personal", "/api/v1/tenants", "/api/v1/nothing", "/metrics"):
        answer = await api.call("GET", path, token=None)
        assert (answer.status, answer.json["reason"]) == (401, "Unauthorized")
