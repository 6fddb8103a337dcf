"""The system's own writes, and what holds after each."""

from __future__ import annotations

import pytest

from rezuscloud.model.errors import AlreadyExists, NotFound
from rezuscloud.model.meta import Condition, Doc, get_condition
from rezuscloud.resources.desk import MAX_EVENTS
from rezuscloud.resources.service import Desk, ResourceService
from rezuscloud.store.db import Store
from tests.support.resources import ADMIN, group, machine_spec, tenant


@pytest.fixture
async def personal(service: ResourceService) -> Doc:
    docs = await service.apply_manifests(ADMIN, [tenant(), group()])
    return docs[0]


def read(service: ResourceService, kind: str = "Tenant", namespace: str = "", name: str = "personal") -> Doc:
    return service.get(ADMIN, kind, namespace, name).doc


async def test_status_keys_are_merged_and_none_removes_one(service: ResourceService, personal: Doc) -> None:
    def write(desk: Desk) -> None:
        desk.set_status("Tenant", "", "personal", {"appliedRevision": "a", "machines": {"declared": 2}})
        desk.set_status("Tenant", "", "personal", {"machines": None, "heldBy": []})
        assert desk.set_status("Tenant", "", "nobody", {"x": 1}) is None

    await service.transact(write)
    assert read(service)["status"] == personal["status"] | {"appliedRevision": "a", "heldBy": []}
    assert read(service)["metadata"]["generation"] == 1


async def test_an_unchanged_status_and_condition_write_nothing(
    service: ResourceService, store: Store, personal: Doc
) -> None:
    claim = Condition("Ready", "True", "AllReady", "2 of 2", 1)

    def write(desk: Desk) -> None:
        desk.set_condition("Tenant", "", "personal", claim)
        desk.set_status("Tenant", "", "personal", {"machines": {"declared": 2}})

    await service.transact(write)
    version = store.log.version
    await service.transact(write)
    assert store.log.version == version
    assert (get_condition(read(service), "Ready") or {})["reason"] == "AllReady"


@pytest.mark.usefixtures("personal")
async def test_putting_a_machine_again_keeps_what_people_wrote_on_it(
    service: ResourceService, store: Store
) -> None:
    def project(desk: Desk) -> Doc:
        return desk.put(
            "Machine", "personal", "workers-1", spec=machine_spec(), labels={"rezuscloud.io/role": "worker"}
        )

    first = await service.transact(project)
    marked = {"metadata": {"labels": {"rack": "7"}}}
    await service.patch(ADMIN, "Machine", "personal", "workers-1", marked, "application/merge-patch+json")
    version = store.log.version
    again = await service.transact(project)
    assert store.log.version == version
    assert again["metadata"]["uid"] == first["metadata"]["uid"]
    assert again["metadata"]["labels"] == {"rezuscloud.io/role": "worker", "rack": "7"}


@pytest.mark.usefixtures("personal")
async def test_a_machine_that_was_replaced_is_another_object_with_the_same_marks(
    service: ResourceService, store: Store
) -> None:
    await service.transact(
        lambda desk: desk.put("Machine", "personal", "workers-1", spec=machine_spec(), uid="uid-1")
    )
    marked = {"metadata": {"labels": {"rack": "7"}}}
    await service.patch(ADMIN, "Machine", "personal", "workers-1", marked, "application/merge-patch+json")
    revision, version = read(service)["status"]["declaredRevision"], store.log.version
    spec = machine_spec() | {"providerId": "new"}
    await service.transact(
        lambda desk: desk.put(
            "Machine", "personal", "workers-1", spec=spec, status={"stage": "Created"}, uid="uid-2"
        )
    )
    machine = read(service, "Machine", "personal", "workers-1")
    assert machine["metadata"]["uid"] == "uid-2"
    assert machine["metadata"]["labels"] == {"rack": "7"}
    assert machine["metadata"]["generation"] == 1
    assert machine["status"] == {"stage": "Created"}
    assert [event.type for event in store.log.since(version)] == ["DELETED", "ADDED"]
    assert read(service)["status"]["declaredRevision"] == revision


async def test_an_owner_is_written_as_a_reference(service: ResourceService, personal: Doc) -> None:
    spec = {"action": "apply"}
    run = await service.transact(lambda desk: desk.put("Run", "personal", "r1", spec=spec, owner=personal))
    (reference,) = run["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["uid"]) == ("Tenant", personal["metadata"]["uid"])


async def test_the_same_event_again_raises_its_count(service: ResourceService, personal: Doc) -> None:
    def record(desk: Desk) -> None:
        desk.record_event(
            personal, reason="LockReleased", message="of a dead run", warning=True, action="Unlock"
        )

    await service.transact(record)
    await service.transact(record)
    (event,) = service.list(ADMIN, "Event", "personal").items
    assert event.doc["count"] == 2
    assert (event.doc["type"], event.doc["reason"]) == ("Warning", "LockReleased")
    uid = personal["metadata"]["uid"]
    selector = f"involvedObject.name=personal,involvedObject.namespace=,involvedObject.uid={uid}"
    assert len(service.list(ADMIN, "Event", fields=selector).items) == 1


async def test_only_the_newest_events_of_a_tenant_are_kept(service: ResourceService, personal: Doc) -> None:
    def record(desk: Desk) -> None:
        for number in range(MAX_EVENTS + 5):
            desk.record_event(personal, reason="Tick", message=f"number {number:03}")

    await service.transact(record)
    messages = {item.doc["message"] for item in service.list(ADMIN, "Event", "personal").items}
    assert len(messages) == MAX_EVENTS
    assert "number 004" not in messages
    assert "number 005" in messages


async def test_nothing_is_recorded_about_a_tenant_that_is_gone(
    service: ResourceService, store: Store, personal: Doc
) -> None:
    def write(desk: Desk) -> None:
        desk.remove("Tenant", "", "personal")
        desk.record_event(personal, reason="Gone", message="x")

    await service.transact(write)
    assert store.objects.list("Event") == []


async def test_a_rebuild_brings_identity_and_age_back(service: ResourceService) -> None:
    remembered = tenant()
    remembered["metadata"] |= {
        "uid": "0e0c2f0a-0000-4000-8000-000000000000",
        "creationTimestamp": "2024-02-29T00:00:00Z",
        "labels": {"env": "home"},
    }
    await service.transact(lambda desk: desk.bring_back(remembered))
    doc = read(service)
    for key in ("uid", "creationTimestamp", "labels", "name"):
        assert doc["metadata"][key] == remembered["metadata"][key]
    assert doc["metadata"]["finalizers"]
    assert doc["status"]["declaredRevision"]
    with pytest.raises(AlreadyExists):
        await service.transact(lambda desk: desk.bring_back(remembered))


@pytest.mark.usefixtures("personal")
async def test_removing_ignores_finalizers_and_what_is_gone(service: ResourceService) -> None:
    await service.transact(lambda desk: desk.remove("NodeGroup", "personal", "workers"))
    await service.transact(lambda desk: desk.remove("NodeGroup", "personal", "workers"))
    await service.transact(lambda desk: desk.clear_finalizers("NodeGroup", "personal", "workers", "x/y"))
    with pytest.raises(NotFound):
        read(service, "NodeGroup", "personal", "workers")
