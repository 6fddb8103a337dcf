"""Owns the records that are kept of a tenant beside its objects: which version of its state key is current
(the keys themselves are `tofu/encryption.py`'s), and whether a state waits beside its run to be stored.
"""

from __future__ import annotations

from rezuscloud.model.meta import format_time
from rezuscloud.resources.service import Desk
from rezuscloud.store.db import Store
from rezuscloud.store.records import Records
from rezuscloud.store.states import Lock


def key_version(records: Records, tenant_uid: str) -> int:
    """The version under which the tenant's next state is sealed; counts from 1."""
    return int(records.get(key_version_record(tenant_uid)) or 1)


def key_version_record(tenant_uid: str) -> str:
    return f"state-key/{tenant_uid}"


def recovery_key(tenant_uid: str) -> str:
    """Record that says: a run's state lies beside it and must be stored before anything else."""
    return f"recovery/{tenant_uid}"


def block_for_recovery(desk: Desk, store: Store, tenant: str, tenant_uid: str, run: str) -> None:
    """From here on nobody writes a state before that of `run` is stored, an operator's tofu neither: it would
    not know of what the run has made, and make it again."""
    store.records.put(desk.tx, recovery_key(tenant_uid), {"run": run})
    if store.states.lock(tenant_uid, desk.tx) is None:
        info = {
            "ID": f"recovery-{run}",
            "Operation": "recovery",
            "Info": f"{run} could not store its state; `rezusctl state recover {tenant}` does",
            "Who": f"RezusCloud, {run}",
            "Version": "",
            "Created": format_time(desk.tx.now),
            "Path": "",
        }
        store.states.take_lock(desk.tx, tenant_uid, Lock(info["ID"], info, run, run, desk.tx.now))


def end_recovery(desk: Desk, store: Store, tenant_uid: str, run: str) -> None:
    store.records.delete(desk.tx, recovery_key(tenant_uid))
    held = store.states.lock(tenant_uid, desk.tx)
    if held is not None and held.run == run:
        store.states.release_lock(desk.tx, tenant_uid, held.id)
