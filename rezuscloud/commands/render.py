"""Owns `rezuscloud render`: declarations in files become the files that OpenTofu would get.

The documents take the very path of the server (admission, declaration, renderer) on a database that is
thrown away. A document that bears a uid (as `rezusctl get -o yaml` prints it) gives the server's bytes; a new
one has no uid yet and gets a zero one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncclick as click

from rezuscloud.access.identity import SYSTEM
from rezuscloud.commands.failure import Failure
from rezuscloud.model.documents import DocumentError, read_documents
from rezuscloud.model.errors import ApiError
from rezuscloud.model.meta import Doc
from rezuscloud.plugin.manager import PluginFailed, PluginManager
from rezuscloud.reconcile.publish import current_revision
from rezuscloud.reconcile.tenant import choose_pins
from rezuscloud.resources.service import ResourceService
from rezuscloud.store.db import Store
from rezuscloud.tofu.render import RenderError, render

_NO_UID = "00000000-0000-0000-0000-000000000000"
_NO_TIME = "1970-01-01T00:00:00Z"


async def run_render(files: Sequence[Path], output: Path | None) -> None:
    docs = [doc for file in files for doc in _read(file)]
    plugins = PluginManager.load()
    with tempfile.TemporaryDirectory(prefix="rezuscloud-render-") as scratch:
        async with Store.open(Path(scratch)) as store:
            service = ResourceService(store, plugins.providers)
            try:
                await service.apply_manifests(SYSTEM, docs)
                rendered = _render_all(store, docs, plugins)
            except ApiError as error:
                raise Failure(error.message) from error
            except (RenderError, PluginFailed) as error:
                raise Failure(f"cannot be rendered: {error}") from error
    if not rendered:
        raise Failure("no Tenant is declared in these files, so there is nothing to render")
    for tenant, content in rendered.items():
        if output is None:
            click.echo(content.decode(), nl=False)
            continue
        folder = output / tenant if len(rendered) > 1 else output
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "main.tf.json").write_bytes(content)
        click.echo(f"wrote {folder / 'main.tf.json'}", err=True)


def _render_all(store: Store, docs: Sequence[Doc], plugins: PluginManager) -> dict[str, bytes]:
    given = {_key(doc): doc.get("metadata") or {} for doc in docs}
    rendered = {}
    for stored in store.objects.list("Tenant"):
        tenant = _as_given(stored.doc, given)
        name = tenant["metadata"]["name"]
        groups = [_as_given(group.doc, given) for group in store.objects.list("NodeGroup", name)]
        content, _ = current_revision(tenant, groups, [])
        files = render(
            tenant,
            groups,
            content=content,
            pins=choose_pins(tenant, groups, None),
            providers=plugins.providers,
            encrypted=True,
        ).files
        rendered[name] = files["main.tf.json"]
    return rendered


def _as_given(doc: Doc, given: dict[tuple[str, str, str], Any]) -> Doc:
    meta = given.get(_key(doc), {})
    identity = {
        "uid": meta.get("uid", _NO_UID),
        "creationTimestamp": str(meta.get("creationTimestamp", _NO_TIME)),
    }
    return {**doc, "metadata": {**doc["metadata"], **identity}}


def _key(doc: Doc) -> tuple[str, str, str]:
    meta = doc.get("metadata") or {}
    return str(doc.get("kind")), str(meta.get("namespace", "")), str(meta.get("name"))


def _read(file: Path) -> list[Doc]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"{file} cannot be read: {error}") from error
    try:
        return read_documents(text)
    except DocumentError as error:
        raise Failure(f"{file}: {error}") from error
