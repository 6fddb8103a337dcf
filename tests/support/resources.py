"""A service on a real store, a provider whose schema is strict, and documents to send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import voluptuous as vol

from rezuscloud.access.identity import Identity
from rezuscloud.model.meta import Doc
from rezuscloud.plugin.types import Fragment, MachineFacts, Provider, RenderRequest, TfResource

ADMIN = Identity("admin", "Admin", role="admin", via="token")
EDITOR = Identity("erin", "Erin", role="edit", via="token")
VIEWER = Identity("vera", "Vera", role="view", via="token")


class StrictProvider(Provider):
    """Only its schema matters here."""

    name = "tiny"
    title = "Tiny"

    def config_schema(self) -> vol.Schema:
        return vol.Schema(
            {
                "ocpus": vol.All(int, vol.Range(min=1, max=8)),
                "disk": {"sizeGb": int},
                "nested": vol.Schema({}, extra=vol.ALLOW_EXTRA),
            }
        )

    def render(self, *, request: RenderRequest) -> Fragment:
        return Fragment()

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return None


class FaultyProvider(StrictProvider):
    """Its schema is broken."""

    name = "faulty"

    def config_schema(self) -> vol.Schema:
        def fail(value: Any) -> Any:
            raise RuntimeError("boom")

        return vol.Schema(fail)


PROVIDERS: Mapping[str, Provider] = {"tiny": StrictProvider(), "faulty": FaultyProvider()}


def tenant(name: str = "personal", **spec: Any) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": {"talosVersion": "v1.13.9", "kubernetesVersion": "1.36.3", **spec},
    }


def group(name: str = "workers", namespace: str = "personal", **spec: Any) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "NodeGroup",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"role": "worker", "replicas": 2, "providerClass": "tiny:small", **spec},
    }


def machine_spec(name: str = "workers-1") -> Doc:
    node_group, _, slot = name.rpartition("-")
    return {
        "nodeGroup": node_group,
        "role": "worker",
        "slot": int(slot),
        "provider": "tiny",
        "providerId": f"id-{name}",
        "hostname": name,
    }
