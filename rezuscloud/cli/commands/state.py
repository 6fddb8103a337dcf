"""`rezusctl state …`: what operators do to TF state. Everything here is for admins."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import asyncclick as click

from rezuscloud.cli.client import STATE_VERSIONS, TENANTS, Client, Failure
from rezuscloud.cli.commands.options import choose_cluster, examples, timeout_option, wait_option
from rezuscloud.cli.commands.waiting import newest_run, wait_until_applied

F = TypeVar("F", bound=Callable[..., Any])

_cluster_option = click.option("-c", "--cluster", "option", metavar="NAME", help="The same as CLUSTER.")


def _cluster(command: F) -> F:
    """The cluster as argument or as option; `_chosen` says which one is meant."""
    return click.argument("cluster", required=False)(_cluster_option(command))


def _chosen(client: Client, cluster: str | None, option: str | None) -> str:
    if cluster and option and cluster != option:
        raise click.UsageError(f"{cluster} or {option}? Name one cluster")
    return choose_cluster(client, cluster or option)


@click.group("state")
async def state_command() -> None:
    """TF state of a cluster: env, pull, recover, unlock, rotate-key."""


@state_command.command(
    "env",
    epilog=examples(
        'eval "$(rezusctl state env home -d home-tofu)"',
        "cd home-tofu && tofu init && tofu plan",
    ),
)
@_cluster
@click.option(
    "-d",
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write the configuration there.",
)
async def env_command(cluster: str | None, option: str | None, directory: Path | None) -> None:
    """Prints for a shell what your own tofu needs for this cluster.

    It holds your token and the state key: do not keep it.
    """
    client = Client.from_environment()
    tenant = _chosen(client, cluster, option)
    kit = client.get(f"{TENANTS.path(None, tenant)}/state-env")
    env = {
        key: f"{client.server}{value}" if value.startswith("/") else value
        for key, value in kit["env"].items()
    }
    env |= {"TF_HTTP_USERNAME": "rezusctl", "TF_HTTP_PASSWORD": client.token or ""}
    for key, value in env.items():
        click.echo(f"export {key}={shlex.quote(value)}")
    if directory is not None:
        _write(directory, kit["files"])


def _write(directory: Path, files: dict[str, str]) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = directory / Path(name).name  # a server names files, never places
            path.write_text(text)
            click.echo(f"wrote {path}", err=True)
    except OSError as error:
        raise Failure(f"{directory} cannot be written: {error}") from error


@state_command.command(
    "pull",
    epilog=examples("rezusctl state pull home | jq .resources", "rezusctl state pull home --version 7"),
)
@_cluster
@click.option("--version", type=int, metavar="NUMBER", help="A version other than the newest.")
async def pull_command(cluster: str | None, option: str | None, version: int | None) -> None:
    """Prints the decrypted state. It holds every secret of the cluster."""
    client = Client.from_environment()
    tenant = _chosen(client, cluster, option)
    if version is None:
        versions = client.get(STATE_VERSIONS.collection(tenant))["items"]
        if not versions:
            client.get(TENANTS.path(None, tenant))  # or is there no such cluster?
            raise Failure(f"{tenant} has no state yet")
        version = max(int(item["spec"]["version"]) for item in versions)
    sys.stdout.buffer.write(client.raw(f"{STATE_VERSIONS.path(tenant, f'v{version}')}/body"))
    sys.stdout.buffer.flush()


@state_command.command("recover", epilog=examples("rezusctl state recover home --wait"))
@_cluster
@wait_option
@timeout_option
async def recover_command(cluster: str | None, option: str | None, wait: bool, timeout_s: float) -> None:
    """Stores the state that a run could not store, and lets the cluster go on."""
    client = Client.from_environment()
    tenant = _chosen(client, cluster, option)
    client.post(f"{TENANTS.path(None, tenant)}/recover", {})
    click.echo(f"tenants/{tenant}: the state is stored; the cluster goes on")
    if wait:
        wait_until_applied(client, tenant, timeout_s)


@state_command.command(
    "unlock", epilog=examples("rezusctl state unlock home 5b3a1f0e-2c8d-4e7b-9c55-0d8f6f1f4a11")
)
@click.argument("words", nargs=-1, required=True, metavar="[CLUSTER] LOCK_ID")
@_cluster_option
async def unlock_command(words: Sequence[str], option: str | None) -> None:
    """Breaks a state lock that somebody left behind. Be sure that nobody works there any more.

    `rezusctl describe cluster` tells the lock's id.
    """
    *clusters, lock_id = words
    if len(clusters) > 1:
        raise click.UsageError("give at most a cluster and the id of its lock")
    client = Client.from_environment()
    tenant = _chosen(client, clusters[0] if clusters else None, option)
    client.post(f"{TENANTS.path(None, tenant)}/unlock", {"lockId": lock_id})
    click.echo(f"tenants/{tenant}: lock {lock_id} is broken")


@state_command.command("rotate-key", epilog=examples("rezusctl state rotate-key home --wait"))
@_cluster
@wait_option
@timeout_option
async def rotate_key_command(cluster: str | None, option: str | None, wait: bool, timeout_s: float) -> None:
    """Makes a new state key and starts the run that re-encrypts the state with it."""
    client = Client.from_environment()
    tenant = _chosen(client, cluster, option)
    before = newest_run(client, tenant)
    client.post(f"{TENANTS.path(None, tenant)}/rotate-key", {})
    click.echo(f"tenants/{tenant}: a new key is made; a run re-encrypts the state")
    if wait:
        wait_until_applied(client, tenant, timeout_s, after=before)
