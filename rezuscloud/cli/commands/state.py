"""`rezusctl state …`: what operators do to TF state. Everything here is for admins."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import asyncclick as click

from rezuscloud.cli.client import Client, Failure
from rezuscloud.cli.commands.options import choose_cluster, timeout_option, wait_option
from rezuscloud.cli.commands.waiting import newest_run, wait_until_applied


@click.group("state")
async def state_command() -> None:
    """TF state of a cluster: env, pull, recover, unlock, rotate-key."""


@state_command.command("env")
@click.argument("cluster", required=False)
@click.option(
    "-d", "--directory", type=click.Path(path_type=Path), help="Also write the configuration there."
)
async def env_command(cluster: str | None, directory: Path | None) -> None:
    """Prints what your own tofu needs for this cluster, for a shell: eval "$(rezusctl state env C)".

    It holds your token and the state key: do not keep it.
    """
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    kit = client.get(f"/api/v1/tenants/{tenant}/state-env")
    env = {
        key: f"{client.server}{value}" if value.startswith("/") else value
        for key, value in kit["env"].items()
    }
    env |= {"TF_HTTP_USERNAME": "rezusctl", "TF_HTTP_PASSWORD": client.token or ""}
    for key, value in env.items():
        click.echo(f"export {key}={shlex.quote(value)}")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in kit["files"].items():
            (directory / name).write_text(text)
            click.echo(f"wrote {directory / name}", err=True)


@state_command.command("pull")
@click.argument("cluster", required=False)
@click.option("--version", "version", type=int, help="A version other than the newest.")
async def pull_command(cluster: str | None, version: int | None) -> None:
    """Prints the decrypted state. It holds every secret of the cluster."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    if version is None:
        versions = client.get(f"/api/v1/namespaces/{tenant}/stateversions")["items"]
        if not versions:
            raise Failure(f"{tenant} has no state yet")
        version = max(int(item["spec"]["version"]) for item in versions)
    sys.stdout.buffer.write(client.binary(f"/api/v1/namespaces/{tenant}/stateversions/v{version}/body"))


@state_command.command("recover")
@click.argument("cluster", required=False)
@wait_option
@timeout_option
async def recover_command(cluster: str | None, wait: bool, timeout_s: float) -> None:
    """Stores the state that a run could not store, and lets the cluster go on."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    client.post(f"/api/v1/tenants/{tenant}/recover", {})
    click.echo(f"tenants/{tenant}: the state is stored; the cluster goes on")
    if wait:
        wait_until_applied(client, tenant, timeout_s)


@state_command.command("unlock")
@click.argument("cluster")
@click.argument("lock_id")
async def unlock_command(cluster: str, lock_id: str) -> None:
    """Breaks a state lock that somebody left behind. Be sure that nobody works there any more."""
    Client.from_environment().post(f"/api/v1/tenants/{cluster}/unlock", {"lockId": lock_id})
    click.echo(f"tenants/{cluster}: lock {lock_id} is broken")


@state_command.command("rotate-key")
@click.argument("cluster", required=False)
@wait_option
@timeout_option
async def rotate_key_command(cluster: str | None, wait: bool, timeout_s: float) -> None:
    """Makes a new state key and starts the run that re-encrypts the state with it."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    before = newest_run(client, tenant)
    client.post(f"/api/v1/tenants/{tenant}/rotate-key", {})
    click.echo(f"tenants/{tenant}: a new key is made; a run re-encrypts the state")
    if wait:
        wait_until_applied(client, tenant, timeout_s, after=before)
