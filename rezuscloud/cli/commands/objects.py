"""`rezusctl get | describe | delete | scale | watch`: any kind, by name or by selector."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import TABLE, Client, Failure, Kind, find_kind
from rezuscloud.cli.commands.options import (
    cluster_option,
    label_option,
    output_option,
    place_of,
    timeout_option,
    wait_option,
)
from rezuscloud.cli.commands.waiting import wait_until_gone
from rezuscloud.cli.output import print_document, print_names, print_rows, print_table


@click.command("get")
@click.argument("kind")
@click.argument("name", required=False)
@cluster_option
@output_option
@label_option
async def get_command(kind: str, name: str | None, cluster: str | None, output: str, selector: str) -> None:
    """Lists objects of a kind, or shows one. Without -c it lists all clusters' objects."""
    client = Client.from_environment()
    entry = find_kind(client, kind)
    if name is not None:
        path = entry.path(place_of(client, entry, cluster), name)
    else:
        path = entry.collection(cluster)
    if output in ("table", "wide"):
        query = {} if name is not None else {"labelSelector": selector}
        table = client.get(path, accept=f"{TABLE},application/json", **query)
        if not table["rows"]:
            click.echo(f"no {entry.plural} there", err=True)
            return
        fleet = entry.namespaced and name is None and cluster is None
        print_table(table, wide=output == "wide", with_namespace=fleet)
        return
    doc = client.get(path) if name is not None else client.get(path, labelSelector=selector)
    if output == "name":
        print_names(entry.plural, [doc] if name is not None else doc["items"])
    else:
        print_document(doc, output)


@click.command("describe")
@click.argument("kind")
@click.argument("name")
@cluster_option
async def describe_command(kind: str, name: str, cluster: str | None) -> None:
    """Shows one object with its conditions and what happened to it."""
    client = Client.from_environment()
    entry = find_kind(client, kind)
    doc = client.get(entry.path(place_of(client, entry, cluster), name))
    _describe(doc)
    events = client.get(
        "/api/v1/events",
        fieldSelector=f"involvedObject.uid={doc['metadata']['uid']},involvedObject.kind={entry.kind}",
    )["items"]
    if events:
        click.echo("\nEvents:")
        events.sort(key=lambda event: event["lastTimestamp"])
        head = [["LAST SEEN", "TYPE", "REASON", "COUNT", "MESSAGE"]]
        print_rows(
            head
            + [[e["lastTimestamp"], e["type"], e["reason"], str(e["count"]), e["message"]] for e in events]
        )


def _describe(doc: Mapping[str, Any]) -> None:
    meta = doc["metadata"]
    shown = {key: value for key, value in meta.items() if key not in ("managedFields", "ownerReferences")}
    click.echo(f"Kind: {doc['kind']}")
    print_document(shown, "yaml")
    for part in ("spec", "status"):
        if doc.get(part):
            body = {key: value for key, value in doc[part].items() if key != "conditions"}
            click.echo(f"\n{part.capitalize()}:")
            print_document(body, "yaml")
    conditions = (doc.get("status") or {}).get("conditions")
    if conditions:
        click.echo("\nConditions:")
        head = [["TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"]]
        print_rows(
            head
            + [
                [c["type"], c["status"], c.get("lastTransitionTime", "-"), c["reason"], c.get("message", "")]
                for c in conditions
            ]
        )


@click.command("delete")
@click.argument("kind")
@click.argument("names", nargs=-1, required=True)
@cluster_option
@wait_option
@timeout_option
async def delete_command(
    kind: str, names: Sequence[str], cluster: str | None, wait: bool, timeout_s: float
) -> None:
    """Deletes objects. A cluster's machines are destroyed before it goes."""
    client = Client.from_environment()
    delete_objects(client, find_kind(client, kind), names, cluster, wait=wait, timeout_s=timeout_s)


def delete_objects(
    client: Client, kind: Kind, names: Sequence[str], cluster: str | None, *, wait: bool, timeout_s: float
) -> None:
    """Asks each object to leave; with `wait` until it has."""
    tenant = place_of(client, kind, cluster)
    for name in names:
        doc = client.delete(kind.path(tenant, name))
        leaves = bool((doc.get("metadata") or {}).get("deletionTimestamp"))
        click.echo(f"{kind.plural}/{name} {'is being deleted' if leaves else 'deleted'}")
    if wait:
        for name in names:
            wait_until_gone(client, kind.path(tenant, name), f"{kind.plural}/{name}", timeout_s)


@click.command("scale")
@click.argument("group")
@click.option("--replicas", type=int, required=True, help="How many machines the node group is to have.")
@cluster_option
async def scale_command(group: str, replicas: int, cluster: str | None) -> None:
    """Sets the number of machines of a node group."""
    client = Client.from_environment()
    kind = find_kind(client, "nodegroups")
    path = kind.path(place_of(client, kind, cluster), group)
    client.patch(path, {"spec": {"replicas": replicas}})
    click.echo(f"nodegroups/{group} scaled to {replicas}")


@click.command("watch")
@click.argument("kind")
@click.argument("name", required=False)
@cluster_option
@label_option
@timeout_option
async def watch_command(
    kind: str, name: str | None, cluster: str | None, selector: str, timeout_s: float
) -> None:
    """Prints changes as they happen, until Ctrl-C or the timeout."""
    client = Client.from_environment()
    entry = find_kind(client, kind)
    fields = f"metadata.name={name}" if name else ""
    deadline = time.monotonic() + timeout_s
    version = ""
    while (left := deadline - time.monotonic()) > 0:
        for event in client.watch(
            entry.collection(cluster),
            labelSelector=selector,
            fieldSelector=fields,
            resourceVersion=version,
            timeoutSeconds=str(max(1, int(left))),
        ):
            if event["type"] == "ERROR":
                if event["object"].get("code") != 410:
                    raise Failure(event["object"].get("message", "the watch failed"))
                version = ""  # too old for the server's memory: from the beginning
                break
            version = event["object"]["metadata"]["resourceVersion"]
            click.echo(_event_line(event))


def _event_line(event: Mapping[str, Any]) -> str:
    doc = event["object"]
    meta = doc["metadata"]
    where = f"{meta['namespace']}/" if meta.get("namespace") else ""
    return f"{event['type']:<9} {doc['kind']} {where}{meta['name']}  {summary(doc)}".rstrip()


def summary(doc: Mapping[str, Any]) -> str:
    """What matters of an object in one line, whatever its kind."""
    status = doc.get("status") or {}
    parts = [str(status[key]) for key in ("phase", "stage") if key in status]
    if doc.get("reason"):
        parts.append(f"{doc['reason']}: {doc.get('message', '')}")
    parts += [f"{hold['by']}: {hold['message']}" for hold in status.get("heldBy") or ()]
    progress = status.get("progress")
    if progress:
        parts.append(f"{progress['done']}/{progress['total']} {progress.get('current', '')}".rstrip())
    for condition in status.get("conditions") or ():
        if condition["type"] in ("Ready", "Applied"):
            parts.append(f"{condition['type']}={condition['status']}")
    return "  ".join(parts)
