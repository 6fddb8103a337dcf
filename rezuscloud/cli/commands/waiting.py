"""Owns `--wait`: follows a cluster's stages until it is as declared, or until somebody is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import ApiFailure, Client, Failure
from rezuscloud.cli.output import Progress, bar

_POLL_S = 0.3
_NEEDS_SOMEBODY = frozenset({"approval", "recovery", "engine", "declaration", "pause"})
"""What does not pass by itself: waiting longer would be of no use."""


def newest_run(client: Client, tenant: str) -> int:
    """Number of the tenant's newest run, going on or ended; 0 when it has had none."""
    return _newest(client.get(f"/api/v1/tenants/{tenant}").get("status") or {})


def wait_until_applied(client: Client, tenant: str, timeout_s: float, *, after: int = -1) -> None:
    """Returns when all that is declared is applied, by a run newer than number `after`, and every machine is
    ready. Raises Failure with what to do when a person has to do something, when a run failed, or when the
    time is over."""
    progress = Progress()
    deadline = time.monotonic() + timeout_s
    text = ""
    while time.monotonic() < deadline:
        doc = client.get(f"/api/v1/tenants/{tenant}")
        status = doc.get("status") or {}
        text = stage(client, tenant, status)
        progress.show(f"{tenant}: {text}")
        if _is_done(doc) and _newest(status) > after:
            progress.end()
            return
        if trouble := _trouble(status):
            progress.end()
            raise Failure(f"{tenant}: {trouble}")
        time.sleep(_POLL_S)
    progress.end()
    raise Failure(
        f"{tenant} is not ready after {timeout_s:g} s: {text}\nit goes on by itself; look with: "
        f"rezusctl describe cluster {tenant}"
    )


def stage(client: Client, tenant: str, status: Mapping[str, Any]) -> str:
    """Where a cluster stands, in a few words."""
    for hold in status.get("heldBy") or ():
        until = f" until {hold['until']}" if hold.get("until") else ""
        return f"{hold['by']}: {hold['message']}{until}"
    if name := status.get("currentRun"):
        try:
            run = client.get(f"/api/v1/namespaces/{tenant}/runs/{name}").get("status") or {}
        except ApiFailure:
            run = {}
        words = f"{name} {run.get('phase', '')}"
        if progress := run.get("progress"):
            words += f" {bar(progress['done'], progress['total'])} {progress.get('current', '')}"
        return words.rstrip()
    if status.get("declaredRevision") != status.get("appliedRevision"):
        return "declared"
    ready = _condition(status, "Ready")
    return f"applied; {ready.get('message', 'not observed yet')}"


def _is_done(doc: Mapping[str, Any]) -> bool:
    status = doc.get("status") or {}
    is_applied = status.get("declaredRevision") == status.get("appliedRevision") and not status.get(
        "currentRun"
    )
    return is_applied and _condition(status, "Ready").get("status") == "True"


def _newest(status: Mapping[str, Any]) -> int:
    names = (status.get("currentRun"), status.get("lastRun"))
    return max(int(name.rpartition("-")[2]) if name else 0 for name in names)


def _trouble(status: Mapping[str, Any]) -> str:
    for hold in status.get("heldBy") or ():
        if hold["by"] in _NEEDS_SOMEBODY or hold["by"] == "backoff":
            return f"{hold['by']}: {hold['message']}"
    return ""


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c["type"] == type_), {})


def wait_until_gone(client: Client, path: str, what: str, timeout_s: float) -> None:
    """Returns when the object is gone. Raises Failure when something holds it or the time is over."""
    progress = Progress()
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            status = client.get(path).get("status") or {}
        except ApiFailure as error:
            if error.code != 404:
                raise
            progress.end()
            click.echo(f"{what} is gone")
            return
        held = (status.get("heldBy") or [{}])[0]
        progress.show(f"{what}: {held['by']}: {held['message']}" if held else f"{what}: being destroyed")
        if trouble := _trouble(status):
            progress.end()
            raise Failure(f"{what}: {trouble}")
        time.sleep(_POLL_S)
    progress.end()
    raise Failure(f"{what} is still there after {timeout_s:g} s; it goes on by itself")
