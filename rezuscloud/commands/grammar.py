"""Owns the grammar of the `rezuscloud` command. What a verb does lies in a file of its own, imported late.

Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import asyncclick as click

from rezuscloud import __version__
from rezuscloud.settings import Settings, SettingsError, read_settings


def settings() -> Settings:
    """The settings of the environment, or the end of the command with all that is wrong with them."""
    try:
        return read_settings(os.environ)
    except SettingsError as error:
        raise click.UsageError(f"the settings cannot be used:\n{error}") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rezuscloud")
async def cli() -> None:
    """Runs RezusCloud. Settings come from REZUSCLOUD_* variables; `rezusctl` talks to a running server."""


@cli.command()
async def serve() -> None:
    """Starts the server and runs until it is told to stop."""
    from rezuscloud.commands.serve import run_serve

    await run_serve(settings())


@cli.command()
@click.option("-f", "--file", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), help="Write files there.")
async def render(files: tuple[Path, ...], output: Path | None) -> None:
    """Prints exactly the .tf.json that OpenTofu would get for the declared tenants. Needs no server."""
    from rezuscloud.commands.render import run_render

    await run_render(files, output)


@cli.command()
@click.option(
    "--from-state",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Folder of TF states: plain, or encrypted with the keys of this data directory.",
)
async def rebuild(directory: Path) -> None:
    """Brings tenants, node groups and machines back from TF state alone, into an empty database."""
    from rezuscloud.commands.rebuild import run_rebuild

    await run_rebuild(settings(), directory)


@cli.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
async def plugins(output: str) -> None:
    """Lists the plugins that are installed, what they give, and why one could not be loaded."""
    from rezuscloud.commands.plugins import run_plugins

    await run_plugins(settings(), output)


@cli.command()
async def version() -> None:
    """Prints the version."""
    click.echo(f"rezuscloud {__version__}")


def main() -> None:
    """Entry point of the script."""
    cli(_anyio_backend="asyncio", prog_name="rezuscloud")
    sys.exit(0)
