"""`rezusctl login | config`: which server, and as whom."""

from __future__ import annotations

import getpass
import os
import sys

import asyncclick as click

from rezuscloud.cli.client import LOGIN, Client, config_path, read_config, write_config
from rezuscloud.cli.commands.options import examples


@click.command(
    "login",
    epilog=examples(
        "rezusctl login",
        "rezusctl login --server https://rezus.example.org",
        'echo "$PASSWORD" | rezusctl login --password-stdin',
    ),
)
@click.option("--server", metavar="URL", help="Address of the server; kept for the next commands.")
@click.option("-u", "--username", default="admin", show_default=True)
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
async def login_command(server: str | None, username: str, password_stdin: bool) -> None:
    """Logs in and keeps the token, in a file that only you can read."""
    client = Client(server.rstrip("/"), None) if server else Client.from_environment()
    client.token = None
    answer = _log_in(client, username, _password(client, username, password_stdin))
    config = read_config()
    login = {"user": username, "token": answer["token"], "expiresAt": answer["expiresAt"]}
    config["server"] = client.server
    config.setdefault("logins", {})[client.server] = login
    write_config(config)
    click.echo(f"logged in to {client.server} as {username} until {answer['expiresAt']}")


def _password(client: Client, username: str, from_stdin: bool) -> str:
    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask for the password; use --password-stdin")
    return getpass.getpass(f"Password of {username} at {client.server}: ")


def _log_in(client: Client, username: str, password: str) -> dict[str, str]:
    answer: dict[str, str] = client.post(LOGIN, {"username": username, "password": password})
    if not {"token", "expiresAt"} <= answer.keys():
        raise client.stranger()
    return answer


@click.command("config", epilog=examples("rezusctl config"))
async def config_command() -> None:
    """Shows which server is used, as whom, and where that is kept."""
    client = Client.from_environment()
    login = (read_config().get("logins") or {}).get(client.server) or {}
    click.echo(f"server   {client.server}")
    if os.environ.get("REZUSCTL_TOKEN"):
        click.echo("login    a token from REZUSCTL_TOKEN")
    elif login:
        click.echo(f"login    {login['user']}, until {login['expiresAt']}")
    else:
        click.echo("login    none; log in with: rezusctl login")
    click.echo(f"file     {config_path()}")
