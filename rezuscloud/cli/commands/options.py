"""Owns the options that several verbs share, and what they mean."""

from __future__ import annotations

import asyncclick as click

from rezuscloud.cli.client import TENANTS, Client, Kind
from rezuscloud.cli.output import FORMATS

cluster_option = click.option("-c", "--cluster", metavar="NAME", help="The cluster it lies in.")
output_option = click.option(
    "-o", "--output", type=click.Choice(FORMATS), default="table", help="How to print it."
)
label_option = click.option("-l", "--selector", default="", metavar="SELECTOR", help="Labels, e.g. env=home.")
wait_option = click.option("--wait", is_flag=True, help="Wait until it is so, and show the stages.")
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait.",
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Have the server check it; change nothing.")


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def choose_cluster(client: Client, cluster: str | None) -> str:
    """The cluster that is meant: the one named, or the only one there is. Raises UsageError."""
    if cluster:
        return cluster
    names = [item["metadata"]["name"] for item in client.get(TENANTS.collection(None))["items"]]
    if len(names) == 1:
        return str(names[0])
    there = f"there are: {', '.join(names)}" if names else "there is none yet"
    raise click.UsageError(f"say which cluster with -c NAME; {there}")


def place_of(client: Client, kind: Kind, cluster: str | None) -> str | None:
    """The cluster for a kind that lies in one; None for a kind that lies in none."""
    return choose_cluster(client, cluster) if kind.namespaced else None
