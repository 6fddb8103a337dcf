"""`make docs`: writes the reference pages that are made from code: settings, kinds and the command lines.

`--check` writes nothing; it exits with 1 and names each page that is not what the code says now.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import asyncclick as click

from rezuscloud.cli.main import cli as rezusctl
from rezuscloud.commands.grammar import cli as rezuscloud
from rezuscloud.model.machine import MachineSpec
from rezuscloud.model.meta import camel, to_wire
from rezuscloud.model.tenant import NodeGroupSpec, TenantSpec
from rezuscloud.resources.registry import REGISTRY, Kind
from rezuscloud.settings import settings_table

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Made by `make docs` from the code. Change the code, not this page. -->\n"

SPECS: Mapping[str, type] = {"Tenant": TenantSpec, "NodeGroup": NodeGroupSpec, "Machine": MachineSpec}

MEANING: Mapping[tuple[str, str], str] = {
    ("Tenant", "talosVersion"): "Talos version of new machines, `v1.13.9` or `1.13.9`.",
    ("Tenant", "kubernetesVersion"): "Kubernetes version; inside the range that `talosVersion` accepts.",
    (
        "Tenant",
        "controlPlaneEndpoint",
    ): "`host[:port]` of the API server. Some providers make one.",
    ("Tenant", "podSubnets"): "One network, or one of IPv4 and one of IPv6. Fixed after the first apply.",
    ("Tenant", "serviceSubnets"): "As `podSubnets`; must not overlap with it.",
    ("Tenant", "credentials"): "Provider → name of its Credential.",
    ("Tenant", "applyPolicy"): "`Auto`: only guarded plans wait for approval. `Manual`: every plan waits.",
    ("Tenant", "paused"): "`true`: nothing is applied until it is `false` again.",
    ("Tenant", "deletionProtection"): "`true`: a DELETE is refused.",
    (
        "NodeGroup",
        "role",
    ): "`controlplane` or `worker`; immutable. A tenant has one control-plane group.",
    ("NodeGroup", "replicas"): "How many machines. Odd for a control plane; 0 to 500.",
    ("NodeGroup", "providerClass"): "`provider` or `provider:class`. The provider part is immutable.",
    ("NodeGroup", "providerConfig"): "What the provider's own schema allows.",
    ("NodeGroup", "nodeLabels"): "Kubernetes labels of the nodes.",
    ("NodeGroup", "nodeTaints"): "Kubernetes taints of the nodes: `key`, `value`, `effect`.",
    ("Machine", "nodeGroup"): "The group that asked for it.",
    ("Machine", "role"): "Role of that group.",
    ("Machine", "slot"): "Its number in the group, from 1. The highest slot leaves first.",
    ("Machine", "provider"): "The provider that made it.",
    ("Machine", "providerId"): "Its name at the provider.",
    ("Machine", "hostname"): "Its host name.",
    ("Machine", "addresses"): "`type` (InternalIP, ExternalIP, Hostname) and `address`.",
    ("Machine", "shape"): "Size or flavour, in the provider's words.",
    ("Machine", "zone"): "Where it stands, in the provider's words.",
}
"""A field without an entry stops `make docs`: nothing is declared that nobody can look up."""


def settings_page() -> str:
    return f"""{NOTE}
# Settings

The server reads its settings once, from the environment. A wrong value stops the start, with the variable's
name and what it may be. A variable that begins with `REZUSCLOUD_` and is not in this table is ignored, with a
warning.

{settings_table()}
## rezusctl

| Variable | Default | Meaning |
| --- | --- | --- |
| `REZUSCTL_SERVER` | the server of the last login, else `http://127.0.0.1:8080` | Address of the server. |
| `REZUSCTL_TOKEN` | the token of the kept login | A bearer token, for scripts. |
| `REZUSCTL_CONFIG` | `~/.config/rezusctl/config.json` | Where logins are kept (mode 0600). |
"""


# ---------------------------------------------------------------- kinds


def kinds_page() -> str:
    rows = [
        f"| [{kind.kind}](#{kind.kind.lower()}) | `{kind.plural}` | {_names(kind.short_names)} "
        f"| {'tenant' if kind.namespaced else 'cluster'} | {_writer(kind)} |"
        for kind in REGISTRY
    ]
    head = f"""{NOTE}
# Kinds

All kinds are in the core group `v1`, at `/api/v1`. What the requests look like is in [api.md](api.md).

| Kind | Plural | Short | Scope | Written by |
| --- | --- | --- | --- | --- |
"""
    return head + "\n".join(rows) + "\n\n" + "\n".join(_kind_section(kind) for kind in REGISTRY)


def _kind_section(kind: Kind) -> str:
    lines = [f"## {kind.kind}", ""]
    if kind.how_made:
        lines += [f"- Where they come from: {kind.how_made}.", f"- How they go: {kind.how_removed}."]
    lines.append(f"- Verbs: {', '.join(kind.verbs)}.")
    if kind.user_metadata:
        lines.append("- People may change labels and annotations, nothing else.")
    if kind.subresources:
        lines.append(f"- Subresources: {_names(kind.subresources)}.")
    if kind.finalizers:
        lines.append(f"- Finalizers: {_names(kind.finalizers)}.")
    if kind.conditions:
        lines.append(f"- Conditions: {_names(sorted(kind.conditions))}.")
    lines.append(f"- Field selectors: {_names(kind.selectable_fields)}.")
    shown = [column.name + (" (wide)" if column.priority else "") for column in kind.columns]
    lines.append(f"- Columns: {', '.join(shown)}.")
    if kind.status_keys:
        lines.append(f"- Status that the server writes: {_names(sorted(kind.status_keys))}.")
    if (view := SPECS.get(kind.kind)) is not None:
        lines += ["", "| `spec.` | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
        lines += _spec_rows(kind.kind, view)
    return "\n".join(lines) + "\n"


def _spec_rows(kind: str, view: type) -> Iterator[str]:
    hints = typing.get_type_hints(view)
    for field in dataclasses.fields(view):
        name = camel(field.name)
        meaning = MEANING.get((kind, name))
        if meaning is None:
            raise SystemExit(
                f"{kind}.spec.{name} has no meaning yet: add it to MEANING in tools/make_docs.py"
            )
        yield f"| `{name}` | {_type_name(hints[field.name])} | {_default(field)} | {meaning} |"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = to_wire(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        value = to_wire(field.default_factory())
    else:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`".replace("'", "")


def _type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _type_name(next(arg for arg in typing.get_args(hint) if arg is not type(None)))
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}s"
    if origin is not None or not isinstance(hint, type) or dataclasses.is_dataclass(hint):
        return "object"
    if issubclass(hint, StrEnum):
        return "word"
    return {str: "string", int: "integer", bool: "boolean", float: "number"}.get(hint, "object")


def _writer(kind: Kind) -> str:
    return "people" if kind.writable == "user" else "the server"


def _names(names: typing.Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


# ---------------------------------------------------------------- command lines


def cli_page() -> str:
    head = f"""{NOTE}
# Command lines

`rezusctl` talks to a server. `rezuscloud` runs one. Both end with 0 when it is done, 1 when it failed and 2
when the command line is wrong.

Without `-c`, `rezusctl` takes the only cluster there is; with several it asks for one. `cluster` and
`clusters` are its names for the kind Tenant.

"""
    return head + "\n".join(
        section
        for name, command in (("rezusctl", rezusctl), ("rezuscloud", rezuscloud))
        for section in _help(name, command, None)
    )


def _help(name: str, command: click.Command, parent: click.Context | None) -> Iterator[str]:
    # The settings of a command count only when it is invoked, and a page is made without that.
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=96, **command.context_settings
    )
    text = command.get_help(context).rstrip()
    yield f"{'##' if parent is None else '###'} {context.command_path}\n\n```text\n{text}\n```\n"
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            found = command.get_command(context, verb)
            assert found is not None
            yield from _help(verb, found, context)


# ---------------------------------------------------------------- all of them

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "kinds.md": kinds_page,
    "cli.md": cli_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    stale = False
    for name, make in PAGES.items():
        page, wanted = REFERENCE / name, make()
        known = page.read_text() if page.exists() else ""
        if known == wanted:
            continue
        stale = True
        if check:
            print(f"{page.relative_to(ROOT)} is stale; run: make docs", file=sys.stderr)
            differences = difflib.unified_diff(known.splitlines(), wanted.splitlines(), lineterm="", n=0)
            for line in islice(differences, 2, 12):
                print(f"  {line}", file=sys.stderr)
        else:
            REFERENCE.mkdir(parents=True, exist_ok=True)
            page.write_text(wanted)
            print(f"wrote {page.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
