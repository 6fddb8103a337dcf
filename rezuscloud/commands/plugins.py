"""Owns `rezuscloud plugins`: what is installed, in which version, and why one could not be loaded."""

from __future__ import annotations

import json

import asyncclick as click

from rezuscloud.model.meta import to_wire
from rezuscloud.plugin.manager import PluginInfo, PluginManager, PluginStatus
from rezuscloud.settings import Settings


async def run_plugins(settings: Settings, output: str) -> None:
    infos = PluginManager.load(settings.plugins_blocked).describe()
    if output == "json":
        click.echo(json.dumps([to_wire(info) for info in infos], indent=2))
        return
    if not infos:
        click.echo("no plugin is installed; a provider comes with `pip install PACKAGE` and a restart")
        return
    rows = [("PLUGIN", "PACKAGE", "VERSION", "STATUS", "PROVIDES"), *(_row(info) for info in infos)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for info in infos:
        if info.status is PluginStatus.FAILED:
            click.echo(f"\n{info.name}: {info.error}")


def _row(info: PluginInfo) -> tuple[str, str, str, str, str]:
    provides = ", ".join(f"{provider.name} ({provider.title})" for provider in info.providers)
    return info.name, info.package, info.version, info.status.value, provides
