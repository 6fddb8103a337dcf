"""`rezusctl version`."""

from __future__ import annotations

import asyncclick as click

from rezuscloud import __version__


@click.command("version", epilog="\b\nExamples:\n  rezusctl version")
async def version_command() -> None:
    """Prints the version of this program."""
    click.echo(f"rezusctl {__version__}")
