"""The door: what people may do, what they are told when not, and what is true afterwards."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import orjson
import pytest

from rezuscloud.model.declaration import declare, declared_revision
from rezuscloud.model.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    TooLarge,
)
from rezuscloud.model.meta import FINALIZER_MACHINES, FINALIZER_SECRETS, Doc, get_condition
from rezuscloud.resources.patch import JSON_PATCH, MERGE_PATCH
from rezuscloud.resources.service import Desk, DropUnknown, ResourceService, scale_of
from rezuscloud.store.db import Store
from tests.support.resources import ADMIN, EDITOR, VIEWER, group, machine_spec, tenant


async def make(service: ResourceService, *docs: Doc) -> None:
    for doc in docs:
        await service.create(ADMIN, doc["kind"], doc["metadata"].get("namespace", ""), doc)


async def make_machine(service: ResourceService, name: str = "workers-1") -> None:
    await service.transact(
        lambda desk: desk.put(
            "Machine",
            "personal",
            name,
            spec=machine_spec(name),
            labels={"rezuscloud.io/tenant": "personal", "rezuscloud.io/node-group": "workers"},
        )
    )


async def set_status(service: ResourceService, **changes: Any) -> None:
    await service.transact(lambda desk: desk.set_status("Tenant", "", "personal", changes))


def assert_revision_is_true(store: Store, name: str = "personal") -> None:
    found = store.objects.get("Tenant", "", name)
    assert found is not None
    groups, machines = (
        [item.doc for item in store.objects.list(kind, name)] for kind in ("NodeGroup", "Machine")
    )
    expected = declared_revision(declare(found.doc, groups, machines))
    assert found.doc["status"]["declaredRevision"] == expected


# ---------------------------------------------------------------- create


async def test_a_new_tenant_has_what_the_system_gives_and_says_honestly_that_nothing_happened(
    service: ResourceService, store: Store
) -> None:
    sent = tenant() | {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    sent["metadata"] |= {"uid": "mine", "generation": 7, "labels": {"env": "home"}, "selfLink": "/x"}
    stored = await service.create(ADMIN, "Tenant", "", sent)
    meta = stored.doc["metadata"]
    assert meta["uid"] != "mine"
    assert (meta["generation"], meta["resourceVersion"], meta["labels"]) == (1, "1", {"env": "home"})
    assert meta["finalizers"] == [FINALIZER_MACHINES, FINALIZER_SECRETS]
    assert "selfLink" not in meta
    applied, ready = (get_condition(stored.doc, type_) for type_ in ("Applied", "Ready"))
    assert applied is not None
    assert (applied["status"], applied["reason"]) == ("False", "Pending")
    assert ready is not None
    assert ready["status"] == "Unknown"
    assert_revision_is_true(store)
    assert store.log.version == 1, "one object, one event"


async def test_what_was_typed_is_stored_as_typed(service: ResourceService) -> None:
    await make(service, tenant())
    typed = {"talosVersion": "v1.13.9", "kubernetesVersion": "1.36.3"}
    assert service.get(ADMIN, "Tenant", "", "personal").doc["spec"] == typed


async def test_the_sender_may_change_the_document_afterwards(service: ResourceService) -> None:
    doc = tenant()
    await make(service, doc)
    doc["spec"]["paused"] = True
    assert "paused" not in service.get(ADMIN, "Tenant", "", "personal").doc["spec"]


async def test_unknown_fields_are_a_bad_request_that_names_them_all(
    service: ResourceService, store: Store
) -> None:
    doc = tenant(bogus=1, color="red", paused="no") | {"specs": {}}
    with pytest.raises(BadRequest) as caught:
        await make(service, doc)
    assert caught.value.message.startswith("strict decoding error: ")
    assert 'unknown field "spec.bogus"' in caught.value.message
    assert sorted(cause.field for cause in caught.value.causes) == ["spec.bogus", "spec.color", "specs"]
    assert store.log.version == 0


async def test_unknown_fields_are_dropped_and_named_when_the_client_asks_for_that(
    service: ResourceService,
) -> None:
    await make(service, tenant())
    drop = DropUnknown()
    doc = group(bogus=1, providerConfig={"ocpus": 1, "shape": {"x": 1}})
    stored = await service.create(ADMIN, "NodeGroup", "personal", doc, drop=drop)
    assert sorted(drop.fields) == ["spec.bogus", "spec.providerConfig.shape"]
    assert stored.doc["spec"] == group(providerConfig={"ocpus": 1})["spec"]


async def test_wrong_values_are_invalid_with_all_causes_of_spec_and_metadata(
    service: ResourceService,
) -> None:
    doc = tenant(paused="no", talosVersion="x")
    doc["metadata"] |= {
        "name": "Not_A_Label",
        "labels": {"ok": "ok", "tier": 1, "bad key": "x"},
        "annotations": {"big": "x" * 300_000},
        "finalizers": ["unqualified", "example.org/fine"],
    }
    with pytest.raises(Invalid) as caught:
        await make(service, doc)
    assert sorted(cause.field for cause in caught.value.causes) == [
        "metadata.annotations",
        "metadata.finalizers[0]",
        "metadata.labels.tier",
        "metadata.labels[bad key]",
        "metadata.name",
        "spec.paused",
        "spec.talosVersion",
    ]


@pytest.mark.parametrize("name", ["default", "kube-system", "a.b", "UP", "-a", "x" * 64, "", "a/b", "a\n"])
async def test_a_tenant_may_not_have_a_reserved_or_malformed_name(
    service: ResourceService, name: str
) -> None:
    with pytest.raises(Invalid) as caught:
        await make(service, tenant(name))
    assert [cause.field for cause in caught.value.causes] == ["metadata.name"]


async def test_a_group_name_leaves_room_for_the_slot(service: ResourceService) -> None:
    await make(service, tenant(), group("g" * 59))
    with pytest.raises(Invalid, match="59 characters"):
        await make(service, group("g" * 60))


async def test_a_name_can_be_generated(service: ResourceService) -> None:
    doc = tenant()
    doc["metadata"] = {"generateName": "lab-"}
    stored = await service.create(ADMIN, "Tenant", "", doc)
    assert stored.doc["metadata"]["name"].startswith("lab-")
    assert len(stored.doc["metadata"]["name"]) == 9
    with pytest.raises(Invalid, match="name or generateName"):
        await make(service, tenant() | {"metadata": {}})


@pytest.mark.parametrize(
    "change",
    [{"kind": "NodeGroup"}, {"apiVersion": "v2"}, {"metadata": []}, {"metadata": "x"}],
)
async def test_a_document_that_is_something_else_is_a_bad_request(
    service: ResourceService, change: Doc
) -> None:
    with pytest.raises(BadRequest):
        await service.create(ADMIN, "Tenant", "", tenant() | change)


async def test_a_namespace_that_differs_from_the_request_is_a_bad_request(service: ResourceService) -> None:
    await make(service, tenant())
    with pytest.raises(BadRequest, match="namespace"):
        await service.create(ADMIN, "NodeGroup", "personal", group(namespace="other"))


async def test_a_document_that_no_store_could_hold_is_refused(service: ResourceService) -> None:
    deep: Doc = {}
    inner = deep
    for _ in range(400):
        inner["x"] = {}
        inner = inner["x"]
    with pytest.raises(BadRequest):
        await service.create(ADMIN, "Tenant", "", tenant() | {"spec": deep})
    with pytest.raises(TooLarge):
        await service.create(ADMIN, "Tenant", "", tenant(note="x" * 2_000_000))


async def test_creating_again_already_exists_even_with_a_resource_version(service: ResourceService) -> None:
    await make(service, tenant())
    read = copy.deepcopy(service.get(ADMIN, "Tenant", "", "personal").doc)
    with pytest.raises(AlreadyExists):
        await service.create(ADMIN, "Tenant", "", read)


async def test_a_group_needs_a_tenant_that_stays(service: ResourceService) -> None:
    with pytest.raises(NotFound, match='tenants "personal" not found'):
        await make(service, group())
    await make(service, tenant())
    await service.delete(ADMIN, "Tenant", "", "personal")
    with pytest.raises(Forbidden, match="being terminated"):
        await make(service, group())


async def test_a_second_control_plane_group_is_invalid(service: ResourceService) -> None:
    await make(service, tenant(), group("cp", role="controlplane", replicas=1))
    with pytest.raises(Invalid, match='already: "cp"'):
        await make(service, group("cp2", role="controlplane", replicas=1))


async def test_a_dry_run_shows_the_result_and_stores_nothing(service: ResourceService, store: Store) -> None:
    shown = await service.create(ADMIN, "Tenant", "", tenant(), dry_run=True)
    assert shown.doc["metadata"]["generation"] == 1
    assert "resourceVersion" not in shown.doc["metadata"]
    with pytest.raises(NotFound):
        service.get(ADMIN, "Tenant", "", "personal")
    with pytest.raises(Invalid):
        await service.create(ADMIN, "Tenant", "", tenant("default"), dry_run=True)
    await make(service, tenant())
    changed = await service.replace(ADMIN, "Tenant", "", "personal", tenant(paused=True), dry_run=True)
    assert changed.doc["metadata"]["generation"] == 2
    assert changed.doc["metadata"]["resourceVersion"] == "1", "so that kubectl diff shows only what changes"
    doc, gone = await service.delete(ADMIN, "Tenant", "", "personal", dry_run=True)
    assert doc["metadata"]["deletionTimestamp"]
    assert not gone
    assert service.get(ADMIN, "Tenant", "", "personal").doc["metadata"]["generation"] == 1
    assert store.log.version == 1


# ---------------------------------------------------------------- replace


async def test_generation_moves_with_the_spec_alone(service: ResourceService) -> None:
    await make(service, tenant())
    labelled = tenant()
    labelled["metadata"]["labels"] = {"a": "b"}
    first = await service.replace(ADMIN, "Tenant", "", "personal", labelled)
    assert first.doc["metadata"]["generation"] == 1
    second = await service.replace(ADMIN, "Tenant", "", "personal", tenant(paused=True))
    assert second.doc["metadata"]["generation"] == 2
    assert "labels" not in second.doc["metadata"]
    assert int(second.doc["metadata"]["resourceVersion"]) > int(first.doc["metadata"]["resourceVersion"])


async def test_a_write_that_changes_nothing_changes_nothing(service: ResourceService, store: Store) -> None:
    await make(service, tenant(), group())
    version = store.log.version
    before = service.get(ADMIN, "NodeGroup", "personal", "workers")
    after = await service.replace(ADMIN, "NodeGroup", "personal", "workers", group())
    await service.replace(ADMIN, "NodeGroup", "personal", "workers", copy.deepcopy(before.doc))
    await service.patch(ADMIN, "NodeGroup", "personal", "workers", {}, MERGE_PATCH)
    assert after.doc == before.doc
    assert store.log.version == version


async def test_true_and_1_are_different_values(service: ResourceService) -> None:
    await make(service, tenant(), group(providerConfig={"nested": {"x": 1}}))
    for value, generation in ((True, 2), (1.0, 3), (1, 4)):
        doc = group(providerConfig={"nested": {"x": value}})
        stored = await service.replace(ADMIN, "NodeGroup", "personal", "workers", doc)
        assert stored.doc["spec"]["providerConfig"]["nested"]["x"] == value
        assert orjson.dumps(value) in orjson.dumps(stored.doc["spec"]["providerConfig"])
        assert stored.doc["metadata"]["generation"] == generation


async def test_what_the_system_owns_is_ignored_in_what_a_client_sends_back(service: ResourceService) -> None:
    await make(service, tenant())
    read = service.get(ADMIN, "Tenant", "", "personal").doc
    sent = copy.deepcopy(read)
    sent["metadata"] |= {
        "uid": "x",
        "generation": 99,
        "creationTimestamp": "2001-01-01T00:00:00Z",
        "deletionTimestamp": "2001-01-01T00:00:00Z",
        "finalizers": ["example.org/mine"],
        "ownerReferences": [{}],
        "labels": {"a": "b"},
    }
    sent["status"] = {"declaredRevision": "lie"}
    stored = (await service.replace(ADMIN, "Tenant", "", "personal", sent)).doc
    for key in ("uid", "generation", "creationTimestamp"):
        assert stored["metadata"][key] == read["metadata"][key]
    assert "deletionTimestamp" not in stored["metadata"]
    assert "ownerReferences" not in stored["metadata"]
    assert stored["metadata"]["finalizers"] == [FINALIZER_MACHINES, FINALIZER_SECRETS, "example.org/mine"]
    assert stored["status"]["declaredRevision"] != "lie"


async def test_a_stale_resource_version_is_a_conflict_and_none_is_unconditional(
    service: ResourceService,
) -> None:
    await make(service, tenant())
    stale = copy.deepcopy(service.get(ADMIN, "Tenant", "", "personal").doc)
    await service.replace(ADMIN, "Tenant", "", "personal", tenant(paused=True))
    with pytest.raises(Conflict):
        await service.replace(ADMIN, "Tenant", "", "personal", stale)
    with pytest.raises(Conflict):
        patch = {"metadata": {"resourceVersion": "1"}, "spec": {"paused": False}}
        await service.patch(ADMIN, "Tenant", "", "personal", patch, MERGE_PATCH)
    await service.replace(ADMIN, "Tenant", "", "personal", tenant())


async def test_replacing_what_is_not_there_is_not_found(service: ResourceService) -> None:
    with pytest.raises(NotFound, match='tenants "personal" not found'):
        await service.replace(ADMIN, "Tenant", "", "personal", tenant())


async def test_role_and_provider_of_a_group_cannot_change_but_its_class_can(service: ResourceService) -> None:
    await make(service, tenant(), group())
    await service.replace(ADMIN, "NodeGroup", "personal", "workers", group(providerClass="tiny:large"))
    changed = group(role="controlplane", replicas=3, providerClass="faulty:x")
    with pytest.raises(Invalid) as caught:
        await service.replace(ADMIN, "NodeGroup", "personal", "workers", changed)
    assert {"spec.role", "spec.providerClass"} <= {cause.field for cause in caught.value.causes}


async def test_subnets_are_fixed_once_the_tenant_was_applied(service: ResourceService) -> None:
    await make(service, tenant())
    await service.replace(ADMIN, "Tenant", "", "personal", tenant(podSubnets=["10.200.0.0/16"]))
    await set_status(service, appliedRevision="x")
    with pytest.raises(Invalid) as caught:
        await service.replace(ADMIN, "Tenant", "", "personal", tenant(podSubnets=["10.201.0.0/16"]))
    assert [cause.field for cause in caught.value.causes] == ["spec.podSubnets"]
    written_out = tenant(podSubnets=["10.200.0.0/16"], serviceSubnets=["10.96.0.0/12"])
    await service.replace(ADMIN, "Tenant", "", "personal", written_out)


async def test_versions_of_a_running_tenant_move_in_steps(service: ResourceService) -> None:
    def versions(talos: str, kubernetes: str) -> Doc:
        return tenant(talosVersion=talos, kubernetesVersion=kubernetes)

    await make(service, versions("v1.10.0", "v1.32.0"))
    await service.replace(ADMIN, "Tenant", "", "personal", versions("v1.11.0", "v1.33.0"))
    declared = service.get(ADMIN, "Tenant", "", "personal").doc["status"]["declaredRevision"]
    await set_status(service, appliedRevision=declared)
    for wrong, field in (
        (versions("v1.11.0", "v1.29.0"), "spec.kubernetesVersion"),
        (versions("v1.11.0", "v1.32.9"), "spec.kubernetesVersion"),
        (versions("v1.10.0", "v1.33.0"), "spec.talosVersion"),
        (versions("v1.14.0", "v1.33.0"), "spec.talosVersion"),
        (versions("v1.12.0", "v1.35.0"), "spec.kubernetesVersion"),
    ):
        with pytest.raises(Invalid) as caught:
            await service.replace(ADMIN, "Tenant", "", "personal", wrong)
        assert [cause.field for cause in caught.value.causes] == [field]
    await service.replace(ADMIN, "Tenant", "", "personal", versions("v1.13.0", "v1.34.1"))
    # Not applied yet: taking it back is no downgrade.
    await service.replace(ADMIN, "Tenant", "", "personal", versions("v1.11.0", "v1.33.0"))


# ---------------------------------------------------------------- patch


async def test_a_merge_patch_scales_a_group(service: ResourceService, store: Store) -> None:
    await make(service, tenant(), group())
    patched = await service.patch(
        ADMIN, "NodeGroup", "personal", "workers", {"spec": {"replicas": 5}, "status": {"x": 1}}, MERGE_PATCH
    )
    assert patched.doc["spec"] == group(replicas=5)["spec"]
    assert patched.doc["metadata"]["generation"] == 2
    assert patched.doc["status"] == {}
    assert_revision_is_true(store)


async def test_a_patch_is_judged_like_any_other_write(service: ResourceService) -> None:
    await make(service, tenant(), group())

    async def patch(body: Any) -> None:
        await service.patch(ADMIN, "NodeGroup", "personal", "workers", body, MERGE_PATCH)

    with pytest.raises(BadRequest, match=r'unknown field "spec\.bogus"'):
        await patch({"spec": {"bogus": 1}})
    with pytest.raises(Invalid):
        await patch({"spec": {"replicas": None}})
    with pytest.raises(BadRequest, match="name"):
        await patch({"metadata": {"name": "other"}})
    with pytest.raises(BadRequest):
        await patch({"kind": "Tenant"})
    with pytest.raises(BadRequest):
        await patch({"metadata": None, "kind": 3})


async def test_a_failed_test_of_a_json_patch_is_invalid_as_controllers_expect(
    service: ResourceService,
) -> None:
    await make(service, tenant())
    version = service.get(ADMIN, "Tenant", "", "personal").doc["metadata"]["resourceVersion"]

    def finalize(expected: str) -> list[Doc]:
        return [
            {"op": "test", "path": "/metadata/resourceVersion", "value": expected},
            {"op": "add", "path": "/metadata/finalizers/-", "value": "kopf.dev/finalizer"},
        ]

    with pytest.raises(Invalid):
        await service.patch(ADMIN, "Tenant", "", "personal", finalize("99"), JSON_PATCH)
    patched = await service.patch(ADMIN, "Tenant", "", "personal", finalize(version), JSON_PATCH)
    assert patched.doc["metadata"]["finalizers"][-1] == "kopf.dev/finalizer"
    assert patched.doc["metadata"]["generation"] == 1


async def test_scale_reads_and_writes_replicas_alone(service: ResourceService) -> None:
    await make(service, tenant(), group())
    scale = scale_of(service.get(ADMIN, "NodeGroup", "personal", "workers").doc)
    assert scale["spec"] == {"replicas": 2}
    scale["spec"]["replicas"] = 4
    replaced = await service.replace_scale(ADMIN, "NodeGroup", "personal", "workers", scale)
    assert replaced.doc["spec"]["replicas"] == 4
    with pytest.raises(Conflict):
        await service.replace_scale(ADMIN, "NodeGroup", "personal", "workers", scale)
    patched = await service.patch(
        ADMIN, "NodeGroup", "personal", "workers", {"spec": {"replicas": 6}}, MERGE_PATCH, subresource="scale"
    )
    assert patched.doc["spec"] == group(replicas=6)["spec"]
    with pytest.raises(NotFound):
        await service.replace_scale(ADMIN, "Tenant", "", "personal", scale)


# ---------------------------------------------------------------- status


async def test_an_admin_keeps_own_status_keys_and_cannot_touch_those_of_the_system(
    service: ResourceService,
) -> None:
    await make(service, tenant())
    before = service.get(ADMIN, "Tenant", "", "personal").doc
    own_condition = {"type": "Backed", "status": "True"}
    sent = {
        "metadata": {"labels": {"ignored": "yes"}},
        "spec": {"ignored": True},
        "status": {
            "kopf": {"progress": 1},
            "appliedRevision": "lie",
            "conditions": [{"type": "Ready", "status": "True"}, own_condition],
        },
    }
    after = (await service.replace_status(ADMIN, "Tenant", "", "personal", sent)).doc
    assert after["status"] == before["status"] | {
        "kopf": {"progress": 1},
        "conditions": [*before["status"]["conditions"], own_condition],
    }
    assert {**after["metadata"], "resourceVersion": ""} == {**before["metadata"], "resourceVersion": ""}
    assert after["spec"] == before["spec"]
    await service.patch(
        ADMIN, "Tenant", "", "personal", {"status": {"kopf": None}}, MERGE_PATCH, subresource="status"
    )
    assert "kopf" not in service.get(ADMIN, "Tenant", "", "personal").doc["status"]


async def test_only_admins_write_status_and_never_that_of_runs(service: ResourceService) -> None:
    await make(service, tenant())
    with pytest.raises(Forbidden):
        await service.replace_status(EDITOR, "Tenant", "", "personal", {"status": {}})
    with pytest.raises(Forbidden, match="system alone"):
        await service.replace_status(ADMIN, "Run", "personal", "x", {"status": {}})


# ---------------------------------------------------------------- delete


async def test_a_tenant_stays_until_its_finalizers_are_cleared_and_takes_all_that_lies_in_it(
    service: ResourceService, store: Store
) -> None:
    await make(service, tenant(), group(), tenant("other"), group(namespace="other"))
    await make_machine(service)
    doc, gone = await service.delete(ADMIN, "Tenant", "", "personal")
    assert doc["metadata"]["deletionTimestamp"]
    assert doc["metadata"]["generation"] == 2
    assert not gone
    version = store.log.version
    again, gone = await service.delete(ADMIN, "Tenant", "", "personal")
    assert again == doc
    assert not gone
    assert store.log.version == version, "asking again changes nothing"

    def clear(*finalizers: str) -> Any:
        return lambda desk: desk.clear_finalizers("Tenant", "", "personal", *finalizers)

    await service.transact(clear(FINALIZER_MACHINES))
    assert service.get(ADMIN, "Tenant", "", "personal").doc["metadata"]["finalizers"] == [FINALIZER_SECRETS]
    await service.transact(clear(FINALIZER_SECRETS))
    for kind in ("NodeGroup", "Machine", "Event"):
        assert store.objects.list(kind, "personal") == []
    with pytest.raises(NotFound):
        service.get(ADMIN, "Tenant", "", "personal")
    assert len(store.objects.list("NodeGroup", "other")) == 1
    with pytest.raises(NotFound):
        await service.delete(ADMIN, "Tenant", "", "personal")


async def test_a_foreign_finalizer_holds_an_object_and_its_removal_lets_it_go(
    service: ResourceService, store: Store
) -> None:
    doc = group()
    doc["metadata"]["finalizers"] = ["example.org/mine"]
    await make(service, tenant(), doc)
    await service.delete(ADMIN, "NodeGroup", "personal", "workers")
    with pytest.raises(Invalid, match="while the object is being deleted"):
        patch = {"metadata": {"finalizers": ["example.org/mine", "example.org/late"]}}
        await service.patch(ADMIN, "NodeGroup", "personal", "workers", patch, MERGE_PATCH)
    await service.transact(
        lambda desk: desk.clear_finalizers("NodeGroup", "personal", "workers", FINALIZER_MACHINES)
    )
    held = service.get(ADMIN, "NodeGroup", "personal", "workers").doc
    assert held["metadata"]["finalizers"] == ["example.org/mine"]
    released = await service.patch(
        ADMIN, "NodeGroup", "personal", "workers", {"metadata": {"finalizers": None}}, MERGE_PATCH
    )
    assert released.doc["metadata"]["name"] == "workers"
    assert store.objects.list("NodeGroup", "personal") == []
    assert_revision_is_true(store)


async def test_people_cannot_take_the_finalizers_of_the_system_away(service: ResourceService) -> None:
    await make(service, tenant())
    await service.delete(ADMIN, "Tenant", "", "personal")
    for patch in ({"metadata": {"finalizers": None}}, {"metadata": {"finalizers": []}}):
        await service.patch(ADMIN, "Tenant", "", "personal", patch, MERGE_PATCH)
    held = service.get(ADMIN, "Tenant", "", "personal").doc
    assert held["metadata"]["finalizers"] == [FINALIZER_MACHINES, FINALIZER_SECRETS]


async def test_deletion_protection_refuses_and_says_what_to_do(service: ResourceService) -> None:
    await make(service, tenant(deletionProtection=True))
    with pytest.raises(Forbidden, match=r"spec\.deletionProtection to false"):
        await service.delete(ADMIN, "Tenant", "", "personal")
    await service.replace(ADMIN, "Tenant", "", "personal", tenant(deletionProtection=False))
    await service.delete(ADMIN, "Tenant", "", "personal")


async def test_the_control_plane_of_an_applied_tenant_leaves_only_with_it(service: ResourceService) -> None:
    await make(service, tenant(), group("cp", role="controlplane", replicas=1))
    await set_status(service, appliedRevision="x")
    with pytest.raises(Forbidden, match="delete the tenant instead"):
        await service.delete(ADMIN, "NodeGroup", "personal", "cp")
    await service.delete(ADMIN, "Tenant", "", "personal")
    await service.delete(ADMIN, "NodeGroup", "personal", "cp")


async def test_preconditions_that_do_not_hold_are_a_conflict(service: ResourceService) -> None:
    await make(service, tenant())
    meta = service.get(ADMIN, "Tenant", "", "personal").doc["metadata"]
    for wrong in ({"uid": "x"}, {"resourceVersion": "99"}):
        with pytest.raises(Conflict, match="Precondition failed"):
            await service.delete(ADMIN, "Tenant", "", "personal", preconditions=wrong)
    right = {key: meta[key] for key in ("uid", "resourceVersion")}
    await service.delete(ADMIN, "Tenant", "", "personal", preconditions=right)


# ---------------------------------------------------------------- what people do not write


@pytest.mark.parametrize("kind", ["Machine", "Run", "StateVersion", "Provider", "Event"])
async def test_kinds_of_the_system_cannot_be_made_or_removed_by_people(
    service: ResourceService, kind: str
) -> None:
    await make(service, tenant())
    with pytest.raises(Forbidden):
        await service.create(ADMIN, kind, "personal", {"metadata": {"name": "x"}})
    with pytest.raises(Forbidden):
        await service.delete(ADMIN, kind, "personal", "x")
    if kind != "Machine":
        with pytest.raises(Forbidden, match="written by the system"):
            await service.replace(ADMIN, kind, "personal", "x", {})


async def test_the_refusal_says_what_to_do_instead(service: ResourceService) -> None:
    with pytest.raises(Forbidden, match=r"raise spec\.replicas of a NodeGroup"):
        await service.create(ADMIN, "Machine", "personal", {})
    with pytest.raises(Forbidden, match="scaled down"):
        await service.delete(ADMIN, "Machine", "personal", "workers-1")


async def test_labels_and_annotations_of_a_machine_are_for_people_the_rest_is_not(
    service: ResourceService, store: Store
) -> None:
    await make(service, tenant(), group())
    await make_machine(service)
    before = service.get(ADMIN, "Tenant", "", "personal").doc["status"]["declaredRevision"]

    async def patch(body: Doc) -> Doc:
        stored = await service.patch(EDITOR, "Machine", "personal", "workers-1", body, MERGE_PATCH)
        return stored.doc

    after = await patch({"metadata": {"labels": {"rack": "7"}, "annotations": {"note": "loud fan"}}})
    assert after["metadata"]["labels"]["rack"] == "7"
    assert after["metadata"]["labels"]["rezuscloud.io/tenant"] == "personal"
    assert after["metadata"]["generation"] == 1
    assert_revision_is_true(store)
    assert service.get(ADMIN, "Tenant", "", "personal").doc["status"]["declaredRevision"] != before
    kept = await patch({"metadata": {"labels": {"rezuscloud.io/tenant": None}}})
    assert kept["metadata"]["labels"]["rezuscloud.io/tenant"] == "personal"
    with pytest.raises(Invalid, match="written by the system"):
        await patch({"metadata": {"labels": {"rezuscloud.io/tenant": "stolen"}}})
    with pytest.raises(Forbidden, match="labels and annotations may be changed"):
        await patch({"spec": {"slot": 9}})
    with pytest.raises(Invalid):
        await patch({"metadata": {"finalizers": ["example.org/x"]}})


# ---------------------------------------------------------------- who asks


async def test_each_method_asks_the_policy_first(service: ResourceService) -> None:
    await make(service, tenant())
    assert service.get(VIEWER, "Tenant", "", "personal")
    assert service.list(VIEWER, "Tenant").items
    for attempt in (
        service.create(VIEWER, "Tenant", "", tenant("x")),
        service.replace(VIEWER, "Tenant", "", "personal", tenant()),
        service.patch(VIEWER, "Tenant", "", "personal", {}, MERGE_PATCH),
        service.delete(VIEWER, "Tenant", "", "personal"),
        service.replace_status(VIEWER, "Tenant", "", "personal", {}),
        service.apply_manifests(VIEWER, [tenant("x")]),
    ):
        with pytest.raises(Forbidden):
            await attempt


async def test_a_transaction_of_the_system_that_fails_writes_nothing(
    service: ResourceService, store: Store
) -> None:
    await make(service, tenant())

    def fail(desk: Desk) -> None:
        desk.set_status("Tenant", "", "personal", {"appliedRevision": "half"})
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        await service.transact(fail)
    assert "appliedRevision" not in service.get(ADMIN, "Tenant", "", "personal").doc["status"]
    assert store.log.version == 1


async def test_of_two_control_planes_asked_for_at_once_one_is_made(service: ResourceService) -> None:
    await make(service, tenant())
    outcomes = await asyncio.gather(
        *(make(service, group(name, role="controlplane", replicas=1)) for name in ("one", "two")),
        return_exceptions=True,
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Invalid", "NoneType"]


async def test_concurrent_edits_of_different_fields_are_all_kept(
    service: ResourceService, store: Store
) -> None:
    await make(service, tenant(), group())

    async def label(number: int) -> Doc:
        patch = {"metadata": {"labels": {f"key-{number}": "x"}}}
        stored = await service.patch(ADMIN, "NodeGroup", "personal", "workers", patch, MERGE_PATCH)
        assert orjson.loads(stored.raw) == stored.doc
        assert f"key-{number}" in stored.doc["metadata"]["labels"]
        return stored.doc

    answers = await asyncio.gather(*map(label, range(100)))
    versions = {doc["metadata"]["resourceVersion"] for doc in answers}
    assert len(versions) == 100, "each is answered with the version that it wrote"
    assert len(service.get(ADMIN, "NodeGroup", "personal", "workers").doc["metadata"]["labels"]) == 100
    assert_revision_is_true(store)
