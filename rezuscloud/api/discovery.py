"""Owns discovery: what this server speaks and which kinds it has, as Kubernetes clients ask for it.

There is one group, the core group `v1`. The answers are the same for everybody who is known, and never change
while the server runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from aiohttp import web

from rezuscloud.http.errors import json_response
from rezuscloud.http.keys import Handler, Permission, Route
from rezuscloud.model.meta import API_VERSION, Doc
from rezuscloud.resources.registry import REGISTRY, Kind

CATEGORY = "rezuscloud"
"""`kubectl get rezuscloud` lists every kind of this category."""

_ANYBODY_KNOWN = Permission("get", "discovery")


def discovery_routes() -> Iterator[Route]:
    """GET of /api, /apis and /api/v1. Some clients write a slash behind them, and follow no redirect."""
    answers: dict[str, Doc] = {
        "/api": {"kind": "APIVersions", "versions": [API_VERSION], "serverAddressByClientCIDRs": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": API_VERSION, "groups": []},
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": API_VERSION,
            "resources": [entry for kind in REGISTRY for entry in _entries(kind)],
        },
    }
    for path, answer in answers.items():
        handler = _always(orjson.dumps(answer))
        yield Route("GET", path, handler, _ANYBODY_KNOWN)
        yield Route("GET", f"{path}/", handler, _ANYBODY_KNOWN)


def _always(body: bytes) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return json_response(body)

    return answer


def _entries(kind: Kind) -> Iterator[Doc]:
    """A kind and its subresources."""
    yield {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": list(kind.verbs),
        "shortNames": list(kind.short_names),
        "categories": [CATEGORY],
    }
    for name in kind.subresources:
        entry = {
            "name": f"{kind.plural}/{name}",
            "singularName": "",
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": ["get", "patch", "update"],
        }
        if name == "scale":
            entry |= {"kind": "Scale", "group": "autoscaling", "version": "v1"}
        yield entry
