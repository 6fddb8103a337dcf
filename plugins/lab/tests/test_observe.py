"""The lab answers for its machines' health itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rezuscloud_lab.provider import LabProvider

from rezuscloud.model.machine import Stage
from rezuscloud.model.tenant import Role
from rezuscloud.plugin.types import Observation, ObserveTarget


def _observe(machine: str, config: Mapping[str, Any]) -> Observation:
    target = ObserveTarget(
        tenant="t", machine=machine, provider_id="1", role=Role.WORKER, addresses=(), config=config
    )
    (observation,) = asyncio.run(LabProvider().observe(machines=[target]))
    return observation


def test_a_machine_is_ready_unless_told_otherwise() -> None:
    seen = _observe("workers-1", {})
    assert (seen.ready, seen.stage) == (True, Stage.READY)
    assert (seen.talos_version, seen.kubernetes_version) == (None, None)


def test_a_machine_listed_as_not_ready_says_why() -> None:
    health = {"notReady": ["workers-1"], "message": "disk full", "talosVersion": "v1.13.9"}
    seen = _observe("workers-1", {"health": health})
    assert (seen.ready, seen.message, seen.talos_version) == (False, "disk full", "v1.13.9")
    assert _observe("workers-2", {"health": health}).ready is True
