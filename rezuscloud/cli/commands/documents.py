"""`rezusctl apply -f`: documents from files become one change. Also how documents are sent and refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import ApiFailure, Client, Failure, cause_text
from rezuscloud.cli.commands.options import (
    cluster_option,
    dry_run_option,
    examples,
    timeout_option,
    wait_option,
)
from rezuscloud.cli.commands.waiting import wait_until_applied
from rezuscloud.model.documents import DocumentError, read_documents

Doc = dict[str, Any]

MANIFESTS = "/api/v1/manifests"

_ITEM = re.compile(r"items\[(\d+)\]\.?")


@click.command(
    "apply",
    epilog=examples(
        "rezusctl apply -f home.yaml --wait",
        "rezusctl apply -f workers.yaml -c home --dry-run",
        "cat *.yaml | rezusctl apply -f -",
    ),
)
@click.option(
    "-f", "--file", "files", multiple=True, required=True, help='A YAML or JSON file; "-" reads input.'
)
@cluster_option
@dry_run_option
@wait_option
@timeout_option
async def apply_command(
    files: Sequence[str], cluster: str | None, dry_run: bool, wait: bool, timeout_s: float
) -> None:
    """Creates or updates what files declare: all of it in one transaction, or nothing.

    With -c, documents that do not say in which cluster they lie, lie in that one.
    """
    docs, labels = _read_all(files)
    if not docs:
        raise Failure(f"no document is there in {', '.join(map(_shown, files))}")
    client = Client.from_environment()
    kinds = {kind.kind: kind for kind in client.kinds()}
    for doc in docs:
        kind = kinds.get(str(doc.get("kind")))
        if (
            cluster
            and kind is not None
            and kind.namespaced
            and isinstance(doc.setdefault("metadata", {}), dict)
        ):
            doc["metadata"].setdefault("namespace", cluster)
    items = send_documents(client, docs, labels, dry_run=dry_run)
    for item in items:
        suffix = " (dry run)" if dry_run else ""
        click.echo(f"{kinds[item['kind']].plural}/{item['metadata']['name']} applied{suffix}")
    if wait and not dry_run:
        for tenant in sorted({_tenant_of(item) for item in items} - {""}):
            wait_until_applied(client, tenant, timeout_s)


def send_documents(client: Client, docs: Sequence[Doc], labels: Sequence[str], *, dry_run: bool) -> list[Doc]:
    """Has all documents stored in one transaction. Raises ApiFailure, which tells by its label each document
    that was refused."""
    body = {"apiVersion": "v1", "kind": "List", "items": docs}
    try:
        items: list[Doc] = client.post(MANIFESTS, body, dryRun="All" if dry_run else "")["items"]
    except ApiFailure as error:
        if "items[" not in error.message:
            raise
        raise ApiFailure(error.code, _told(error, labels)) from error
    return items


def _told(error: ApiFailure, labels: Sequence[str]) -> str:
    lines = []
    for cause in error.causes:
        found = _ITEM.match(cause.get("field", ""))
        if found is None or int(found[1]) >= len(labels):
            return error.message
        lines.append(f"{labels[int(found[1])]}: {_ITEM.sub('', cause_text(cause))}")
    if not lines:
        return _ITEM.sub(lambda found: labels[int(found[1])], error.message)
    if len(lines) == 1:
        return f"nothing was written: {lines[0]}"
    return "nothing was written:" + "".join(f"\n  {line}" for line in lines)


def _read_all(files: Sequence[str]) -> tuple[list[Doc], list[str]]:
    """All documents, and by what a person knows each: file, place and name."""
    docs: list[Doc] = []
    labels: list[str] = []
    for file in files:
        found, shown = _read(file), _shown(file)
        docs += found
        labels += [f"{shown}, document {place} ({name_of(doc)})" for place, doc in enumerate(found, 1)]
    return docs, labels


def _read(file: str) -> list[Doc]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{_shown(file)} cannot be read: {error}") from error
    try:
        return read_documents(text)
    except DocumentError as error:
        raise Failure(f"{_shown(file)}: {error}") from error


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file


def name_of(doc: Doc) -> str:
    """Kind and name of a document, whatever is in it."""
    meta = doc.get("metadata")
    return (
        f"{doc.get('kind', 'no kind')} {meta.get('name', 'without name') if isinstance(meta, dict) else ''}"
    )


def _tenant_of(item: Doc) -> str:
    meta = item["metadata"]
    return str(meta["name"] if item["kind"] == "Tenant" else meta.get("namespace", ""))
