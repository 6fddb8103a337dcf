"""What the tests of the state backend share: a house of real rooms, states to send, and the real tofu."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rezuscloud.access.identity import Identity
from rezuscloud.api.tfstate import loopback_app
from rezuscloud.http.server import listen
from rezuscloud.model.meta import Doc
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.states import RunCredential, StateAccess, StateBackend
from rezuscloud.store.db import Store
from rezuscloud.tofu.encryption import KeyRing, raw_encryption

ADMIN = Identity("admin", "Administrator", role="admin", via="token")
LINEAGE = "0b7a4ad9-6a7e-4b6c-9f0e-6f6f9f1c0001"
MIB = 1024 * 1024


@dataclass
class House:
    """The rooms under the state backend, with one tenant called `blue`."""

    store: Store
    service: ResourceService
    keys: KeyRing
    backend: StateBackend
    tenant: Doc

    @property
    def uid(self) -> str:
        return str(self.tenant["metadata"]["uid"])

    def access(self, run: str = "r-1", *, may_empty: bool = False) -> StateAccess:
        return StateAccess("blue", self.uid, run, run, may_empty)

    def operator(self) -> StateAccess:
        return self.backend.operator_access(ADMIN, "blue")

    def seal(self, plain: bytes, version: int = 1) -> bytes:
        return self.keys.seal_state(self.uid, version, plain)

    def events(self, reason: str) -> list[Doc]:
        stored = self.store.objects.list("Event", "blue")
        return [each.doc for each in stored if each.doc["reason"] == reason]

    def versions(self) -> list[Doc]:
        found = [each.doc for each in self.store.objects.list("StateVersion", "blue")]
        return sorted(found, key=lambda doc: doc["spec"]["version"])


@asynccontextmanager
async def open_house(data_dir: Path) -> AsyncIterator[House]:
    async with Store.open(data_dir) as store:
        service = ResourceService(store, {})
        keys = KeyRing.open(data_dir, None)
        stored = await service.create(ADMIN, "Tenant", "", tenant_doc("blue"))
        yield House(store, service, keys, StateBackend(service, store, keys), stored.doc)


def tenant_doc(name: str) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": {"talosVersion": "v1.13.9", "kubernetesVersion": "v1.36.3"},
    }


def state(serial: int = 1, *, lineage: str = LINEAGE, resources: int = 1, note: str = "") -> bytes:
    """A plain state as tofu writes it, with so many resources."""
    one = {
        "mode": "managed",
        "type": "terraform_data",
        "provider": 'provider["terraform.io/builtin/terraform"]',
        "instances": [{"schema_version": 0, "attributes": {"id": "x", "input": note}}],
    }
    body = {
        "version": 4,
        "terraform_version": "1.12.6",
        "serial": serial,
        "lineage": lineage,
        "outputs": {},
        "resources": [{**one, "name": f"n{number}"} for number in range(resources)],
        "check_results": None,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def lock_info(lock_id: str, **more: str) -> Doc:
    """LockInfo as tofu sends it."""
    return {
        "ID": lock_id,
        "Operation": "OperationTypeApply",
        "Info": "",
        "Who": "root@here",
        "Version": "1.12.6",
        "Created": "2026-12-01T04:00:00.123456789Z",
        "Path": "",
        **more,
    }


def md5(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def basic(username: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()


@dataclass
class Wire:
    """Sits in front of a listener: counts what came, and can cut the connection after a verb has acted."""

    seen: list[tuple[str, int]] = field(default_factory=list)
    """(method, status) of each answered request; status 0 = cut off."""
    cut: Counter[str] = field(default_factory=Counter)
    """Method → how many of its next answers are lost on the way."""
    arrived: dict[str, asyncio.Event] = field(default_factory=dict)

    def first(self, method: str) -> asyncio.Event:
        """Set when the first request of this method has been answered."""
        return self.arrived.setdefault(method, asyncio.Event())

    def wrap(self, app: web.Application) -> web.Application:
        app.middlewares.insert(0, self._middleware())
        return app

    def methods(self) -> list[str]:
        return [method for method, _ in self.seen]

    def _middleware(self) -> Any:
        @web.middleware
        async def pass_through(request: web.Request, handler: Any) -> web.StreamResponse:
            response: web.StreamResponse = await handler(request)
            self.first(request.method).set()
            if self.cut[request.method] > 0:
                self.cut[request.method] -= 1
                self.seen.append((request.method, 0))
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError("cut")
            self.seen.append((request.method, response.status))
            return response

        return pass_through


@dataclass
class Door:
    """A client of one state address, speaking the protocol by hand."""

    url: str
    client: aiohttp.ClientSession
    auth: str
    """Value of the Authorization header; empty for none."""

    async def send(
        self,
        method: str,
        data: bytes | Doc | None = None,
        *,
        lock: str | None = None,
        headers: Mapping[str, str] | None = None,
        auth: str | None = None,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        body = json.dumps(data).encode() if isinstance(data, dict) else data
        async with self.client.request(
            method,
            self.url,
            data=body,
            params={"ID": lock} if lock else {},
            headers={"Authorization": self.auth if auth is None else auth, **(headers or {})},
        ) as answer:
            return answer.status, await answer.read(), answer.headers

    async def status(self, method: str, data: bytes | Doc | None = None, **more: Any) -> int:
        return (await self.send(method, data, **more))[0]


@asynccontextmanager
async def serve_runs(
    house: House, *, max_bytes: int = 64 * MIB, wire: Wire | None = None
) -> AsyncIterator[str]:
    """The runners' own listener on a real socket; gives the address of the tenant's state."""
    app = loopback_app(house.backend, max_bytes=max_bytes)
    async with listen(wire.wrap(app) if wire else app, "127.0.0.1", 0) as listener:
        yield f"{listener.url}/state/{house.uid}"


@asynccontextmanager
async def open_door(
    house: House, url: str, run: str = "r-1", *, may_empty: bool = False
) -> AsyncIterator[Door]:
    credential = house.backend.issue("blue", house.uid, run, may_empty=may_empty)
    async with aiohttp.ClientSession() as client:
        yield Door(url, client, basic(credential.username, credential.password))


# ---------------------------------------------------------------- the real tofu

CONFIG: Doc = {
    "terraform": {"backend": {"http": {}}},
    "resource": {"terraform_data": {"one": {"input": "1"}, "two": {"input": "2"}}},
}


@dataclass
class Tofu:
    """The real OpenTofu in a directory of its own, pointed at a state address."""

    program: Path
    cwd: Path
    env: dict[str, str]

    @classmethod
    def at(
        cls,
        program: Path,
        cwd: Path,
        url: str,
        credential: RunCredential,
        *,
        key: bytes | None,
        config: Mapping[str, Any] = CONFIG,
    ) -> Tofu:
        """`key` encrypts the state; None leaves it plain."""
        cwd.mkdir(mode=0o700)
        tofu = cls(program, cwd, {})
        tofu.configure(config)
        (cwd / "cli.tfrc").write_text("")
        tofu.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(cwd),
            "TMPDIR": str(cwd),
            "TF_CLI_CONFIG_FILE": str(cwd / "cli.tfrc"),
            "TF_IN_AUTOMATION": "1",
            "TF_INPUT": "0",
            "TF_HTTP_ADDRESS": url,
            "TF_HTTP_LOCK_ADDRESS": url,
            "TF_HTTP_LOCK_METHOD": "LOCK",
            "TF_HTTP_UNLOCK_ADDRESS": url,
            "TF_HTTP_UNLOCK_METHOD": "UNLOCK",
            "TF_HTTP_USERNAME": credential.username,
            "TF_HTTP_PASSWORD": credential.password,
            "TF_HTTP_RETRY_WAIT_MIN": "1",
            "TF_HTTP_RETRY_WAIT_MAX": "1",
        }
        if key is not None:
            tofu.env["TF_ENCRYPTION"] = raw_encryption(key)
        return tofu

    def configure(self, config: Mapping[str, Any]) -> None:
        (self.cwd / "main.tf.json").write_text(json.dumps(config, indent=1))

    @asynccontextmanager
    async def started(self, *args: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """A running tofu; it and all it started are gone when the block ends."""
        process = await asyncio.create_subprocess_exec(
            self.program,
            *args,
            cwd=self.cwd,
            env=self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def run(self, *args: str) -> tuple[int, str]:
        """Exit code and all output."""
        async with self.started(*args) as process:
            output, _ = await process.communicate()
            assert process.returncode is not None
            return process.returncode, output.decode(errors="replace")

    async def ok(self, *args: str) -> str:
        """Output of a command that must succeed."""
        code, output = await self.run(*args)
        assert code == 0, output
        return output
