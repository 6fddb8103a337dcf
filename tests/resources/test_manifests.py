"""Several documents, one change."""

from __future__ import annotations

import pytest

from rezuscloud.model.errors import ApiError, BadRequest, Conflict, Forbidden, Invalid, NotFound
from rezuscloud.model.meta import Doc
from rezuscloud.resources.service import ResourceService
from rezuscloud.store.db import Store
from tests.support.resources import ADMIN, VIEWER, group, tenant


def control_plane() -> Doc:
    return group("cp", role="controlplane", replicas=3)


async def refused(service: ResourceService, *docs: Doc) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await service.apply_manifests(ADMIN, docs)
    return caught.value


async def test_a_cluster_with_its_groups_is_one_change_in_any_order(
    service: ResourceService, store: Store
) -> None:
    results = await service.apply_manifests(ADMIN, [group(), tenant(), control_plane()])
    assert [doc["metadata"]["name"] for doc in results] == ["workers", "personal", "cp"]
    assert store.log.version == 3, "one event for each object"
    stored = service.get(ADMIN, "Tenant", "", "personal")
    assert stored.doc == results[1]
    groups = [item.doc for item in service.list(ADMIN, "NodeGroup", "personal").items]
    assert [doc["metadata"]["name"] for doc in groups] == ["cp", "workers"]


async def test_applying_the_same_again_changes_nothing(service: ResourceService, store: Store) -> None:
    first = await service.apply_manifests(ADMIN, [tenant(), group()])
    assert await service.apply_manifests(ADMIN, [tenant(), group()]) == first
    assert store.log.version == 2


async def test_applying_replaces_the_spec_and_adds_labels_to_what_others_wrote(
    service: ResourceService,
) -> None:
    first = tenant(paused=True)
    first["metadata"] |= {"labels": {"env": "home"}, "finalizers": ["example.org/mine"]}
    await service.apply_manifests(ADMIN, [first])
    second = tenant()
    second["metadata"] |= {"labels": {"tier": "one"}, "annotations": {"note": "hi"}}
    (doc,) = await service.apply_manifests(ADMIN, [second])
    assert doc["spec"] == second["spec"]
    assert doc["metadata"]["labels"] == {"env": "home", "tier": "one"}
    assert doc["metadata"]["annotations"] == {"note": "hi"}
    assert "example.org/mine" in doc["metadata"]["finalizers"]
    assert doc["metadata"]["generation"] == 2


async def test_errors_of_all_documents_are_told_at_once_and_nothing_is_half_written(
    service: ResourceService, store: Store
) -> None:
    error = await refused(service, tenant(), group(replicas=-1), group("x", role="boss"), control_plane())
    assert isinstance(error, Invalid)
    assert [cause.field for cause in error.causes] == ["items[1].spec.replicas", "items[2].spec.role"]
    assert store.log.version == 0


async def test_unknown_fields_come_first_with_their_document(service: ResourceService) -> None:
    error = await refused(service, tenant(bogus=1), group(replicas=-1), group("x", color=1))
    assert isinstance(error, BadRequest)
    assert [cause.field for cause in error.causes] == ["items[0].spec.bogus", "items[2].spec.color"]
    assert 'unknown field "items[2].spec.color"' in error.message


@pytest.mark.parametrize("name", [None, "", 5])
async def test_a_group_must_say_in_which_tenant_it_lies(service: ResourceService, name: object) -> None:
    doc = group()
    doc["metadata"]["namespace"] = name
    error = await refused(service, tenant(), doc)
    assert isinstance(error, Invalid)
    assert [cause.field for cause in error.causes] == ["items[1].metadata.namespace"]


async def test_the_same_object_twice_is_a_duplicate(service: ResourceService) -> None:
    error = await refused(service, tenant(), group(), group(replicas=5))
    assert [(cause.field, cause.reason) for cause in error.causes] == [
        ("items[2].metadata.name", "FieldValueDuplicate")
    ]


async def test_two_control_planes_in_one_manifest_are_refused(service: ResourceService) -> None:
    error = await refused(service, control_plane(), tenant(), group("cp2", role="controlplane", replicas=1))
    assert [cause.field for cause in error.causes] == ["items[2].spec.role"]


async def test_an_unknown_kind_and_a_document_without_kind_are_bad_requests(service: ResourceService) -> None:
    error = await refused(service, {"kind": "Pod", "metadata": {"name": "x"}})
    assert isinstance(error, BadRequest)
    assert error.message.startswith('items[0]: no kind "Pod" is known')
    assert isinstance(await refused(service, {"metadata": {}}), BadRequest)
    assert isinstance(await refused(service, "x"), BadRequest)  # type: ignore[arg-type] # what JSON may hold


async def test_a_tenant_that_is_missing_or_leaving_stops_the_manifest(service: ResourceService) -> None:
    assert isinstance(await refused(service, group()), NotFound)
    await service.apply_manifests(ADMIN, [tenant()])
    await service.delete(ADMIN, "Tenant", "", "personal")
    assert isinstance(await refused(service, tenant()), Conflict)
    assert isinstance(await refused(service, group()), Forbidden)


async def test_who_may_not_write_is_told_so_and_a_stale_version_is_a_conflict(
    service: ResourceService,
) -> None:
    with pytest.raises(Forbidden):
        await service.apply_manifests(VIEWER, [tenant(), group()])
    await service.apply_manifests(ADMIN, [tenant()])
    stale = tenant(paused=True)
    stale["metadata"]["resourceVersion"] = "99"
    assert isinstance(await refused(service, stale), Conflict)
    assert isinstance(await refused(service, {"kind": "Run", "metadata": group()["metadata"]}), Forbidden)


async def test_a_dry_run_of_a_manifest_stores_nothing(service: ResourceService, store: Store) -> None:
    results = await service.apply_manifests(ADMIN, [tenant(), group()], dry_run=True)
    assert len(results) == 2
    assert store.log.version == 0
