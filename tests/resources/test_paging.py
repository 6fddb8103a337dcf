"""Lists: selectors, pages, and the moment that all pages of one list show."""

from __future__ import annotations

import pytest

from rezuscloud.model.errors import BadRequest, Expired
from rezuscloud.resources.service import Page, ResourceService
from rezuscloud.store.db import Store
from tests.support.resources import ADMIN, group, tenant


def names(page: Page) -> list[str]:
    return [item.doc["metadata"]["name"] for item in page.items]


async def fill(service: ResourceService, *tenants: str) -> None:
    for name in tenants:
        doc = tenant(name, paused=name < "c")
        doc["metadata"]["labels"] = {"first": name}
        await service.create(ADMIN, "Tenant", "", doc)


async def test_selectors_choose_by_label_and_field(service: ResourceService) -> None:
    await fill(service, "a", "b", "c")
    assert names(service.list(ADMIN, "Tenant", labels="first in (a,c)")) == ["a", "c"]
    assert names(service.list(ADMIN, "Tenant", fields="metadata.name=b,")) == ["b"]
    assert names(service.list(ADMIN, "Tenant", labels="first!=a", fields="spec.paused=true")) == ["b"]


@pytest.mark.parametrize(("labels", "fields"), [("a in (", ""), ("", "spec.foo=1"), ("a b c", "")])
async def test_a_selector_that_cannot_be_read_is_a_bad_request(
    service: ResourceService, labels: str, fields: str
) -> None:
    with pytest.raises(BadRequest, match="selector"):
        service.list(ADMIN, "Tenant", labels=labels, fields=fields)


async def test_groups_are_listed_by_tenant_or_for_all_in_order(service: ResourceService) -> None:
    for name in ("two", "one"):
        await service.apply_manifests(ADMIN, [tenant(name), group("b", name), group("a", name)])
    fleet = service.list(ADMIN, "NodeGroup")
    assert [(i.doc["metadata"]["namespace"], i.doc["metadata"]["name"]) for i in fleet.items] == [
        ("one", "a"),
        ("one", "b"),
        ("two", "a"),
        ("two", "b"),
    ]
    assert names(service.list(ADMIN, "NodeGroup", "two")) == ["a", "b"]
    assert names(service.list(ADMIN, "NodeGroup", "nobody")) == []


async def test_pages_show_one_moment_whatever_happens_between_them(service: ResourceService) -> None:
    await fill(service, "a", "b", "c", "d", "e")
    first = service.list(ADMIN, "Tenant", limit=2)
    assert names(first) == ["a", "b"]
    assert first.remaining == 3
    await service.create(ADMIN, "Tenant", "", tenant("cc"))
    await service.replace(ADMIN, "Tenant", "", "d", tenant("d", paused=True))
    await service.replace(ADMIN, "Tenant", "", "d", tenant("d", applyPolicy="Manual"))
    await service.transact(lambda desk: desk.remove("Tenant", "", "c"))
    second = service.list(ADMIN, "Tenant", limit=2, continue_=first.continue_)
    third = service.list(ADMIN, "Tenant", limit=2, continue_=second.continue_)
    assert names(second) + names(third) == ["c", "d", "e"]
    assert second.items[1].doc["metadata"]["labels"] == {"first": "d"}
    assert first.version == second.version == third.version
    assert third.continue_ == ""
    assert third.remaining is None
    assert names(service.list(ADMIN, "Tenant")) == ["a", "b", "cc", "d", "e"]


async def test_the_number_that_follows_is_not_told_with_selectors(service: ResourceService) -> None:
    await fill(service, "a", "b", "c")
    page = service.list(ADMIN, "Tenant", labels="first", limit=1)
    assert page.continue_
    assert page.remaining is None
    rest = service.list(ADMIN, "Tenant", labels="first!=b", limit=1, continue_=page.continue_)
    assert names(rest) == ["c"]


@pytest.mark.parametrize("token", ["x", "!!!", "W10", "bnVsbA", "é"])
async def test_a_token_that_was_not_made_here_is_a_bad_request(service: ResourceService, token: str) -> None:
    with pytest.raises(BadRequest, match="continue token"):
        service.list(ADMIN, "Tenant", limit=1, continue_=token)


async def test_a_token_of_another_kind_is_a_bad_request(service: ResourceService) -> None:
    await fill(service, "a", "b")
    token = service.list(ADMIN, "Tenant", limit=1).continue_
    with pytest.raises(BadRequest):
        service.list(ADMIN, "NodeGroup", continue_=token)


async def test_a_token_that_the_log_no_longer_reaches_has_expired(
    service: ResourceService, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(service, "a", "b")
    token = service.list(ADMIN, "Tenant", limit=1).continue_

    def pruned(version: int, kind: str | None = None) -> None:
        raise Expired("too old")

    monkeypatch.setattr(store.log, "since", pruned)
    with pytest.raises(Expired):
        service.list(ADMIN, "Tenant", continue_=token)
