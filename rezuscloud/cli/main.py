"""Owns the grammar of `rezusctl`; what a verb does lies in `commands/`, imported when it is used.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 broken off by Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Coroutine
from typing import Any

import asyncclick as click

from rezuscloud import __version__

_VERBS = {
    "Clusters": {
        "create": "clusters",
        "cluster": "clusters",
        "scale": "objects",
        "state": "state",
    },
    "Anything that is declared": {
        "get": "objects",
        "describe": "objects",
        "apply": "documents",
        "delete": "objects",
        "watch": "objects",
    },
    "Runs": {
        "logs": "runs",
        "approve": "runs",
        "deny": "runs",
        "cancel": "runs",
        "retry": "runs",
    },
    "This program": {
        "login": "config",
        "config": "config",
        "version": "version",
    },
}
"""Verb → the module of `commands/` that holds it as `<verb>_command`, in the groups that the help shows."""

_MODULES = {verb: module for verbs in _VERBS.values() for verb, module in verbs.items()}


class _Verbs(click.Group):
    """Finds a verb's module only when that verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        module = importlib.import_module(f"rezuscloud.cli.commands.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, verbs in _VERBS.items():
            rows = []
            for verb in verbs:
                command = self.get_command(ctx, verb)
                assert command is not None
                rows.append((verb, command.get_short_help_str(80)))
            with formatter.section(title):
                formatter.write_dl(rows, col_spacing=4)

    async def invoke(self, ctx: click.Context) -> Any:
        try:
            return await super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo(err=True)
            raise click.exceptions.Exit(130) from None


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  rezusctl login --server http://127.0.0.1:8080
  rezusctl create cluster home --provider lab --control-planes 3 --workers 2 --wait
  rezusctl get clusters
  rezusctl get machines -c home -o wide

\b
Environment:
  REZUSCTL_SERVER, REZUSCTL_TOKEN   server and token, before those of the kept login
  REZUSCTL_CONFIG                   the file of kept logins
  NO_COLOR                          no colours on a terminal either

\b
Completion for bash (or zsh_source, fish_source):
  eval "$(_REZUSCTL_COMPLETE=bash_source rezusctl)"
""",
)
@click.version_option(__version__, prog_name="rezusctl")
async def cli() -> None:
    """Builds clusters on a RezusCloud server. kubectl manages them, rezuscloud runs them."""


def main() -> None:
    """Entry point of the script."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        _run(cli.main(prog_name="rezusctl", color=color))
    except KeyboardInterrupt:
        sys.exit(130)


def _run(command: Coroutine[Any, Any, Any]) -> None:
    """Runs a command without an event loop. It makes one blocking request after another, so a loop would do
    nothing but take longer to import than most commands run, and keep Ctrl-C from a read that blocks."""
    try:
        command.send(None)
    except StopIteration:
        return
    raise RuntimeError("a command of rezusctl waited for an event loop, and there is none")
