"""The program as such: help, speed, addresses, and servers that are none."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncclick as click
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rezuscloud import __version__
from rezuscloud.cli.main import cli as program
from tests.support.cli import Cli

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def commands(group: click.Group, *path: str) -> list[tuple[str, click.Command]]:
    """All commands that do something, by their words."""
    found: list[tuple[str, click.Command]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        words = (*path, name)
        found += (
            commands(command, *words) if isinstance(command, click.Group) else [(" ".join(words), command)]
        )
    return found


async def test_version_prints_the_version_of_the_package(cli: Cli) -> None:
    assert await cli.ok("version") == f"rezusctl {__version__}\n"


async def test_version_takes_less_than_three_tenths_of_a_second(cli: Cli) -> None:
    times = []
    for _ in range(5):
        before = time.monotonic()
        await cli.ok("version")
        times.append(time.monotonic() - before)
    assert min(times) < 0.3


async def test_version_imports_neither_an_event_loop_nor_a_client(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['rezusctl', 'version']\n"
        "from rezuscloud.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('asyncio', 'http.client', 'json', 'ssl', 'yaml') if name in sys.modules])"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=tmp_path, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert out.decode().splitlines()[-1] == "[]"


async def test_the_help_shows_every_verb_in_a_group(cli: Cli) -> None:
    shown = await cli.ok("--help")
    for title in ("Clusters:", "Anything that is declared:", "Runs:", "This program:"):
        assert title in shown
    for verb in (
        *("login", "get", "describe", "create", "apply", "delete", "watch", "logs", "approve", "deny"),
        *("cancel", "retry", "scale", "state", "config", "version", "cluster"),
    ):
        assert f"\n  {verb} " in shown
    assert "..." not in shown.partition("Examples:")[0].partition("Options:")[2], "no sentence is cut off"


@pytest.mark.parametrize(("words", "command"), commands(program))
def test_every_command_has_examples_that_begin_with_its_words(words: str, command: click.Command) -> None:
    assert command.epilog is not None
    assert f"rezusctl {words}" in command.epilog


@pytest.mark.parametrize("words", [["frobnicate"], ["get"], ["get", "tn", "-o", "xml"], ["scale", "workers"]])
async def test_wrong_usage_ends_with_2(cli: Cli, words: list[str]) -> None:
    assert "Usage: rezusctl" in await cli.fails(*words, code=2)


async def test_the_shell_completes_verbs_and_options(cli: Cli) -> None:
    source = await cli.run(env={"_REZUSCTL_COMPLETE": "bash_source"})
    assert "_rezusctl_completion" in source.stdout
    env = {"_REZUSCTL_COMPLETE": "bash_complete", "COMP_WORDS": "rezusctl ap", "COMP_CWORD": "1"}
    assert (await cli.run(env=env)).stdout.split() == ["plain,apply", "plain,approve"]


# ---------------------------------------------------------------- addresses


async def test_a_server_that_cannot_be_reached_is_told_with_what_to_do(cli: Cli) -> None:
    cli.env["REZUSCTL_SERVER"] = "http://127.0.0.1:1"
    said = await cli.fails("get", "clusters")
    assert "cannot reach http://127.0.0.1:1" in said
    assert "rezusctl login --server URL" in said


@pytest.mark.parametrize("address", ["ftp://x", "127.0.0.1:8080", "http://x:99999", "http://a b", "https:"])
async def test_what_is_no_address_is_told_as_such(cli: Cli, address: str) -> None:
    cli.env["REZUSCTL_SERVER"] = address
    assert "is no server address; it looks like http://host:8080" in await cli.fails("get", "clusters")


async def test_a_token_that_cannot_be_sent_is_not_shown(cli: Cli) -> None:
    cli.env |= {"REZUSCTL_SERVER": "http://127.0.0.1:1", "REZUSCTL_TOKEN": "top\nsecret"}
    said = await cli.fails("get", "clusters")
    assert "token" in said
    assert "secret" not in said


async def test_a_damaged_config_file_is_told_with_its_path(cli: Cli) -> None:
    cli.config.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"logins": []}'):
        cli.config.write_text(text)
        assert str(cli.config) in await cli.fails("config")


# ---------------------------------------------------------------- servers that are none


@asynccontextmanager
async def listening(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


def always(status: str, body: str, header: str = "X-Test: 1", *, missing: int = 0) -> Talk:
    """Answers every request the same; `missing` bytes never come."""
    length = f"Content-Length: {len(body) + missing}"
    head = "\r\n".join([f"HTTP/1.1 {status}", length, header, "Connection: close"])

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"{head}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    return talk


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        ("200 OK", "<html>Welcome</html>", "does not answer like a RezusCloud server"),
        ("200 OK", "[1]", "does not answer like a RezusCloud server"),
        ("200 OK", "{}", "does not answer like a RezusCloud server"),
        (
            "502 Bad Gateway",
            "<html>nginx</html>",
            "answers 502 Bad Gateway, and not like a RezusCloud server",
        ),
        ("404 Not Found", '{"error": 1}', "answers 404 Not Found"),
    ],
)
async def test_a_server_of_another_kind_is_recognised(cli: Cli, status: str, body: str, says: str) -> None:
    async with listening(always(status, body)) as cli.env["REZUSCTL_SERVER"]:
        assert says in await cli.fails("get", "clusters")
        assert says in await cli.fails("login", "--password-stdin", stdin="x\n")


async def test_a_redirect_tells_the_address_to_use(cli: Cli) -> None:
    moved = always("301 Moved Permanently", "", "Location: https://rezus.example.org/")
    async with listening(moved) as cli.env["REZUSCTL_SERVER"]:
        assert "sends on to https://rezus.example.org/; use that address" in await cli.fails("get", "tn")


async def test_half_an_answer_is_no_answer(cli: Cli) -> None:
    async with listening(always("200 OK", "{}", missing=500)) as cli.env["REZUSCTL_SERVER"]:
        assert "cannot reach" in await cli.fails("get", "clusters")


async def test_what_a_server_says_cannot_command_the_terminal(cli: Cli) -> None:
    body = json.dumps({"kind": "Status", "message": "no \x1b[2J way"})
    async with listening(always("403 Forbidden", body)) as cli.env["REZUSCTL_SERVER"]:
        assert "\x1b" not in await cli.fails("get", "clusters")


async def test_https_wants_a_certificate_of_a_known_authority(cli: Cli, tmp_path: Path) -> None:
    certificate, tls = self_signed(tmp_path)
    body = json.dumps({"token": "t", "expiresAt": "2031-01-01T00:00:00Z"})
    async with listening(always("200 OK", body), tls) as url:
        login = ("login", "--server", url, "--password-stdin")
        said = await cli.fails(*login, stdin="x\n")
        assert "SSL_CERT_FILE" in said
        cli.env["SSL_CERT_FILE"] = str(certificate)
        assert f"logged in to {url} as admin" in await cli.ok(*login, stdin="x\n")


def self_signed(directory: Path) -> tuple[Path, ssl.SSLContext]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path, key_path = directory / "cert.pem", directory / "key.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path, key_path)
    return path, tls


# ---------------------------------------------------------------- streams


async def test_a_watch_that_is_too_old_begins_anew_from_what_is_there(cli: Cli) -> None:
    """The server keeps so many changes that only a stand-in can have forgotten them."""
    asked: list[str] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        asked.append(target)
        if "watch=" not in target:
            kind = {"name": "tenants", "singularName": "tenant", "kind": "Tenant", "namespaced": False}
            lines = [{"kind": "APIResourceList", "resources": [kind]}]
        elif "resourceVersion=7" in target:
            lines = [{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}]
        elif len(asked) == 2:
            meta = {"name": "home", "resourceVersion": "3"}
            lines = [
                {"type": "ADDED", "object": {"kind": "Tenant", "metadata": meta}},
                {"type": "BOOKMARK", "object": {"kind": "Tenant", "metadata": {"resourceVersion": "7"}}},
            ]
        else:
            meta = {"name": "anew", "resourceVersion": "90"}
            lines = [{"type": "ADDED", "object": {"kind": "Tenant", "metadata": meta}}]
        body = "".join(json.dumps(line) + "\n" for line in lines)
        writer.write(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async with listening(talk) as cli.env["REZUSCTL_SERVER"]:
        out = await cli.ok("watch", "clusters", "--timeout", "1.2")
    assert out.startswith("ADDED     Tenant home\nADDED     Tenant anew\n")
    assert ["resourceVersion=7" in target for target in asked[1:4]] == [False, True, False]
