"""What all tests share: the repository on the path, and the real engine, found or loudly missed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def engine_path() -> Path:
    """The real OpenTofu that `make tools` made or that REZUSCLOUD_TOFU names."""
    path = Path(os.environ.get("REZUSCLOUD_TOFU") or ROOT / ".tools/bin/tofu")
    if not path.is_file():
        pytest.skip(f"NOT PROVED: no OpenTofu at {path}; run `make tools` first")
    return path
