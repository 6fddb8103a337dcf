"""Owns `rezuscloud serve`: what a person sees of the start, and how the start fails."""

from __future__ import annotations

import os
import sys

import asyncclick as click

from rezuscloud.bus.server import NatsFailed
from rezuscloud.commands.failure import Failure
from rezuscloud.kit.process import StartError
from rezuscloud.main import Server, serve, set_up_logging
from rezuscloud.settings import Settings, unknown_variables
from rezuscloud.store.db import StoreDamaged, StoreInUse
from rezuscloud.tofu.encryption import RootKeyError


async def run_serve(settings: Settings) -> None:
    set_up_logging(settings)
    for line in unknown_variables(os.environ):
        click.echo(f"warning: {line}", err=True)
    try:
        await serve(settings, announce=_announce)
    except (StoreInUse, StoreDamaged, RootKeyError, NatsFailed, StartError) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(
            f"cannot listen on {settings.host}:{settings.port} or use {settings.data_dir}: {error}"
        ) from error


def _announce(server: Server) -> None:
    click.echo(f"RezusCloud listens on {server.listener.url}")
    if server.first_password is not None:
        click.echo(f"admin password (shown only now): {server.first_password}")
    sys.stdout.flush()
