"""The plugin: registers the provider `example`."""

from __future__ import annotations

from collections.abc import Sequence

from rezuscloud.plugin.hookspecs import hookimpl
from rezuscloud.plugin.types import Provider
from rezuscloud_example.provider import ExampleProvider


@hookimpl
def rezuscloud_register_providers() -> Sequence[Provider]:
    return [ExampleProvider()]
