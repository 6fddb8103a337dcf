"""`rezusctl approve | deny | cancel | retry | logs`: what a person does to runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import RUNS, TENANTS, ApiFailure, Client, Failure, keep_open
from rezuscloud.cli.commands.options import (
    choose_cluster,
    cluster_option,
    examples,
    timeout_option,
    wait_option,
)
from rezuscloud.cli.commands.waiting import newest_run, wait_until_applied
from rezuscloud.cli.output import printable

_ENDED = frozenset({"Succeeded", "Failed", "Cancelled", "Superseded", "Interrupted"})


@click.command(
    "approve",
    epilog=examples(
        "rezusctl approve -c home --wait", "rezusctl approve run-3 -c home --plan 7c9e6679 --yes"
    ),
)
@click.argument("run", required=False)
@cluster_option
@click.option("--plan", "plan_id", metavar="ID", help="Approve only if the run holds this plan.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, also on a terminal.")
@wait_option
@timeout_option
async def approve_command(
    run: str | None, cluster: str | None, plan_id: str | None, yes: bool, wait: bool, timeout_s: float
) -> None:
    """Lets a held run apply exactly the plan it holds. Shows that plan first.

    Without a name it is the run that waits.
    """
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    doc = _held(client, tenant, run)
    name, plan = doc["metadata"]["name"], doc["status"]["plan"]
    _show_plan(plan)
    if sys.stdin.isatty() and not yes:
        click.confirm(f"Apply this plan to {tenant}?", abort=True, err=True)
    client.post(f"{RUNS.path(tenant, name)}/approve", {"planId": plan_id or plan["id"]})
    click.echo(f"runs/{name} approved: plan {plan['id']}")
    if wait:
        wait_until_applied(client, tenant, timeout_s)


@click.command("deny", epilog=examples("rezusctl deny -c home"))
@click.argument("run", required=False)
@cluster_option
async def deny_command(run: str | None, cluster: str | None) -> None:
    """Ends a held run. Nothing is applied until the declaration changes or you retry."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    doc = _held(client, tenant, run)
    name = doc["metadata"]["name"]
    client.post(f"{RUNS.path(tenant, name)}/deny", {"planId": doc["status"]["plan"]["id"]})
    click.echo(f"runs/{name} denied")


@click.command("cancel", epilog=examples("rezusctl cancel -c home", "rezusctl cancel run-3 -c home --force"))
@click.argument("run", required=False)
@cluster_option
@click.option("--force", is_flag=True, help="Interrupt a second time: the resource in flight may be lost.")
async def cancel_command(run: str | None, cluster: str | None, force: bool) -> None:
    """Stops a run, without a name the newest one. A running apply saves its state first."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    name = run or _newest(client, tenant)
    client.post(f"{RUNS.path(tenant, name)}/cancel", {"force": force})
    click.echo(f"runs/{name} is being cancelled")


@click.command("retry", epilog=examples("rezusctl retry -c home --wait"))
@cluster_option
@wait_option
@timeout_option
async def retry_command(cluster: str | None, wait: bool, timeout_s: float) -> None:
    """Starts a run for what is declared now, at once."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    before = newest_run(client, tenant)
    client.post(f"{TENANTS.path(None, tenant)}/apply", {})
    click.echo(f"tenants/{tenant}: a run starts")
    if wait:
        wait_until_applied(client, tenant, timeout_s, after=before)


@click.command("logs", epilog=examples("rezusctl logs -c home -f", "rezusctl logs run-3 -c home"))
@click.argument("run", required=False)
@cluster_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
async def logs_command(run: str | None, cluster: str | None, follow: bool) -> None:
    """Prints the log of a run, without a name that of the newest one."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    path = RUNS.path(tenant, run or _newest(client, tenant))
    offset = 0

    def open_stream() -> Iterator[bytes]:
        return client.stream(f"{path}/log", offset=str(offset), follow="true" if follow else "")

    for piece in keep_open(open_stream, lambda: not follow or _has_ended(client, path)):
        offset += len(piece)
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def _has_ended(client: Client, path: str) -> bool:
    try:
        return client.get(path)["status"]["phase"] in _ENDED
    except ApiFailure as error:
        if error.code == 404:  # its tenant went, and took it along
            return True
        raise


def _runs(client: Client, tenant: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = client.get(RUNS.collection(tenant))["items"]
    return sorted(runs, key=lambda run: int(run["metadata"]["name"].rpartition("-")[2]))


def _newest(client: Client, tenant: str) -> str:
    runs = _runs(client, tenant)
    if not runs:
        client.get(TENANTS.path(None, tenant))  # or is there no such cluster?
        raise Failure(f"{tenant} has had no run yet")
    return str(runs[-1]["metadata"]["name"])


def _held(client: Client, tenant: str, name: str | None) -> dict[str, Any]:
    """The run that waits for approval."""
    if name is not None:
        run: dict[str, Any] = client.get(RUNS.path(tenant, name))
        if (phase := run["status"]["phase"]) != "Held":
            raise Failure(f"{name} of {tenant} is {phase} and waits for no approval")
        return run
    for run in reversed(_runs(client, tenant)):
        if run["status"]["phase"] == "Held":
            return run
    client.get(TENANTS.path(None, tenant))
    raise Failure(f"no run of {tenant} waits for approval")


def _show_plan(plan: dict[str, Any]) -> None:
    click.echo(printable(f"plan {plan['id']}: {plan['summary']}"))
    for machine in plan["machines"]:
        click.echo(printable(f"  {machine['action']:<8} {machine['name']}: {machine['reason']}"))
    for why in plan.get("guard", ()):
        click.echo(click.style(printable(f"  ! {why}"), fg="yellow"))
