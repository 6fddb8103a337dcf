"""Owns how `rezusctl` reaches a server: addresses, the kept login, requests, streams, and what went wrong.

It uses http.client of the standard library: one command makes a few requests one after another, and an
asynchronous client would cost more to import than all of them.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncclick as click

DEFAULT_SERVER = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0
JSON = "application/json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


class Failure(click.ClickException):
    """Ends the command with exit code 1 and a message that says what to do."""


class ApiFailure(Failure):
    """The server refused. `code` is the HTTP code, `reason` Kubernetes' word."""

    def __init__(self, code: int, status: Mapping[str, Any]) -> None:
        self.code = code
        self.reason = str(status.get("reason", ""))
        super().__init__(_told(code, status))


def _told(code: int, status: Mapping[str, Any]) -> str:
    message = str(status.get("message") or f"the server answered {code}")
    causes = (status.get("details") or {}).get("causes") or []
    if code == 401:
        message += "\nlog in with: rezusctl login"
    if len(causes) > 1:
        message += "".join(f"\n  {cause.get('field', '')}: {cause.get('message', '')}" for cause in causes)
    return message


# ---------------------------------------------------------------- the kept login


def config_path() -> Path:
    if given := os.environ.get("REZUSCTL_CONFIG"):
        return Path(given)
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "rezusctl" / "config.json"


def read_config() -> dict[str, Any]:
    """`{"server": url, "logins": {url: {"user", "token", "expiresAt"}}}`; empty when there is none."""
    path = config_path()
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read ({error}); mend or remove it") from error
    return config if isinstance(config, dict) else {}


def write_config(config: Mapping[str, Any]) -> None:
    """Writes the file with mode 0600: it holds tokens."""
    path = config_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(config, file, indent=2)
    part.replace(path)


# ---------------------------------------------------------------- requests


@dataclass
class Client:
    """One server and the token for it."""

    server: str
    token: str | None

    @classmethod
    def from_environment(cls) -> Client:
        """REZUSCTL_SERVER and REZUSCTL_TOKEN come first, then the kept login."""
        config = read_config()
        server = os.environ.get("REZUSCTL_SERVER") or config.get("server") or DEFAULT_SERVER
        server = server.rstrip("/")
        login = (config.get("logins") or {}).get(server) or {}
        return cls(server, os.environ.get("REZUSCTL_TOKEN") or login.get("token"))

    def get(self, path: str, *, accept: str = JSON, **query: str) -> Any:
        return self._json("GET", path, accept=accept, query=query)

    def post(self, path: str, body: Any, **query: str) -> Any:
        return self._json("POST", path, body=body, query=query)

    def patch(self, path: str, body: Any, **query: str) -> Any:
        return self._json("PATCH", path, body=body, query=query, content_type="application/merge-patch+json")

    def delete(self, path: str, **query: str) -> Any:
        return self._json("DELETE", path, query=query)

    def text(self, path: str, **query: str) -> tuple[str, Mapping[str, str]]:
        """A text answer with its headers."""
        answer = self._open("GET", path, query=query, accept="text/plain, application/json")
        return answer.read().decode("utf-8", "replace"), dict(answer.getheaders())

    def binary(self, path: str) -> bytes:
        return self._open("GET", path).read()

    def watch(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """The events of a watch until the server ends it."""
        answer = self._open("GET", path, query={**query, "watch": "true"}, timeout_s=None)
        for line in answer:
            if line.strip():
                yield json.loads(line)

    def stream(self, path: str, **query: str) -> Iterator[bytes]:
        """Pieces of an answer as they come."""
        answer = self._open("GET", path, query=query, timeout_s=None, accept="text/plain")
        while piece := answer.read1(65536):
            yield piece

    def _json(self, method: str, path: str, **kwargs: Any) -> Any:
        raw = self._open(method, path, **kwargs).read()
        try:
            return json.loads(raw)
        except ValueError as error:
            raise Failure(
                f"{self.server} does not answer like a RezusCloud server; check the address"
            ) from error

    def _open(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        accept: str = JSON,
        content_type: str = JSON,
        timeout_s: float | None = TIMEOUT_S,
    ) -> http.client.HTTPResponse:
        parts = urllib.parse.urlsplit(self.server)
        asked = {key: value for key, value in (query or {}).items() if value}
        target = parts.path.rstrip("/") + path + (f"?{urllib.parse.urlencode(asked)}" if asked else "")
        headers = {"Accept": accept, "User-Agent": "rezusctl"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        try:
            connection = self._connect(parts, timeout_s)
            connection.request(method, target, body=data, headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise Failure(
                f"cannot reach {self.server}: {error}\nis the server running? REZUSCTL_SERVER or "
                "`rezusctl login --server URL` say where it is"
            ) from error
        if answer.status >= 400:
            raise ApiFailure(answer.status, _status_of(answer))
        return answer

    @staticmethod
    def _connect(parts: urllib.parse.SplitResult, timeout_s: float | None) -> http.client.HTTPConnection:
        if not parts.hostname or parts.scheme not in ("http", "https"):
            raise Failure(f"{parts.geturl()!r} is no server address; it looks like http://host:8080")
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def _status_of(answer: http.client.HTTPResponse) -> Mapping[str, Any]:
    raw = answer.read(1 << 20)
    try:
        status = json.loads(raw)
    except ValueError:
        return {"message": f"the server answered {answer.status} {answer.reason}"}
    return status if isinstance(status, dict) else {}


# ---------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """One kind as the server names it."""

    kind: str
    plural: str
    namespaced: bool

    def collection(self, tenant: str | None) -> str:
        """Path of the collection: of one tenant, or of all."""
        return (
            f"/api/v1/namespaces/{tenant}/{self.plural}"
            if self.namespaced and tenant
            else f"/api/v1/{self.plural}"
        )

    def path(self, tenant: str | None, name: str) -> str:
        return f"{self.collection(tenant)}/{name}"


_OUR_WORDS = {"cluster": "tenants", "clusters": "tenants"}


def find_kind(client: Client, word: str) -> Kind:
    """The kind that a person means: by plural, singular, kind or short name. Raises UsageError."""
    resources = client.get("/api/v1")["resources"]
    word = _OUR_WORDS.get(word.lower(), word.lower())
    for entry in resources:
        names = {entry["name"], entry["singularName"], entry["kind"].lower(), *entry.get("shortNames", ())}
        if "/" not in entry["name"] and word in names:
            return Kind(entry["kind"], entry["name"], entry["namespaced"])
    known = ", ".join(sorted(e["name"] for e in resources if "/" not in e["name"]))
    raise click.UsageError(f"there is no kind {word!r}; there are: clusters, {known}")
