"""`rezusctl apply -f`: documents from files become one change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import Client, Failure
from rezuscloud.cli.commands.options import timeout_option, wait_option
from rezuscloud.cli.commands.waiting import wait_until_applied
from rezuscloud.model.documents import DocumentError, read_documents


@click.command("apply")
@click.option(
    "-f", "--file", "files", multiple=True, required=True, help='A YAML or JSON file; "-" reads input.'
)
@click.option("--dry-run", is_flag=True, help="Have the server check them; change nothing.")
@wait_option
@timeout_option
async def apply_command(files: Sequence[str], dry_run: bool, wait: bool, timeout_s: float) -> None:
    """Creates or updates all documents of the files in one transaction, or none of them."""
    docs = [doc for file in files for doc in _read(file)]
    if not docs:
        raise Failure("the files hold no document")
    client = Client.from_environment()
    body = {"apiVersion": "v1", "kind": "List", "items": docs}
    answer = client.post("/api/v1/manifests", body, dryRun="All" if dry_run else "")
    suffix = " (dry run)" if dry_run else ""
    for item in answer["items"]:
        click.echo(f"{item['kind'].lower()}/{item['metadata']['name']} applied{suffix}")
    if wait and not dry_run:
        for tenant in sorted({_tenant_of(item) for item in answer["items"]} - {""}):
            wait_until_applied(client, tenant, timeout_s)


def _read(file: str) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{file} cannot be read: {error}") from error
    try:
        return read_documents(text)
    except DocumentError as error:
        raise Failure(f"{file}: {error}") from error


def _tenant_of(item: dict[str, Any]) -> str:
    meta = item["metadata"]
    return str(meta["name"] if item["kind"] == "Tenant" else meta.get("namespace", ""))
