"""What is installed, as objects."""

from __future__ import annotations

from rezuscloud.model.meta import get_condition
from rezuscloud.plugin.manager import PluginInfo, PluginStatus, ProviderInfo
from rezuscloud.plugin.types import CONTRACT_VERSION, Feature, RequiredProvider
from rezuscloud.resources.providers import sync_providers
from rezuscloud.resources.service import ResourceService
from rezuscloud.store.db import Store
from tests.support.resources import ADMIN

LAB = PluginInfo(
    "lab",
    "rezuscloud-lab",
    "1.2.0",
    PluginStatus.LOADED,
    providers=(
        ProviderInfo(
            "lab",
            "Lab",
            CONTRACT_VERSION,
            (Feature.OBSERVE,),
            {"random": RequiredProvider("example.org/hashicorp/random", "~> 3.8")},
        ),
    ),
)
BROKEN = PluginInfo("My_Broken.Plugin", "rezuscloud-broken", "0.1", PluginStatus.FAILED, error="it raised")
BLOCKED = PluginInfo("oci", "rezuscloud-oci", "2.0", PluginStatus.BLOCKED)


async def test_each_plugin_is_shown_with_whether_it_is_loaded(service: ResourceService) -> None:
    await sync_providers(service, [LAB, BROKEN, BLOCKED])
    shown = {
        item.doc["metadata"]["name"]: (get_condition(item.doc, "Loaded") or {})["reason"]
        for item in service.list(ADMIN, "Provider").items
    }
    assert shown == {"lab": "Loaded", "my-broken-plugin": "Failed", "oci": "Blocked"}
    lab = service.get(ADMIN, "Provider", "", "lab").doc
    assert lab["spec"]["requiredProviders"] == [
        {"name": "random", "source": "example.org/hashicorp/random", "version": "~> 3.8"}
    ]
    assert lab["spec"]["features"] == ["observe"]
    assert service.get(ADMIN, "Provider", "", "my-broken-plugin").doc["status"]["error"] == "it raised"


async def test_starting_again_writes_nothing_and_what_was_uninstalled_goes(
    service: ResourceService, store: Store
) -> None:
    await sync_providers(service, [LAB, BROKEN])
    version = store.log.version
    await sync_providers(service, [LAB, BROKEN])
    assert store.log.version == version
    await sync_providers(service, [LAB])
    assert [item.doc["metadata"]["name"] for item in service.list(ADMIN, "Provider").items] == ["lab"]
