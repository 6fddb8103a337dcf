"""Owns which version of a tenant's state key is current. The keys themselves are `tofu/encryption.py`'s."""

from __future__ import annotations

from rezuscloud.store.records import Records


def key_version(records: Records, tenant_uid: str) -> int:
    """The version under which the tenant's next state is sealed; counts from 1."""
    return int(records.get(key_version_record(tenant_uid)) or 1)


def key_version_record(tenant_uid: str) -> str:
    return f"state-key/{tenant_uid}"
