"""The lab keeps the contract of every provider."""

from __future__ import annotations

from rezuscloud_lab.provider import LabProvider

from rezuscloud.plugin.testing import ProviderConformance


class TestLab(ProviderConformance):
    provider = LabProvider()
    machine_class = "small"
    valid_configs = (
        {"zone": "lab-b", "tags": {"tier": "web", "note": "x"}, "memoryMb": 4096, "image": "lab-2"},
        {},
        {"latencyS": 0.5, "failCreate": "no capacity", "destroyLatencyS": 3600, "failDestroy": "busy"},
        {
            "health": {
                "notReady": ["workers-1"],
                "message": "disk",
                "talosVersion": "v1.13.9",
                "kubernetesVersion": "v1.36.3",
            }
        },
    )
    invalid_configs = (
        {"latencyS": -1},
        {"latencyS": 3601},
        {"latencyS": True},
        {"latencyS": float("nan")},
        {"latencyS": "5"},
        {"failCreate": 1},
        {"failCreate": "two\nlines"},
        {"failDestroy": "x" * 501},
        {"image": ""},
        {"memoryMb": 0},
        {"memoryMb": 1.5},
        {"tags": {"a": 1}},
        {"tags": {"": "x"}},
        {"tags": {f"t{i}": "x" for i in range(51)}},
        {"tags": []},
        {"health": {"notReady": "workers-1"}},
        {"health": {"broken": True}},
    )
