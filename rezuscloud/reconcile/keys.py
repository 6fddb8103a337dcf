"""Owns the records that are kept of a tenant beside its objects: which version of its state key is current (the
keys themselves are `tofu/encryption.py`'s), and whether a state waits beside its run to be stored.
"""

from __future__ import annotations

from rezuscloud.store.records import Records


def key_version(records: Records, tenant_uid: str) -> int:
    """The version under which the tenant's next state is sealed; counts from 1."""
    return int(records.get(key_version_record(tenant_uid)) or 1)


def key_version_record(tenant_uid: str) -> str:
    return f"state-key/{tenant_uid}"


def recovery_key(tenant_uid: str) -> str:
    """Record that says: a run's state lies beside it and must be stored before anything else."""
    return f"recovery/{tenant_uid}"
