"""`rezusctl create cluster …` and the noun-first spelling `rezusctl cluster create|get|describe|delete …`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import Client, find_kind
from rezuscloud.cli.commands.objects import delete_objects, describe_command, get_command
from rezuscloud.cli.commands.options import output_option, timeout_option, wait_option
from rezuscloud.cli.commands.waiting import wait_until_applied
from rezuscloud.cli.output import print_document

TALOS_VERSION = "v1.13.9"
KUBERNETES_VERSION = "v1.36.3"


def _cluster_documents(
    name: str,
    provider: str,
    control_planes: int,
    workers: int,
    talos_version: str,
    kubernetes_version: str,
    endpoint: str | None,
) -> list[dict[str, Any]]:
    spec: dict[str, Any] = {"talosVersion": talos_version, "kubernetesVersion": kubernetes_version}
    if endpoint:
        spec["controlPlaneEndpoint"] = endpoint
    provider_class = provider if ":" in provider else f"{provider}:"
    docs: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec},
        _group(name, "controlplane", "controlplane", control_planes, provider_class),
    ]
    if workers:
        docs.append(_group(name, "workers", "worker", workers, provider_class))
    return docs


def _group(tenant: str, name: str, role: str, replicas: int, provider_class: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "NodeGroup",
        "metadata": {"name": name, "namespace": tenant},
        "spec": {"role": role, "replicas": replicas, "providerClass": provider_class},
    }


@click.command("cluster")
@click.argument("name")
@click.option("--provider", required=True, help="Where its machines come from: NAME or NAME:CLASS.")
@click.option("--control-planes", default=1, show_default=True, help="Control-plane machines; an odd number.")
@click.option("--workers", default=0, show_default=True, help="Worker machines.")
@click.option("--talos-version", default=TALOS_VERSION, show_default=True)
@click.option("--kubernetes-version", default=KUBERNETES_VERSION, show_default=True)
@click.option("--endpoint", metavar="HOST[:PORT]", help="Where its API server will be reached.")
@click.option(
    "--dry-run", is_flag=True, help="Print the documents and have the server check them; change nothing."
)
@wait_option
@timeout_option
async def _create_cluster(
    name: str,
    provider: str,
    control_planes: int,
    workers: int,
    talos_version: str,
    kubernetes_version: str,
    endpoint: str | None,
    dry_run: bool,
    wait: bool,
    timeout_s: float,
) -> None:
    """Declares a cluster with its node groups, as one change."""
    client = Client.from_environment()
    docs = _cluster_documents(
        name, provider, control_planes, workers, talos_version, kubernetes_version, endpoint
    )
    # A plain POST of the tenant first would be a second change; the List is one transaction and says so if
    # the cluster is there already.
    body = {"apiVersion": "v1", "kind": "List", "items": docs}
    client.post("/api/v1/manifests", body, dryRun="All" if dry_run else "", mode="create")
    if dry_run:
        print_document(body, "yaml")
        return
    click.echo(f"tenants/{name} created with {control_planes} control planes and {workers} workers")
    if wait:
        wait_until_applied(client, name, timeout_s)


@click.group("create")
async def create_command() -> None:
    """Creates a cluster. Other kinds come from files: see `rezusctl apply`."""


create_command.add_command(_create_cluster, "cluster")


@click.group("cluster")
async def cluster_command() -> None:
    """Clusters, noun first: create, get, describe, delete."""


@click.command("get")
@click.argument("name", required=False)
@output_option
@click.option("-l", "--selector", default="", metavar="SELECTOR")
async def _cluster_get(name: str | None, output: str, selector: str) -> None:
    """Lists clusters, or shows one."""
    assert get_command.callback is not None
    await get_command.callback("clusters", name, None, output, selector)


@click.command("describe")
@click.argument("name")
async def _cluster_describe(name: str) -> None:
    """Shows a cluster with its conditions and what happened to it."""
    assert describe_command.callback is not None
    await describe_command.callback("cluster", name, None)


@click.command("delete")
@click.argument("names", nargs=-1, required=True)
@wait_option
@timeout_option
async def _cluster_delete(names: Sequence[str], wait: bool, timeout_s: float) -> None:
    """Deletes clusters: their machines are destroyed before they go."""
    client = Client.from_environment()
    delete_objects(client, find_kind(client, "clusters"), names, None, wait=wait, timeout_s=timeout_s)


for _command in (_create_cluster, _cluster_get, _cluster_describe, _cluster_delete):
    cluster_command.add_command(_command, "create" if _command is _create_cluster else None)
