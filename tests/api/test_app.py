"""All routes: each says who may pass it, and nothing else is open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from rezuscloud.access.identity import Identity
from rezuscloud.access.policy import is_allowed
from rezuscloud.api.actions import Actions
from rezuscloud.http.keys import ENTRANCE, RULES, Access, Permission
from rezuscloud.resources.registry import REGISTRY
from tests.support.api import TENANT, Api, placed, serve

PUBLIC = {"/healthz", "/livez", "/readyz", "/version", "/api/v1/auth/login"}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        yield running


async def test_every_route_declares_its_rule_and_only_a_known_few_are_public(api: Api) -> None:
    rules = api.app[RULES]
    public = set()
    for route in api.app.router.routes():
        rule = rules.get(route)
        assert isinstance(rule, Access | Permission), f"{route} declares no rule"
        assert route.resource is not None
        if rule is Access.PUBLIC:
            public.add(route.resource.canonical)
    assert public == PUBLIC


async def test_every_route_that_is_not_public_asks_who_is_there(api: Api) -> None:
    for route in api.app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        if path in PUBLIC:
            continue
        path = path.replace("{tenant}", "personal").replace("{path}", "tenants")
        method = "GET" if route.method == "*" else route.method
        answer = await api.call(method, path, token=None)
        assert answer.status == 401, (method, path)


async def test_every_kind_and_subresource_asks_the_policy(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody whose role may do nothing is refused everywhere below /api/v1."""
    await api.ok("POST", "/api/v1/manifests", {"items": [TENANT, placed("w")], "kind": "List"})
    nobody = Identity("nobody", "Nobody", role="none", via="token")
    monkeypatch.setattr(api.sessions, "verify", lambda token: nobody)
    paths = [("POST", "/api/v1/manifests"), ("GET", "/metrics")]
    for kind in REGISTRY:
        base = f"/api/v1/namespaces/personal/{kind.plural}" if kind.namespaced else f"/api/v1/{kind.plural}"
        paths += [("GET", base), ("GET", base + "?watch=true"), ("POST", base)]
        paths += [(method, base + "/x") for method in ("GET", "PUT", "PATCH", "DELETE")]
        paths += [(method, base + "/x/status") for method in ("GET", "PUT", "PATCH")]
    paths += [
        (method, "/api/v1/namespaces/personal/nodegroups/w/scale") for method in ("GET", "PUT", "PATCH")
    ]
    actions = Actions(api.service, api.recorder, api.states, api.logs, api.streams, lambda _: lambda: True)
    for kind_name, name, method in actions.permissions:
        plural = REGISTRY.kind(kind_name).plural
        base = "/api/v1/tenants" if kind_name == "Tenant" else f"/api/v1/namespaces/personal/{plural}"
        paths.append((method, f"{base}/x/{name}"))
    for method, path in paths:
        patch = {"Content-Type": "application/merge-patch+json"} if method == "PATCH" else {}
        body = None if method in ("GET", "DELETE") else placed("x")
        if path.endswith("/manifests"):
            body = {"kind": "List", "items": [placed("x")]}
        answer = await api.call(method, path, body, headers=patch)
        is_not_there = answer.status == 404 and "no subresource" in answer.json["message"]
        assert answer.status == 403 or is_not_there, (method, path, answer.body)
    assert not is_allowed(nobody, "get")


async def test_the_application_has_one_middleware_and_a_body_limit(api: Api) -> None:
    assert len(api.app.middlewares) == 1
    assert isinstance(api.app, web.Application)


@pytest.mark.parametrize(
    ("method", "path", "is_taken"),
    [
        ("GET", "/api/v1/tenants", True),
        ("GET", "/api/v1/namespaces/personal/nodegroups/w", True),
        ("GET", "/api/v1/namespaces/personal/tfstate", False),
        ("GET", "/api/v1/tenants/personal/tfstate", False),
        ("GET", "/api/v1/tenants/personal/state-env", False),
        ("GET", "/api/v1/manifests", False),
        ("GET", "/api/v1/nothing", False),
        ("GET", "/api/v1", False),
        ("GET", "/healthz", False),
        ("HEAD", "/api/v1/tenants", False),
        ("POST", "/api/v1/tenants", False),
    ],
)
async def test_only_a_plain_read_of_objects_takes_the_short_way_in(
    api: Api, method: str, path: str, is_taken: bool
) -> None:
    answer = api.app[ENTRANCE](make_mocked_request(method, path, app=api.app))
    assert (answer is not None) is is_taken
    if answer is not None:
        answer.close()  # type: ignore[attr-defined]  # a coroutine that was never started
        assert (await api.call(method, path, token=None)).status == 401
