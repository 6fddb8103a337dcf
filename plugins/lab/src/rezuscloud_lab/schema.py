"""Owns what a node group of the lab may ask for, and in which words a wrong value is refused."""

from __future__ import annotations

from typing import Any

import voluptuous as vol

MAX_SECONDS = 3600


def _text(*, at_least: int = 0, at_most: int = 500) -> Any:
    def printable(value: object) -> str:
        if not isinstance(value, str):
            raise vol.Invalid("expected text")
        if not at_least <= len(value) <= at_most:
            raise vol.Invalid(f"expected {at_least} to {at_most} characters")
        if not value.isprintable():
            raise vol.Invalid("expected printable text on one line")
        return value

    return printable


def _seconds(value: object) -> int | float:
    # A bool is an int in Python, and NaN compares false with everything.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        raise vol.Invalid(f"expected a number of seconds from 0 to {MAX_SECONDS}")
    return value


def _megabytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024 * 1024:
        raise vol.Invalid("expected a whole number of MB from 1 to 1048576")
    return value


_TAGS = vol.All({_text(at_least=1, at_most=128): _text()}, vol.Length(max=50, msg="expected at most 50 tags"))

_HEALTH = vol.Schema(
    {
        vol.Optional(
            "notReady", default=list, description="Names of machines that are to be reported as not ready"
        ): [_text(at_least=1, at_most=63)],
        vol.Optional("message", default="", description="Why they are not ready"): _text(),
        vol.Optional("talosVersion", description="Talos version that the machines report"): _text(at_most=40),
        vol.Optional("kubernetesVersion", description="Kubernetes version that the machines report"): _text(
            at_most=40
        ),
    }
)

CONFIG = vol.Schema(
    {
        vol.Optional("image", default="lab-1", description="Changing it replaces the machines"): _text(
            at_least=1, at_most=100
        ),
        vol.Optional("memoryMb", default=2048, description="Changes in place"): _megabytes,
        vol.Optional("zone", default="lab-a", description="Changes in place"): _text(at_least=1, at_most=63),
        vol.Optional("tags", default=dict, description="Changes in place"): _TAGS,
        vol.Optional("latencyS", default=0, description="Seconds that making a machine takes"): _seconds,
        vol.Optional("failCreate", default="", description="Making a machine fails with this text"): _text(),
        vol.Optional("destroyLatencyS", default=0, description="Seconds that removing one takes"): _seconds,
        vol.Optional("failDestroy", default="", description="Removing one fails with this text"): _text(),
        vol.Optional("health", default=dict, description="What is observed"): _HEALTH,
    }
)
"""Schema of `NodeGroup.spec.providerConfig`."""
