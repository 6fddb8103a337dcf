"""The declaration and its revision: what counts as owed."""

from __future__ import annotations

from typing import Any

from rezuscloud.model.declaration import declare, declared_machines, declared_revision, declared_slots
from rezuscloud.model.errors import Cause, Invalid, NotFound
from rezuscloud.model.tenant import NodeGroupSpec, Role

Doc = dict[str, Any]


def doc(kind: str, name: str, spec: Doc, **meta: Any) -> Doc:
    base = {"name": name, "uid": f"uid-{name}", "creationTimestamp": "2026-12-01T00:00:00Z"}
    return {"kind": kind, "metadata": base | meta, "spec": spec}


TENANT = doc("Tenant", "home", {"talosVersion": "v1.13.9"})
CP = doc("NodeGroup", "cp", {"role": "controlplane", "replicas": 3, "providerClass": "lab:a"})
WORKERS = doc("NodeGroup", "workers", {"role": "worker", "replicas": 2, "providerClass": "lab:a"})


def revision(
    tenant: Doc = TENANT, groups: tuple[Doc, ...] = (CP, WORKERS), machines: tuple[Doc, ...] = ()
) -> str:
    return declared_revision(declare(tenant, groups, machines))


def test_slots_count_from_one_and_name_the_machines() -> None:
    assert declared_slots([WORKERS, CP]) == {"cp": [1, 2, 3], "workers": [1, 2]}
    assert declared_machines([WORKERS]) == {"workers-1", "workers-2"}


def test_the_order_of_groups_and_what_the_system_writes_do_not_change_the_revision() -> None:
    bumped = TENANT | {
        "metadata": TENANT["metadata"] | {"resourceVersion": "9", "generation": 4},
        "status": {"x": 1},
    }
    assert revision() == revision(groups=(WORKERS, CP)) == revision(tenant=bumped)


def test_specs_labels_and_annotations_change_the_revision() -> None:
    labelled = TENANT | {"metadata": TENANT["metadata"] | {"labels": {"env": "home"}}}
    annotated = CP | {"metadata": CP["metadata"] | {"annotations": {"a": "b"}}}
    scaled = WORKERS | {"spec": WORKERS["spec"] | {"replicas": 3}}
    all_of_them = {
        revision(),
        revision(labelled),
        revision(groups=(annotated, WORKERS)),
        revision(groups=(CP, scaled)),
    }
    assert len(all_of_them) == 4


def test_pausing_owes_nothing_and_is_never_applied() -> None:
    paused = TENANT | {"spec": TENANT["spec"] | {"paused": True}}
    unpaused = TENANT | {"spec": TENANT["spec"] | {"paused": False}}
    assert revision(paused) == revision(unpaused) == revision()
    assert "paused" not in declare(paused, [], [])["tenant"]["spec"]
    assert declare(unpaused, [], [])["tenant"]["spec"]["paused"] is False


def test_a_leaving_group_is_declared_no_more() -> None:
    leaving = WORKERS | {"metadata": WORKERS["metadata"] | {"deletionTimestamp": "2026-12-01T00:00:00Z"}}
    assert revision(groups=(CP, leaving)) == revision(groups=(CP,))


def machine(name: str, **labels: str) -> Doc:
    return doc("Machine", name, {}, labels={"rezuscloud.io/tenant": "home", **labels})


def test_only_what_people_wrote_on_declared_machines_counts() -> None:
    assert revision(machines=(machine("workers-1"),)) == revision()
    assert revision(machines=(machine("workers-1", rack="a"),)) != revision()
    assert revision(machines=(machine("workers-9", rack="a"),)) == revision()


def test_a_provider_class_has_two_parts() -> None:
    spec = NodeGroupSpec(Role.WORKER, 1, "oci:VM.Standard.A1.Flex")
    assert (spec.provider, spec.machine_class) == ("oci", "VM.Standard.A1.Flex")
    assert NodeGroupSpec(Role.WORKER, 1, "lab").machine_class == ""


def test_errors_become_kubernetes_status_objects() -> None:
    error = Invalid.of("NodeGroup", "bad", [Cause("spec.replicas", "must be odd")])
    assert error.to_status() == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": 'NodeGroup "bad" is invalid: spec.replicas: must be odd',
        "reason": "Invalid",
        "code": 422,
        "details": {
            "name": "bad",
            "kind": "NodeGroup",
            "causes": [{"reason": "FieldValueInvalid", "message": "must be odd", "field": "spec.replicas"}],
        },
    }
    assert "details" not in NotFound("no such thing").to_status()
