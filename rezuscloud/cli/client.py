"""Owns how `rezusctl` reaches a server: addresses, the kept login, requests, streams, and what went wrong.

It uses http.client of the standard library: one command makes a few requests one after another, and an
asynchronous client would cost more to import than all of them (ADR 0009).
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncclick as click

from rezuscloud.cli.output import printable

DEFAULT_SERVER = "http://127.0.0.1:8080"
TIMEOUT_S = 65.0
"""A little longer than a server takes at most for a write."""
SILENCE_S = 150.0
"""A watch is told at least once a minute that nothing happened; longer silence means that nobody is there."""
PATIENCE_S = 30.0
"""How long a server that was there may be away, e.g. while it starts anew."""
JSON = "application/json"
LOGIN = "/api/v1/auth/login"
TABLE = f"{JSON};as=Table;v=v1;g=meta.k8s.io,{JSON}"

T = TypeVar("T")


class Failure(click.ClickException):
    """Ends the command with exit code 1 and a message that says what to do."""


class Unreachable(Failure):
    """No answer, or half of one."""


class ApiFailure(Failure):
    """The server refused. `code` is the HTTP code, `causes` name fields."""

    def __init__(self, code: int, message: str, causes: Sequence[Mapping[str, str]] = ()) -> None:
        self.code = code
        self.causes = causes
        super().__init__(printable(_told(message, [cause_text(cause) for cause in causes])))


def cause_text(cause: Mapping[str, str]) -> str:
    """One thing that is wrong, with its field."""
    field, message = cause.get("field", ""), cause.get("message", "")
    return message if not field or field in message else f"{field}: {message}"


def _told(message: str, causes: Sequence[str]) -> str:
    """Several causes stand each on a line of its own."""
    if len(causes) > 1 and (at := message.find(causes[0])) > 0:
        return message[:at].rstrip(" ") + "".join(f"\n  {cause}" for cause in causes)
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
    if not isinstance(config, dict) or not isinstance(config.get("logins", {}), dict):
        raise Failure(f"{path} holds no logins of rezusctl; mend or remove it")
    return config


def write_config(config: Mapping[str, Any]) -> None:
    """Writes the file with mode 0600: it holds tokens."""
    path = config_path()
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(config, file, indent=2)
        part.replace(path)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error}; REZUSCTL_CONFIG names another file") from error


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
        server = server.strip().rstrip("/")
        login = (config.get("logins") or {}).get(server) or {}
        token = os.environ.get("REZUSCTL_TOKEN") or login.get("token") or ""
        return cls(server, token.strip() or None)

    def get(self, path: str, *, accept: str = JSON, **query: str) -> Any:
        return self._json("GET", path, accept=accept, query=query)

    def post(self, path: str, body: Any, **query: str) -> Any:
        return self._json("POST", path, body=body, query=query)

    def patch(self, path: str, body: Any) -> Any:
        return self._json("PATCH", path, body=body, content_type="application/merge-patch+json")

    def delete(self, path: str) -> Any:
        return self._json("DELETE", path)

    def raw(self, path: str) -> bytes:
        """The body as it comes."""
        return self._read(self._open("GET", path))

    def watch(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """The events of a collection, bookmarks among them, until the server ends the stream."""
        query |= {"watch": "true", "allowWatchBookmarks": "true"}
        answer = self._open("GET", path, query=query, timeout_s=SILENCE_S)
        return (json.loads(line) for line in self._pieces(answer.readline) if line.strip())

    def stream(self, path: str, **query: str) -> Iterator[bytes]:
        """Pieces of a text as they come, until the server ends the stream."""
        answer = self._open("GET", path, query=query, accept=f"text/plain,{JSON}", timeout_s=None)
        return self._pieces(lambda: answer.read1(65536))

    # ------------------------------------------------------------ how

    def _json(self, method: str, path: str, **how: Any) -> Any:
        try:
            answer = json.loads(self._read(self._open(method, path, **how)))
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self.stranger()
        return answer

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        return b"".join(self._pieces(answer.read))

    def _pieces(self, read: Callable[[], bytes]) -> Iterator[bytes]:
        try:
            while piece := read():
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error) from error

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
        asked = {key: value for key, value in (query or {}).items() if value}
        target = path + (f"?{urllib.parse.urlencode(asked)}" if asked else "")
        headers = {"Accept": accept, "User-Agent": "rezusctl"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        connection, prefix = self._connection(timeout_s)
        try:
            connection.request(method, prefix + target, body=data, headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._away(error) from error
        except ValueError as error:  # its text would show the token
            raise Failure("the token or the address holds characters that no request may hold") from error
        if answer.status >= 400:
            raise self._refusal(answer, path)
        if answer.status >= 300:
            raise Failure(f"{self.server} sends on to {answer.getheader('Location')}; use that address")
        return answer

    def _connection(self, timeout_s: float | None) -> tuple[http.client.HTTPConnection, str]:
        """The connection, not yet open, and the path below which the server lies."""
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            parts = urllib.parse.urlsplit(self.server)
            if parts.hostname:
                return kinds[parts.scheme](parts.hostname, parts.port, timeout=timeout_s), parts.path
        except (KeyError, ValueError, http.client.InvalidURL):
            pass
        raise Failure(f"{self.server!r} is no server address; it looks like http://host:8080")

    def _refusal(self, answer: http.client.HTTPResponse, path: str) -> Failure:
        try:
            status = json.loads(self._read(answer))
        except ValueError:
            status = None
        if isinstance(status, dict) and "message" in status:
            message = str(status["message"])
            if answer.status == 401 and path != LOGIN:
                message = message if self.token else f"you are not logged in to {self.server}"
                message += "\nlog in with: rezusctl login"
            return ApiFailure(answer.status, message, (status.get("details") or {}).get("causes") or ())
        return Failure(
            f"{self.server} answers {answer.status} {answer.reason}, and not like a RezusCloud server; "
            "check the address, or what stands before it"
        )

    def stranger(self) -> Failure:
        """What answers here is something else."""
        return Failure(f"{self.server} does not answer like a RezusCloud server; check the address")

    def _away(self, error: Exception) -> Unreachable:
        is_tls = type(error).__name__ == "SSLCertVerificationError"
        what = (
            "its certificate is not trusted here; SSL_CERT_FILE names a file of authorities that are"
            if is_tls
            else "is the server running? REZUSCTL_SERVER or `rezusctl login --server URL` say where it is"
        )
        why = "no answer in time" if isinstance(error, TimeoutError) else error or type(error).__name__
        return Unreachable(f"cannot reach {self.server}: {why}\n{what}")

    # ------------------------------------------------------------ kinds

    def kinds(self) -> list[Kind]:
        """All kinds that the server has."""
        resources = self.get("/api/v1").get("resources")
        if not isinstance(resources, list):
            raise self.stranger()
        return [
            Kind(
                entry["kind"],
                entry["name"],
                entry["namespaced"],
                frozenset({entry["name"], entry["singularName"], *entry.get("shortNames", ())}),
            )
            for entry in resources
            if "/" not in entry["name"]
        ]


def _tell(text: str) -> None:
    click.echo(text, err=True)


def patiently(ask: Callable[[], T], tell: Callable[[str], None] = _tell) -> T:
    """The answer, also when the server is away for a while. For what goes on, not for what begins."""
    try:
        return ask()
    except Unreachable as away:
        tell(f"{away.message.splitlines()[0]}; trying again for {PATIENCE_S:g} s")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        time.sleep(1)
        try:
            return ask()
        except Unreachable:
            if time.monotonic() > deadline:
                raise


def keep_open(open_stream: Callable[[], Iterator[T]], is_done: Callable[[], bool]) -> Iterator[T]:
    """What a stream gives. When it breaks off, or ends before `is_done`, it is opened anew; `open_stream`
    knows where to go on."""
    stream = open_stream()
    while True:
        try:
            yield from stream
            if is_done():
                return
            time.sleep(0.2)
            stream = open_stream()
        except Unreachable:
            stream = patiently(open_stream)


# ---------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """One kind as the server names it."""

    kind: str
    plural: str
    namespaced: bool
    names: frozenset[str] = frozenset()

    @property
    def in_words(self) -> str:
        """What people call several of them."""
        return "clusters" if self.kind == "Tenant" else self.plural

    def collection(self, tenant: str | None) -> str:
        """Path of the collection: of one tenant, or of all."""
        if self.namespaced and tenant:
            return f"/api/v1/namespaces/{segment(tenant)}/{self.plural}"
        return f"/api/v1/{self.plural}"

    def path(self, tenant: str | None, name: str) -> str:
        return f"{self.collection(tenant)}/{segment(name)}"


TENANTS = Kind("Tenant", "tenants", namespaced=False)
NODE_GROUPS = Kind("NodeGroup", "nodegroups", namespaced=True)
RUNS = Kind("Run", "runs", namespaced=True)
STATE_VERSIONS = Kind("StateVersion", "stateversions", namespaced=True)

_OUR_WORDS = {"cluster": "tenants", "clusters": "tenants"}


def find_kind(client: Client, word: str) -> Kind:
    """The kind that a person means: by plural, singular, kind or short name. Raises UsageError."""
    word = word.lower()
    kinds = client.kinds()
    for kind in kinds:
        if _OUR_WORDS.get(word, word) in kind.names:
            return kind
    known = ", ".join(sorted(kind.plural for kind in kinds))
    raise click.UsageError(f"there is no kind {word!r}; there are: clusters, {known}")


def segment(name: str) -> str:
    """A name as one segment of a path, whatever is in it."""
    return urllib.parse.quote(name, safe="")
