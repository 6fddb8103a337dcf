"""The lab plugin: registers the provider `lab`."""

from __future__ import annotations

from collections.abc import Sequence

from rezuscloud.plugin.hookspecs import hookimpl
from rezuscloud.plugin.types import Provider
from rezuscloud_lab.provider import LabProvider


@hookimpl
def rezuscloud_register_providers() -> Sequence[Provider]:
    return [LabProvider()]
