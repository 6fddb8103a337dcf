"""Owns `--wait`: follows a cluster's stages until it is as declared, or until somebody is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import asyncclick as click

from rezuscloud.cli.client import RUNS, TENANTS, ApiFailure, Client, Failure, Kind, patiently
from rezuscloud.cli.output import Progress, bar, printable

_POLL_S = 0.3
_STANDS_S = 1.0
"""What was in the way before the request may be read once more; what stands longer is its answer."""
_PASSES = frozenset({"debounce", "capacity", "lock"})
"""What passes without anybody's doing. For everything else waiting longer would be of no use."""


def newest_run(client: Client, tenant: str) -> int:
    """Number of the tenant's newest run, going on or ended; 0 when it has had none."""
    return _newest(_status(client.get(TENANTS.path(None, tenant))))


def wait_until_applied(client: Client, tenant: str, timeout_s: float, *, after: int = -1) -> None:
    """Returns when all that is declared is applied, by a run newer than number `after`, and every machine is
    ready. Raises Failure with what to do when a person has to do something, when a run failed, or when the
    time is over."""
    patience = _Patience(client, tenant, tenant, timeout_s)
    with Progress() as progress:
        while True:
            doc = patiently(lambda: client.get(TENANTS.path(None, tenant)), progress.show)
            status = _status(doc)
            words = stage(client, tenant, status)
            progress.show(f"{tenant}: {words}")
            if _is_done(status) and _newest(status) > after:
                return
            patience.check(status, words)
            time.sleep(_POLL_S)


def wait_until_gone(client: Client, kind: Kind, tenant: str | None, name: str, timeout_s: float) -> None:
    """Returns when the object is gone. Raises Failure when something holds it or the time is over."""
    what, owner = f"{kind.plural}/{name}", tenant or name
    patience = _Patience(client, owner, what, timeout_s)
    with Progress() as progress:
        while True:
            try:
                patiently(lambda: client.get(kind.path(tenant, name)), progress.show)
                status = _status(client.get(TENANTS.path(None, owner)))
            except ApiFailure as error:
                if error.code != 404:
                    raise
                break
            words = stage(client, owner, status)
            progress.show(f"{what}: {words}")
            patience.check(status, words)
            time.sleep(_POLL_S)
    click.echo(f"{what} is gone")


def stage(client: Client, tenant: str, status: Mapping[str, Any]) -> str:
    """Where a cluster stands, in a few words."""
    if name := status.get("currentRun"):
        return _run_stage(client, tenant, name)
    for hold in status.get("heldBy") or ():
        return hold_text(hold)
    if status.get("declaredRevision") != status.get("appliedRevision"):
        return "declared"
    ready = _condition(status, "Ready")
    return f"applied; {ready.get('message', 'not observed yet')}"


def hold_text(hold: Mapping[str, str]) -> str:
    """What holds a cluster back, why, and until when."""
    until = f" until {hold['until']}" if hold.get("until") else ""
    return f"{hold['by']}: {hold['message']}{until}"


def _run_stage(client: Client, tenant: str, name: str) -> str:
    try:
        run = _status(client.get(RUNS.path(tenant, name)))
    except Failure:
        run = {}
    words = f"{name} {run.get('phase', '')}"
    if progress := run.get("progress"):
        words += f" {bar(progress['done'], progress['total'])} {progress.get('current') or ''}"
    return words.rstrip()


class _Patience:
    """Ends when the time is over, or when something stands in the way that does not pass by itself."""

    def __init__(self, client: Client, tenant: str, what: str, timeout_s: float) -> None:
        self._client = client
        self._tenant = tenant
        self._what = what
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._trouble = ""
        self._since = 0.0

    def check(self, status: Mapping[str, Any], words: str) -> None:
        """Raises Failure. `words` say where the cluster stands."""
        now, trouble = time.monotonic(), _trouble(status)
        if trouble != self._trouble:
            self._trouble, self._since = trouble, now
        if trouble and now - self._since >= _STANDS_S:
            raise Failure(f"{self._what}: {trouble}{self._details(status)}")
        if now >= self._deadline:
            raise Failure(
                f"{self._what}: not done after {self._timeout_s:g} s: {words}\n"
                f"it goes on by itself; look with: rezusctl describe cluster {self._tenant}"
            )

    def _details(self, status: Mapping[str, Any]) -> str:
        """What the engine said of the newest run, if that is why."""
        name = status.get("lastRun")
        if not name or all(hold["by"] != "backoff" for hold in status.get("heldBy") or ()):
            return ""
        error = _status(self._client.get(RUNS.path(self._tenant, name))).get("error") or {}
        said = printable(error.get("detail", "").strip())
        return "\n" + (f"{said}\n" if said else "") + f"more in: rezusctl logs {name} -c {self._tenant}"


def _trouble(status: Mapping[str, Any]) -> str:
    for hold in status.get("heldBy") or ():
        if hold["by"] not in _PASSES:
            return f"{hold['by']}: {hold['message']}"
    return ""


def _is_done(status: Mapping[str, Any]) -> bool:
    is_applied = status.get("declaredRevision") == status.get("appliedRevision")
    return is_applied and not status.get("currentRun") and _condition(status, "Ready").get("status") == "True"


def _newest(status: Mapping[str, Any]) -> int:
    names = (status.get("currentRun"), status.get("lastRun"))
    return max(int(name.rpartition("-")[2]) if name else 0 for name in names)


def _status(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    return doc.get("status") or {}


def _condition(status: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or () if c["type"] == type_), {})
