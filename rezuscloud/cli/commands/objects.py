"""`rezusctl get | describe | delete | scale | watch`: any kind, by name or by selector."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import NODE_GROUPS, TABLE, TENANTS, Client, Failure, Kind, find_kind, keep_open
from rezuscloud.cli.commands.options import (
    cluster_option,
    examples,
    label_option,
    output_option,
    place_of,
    timeout_option,
    wait_option,
)
from rezuscloud.cli.commands.waiting import hold_text, wait_until_gone
from rezuscloud.cli.output import print_document, print_names, print_rows, print_table, printable, to_yaml

# ---------------------------------------------------------------- get


@click.command(
    "get",
    epilog=examples(
        "rezusctl get clusters",
        "rezusctl get cluster home -o yaml",
        "rezusctl get machines -o wide",
        "rezusctl get nodegroups -c home -l tier=web -o name",
    ),
)
@click.argument("kind")
@click.argument("name", required=False)
@cluster_option
@output_option
@label_option
async def get_command(kind: str, name: str | None, cluster: str | None, output: str, selector: str) -> None:
    """Lists objects of a kind, or shows one.

    KIND is a plural, a singular or a short name: clusters, cluster, ng. Without -c it lists those of all
    clusters.
    """
    client = Client.from_environment()
    get_objects(client, find_kind(client, kind), name, cluster, output=output, selector=selector)


def get_objects(
    client: Client, kind: Kind, name: str | None, cluster: str | None, *, output: str, selector: str
) -> None:
    """Prints a collection, or one object of it."""
    if name is not None and selector:
        raise click.UsageError("give a name or -l, not both")
    path = kind.collection(cluster) if name is None else kind.path(place_of(client, kind, cluster), name)
    is_table = output in ("table", "wide")
    answer = client.get(path, labelSelector=selector, **({"accept": TABLE} if is_table else {}))
    if name is None and not answer["rows" if is_table else "items"]:
        _check_cluster(client, kind, cluster)
    if is_table and answer["rows"]:
        is_fleet = kind.namespaced and name is None and cluster is None
        print_table(answer, wide=output == "wide", with_cluster=is_fleet)
    elif is_table:
        click.echo(f"there are no {kind.in_words}" + (f" in {cluster}" if cluster else ""), err=True)
    elif output == "name":
        print_names(kind.plural, [answer] if name is not None else answer["items"])
    else:
        print_document(answer, output)


def _check_cluster(client: Client, kind: Kind, cluster: str | None) -> None:
    """Nothing is there: because there is no such cluster? Raises ApiFailure."""
    if kind.namespaced and cluster:
        client.get(TENANTS.path(None, cluster))


# ---------------------------------------------------------------- describe


@click.command(
    "describe", epilog=examples("rezusctl describe cluster home", "rezusctl describe run run-3 -c home")
)
@click.argument("kind")
@click.argument("name")
@cluster_option
async def describe_command(kind: str, name: str, cluster: str | None) -> None:
    """Shows one object with its conditions and what happened to it."""
    client = Client.from_environment()
    describe_object(client, find_kind(client, kind), name, cluster)


def describe_object(client: Client, kind: Kind, name: str, cluster: str | None) -> None:
    """Prints one object in full, and its events, oldest first."""
    doc = client.get(kind.path(place_of(client, kind, cluster), name))
    hidden = ("apiVersion", "managedFields", "ownerReferences", "conditions")
    for part, value in doc.items():
        if isinstance(value, dict):
            shown = {key: item for key, item in value.items() if key not in hidden}
            if shown:
                click.echo(f"\n{part.capitalize()}:")
                click.echo(indent(to_yaml(shown), "  "), nl=False)
        elif part not in hidden:
            click.echo(f"{part.capitalize()}: {printable(str(value))}")
    if conditions := (doc.get("status") or {}).get("conditions"):
        click.echo("\nConditions:")
        rows = [
            [
                condition["type"],
                condition["status"],
                condition.get("lastTransitionTime", "-"),
                condition["reason"],
                condition["message"],
            ]
            for condition in conditions
        ]
        print_rows([["TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"], *rows])
    events = client.get(
        "/api/v1/events",
        accept=TABLE,
        fieldSelector=f"involvedObject.uid={doc['metadata']['uid']}",
        includeObject="Object",
    )
    if events["rows"]:
        click.echo("\nEvents:")
        events["rows"].sort(key=lambda row: str(row["object"]["lastTimestamp"]))
        print_table(events)


# ---------------------------------------------------------------- delete


@click.command(
    "delete",
    epilog=examples("rezusctl delete nodegroup workers -c home", "rezusctl delete cluster home --wait"),
)
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
            wait_until_gone(client, kind, tenant, name, timeout_s)


# ---------------------------------------------------------------- scale


@click.command("scale", epilog=examples("rezusctl scale workers --replicas 5 -c home"))
@click.argument("group")
@click.option("--replicas", type=int, required=True, help="How many machines the node group is to have.")
@cluster_option
async def scale_command(group: str, replicas: int, cluster: str | None) -> None:
    """Sets the number of machines of a node group."""
    client = Client.from_environment()
    client.patch(
        NODE_GROUPS.path(place_of(client, NODE_GROUPS, cluster), group), {"spec": {"replicas": replicas}}
    )
    click.echo(f"nodegroups/{group} scaled to {replicas}")


# ---------------------------------------------------------------- watch


@click.command(
    "watch",
    epilog=examples(
        "rezusctl watch clusters",
        "rezusctl watch runs -c home --timeout 60",
        "rezusctl watch machine workers-1 -c home",
    ),
)
@click.argument("kind")
@click.argument("name", required=False)
@cluster_option
@label_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End after this time; without it, Ctrl-C does.",
)
async def watch_command(
    kind: str, name: str | None, cluster: str | None, selector: str, timeout_s: float | None
) -> None:
    """Prints what is there, and then changes as they happen."""
    client = Client.from_environment()
    entry = find_kind(client, kind)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    query = {"labelSelector": selector, "fieldSelector": f"metadata.name={name}" if name else ""}
    for event in _changes(client, entry.collection(cluster), query, deadline):
        click.echo(_event_line(event))


def _changes(
    client: Client, path: str, query: Mapping[str, str], deadline: float | None
) -> Iterator[Mapping[str, Any]]:
    """All events until the deadline, over as many streams as it takes."""
    version = ""

    def left_s() -> float:
        return 1.0 if deadline is None else deadline - time.monotonic()

    def open_stream() -> Iterator[Mapping[str, Any]]:
        where = {"resourceVersion": version} if version else {"sendInitialEvents": "true"}
        limit = {} if deadline is None else {"timeoutSeconds": str(max(1, round(left_s())))}
        return follow(client.watch(path, **query, **where, **limit))

    def follow(stream: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        nonlocal version
        has_all = bool(version)  # what is there comes in no order of versions; a bookmark stands behind it
        for event in stream:
            doc = event["object"]
            if event["type"] == "ERROR":
                if doc.get("code") != 410:
                    raise Failure(printable(str(doc.get("message", "the watch failed"))))
                version = ""  # older than the server remembers: once more from what is there
                return
            has_all = has_all or event["type"] == "BOOKMARK"
            if has_all:
                version = doc["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                yield event

    return keep_open(open_stream, lambda: left_s() < 0.5)


_COLORS = {"ADDED": "green", "MODIFIED": "yellow", "DELETED": "red"}


def _event_line(event: Mapping[str, Any]) -> str:
    doc = event["object"]
    meta = doc["metadata"]
    where = f"{meta['namespace']}/" if meta.get("namespace") else ""
    word = click.style(f"{event['type']:<9}", fg=_COLORS.get(event["type"]))
    return f"{word} {doc['kind']} {where}{meta['name']}  {printable(summary(doc))}".rstrip()


def summary(doc: Mapping[str, Any]) -> str:
    """What matters of an object in one line, whatever its kind."""
    status = doc.get("status") or {}
    parts = [str(status[key]) for key in ("phase", "stage") if key in status]
    if doc.get("reason"):
        parts.append(f"{doc['reason']}: {doc.get('message', '')}")
    parts += [hold_text(hold) for hold in status.get("heldBy") or ()]
    if progress := status.get("progress"):
        parts.append(f"{progress['done']}/{progress['total']} {progress.get('current') or ''}".rstrip())
    parts += [
        f"{condition['type']}={condition['status']}"
        for condition in status.get("conditions") or ()
        if condition["type"] in ("Ready", "Applied")
    ]
    return "  ".join(parts)
