"""`rezusctl login` and `rezusctl config`: which server, and as whom."""

from __future__ import annotations

import os
import sys

import asyncclick as click

from rezuscloud.cli.client import Client, config_path, read_config, write_config


@click.command("login")
@click.option("--server", metavar="URL", help="Address of the server; kept for the next commands.")
@click.option("-u", "--username", default="admin", show_default=True)
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
async def login_command(server: str | None, username: str, password_stdin: bool) -> None:
    """Logs in and keeps the token (in a file that only you can read)."""
    client = Client.from_environment()
    if server:
        client = Client(server.rstrip("/"), None)
    client.token = None
    if password_stdin:
        password = sys.stdin.readline().rstrip("\n")
    else:
        password = await click.prompt(f"Password of {username} at {client.server}", hide_input=True)
    answer = client.post("/api/v1/auth/login", {"username": username, "password": password})
    config = read_config()
    login = {"user": username, "token": answer["token"], "expiresAt": answer["expiresAt"]}
    config["server"] = client.server
    config.setdefault("logins", {})[client.server] = login
    write_config(config)
    click.echo(f"logged in to {client.server} as {username} until {answer['expiresAt']}")


@click.command("config")
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
