"""`rezusctl approve | deny | cancel | retry | logs`: what a person does to runs."""

from __future__ import annotations

import sys
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import Client, Failure
from rezuscloud.cli.commands.options import choose_cluster, cluster_option, timeout_option, wait_option
from rezuscloud.cli.commands.waiting import newest_run, wait_until_applied


@click.command("approve")
@click.argument("run", required=False)
@cluster_option
@click.option("--plan", "plan_id", help="Approve only if the run holds this plan.")
@wait_option
@timeout_option
async def approve_command(
    run: str | None, cluster: str | None, plan_id: str | None, wait: bool, timeout_s: float
) -> None:
    """Lets a held run apply exactly the plan it holds. Shows that plan first."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    doc = _held(client, tenant, run)
    name, plan = doc["metadata"]["name"], doc["status"]["plan"]
    _show_plan(plan)
    client.post(f"/api/v1/namespaces/{tenant}/runs/{name}/approve", {"planId": plan_id or plan["id"]})
    click.echo(f"runs/{name} approved: plan {plan['id']}")
    if wait:
        wait_until_applied(client, tenant, timeout_s)


@click.command("deny")
@click.argument("run", required=False)
@cluster_option
async def deny_command(run: str | None, cluster: str | None) -> None:
    """Ends a held run. Nothing is applied until the declaration changes or you retry."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    doc = _held(client, tenant, run)
    name = doc["metadata"]["name"]
    client.post(f"/api/v1/namespaces/{tenant}/runs/{name}/deny", {"planId": doc["status"]["plan"]["id"]})
    click.echo(f"runs/{name} denied")


@click.command("cancel")
@click.argument("run", required=False)
@cluster_option
@click.option("--force", is_flag=True, help="Interrupt a second time: the resource in flight may be lost.")
async def cancel_command(run: str | None, cluster: str | None, force: bool) -> None:
    """Stops a run; a running apply saves its state first."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    name = run or _newest(client, tenant)["metadata"]["name"]
    client.post(f"/api/v1/namespaces/{tenant}/runs/{name}/cancel", {"force": force})
    click.echo(f"runs/{name} is being cancelled")


@click.command("retry")
@cluster_option
@wait_option
@timeout_option
async def retry_command(cluster: str | None, wait: bool, timeout_s: float) -> None:
    """Starts a run for what is declared now, without waiting for debounce or backoff."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    before = newest_run(client, tenant)
    client.post(f"/api/v1/tenants/{tenant}/apply", {})
    click.echo(f"tenants/{tenant}: a run starts")
    if wait:
        wait_until_applied(client, tenant, timeout_s, after=before)


@click.command("logs")
@click.argument("run", required=False)
@cluster_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
async def logs_command(run: str | None, cluster: str | None, follow: bool) -> None:
    """Prints the log of a run; without a name that of the newest one."""
    client = Client.from_environment()
    tenant = choose_cluster(client, cluster)
    name = run or _newest(client, tenant)["metadata"]["name"]
    for piece in client.stream(
        f"/api/v1/namespaces/{tenant}/runs/{name}/log", offset="0", follow="true" if follow else ""
    ):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()


def _runs(client: Client, tenant: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = client.get(f"/api/v1/namespaces/{tenant}/runs")["items"]
    return sorted(runs, key=lambda run: int(run["metadata"]["name"].rpartition("-")[2]))


def _newest(client: Client, tenant: str) -> dict[str, Any]:
    runs = _runs(client, tenant)
    if not runs:
        raise Failure(f"{tenant} has had no run yet")
    return runs[-1]


def _held(client: Client, tenant: str, name: str | None) -> dict[str, Any]:
    run: dict[str, Any]
    for run in reversed(_runs(client, tenant)):
        if name in (None, run["metadata"]["name"]) and run["status"]["phase"] == "Held":
            return run
    what = f"run {name} of {tenant}" if name else f"no run of {tenant}"
    raise Failure(f"{what} {'does not wait' if name else 'waits'} for approval")


def _show_plan(plan: dict[str, Any]) -> None:
    click.echo(f"plan {plan['id']}: {plan['summary']}")
    for machine in plan["machines"]:
        click.echo(f"  {machine['action']:<8} {machine['name']}: {machine['reason']}")
    for why in plan.get("guard", ()):
        click.echo(click.style(f"  ! {why}", fg="yellow"))
