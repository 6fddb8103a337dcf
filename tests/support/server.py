"""A real server as a child process with a data directory of its own, and a small client for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

PASSWORD = "correct horse battery"
BIN = Path(sys.executable).parent
START_S = 30.0

Doc = dict[str, Any]


class ApiError(AssertionError):
    """An answer of 400 or more."""

    def __init__(self, code: int, body: Any) -> None:
        super().__init__(f"{code}: {body}")
        self.code = code
        self.body = body


class Server:
    """One `rezuscloud serve`. It can be killed and started again on the same data directory."""

    def __init__(self, data_dir: Path, engine: Path | None, **settings: str) -> None:
        self.data_dir = data_dir
        self.log_file = data_dir.parent / f"{data_dir.name}.log"
        self.url = ""
        self.token = ""
        self.pid = 0
        self._settings = {
            "REZUSCLOUD_ADDR": "127.0.0.1:0",
            "REZUSCLOUD_ADMIN_PASSWORD": PASSWORD,
            "REZUSCLOUD_DEBOUNCE_S": "0",
            "REZUSCLOUD_RESYNC_S": "0",
            **({"REZUSCLOUD_TOFU": str(engine)} if engine else {}),
            **settings,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    # ------------------------------------------------------------ life

    async def start(self, **settings: str) -> None:
        """Starts it and logs in. Settings given here stay for later starts."""
        self._settings |= settings
        env = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.data_dir.parent),
            "REZUSCLOUD_DATA_DIR": str(self.data_dir),
            **self._settings,
        }
        offset = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(BIN / "rezuscloud"), "serve", env=env, cwd=self.data_dir.parent, stdout=log, stderr=log
            )
        self.pid = self._process.pid
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"listens on (http://\S+)", self.log_text()[offset:])):
            if self._process.returncode is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{self.log_text()[offset:]}")
            await asyncio.sleep(0.02)
        self.url = found[1]
        await self._close_session()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        answer = await self.post(
            "/api/v1/auth/login",
            {"username": "admin", "password": self._settings["REZUSCLOUD_ADMIN_PASSWORD"]},
        )
        self.token = answer["token"]

    async def stop(self, timeout_s: float = 60) -> int:
        """SIGTERM, and its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    async def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def close(self) -> None:
        await self._close_session()
        if self._process is not None and self._process.returncode is None:
            try:
                await self.stop(timeout_s=20)
            except TimeoutError:
                await self.kill()

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def log_text(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    # ------------------------------------------------------------ requests

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body)
        sent = {**self.headers, "Content-Type": "application/json", **headers}
        async with self.session.request(method, f"{self.url}{path}", data=data, headers=sent) as answer:
            raw = await answer.read()
            try:
                doc = json.loads(raw)
            except ValueError:
                doc = raw.decode(errors="replace")
            if answer.status >= 400:
                raise ApiError(answer.status, doc)
            return doc

    async def get(self, path: str) -> Any:
        return await self.request("GET", path)

    async def post(self, path: str, body: Any) -> Any:
        return await self.request("POST", path, body)

    async def put(self, path: str, body: Any) -> Any:
        return await self.request("PUT", path, body)

    async def patch(self, path: str, body: Any) -> Any:
        return await self.request("PATCH", path, body, **{"Content-Type": "application/merge-patch+json"})

    async def delete(self, path: str) -> Any:
        return await self.request("DELETE", path)

    # ------------------------------------------------------------ tenants

    async def declare(self, name: str, *groups: Doc, **spec: Any) -> None:
        """Declares a tenant and its groups as one change."""
        items = [
            tenant(name, **spec),
            *(group | {"metadata": group["metadata"] | {"namespace": name}} for group in groups),
        ]
        await self.post("/api/v1/manifests", {"apiVersion": "v1", "kind": "List", "items": items})

    async def tenant(self, name: str) -> Doc:
        doc: Doc = await self.get(f"/api/v1/tenants/{name}")
        return doc

    async def runs(self, name: str) -> list[Doc]:
        """All runs of a tenant, oldest first."""
        items = (await self.get(f"/api/v1/namespaces/{name}/runs"))["items"]
        return sorted(items, key=lambda run: int(run["metadata"]["name"].removeprefix("run-")))

    async def machines(self, name: str) -> list[str]:
        items = (await self.get(f"/api/v1/namespaces/{name}/machines"))["items"]
        return sorted(item["metadata"]["name"] for item in items)

    async def until(self, check: Callable[[], Awaitable[Any]], timeout_s: float = 30) -> Any:
        """The first true answer of `check`; fails with the server's log when the time is over."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with suppress(aiohttp.ClientError):
                if found := await check():
                    return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"it did not happen in {timeout_s} s; the log ends:\n{self.log_text()[-4000:]}")

    async def until_applied(self, name: str, timeout_s: float = 30) -> Doc:
        """Waits until all that is declared is applied, and nothing goes on."""

        async def check() -> Doc | None:
            doc = await self.tenant(name)
            status = doc["status"]
            is_applied = status["declaredRevision"] == status.get("appliedRevision")
            return doc if is_applied and not status.get("currentRun") and not status.get("heldBy") else None

        doc: Doc = await self.until(check, timeout_s)
        return doc

    async def until_held(self, name: str, by: str, timeout_s: float = 30) -> Doc:
        """Waits until something holds the tenant back, and gives that entry."""

        async def check() -> Doc | None:
            holds = (await self.tenant(name))["status"].get("heldBy", [])
            return next((hold for hold in holds if hold["by"] == by), None)

        hold: Doc = await self.until(check, timeout_s)
        return hold


def tenant(name: str, **spec: Any) -> Doc:
    versions = {"talosVersion": "v1.13.9", "kubernetesVersion": "v1.36.3"}
    return {"apiVersion": "v1", "kind": "Tenant", "metadata": {"name": name}, "spec": versions | spec}


def group(name: str, role: str, replicas: int, **config: Any) -> Doc:
    """A node group of the lab provider; `config` is its providerConfig."""
    spec = {"role": role, "replicas": replicas, "providerClass": "lab:small", "providerConfig": config}
    return {"apiVersion": "v1", "kind": "NodeGroup", "metadata": {"name": name}, "spec": spec}


def control_plane(replicas: int = 1, **config: Any) -> Doc:
    return group("cp", "controlplane", replicas, **config)


def workers(replicas: int, **config: Any) -> Doc:
    return group("workers", "worker", replicas, **config)


@asynccontextmanager
async def running(data_dir: Path, engine: Path | None, **settings: str) -> AsyncIterator[Server]:
    """A server that is up for the block."""
    server = Server(data_dir, engine, **settings)
    try:
        await server.start()
        yield server
    finally:
        await server.close()


def environment_of(pid: int) -> Mapping[str, str]:
    """The environment of a process, e.g. of a running engine."""
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(item.partition("=")[::2] for item in raw.split("\0") if item)
