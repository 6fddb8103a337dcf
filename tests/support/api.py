"""The main port on a real socket, over a real store: what tests of `api/` share."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import voluptuous as vol
from aiohttp import web
from yarl import URL

from rezuscloud.access.identity import Identity, Sessions
from rezuscloud.api.app import build_app
from rezuscloud.api.health import PartState
from rezuscloud.bus.client import Bus
from rezuscloud.bus.server import run_server
from rezuscloud.http.access_log import AccessLog
from rezuscloud.http.metrics import Metrics
from rezuscloud.http.server import Limits, Listener, listen
from rezuscloud.http.sse import Streams
from rezuscloud.kit.tasks import TaskSupervisor
from rezuscloud.model.meta import FINALIZER_MACHINES, FINALIZER_SECRETS, Doc
from rezuscloud.plugin.types import Fragment, MachineFacts, Provider, RenderRequest, TfResource
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.watch import WatchHub
from rezuscloud.store.db import Store
from rezuscloud.store.records import RunLogs

PASSWORD = "correct horse battery"


class Plain(Provider):
    """A provider that takes one number and makes nothing."""

    name = "plain"
    title = "Plain"

    def config_schema(self) -> vol.Schema:
        return vol.Schema({vol.Optional("size", default=1): vol.All(int, vol.Range(min=1, max=9))})

    def render(self, *, request: RenderRequest) -> Fragment:
        return Fragment()

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return None


@dataclass
class Recorder:
    """Stands in for the reconciler: remembers what it was asked for."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    error: Exception | None = None

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    async def approve(self, identity: Identity, tenant: str, run: str, plan_id: str) -> None:
        self._note("approve", identity.subject, tenant, run, plan_id)

    async def deny(self, identity: Identity, tenant: str, run: str, plan_id: str) -> None:
        self._note("deny", identity.subject, tenant, run, plan_id)

    async def cancel(self, identity: Identity, tenant: str, run: str, force: bool = False) -> None:
        self._note("cancel", identity.subject, tenant, run, force)

    async def retry(self, identity: Identity, tenant: str, run: str) -> None:
        self._note("retry", identity.subject, tenant, run)

    async def plan(self, identity: Identity, tenant: str, run: str) -> Doc:
        self._note("plan", identity.subject, tenant, run)
        return {"format_version": "1.2"}

    async def apply_now(self, identity: Identity, tenant: str) -> None:
        self._note("apply", identity.subject, tenant)

    async def recover(self, identity: Identity, tenant: str) -> Doc:
        self._note("recover", identity.subject, tenant)
        return {"adopted": 1}

    async def unlock(self, identity: Identity, tenant: str, lock_id: str) -> None:
        self._note("unlock", identity.subject, tenant, lock_id)

    async def state_env(self, identity: Identity, tenant: str) -> Doc:
        self._note("state-env", identity.subject, tenant)
        return {"env": {"TF_HTTP_ADDRESS": "http://somewhere"}}

    async def rotate_key(self, identity: Identity, tenant: str) -> None:
        self._note("rotate-key", identity.subject, tenant)


@dataclass
class States:
    """Stands in for the state backend: holds decrypted states."""

    held: dict[tuple[str, int], Doc] = field(default_factory=dict)

    async def plain(self, tenant_uid: str, version: int | None = None) -> Doc | None:
        return self.held.get((tenant_uid, version or 0))


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Api:
    """The running server and a client that has logged in."""

    app: web.Application
    listener: Listener
    client: aiohttp.ClientSession
    store: Store
    service: ResourceService
    hub: WatchHub
    sessions: Sessions
    streams: Streams
    metrics: Metrics
    logs: RunLogs
    recorder: Recorder
    states: States
    parts: dict[str, PartState]
    token: str

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: str | None = "",
    ) -> Answer:
        """One request. `body` that is no bytes goes as JSON; `token` None sends none."""
        sent = dict(headers or {})
        if token is not None:
            sent.setdefault("Authorization", f"Bearer {token or self.token}")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        url = self.listener.url + path
        async with self.client.request(method, _raw(url), data=data, headers=sent) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def ok(self, method: str, path: str, body: Any = None, **kwargs: Any) -> Any:
        """The JSON of a request that must succeed."""
        answer = await self.call(method, path, body, **kwargs)
        assert answer.status in (200, 201), (answer.status, answer.body)
        return answer.json

    @asynccontextmanager
    async def stream(self, path: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
        sent = {"Authorization": f"Bearer {self.token}"} | {
            key.replace("_", "-"): value for key, value in headers.items()
        }
        async with self.client.get(_raw(self.listener.url + path), headers=sent) as answer:
            yield answer

    async def put_system(self, kind: str, namespace: str, name: str, spec: Doc, status: Doc) -> Doc:
        """An object as the system makes it."""

        def make(desk: Any) -> Doc:
            doc: Doc = desk.put(kind, namespace, name, spec=spec, status=status)
            return doc

        return await self.service.transact(make)

    async def set_status(self, kind: str, namespace: str, name: str, status: Doc) -> None:
        await self.service.transact(lambda desk: desk.set_status(kind, namespace, name, status))

    async def release(self, kind: str, namespace: str, name: str) -> None:
        """What the system does when nothing holds an object any more."""
        await self.service.transact(
            lambda desk: desk.clear_finalizers(kind, namespace, name, FINALIZER_MACHINES, FINALIZER_SECRETS)
        )


def _raw(url: str) -> URL:
    """Sent exactly as it is written here."""
    return URL(url, encoded=True)


@asynccontextmanager
async def serve(
    directory: Path, *, streams: Streams | None = None, limits: Limits | None = None
) -> AsyncIterator[Api]:
    """Builds all rooms below the API, serves it on loopback, logs in."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store.open(directory / "data"))
        tasks = TaskSupervisor()
        nats = await stack.enter_async_context(run_server(directory / "nats", tasks))
        bus = await stack.enter_async_context(Bus.connect(nats.url, token=nats.token))
        service = ResourceService(store, {"plain": Plain()})
        hub = WatchHub(store, bus)
        telling = asyncio.create_task(hub.run())
        stack.callback(telling.cancel)
        sessions = Sessions(store.records, store, directory / "session.key", bcrypt_rounds=4)
        stack.callback(sessions.close)
        await sessions.ensure_admin(PASSWORD)
        streams = Streams() if streams is None else streams
        metrics, recorder, states = Metrics(), Recorder(), States()
        store.on_commit_timed.append(metrics.count_commit)
        logs = RunLogs(directory / "logs")
        log = io.StringIO()
        parts = {"store": PartState(True), "engine": PartState(True, "OpenTofu 1.12.6")}
        app = build_app(
            service=service,
            hub=hub,
            sessions=sessions,
            operator=recorder,
            states=states,
            logs=logs,
            readiness={name: (lambda name=name: parts[name]) for name in parts},
            metrics=metrics,
            access_log=AccessLog(stream=log),
            streams=streams,
        )
        listener = await stack.enter_async_context(listen(app, "127.0.0.1", 0, limits=limits))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        token, _ = await sessions.login("admin", PASSWORD, "test")
        yield Api(
            app,
            listener,
            client,
            store,
            service,
            hub,
            sessions,
            streams,
            metrics,
            logs,
            recorder,
            states,
            parts,
            token,
        )


TENANT: Doc = {
    "apiVersion": "v1",
    "kind": "Tenant",
    "metadata": {"name": "personal", "labels": {"env": "home"}},
    "spec": {
        "talosVersion": "v1.13.9",
        "kubernetesVersion": "v1.36.3",
        "controlPlaneEndpoint": "api.example.org",
    },
}


def group(name: str, *, role: str = "worker", replicas: int = 2, **labels: str) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "NodeGroup",
        "metadata": {"name": name, "labels": labels},
        "spec": {"role": role, "replicas": replicas, "providerClass": "plain"},
    }


def placed(name: str, *, role: str = "worker", replicas: int = 2) -> Doc:
    """A group that says itself in which tenant it lies, as manifests do."""
    doc = group(name, role=role, replicas=replicas)
    doc["metadata"]["namespace"] = "personal"
    return doc
