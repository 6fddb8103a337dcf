"""TF state alone brings tenants, node groups and machines back, and a guest's fault stays its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.declaration import declare, declared_revision
from rezuscloud.model.meta import LABEL_NODE_GROUP, LABEL_ROLE, LABEL_TENANT, Doc
from rezuscloud.model.tenant import Role
from rezuscloud.plugin.types import MachineFacts, TfResource
from rezuscloud.tofu.projection import Projection, ProjectionError, bring_back, project
from rezuscloud.tofu.render import make_envelope, render
from tests.support.bare_tofu import BareTofu
from tests.support.tiny_provider import (
    TENANT_UID,
    TinyProvider,
    content_and_pins,
    control_plane,
    group_doc,
    tenant_doc,
)

PROVIDERS = {"tiny": TinyProvider()}
BUILT_IN = 'provider["terraform.io/builtin/terraform"]'
GROUPS = [control_plane(), group_doc("workers", 11)]


def _record(name: str, **instance: Any) -> Doc:
    """A resource of a state, as the engine writes it."""
    attributes = {"id": f"id-{name}", "input": {"value": {"hostname": name}, "type": ["object", {}]}}
    return {
        "mode": "managed",
        "type": "terraform_data",
        "name": name,
        "provider": BUILT_IN,
        "instances": [{"attributes": attributes} | instance],
    }


def _declaration(groups: list[Doc]) -> Doc:
    envelope = make_envelope(**content_and_pins(tenant_doc(), groups))
    text = json.dumps(envelope)
    return _record("declaration", attributes={"id": "d", "input": {"value": text, "type": "string"}})


def _state(*resources: Doc) -> Doc:
    return {"version": 4, "serial": 3, "lineage": "l", "outputs": {}, "resources": list(resources)}


def _project(*resources: Doc) -> Projection:
    return project(_state(*resources), tenant_uid=TENANT_UID, providers=PROVIDERS)


@pytest.mark.engine
def test_name_uid_labels_annotations_and_spec_come_back_equal_from_state_alone(
    engine_path: Path, tmp_path: Path
) -> None:
    marks: dict[str, Any] = {"labels": {"env": "home"}, "annotations": {"example.org/note": '${x} "é"\n'}}
    tenant = tenant_doc(**marks)
    groups = [
        control_plane(),
        group_doc("workers", 2, meta=marks, note="%{ if x }", extra={"${k}": [1, 2.5]}),
    ]
    # The machines are projected once, a person marks one, and the next run carries the mark into state.
    tofu = BareTofu(engine_path, tmp_path / "run")
    machines: list[Doc] = []
    for _ in range(2):
        wanted = content_and_pins(tenant, groups, machines)
        tofu.write(render(tenant, groups, **wanted, providers=PROVIDERS, encrypted=False).files)
        tofu.apply()
        projection = project(tofu.state, tenant_uid=TENANT_UID, providers=PROVIDERS)
        assert projection.declaration is not None
        _, _, machines = bring_back(projection.declaration, projection.machines)
        machines[1]["metadata"] |= {
            "labels": machines[1]["metadata"]["labels"] | {"rack": "7"},
            "annotations": {"example.org/who": "${me}"},
        }

    assert projection.declaration is not None
    back_tenant, back_groups, back_machines = bring_back(projection.declaration, projection.machines)

    assert back_tenant == tenant
    assert back_groups == groups
    assert back_machines == machines
    assert [machine["metadata"]["name"] for machine in back_machines] == [
        "control-1",
        "workers-1",
        "workers-2",
    ]
    assert back_machines[1]["metadata"]["labels"] == {
        LABEL_TENANT: "blue",
        LABEL_NODE_GROUP: "workers",
        LABEL_ROLE: "worker",
        "rack": "7",
    }
    # What came back is what was applied: nothing is owed.
    assert projection.applied_revision == declared_revision(declare(back_tenant, back_groups, back_machines))
    assert projection.declaration["pins"] == {
        "contract": "v1.13",
        "bootstrapMachine": "control-1",
        "slots": {"control": [1], "workers": [1, 2]},
    }
    assert projection.providers == {"terraform.io/builtin/terraform"}
    assert projection.resource_count == 4


def test_a_machine_gets_role_and_slot_from_the_declaration_and_facts_from_its_provider() -> None:
    projection = _project(_declaration(GROUPS), _record("machine_control-1"))
    (machine,) = projection.machines
    assert machine.name == "control-1"
    assert (machine.spec.role, machine.spec.node_group, machine.spec.slot) == (
        Role.CONTROLPLANE,
        "control",
        1,
    )
    assert (machine.spec.provider, machine.spec.provider_id) == ("tiny", "id-machine_control-1")
    assert machine.spec.zone == "zone-a"


def test_the_uid_stays_with_the_machine_and_changes_with_a_new_one() -> None:
    first, again = (_project(_record("machine_workers-1")).machines[0] for _ in range(2))
    attributes = {"id": "other", "input": {"value": {"hostname": "x"}}}
    replaced = _project(_record("machine_workers-1", attributes=attributes)).machines[0]
    assert first.uid == again.uid != replaced.uid


def test_machines_are_in_order_of_group_and_slot() -> None:
    names = [f"machine_workers-{slot}" for slot in (10, 2, 1)] + ["machine_control-1"]
    projection = _project(_declaration(GROUPS), *(_record(name) for name in names))
    listed = [machine.name for machine in projection.machines]
    assert listed == ["control-1", "workers-1", "workers-2", "workers-10"]


def test_a_deposed_object_is_counted_and_is_no_machine() -> None:
    projection = _project(_record("machine_workers-1", deposed="0badc0de"))
    assert projection.machines == ()
    assert projection.resource_count == 1


def test_a_tainted_machine_says_so_and_one_that_left_nothing_to_read_is_left_out() -> None:
    projection = _project(
        _record("machine_workers-1", status="tainted"),
        _record("machine_workers-2", status="tainted", attributes={"id": None}),
    )
    assert [(machine.name, machine.tainted) for machine in projection.machines] == [("workers-1", True)]


def test_a_machine_made_anew_as_another_type_is_the_finished_one() -> None:
    half = _record("machine_workers-1", status="tainted") | {"type": "tiny_next"}
    for order in ([_record("machine_workers-1"), half], [half, _record("machine_workers-1")]):
        (machine,) = _project(*order).machines
        assert machine.tainted is False


def test_a_machine_whose_group_is_gone_is_still_projected() -> None:
    (machine,) = _project(_declaration([control_plane()]), _record("machine_old-3")).machines
    assert (machine.spec.node_group, machine.spec.slot, machine.spec.role) == ("old", 3, Role.WORKER)


def test_data_and_other_resources_are_no_machines_but_their_providers_are_needed() -> None:
    data = _record("machine_workers-1") | {
        "mode": "data",
        "provider": 'module.x.provider["registry.opentofu.org/oracle/oci"].home',
    }
    network = _record("network")
    del network["provider"]
    network["instances"] = [
        {"index_key": "a", "attributes": {}, "provider": 'provider["registry.opentofu.org/a/b"].by["a"]'}
    ]
    projection = _project(data, network)
    assert projection.machines == ()
    assert projection.resource_count == 1
    assert projection.providers == {"registry.opentofu.org/oracle/oci", "registry.opentofu.org/a/b"}


def test_a_state_without_declaration_has_no_applied_revision() -> None:
    projection = _project()
    assert (projection.declaration, projection.applied_revision) == (None, None)
    assert projection.machines == ()


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"input": {"value": "{cut", "type": "string"}}, "cannot be read"),
        ({"input": None}, "cannot be read"),
        ({}, "cannot be read"),
        ({"input": {"value": '{"formatVersion": 99}', "type": "string"}}, "format 99"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_an_error_with_a_cure(attributes: Doc, said: str) -> None:
    with pytest.raises(ProjectionError, match=said):
        _project(_record("declaration", attributes=attributes))


def test_a_state_of_another_format_is_refused() -> None:
    with pytest.raises(ProjectionError, match="format 5"):
        project({"version": 5}, tenant_uid=TENANT_UID, providers=PROVIDERS)


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(ProjectionError, match="damaged"):
        _project({"mode": "managed", "name": "machine_x-1"})


@pytest.mark.parametrize("name", ["machine_1", "machine_x", "machine_x-y", "machine_-1"])
def test_a_stranger_named_like_a_machine_is_an_error(name: str) -> None:
    with pytest.raises(ProjectionError, match="named like a machine"):
        _project(_record(name))


class _Leaky(TinyProvider):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        raise ValueError(f"cannot read {resource.attributes}")


class _Wrong(TinyProvider):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return MachineFacts(machine="another-1", provider_id="x", hostname="x")


class _Blind(TinyProvider):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return None


@pytest.mark.parametrize("provider", [_Leaky(), _Wrong()])
def test_a_guest_that_cannot_read_its_machine_is_named_and_its_words_are_not_repeated(
    provider: TinyProvider,
) -> None:
    state = _state(_declaration(GROUPS), _record("machine_workers-1"))
    with pytest.raises(ProjectionError, match='Provider "tiny"') as caught:
        project(state, tenant_uid=TENANT_UID, providers={"tiny": provider})
    assert "id-machine" not in str(caught.value)


def test_only_the_provider_that_the_group_declares_is_asked() -> None:
    state = _state(_declaration(GROUPS), _record("machine_workers-1"))
    providers = {"alpha": _Leaky(), "tiny": TinyProvider()}
    (machine,) = project(state, tenant_uid=TENANT_UID, providers=providers).machines
    assert machine.spec.provider == "tiny"


def test_what_no_provider_knows_is_no_machine() -> None:
    state = _state(_record("machine_workers-1"))
    assert project(state, tenant_uid=TENANT_UID, providers={"tiny": _Blind()}).machines == ()
