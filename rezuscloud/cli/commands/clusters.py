"""`rezusctl create cluster …` and the noun-first spelling `rezusctl cluster create|get|describe|delete …`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import TENANTS, ApiFailure, Client, Failure
from rezuscloud.cli.commands.documents import name_of, send_documents
from rezuscloud.cli.commands.objects import delete_objects, describe_object, get_objects
from rezuscloud.cli.commands.options import (
    dry_run_option,
    examples,
    label_option,
    output_option,
    timeout_option,
    wait_option,
)
from rezuscloud.cli.commands.waiting import wait_until_applied
from rezuscloud.cli.output import print_document

TALOS_VERSION = "v1.13.9"
KUBERNETES_VERSION = "v1.36.3"

Doc = dict[str, Any]


@click.group("create")
async def create_command() -> None:
    """Creates a cluster. Other kinds come from files: see `rezusctl apply`."""


@click.group("cluster")
async def cluster_command() -> None:
    """Clusters, noun first: create, get, describe, delete."""


# ---------------------------------------------------------------- create


@click.command(
    "cluster",
    epilog=examples(
        "rezusctl create cluster home --provider lab --control-planes 3 --workers 2 --wait",
        "rezusctl cluster create home --provider lab:small --dry-run > home.yaml",
    ),
)
@click.argument("name")
@click.option(
    "--provider", required=True, metavar="NAME[:CLASS]", help="Where its machines come from, and their class."
)
@click.option("--control-planes", default=1, show_default=True, help="Control-plane machines; an odd number.")
@click.option("--workers", default=0, show_default=True, help="Worker machines.")
@click.option("--talos-version", default=TALOS_VERSION, show_default=True, metavar="VERSION")
@click.option("--kubernetes-version", default=KUBERNETES_VERSION, show_default=True, metavar="VERSION")
@click.option("--endpoint", metavar="HOST[:PORT]", help="Where its API server will be reached.")
@dry_run_option
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
    """Declares a cluster with its node groups, as one change.

    It fails if the cluster is there already. --dry-run prints the documents, for `rezusctl apply`.
    """
    spec = {"talosVersion": talos_version, "kubernetesVersion": kubernetes_version}
    if endpoint:
        spec["controlPlaneEndpoint"] = endpoint
    docs: list[Doc] = [
        {"apiVersion": "v1", "kind": "Tenant", "metadata": {"name": name}, "spec": spec},
        _group(name, "controlplane", "controlplane", control_planes, provider),
    ]
    if workers:
        docs.append(_group(name, "workers", "worker", workers, provider))
    client = Client.from_environment()
    _create(client, name, docs, dry_run=dry_run)
    if dry_run:
        print_document({"apiVersion": "v1", "kind": "List", "items": docs}, "yaml")
        return
    click.echo(f"tenants/{name} created with {control_planes} control planes and {workers} workers")
    if wait:
        wait_until_applied(client, name, timeout_s)


def _group(tenant: str, name: str, role: str, replicas: int, provider: str) -> Doc:
    return {
        "apiVersion": "v1",
        "kind": "NodeGroup",
        "metadata": {"name": name, "namespace": tenant},
        "spec": {"role": role, "replicas": replicas, "providerClass": provider},
    }


def _create(client: Client, name: str, docs: Sequence[Doc], *, dry_run: bool) -> None:
    """Stores the documents in one transaction, if none of them exists. Raises Failure."""
    # Manifests are applied, not created. But "0" is no object's version: what exists is refused, and what
    # does not exist has no version to compare.
    guarded = [{**doc, "metadata": {**doc["metadata"], "resourceVersion": "0"}} for doc in docs]
    try:
        send_documents(client, guarded, [name_of(doc) for doc in docs], dry_run=dry_run)
    except ApiFailure as error:
        if error.code in (409, 422) and (why := _why_taken(client, name)):
            raise Failure(why) from error
        raise


def _why_taken(client: Client, name: str) -> str:
    """What to say when a cluster of this name exists; "" when none does."""
    try:
        found = client.get(TENANTS.path(None, name))
    except ApiFailure:
        return ""
    if found["metadata"].get("deletionTimestamp"):
        return f"cluster {name} already exists and is being deleted; create it again when it is gone"
    return (
        f"cluster {name} already exists, and nothing was changed; `rezusctl scale` and `rezusctl apply` "
        "change a cluster"
    )


# ---------------------------------------------------------------- noun first


@click.command("get", epilog=examples("rezusctl cluster get", "rezusctl cluster get home -o yaml"))
@click.argument("name", required=False)
@output_option
@label_option
async def _cluster_get(name: str | None, output: str, selector: str) -> None:
    """Lists clusters, or shows one."""
    get_objects(Client.from_environment(), TENANTS, name, None, output=output, selector=selector)


@click.command("describe", epilog=examples("rezusctl cluster describe home"))
@click.argument("name")
async def _cluster_describe(name: str) -> None:
    """Shows a cluster with its conditions and what happened to it."""
    describe_object(Client.from_environment(), TENANTS, name, None)


@click.command("delete", epilog=examples("rezusctl cluster delete home --wait"))
@click.argument("names", nargs=-1, required=True)
@wait_option
@timeout_option
async def _cluster_delete(names: Sequence[str], wait: bool, timeout_s: float) -> None:
    """Deletes clusters: their machines are destroyed before they go."""
    delete_objects(Client.from_environment(), TENANTS, names, None, wait=wait, timeout_s=timeout_s)


create_command.add_command(_create_cluster)
cluster_command.add_command(_create_cluster, "create")
for _command in (_cluster_get, _cluster_describe, _cluster_delete):
    cluster_command.add_command(_command)
