"""What a spec may hold. Everything wrong is found at once, with its field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rezuscloud.model.meta import Doc
from rezuscloud.resources.causes import field_path
from rezuscloud.resources.schemas import Findings, check_spec
from tests.support.resources import PROVIDERS, group, tenant


def check(doc: Doc) -> Findings:
    before = copy.deepcopy(doc)
    findings = check_spec(doc["kind"], doc["spec"], PROVIDERS)
    assert doc == before, "checking must not change what was typed"
    return findings


def fields(doc: Doc) -> list[str]:
    return sorted(cause.field for cause in check(doc).causes)


def test_a_tenant_as_the_documentation_shows_it_is_accepted() -> None:
    doc = tenant(
        controlPlaneEndpoint="api.example.org",
        podSubnets=["10.244.0.0/16", "fd00:1::/56"],
        serviceSubnets=["10.96.0.0/12"],
        credentials={"oci": "main"},
        applyPolicy="Manual",
        paused=False,
        deletionProtection=True,
    )
    assert check(doc) == Findings()


@pytest.mark.parametrize(
    "endpoint",
    ["api", "api.example.org:443", "192.0.2.1", "192.0.2.1:6443", "[2001:db8::1]:6443", "2001:db8::1"],
)
def test_an_endpoint_is_a_host_with_or_without_a_port(endpoint: str) -> None:
    assert check(tenant(controlPlaneEndpoint=endpoint)) == Findings()


@pytest.mark.parametrize(
    "endpoint",
    ["", "https://api", "api/x", "api:0", "api:99999", "api:x", "[::1", "[10.0.0.1]:1", "UP", "a_b", 5, None],
)
def test_what_is_no_endpoint_is_refused(endpoint: Any) -> None:
    assert fields(tenant(controlPlaneEndpoint=endpoint)) == ["spec.controlPlaneEndpoint"]


@pytest.mark.parametrize(
    "version", ["1.36", "v1.36", "latest", "v1.36.3-beta.0", "v01.36.3", 1.36, None, True]
)
def test_what_is_no_version_is_refused(version: Any) -> None:
    assert fields(tenant(kubernetesVersion=version)) == ["spec.kubernetesVersion"]


@pytest.mark.parametrize(
    ("talos", "kubernetes", "refused"),
    [
        ("v1.13.9", "v1.36.3", []),
        ("1.13.0", "v1.31.0", []),
        ("v1.13.9", "v1.37.0", ["spec.kubernetesVersion"]),
        ("v1.13.9", "v1.30.0", ["spec.kubernetesVersion"]),
        ("v1.13.9", "v2.36.0", ["spec.kubernetesVersion"]),
        ("v1.9.0", "v1.30.0", ["spec.talosVersion"]),
        ("v1.99.0", "v1.30.0", ["spec.talosVersion"]),
    ],
)
def test_kubernetes_must_be_in_the_range_of_talos(talos: str, kubernetes: str, refused: list[str]) -> None:
    assert fields(tenant(talosVersion=talos, kubernetesVersion=kubernetes)) == refused


@pytest.mark.parametrize(
    "subnets",
    [["10.244.0.1/16"], ["10.244.0.0"], [], ["10.0.0.0/8", "10.1.0.0/16"], ["a"], "10.244.0.0/16", [5], None],
)
def test_what_are_no_subnets_is_refused(subnets: Any) -> None:
    assert fields(tenant(podSubnets=subnets))[0].startswith("spec.podSubnets")


def test_pods_and_services_may_not_overlap_also_with_the_default_of_the_other() -> None:
    assert fields(tenant(podSubnets=["10.0.0.0/8"])) == ["spec.podSubnets"]
    assert fields(tenant(podSubnets=["10.0.0.0/16"], serviceSubnets=["10.0.0.0/24"])) == [
        "spec.serviceSubnets"
    ]


def test_all_wrong_values_and_all_unknown_fields_are_found_at_once() -> None:
    doc = group(
        replicas=-1, role="boss", bogus=1, nodeTaints=[{"key": "a b", "effect": "Kill", "color": "red"}]
    )
    found = check(doc)
    assert [field_path(path) for path in found.unknown] == ["spec.bogus", "spec.nodeTaints[0].color"]
    assert sorted(cause.field for cause in found.causes) == [
        "spec.nodeTaints[0].effect",
        "spec.nodeTaints[0].key",
        "spec.replicas",
        "spec.role",
    ]


def test_missing_fields_are_required() -> None:
    doc = group()
    doc["spec"] = {}
    found = check(doc)
    assert {cause.field: cause.reason for cause in found.causes} == {
        "spec.providerClass": "FieldValueRequired",
        "spec.replicas": "FieldValueRequired",
        "spec.role": "FieldValueRequired",
    }
    assert [cause.field for cause in check_spec("Tenant", [], {}).causes] == ["spec"]


@pytest.mark.parametrize("replicas", [True, "3", 2.0, -1, 501, None])
def test_replicas_is_a_whole_number_within_bounds(replicas: Any) -> None:
    assert fields(group(replicas=replicas)) == ["spec.replicas"]


@pytest.mark.parametrize(("replicas", "accepted"), [(1, True), (3, True), (0, False), (2, False), (4, False)])
def test_a_control_plane_has_an_odd_number_of_machines(replicas: int, accepted: bool) -> None:
    assert (fields(group(role="controlplane", replicas=replicas)) == []) is accepted


def test_an_unknown_provider_is_answered_with_those_that_are_installed() -> None:
    (cause,) = check(group(providerClass="oci:big")).causes
    assert cause.field == "spec.providerClass"
    assert cause.reason == "FieldValueNotSupported"
    assert '"faulty", "tiny"' in cause.message


def test_the_provider_judges_its_own_config_with_field_paths() -> None:
    found = check(group(providerConfig={"ocpus": 99, "disk": {"sizeGb": "big", "color": 1}, "shape": 1}))
    assert sorted(cause.field for cause in found.causes) == [
        "spec.providerConfig.disk.sizeGb",
        "spec.providerConfig.ocpus",
    ]
    assert sorted(map(field_path, found.unknown)) == [
        "spec.providerConfig.disk.color",
        "spec.providerConfig.shape",
    ]


def test_a_provider_whose_schema_fails_refuses_with_its_name() -> None:
    (cause,) = check(group(providerClass="faulty")).causes
    assert cause.field == "spec.providerConfig"
    assert "provider faulty failed" in cause.message
    assert "boom" in cause.message


def test_labels_of_nodes_follow_the_rules_of_kubernetes() -> None:
    assert check(group(nodeLabels={"example.org/tier": "web", "empty": ""})) == Findings()
    assert fields(group(nodeLabels={"bad key": "x", "n": 1, "v": "a b"})) == [
        "spec.nodeLabels.n",
        "spec.nodeLabels.v",
        "spec.nodeLabels[bad key]",
    ]


def test_the_same_taint_twice_is_a_duplicate() -> None:
    taint = {"key": "gpu", "value": "x", "effect": "NoSchedule"}
    (cause,) = check(group(nodeTaints=[taint, {**taint, "value": "y"}])).causes
    assert (cause.field, cause.reason) == ("spec.nodeTaints[1]", "FieldValueDuplicate")
