"""A real store in a fresh directory, and the service on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rezuscloud.resources.service import ResourceService
from rezuscloud.store.db import Store
from tests.support.resources import PROVIDERS


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "data") as store:
        yield store


@pytest.fixture
def service(store: Store) -> ResourceService:
    return ResourceService(store, PROVIDERS)
