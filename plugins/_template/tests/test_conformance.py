"""The provider keeps the contract. Add your own tests beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rezuscloud_example.provider import ExampleProvider

from rezuscloud.plugin.testing import ProviderConformance


class TestExample(ProviderConformance):
    provider = ExampleProvider()
    machine_class = "small"
    credentials: ClassVar[Mapping[str, str]] = {"apiToken": "made-up-token-of-the-tests"}
    valid_configs = ({"size": 2, "zone": "zone-2"}, {})
    invalid_configs = ({"size": 0}, {"size": "2"}, {"zone": ""})
