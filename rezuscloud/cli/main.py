"""Owns the grammar of `rezusctl`; what a verb does lies in `commands/`, imported when it is used.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import importlib

import asyncclick as click

from rezuscloud import __version__

_VERBS = {
    "apply": "documents",
    "approve": "runs",
    "cancel": "runs",
    "cluster": "clusters",
    "config": "config",
    "create": "clusters",
    "delete": "objects",
    "deny": "runs",
    "describe": "objects",
    "get": "objects",
    "login": "config",
    "logs": "runs",
    "retry": "runs",
    "scale": "objects",
    "state": "state",
    "watch": "objects",
}
"""Verb → the module of `commands/` that holds it, as a command of the same name with `_command` behind it."""


class _Verbs(click.Group):
    """Finds a verb's module only when that verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*_VERBS, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f"rezuscloud.cli.commands.{_VERBS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rezusctl")
async def cli() -> None:
    """Builds clusters on a RezusCloud server. kubectl manages them, rezuscloud runs them."""


@cli.command("version")
async def version_command() -> None:
    """Prints the version of this program."""
    click.echo(f"rezusctl {__version__}")


def main() -> None:
    """Entry point of the script."""
    cli(_anyio_backend="asyncio", prog_name="rezusctl")
