"""Owns the hooks. They are few, synchronous, called once at start, and return objects.

A new hook comes only with a plugin that needs it, its page in the docs and a conformance test.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from rezuscloud.plugin.types import Provider

PROJECT = "rezuscloud"
"""Name of the entry-point group and of the pluggy project; all hook names begin with it."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rezuscloud_register_providers() -> Sequence[Provider]:  # type: ignore[empty-body]
    """Returns the providers of this plugin: where machines come from."""
