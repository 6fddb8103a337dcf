"""What is rendered is stable, literal, accepted by the real engine, and never half a guest's rubbish."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rezuscloud.model.meta import Doc
from rezuscloud.plugin.types import (
    Expr,
    Fragment,
    MachineFacts,
    Provider,
    RenderRequest,
    RequiredProvider,
    TfResource,
)
from rezuscloud.tofu.messages import parse_line
from rezuscloud.tofu.projection import project
from rezuscloud.tofu.render import Rendered, RenderError, escape, render
from tests.support.bare_tofu import BareTofu
from tests.support.tiny_provider import (
    TENANT_UID,
    TinyProvider,
    content_and_pins,
    control_plane,
    group_doc,
    tenant_doc,
)

HOSTILE = (
    '${file("/etc/hostname")}',
    "%{ if true }x%{ endif }",
    "$${x} $$${x} %%{x} $%{x} %${x} ${~ x ~}",
    "quotes \" ' ` and \\ back\\\\slash",
    "lines\nand\r\n\ttabs\u2028",
    "ünï·cødé 🚀 \u0001",
    "<<EOT\n${x}\nEOT",
    "// not a comment",
    "",
)
PROVIDERS = {"tiny": TinyProvider()}


def _render(
    groups: list[Doc],
    tenant: Doc | None = None,
    *,
    providers: Mapping[str, Provider] = PROVIDERS,
    encrypted: bool = False,
    state_providers: tuple[str, ...] = (),
) -> Rendered:
    tenant = tenant or tenant_doc()
    return render(
        tenant,
        groups,
        **content_and_pins(tenant, groups),
        providers=providers,
        encrypted=encrypted,
        state_providers=state_providers,
    )


def _config(rendered: Rendered) -> dict[str, Any]:
    return dict(json.loads(rendered.files["main.tf.json"]))


class Guest(TinyProvider):
    """A provider whose fragment is whatever a test says."""

    def __init__(
        self,
        make: Callable[[RenderRequest], Any],
        required: Any = None,
    ) -> None:
        self._make = make
        self._required = required or {}

    def render(self, *, request: RenderRequest) -> Fragment:
        made: Fragment = self._make(request)
        return made

    def required_providers(self) -> Mapping[str, RequiredProvider]:
        required: Mapping[str, RequiredProvider] = self._required
        return required


def _machines(request: RenderRequest, type_: str = "terraform_data", **body: Any) -> dict[str, Any]:
    return {type_: {machine.resource_name: body for machine in request.machines}}


# ---------------------------------------------------------------- bytes


def test_equal_input_gives_equal_bytes_in_any_order() -> None:
    groups = [control_plane(), group_doc("a", note="x", image="v2"), group_doc("b", 3)]
    turned = [group_doc("b", 3), group_doc("a", image="v2", note="x"), control_plane()]
    assert _render(groups).files == _render(turned).files


def test_each_attribute_has_a_line_of_its_own_and_the_file_ends_with_a_newline() -> None:
    text = _render([control_plane()]).files["main.tf.json"].decode()
    assert text.endswith("}\n")
    assert max(line.count('": ') for line in text.replace(r"\"", "").splitlines()) == 1


def test_machines_are_listed_by_slot_not_by_letter() -> None:
    rendered = _render([control_plane(), group_doc("w", 11)])
    assert rendered.machines[-2:] == ("w-10", "w-11")


def test_a_leaving_group_is_not_rendered() -> None:
    leaving = group_doc("old", meta={"deletionTimestamp": "2026-12-01T01:00:00Z"})
    assert _render([control_plane(), leaving]).machines == ("control-1",)


def test_encryption_is_enforced_only_when_asked() -> None:
    enforced = _config(_render([control_plane()], encrypted=True))["terraform"]["encryption"]
    assert enforced == {"state": {"enforced": True}, "plan": {"enforced": True}}
    assert "encryption" not in _config(_render([control_plane()]))["terraform"]


def test_the_declaration_waits_for_every_other_resource() -> None:
    body = _config(_render([control_plane(), group_doc()]))["resource"]["terraform_data"]["declaration"]
    assert body["depends_on"] == [
        "terraform_data.machine_control-1",
        "terraform_data.machine_workers-1",
        "terraform_data.machine_workers-2",
    ]


# ---------------------------------------------------------------- with the real engine


@pytest.mark.engine
def test_rendered_files_pass_init_plan_and_apply_and_a_second_plan_changes_nothing(
    engine_path: Path, tmp_path: Path
) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    tofu.write(_render([control_plane(), group_doc()]).files)
    tofu.apply()
    tofu.expect_no_changes()


@pytest.mark.engine
def test_hostile_strings_stay_literal_as_values_and_as_keys(engine_path: Path, tmp_path: Path) -> None:
    groups = [control_plane()]
    for number, text in enumerate(HOSTILE):
        groups.append(group_doc(f"g{number}", 1, note=text, extra={text or "empty": [text, {text: text}]}))
    tenant = tenant_doc(annotations={"example.org/text": "".join(HOSTILE), HOSTILE[0]: "key"})
    tofu = BareTofu(engine_path, tmp_path / "run")
    tofu.write(_render(groups, tenant).files)
    tofu.apply()
    tofu.expect_no_changes()
    inputs = {
        resource["name"]: resource["instances"][0]["attributes"]["input"]["value"]
        for resource in tofu.state["resources"]
    }
    for number, text in enumerate(HOSTILE):
        made = inputs[f"machine_g{number}-1"]
        assert made["note"] == text
        assert made["extra"] == {text or "empty": [text, {text: text}]}
    declaration = project(tofu.state, tenant_uid=TENANT_UID, providers=PROVIDERS).declaration
    assert declaration is not None
    assert declaration["declaration"] == content_and_pins(tenant, groups)["content"]


@pytest.mark.engine
def test_the_declaration_keeps_text_that_the_engine_would_normalise(
    engine_path: Path, tmp_path: Path
) -> None:
    decomposed = unicodedata.normalize("NFD", "é")
    tenant = tenant_doc(annotations={"example.org/name": decomposed})
    tofu = BareTofu(engine_path, tmp_path / "run")
    tofu.write(_render([control_plane()], tenant).files)
    tofu.apply()
    declaration = project(tofu.state, tenant_uid=TENANT_UID, providers=PROVIDERS).declaration
    assert declaration is not None
    annotations = declaration["declaration"]["tenant"]["metadata"]["annotations"]
    assert annotations == {"example.org/name": decomposed}


@pytest.mark.engine
def test_a_run_that_fails_half_way_leaves_the_old_revision_in_state(
    engine_path: Path, tmp_path: Path
) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    tofu.write(_render([control_plane()]).files)
    tofu.apply()
    before = project(tofu.state, tenant_uid=TENANT_UID, providers=PROVIDERS)
    tofu.write(_render([control_plane(), group_doc(fail=True)]).files)
    tofu.apply(code=1)
    after = project(tofu.state, tenant_uid=TENANT_UID, providers=PROVIDERS)
    assert after.applied_revision == before.applied_revision is not None
    assert {machine.name for machine in after.machines if machine.tainted} == {"workers-1", "workers-2"}


@pytest.mark.engine
def test_the_new_revision_is_written_only_after_removed_machines_are_gone(
    engine_path: Path, tmp_path: Path
) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    tofu.write(_render([control_plane(), group_doc()]).files)
    tofu.apply()
    tofu.write(_render([control_plane(), group_doc("workers", 1)]).files)
    tofu.plan()
    tofu.run("apply", "-json-into=apply.jsonl", "plan.bin")
    steps = [
        (message.type, message.address.rpartition(".")[2])
        for message in map(parse_line, (tofu.cwd / "apply.jsonl").read_bytes().splitlines())
        if message and message.type in ("apply_start", "apply_complete")
    ]
    gone, written = ("apply_complete", "machine_workers-2"), ("apply_start", "declaration")
    assert steps.index(gone) < steps.index(written)


@pytest.mark.engine
def test_expressions_and_bare_references_reach_the_engine_as_such(engine_path: Path, tmp_path: Path) -> None:
    def make(request: RenderRequest) -> Fragment:
        lifecycle = {"ignore_changes": [Expr("triggers_replace")], "replace_triggered_by": []}
        resources = _machines(request, input=Expr("local.note"), lifecycle=lifecycle)
        resources["terraform_data"]["shared"] = {"input": "x"}
        for machine in request.machines:
            resources["terraform_data"][machine.resource_name]["depends_on"] = [Expr("terraform_data.shared")]
        return Fragment(
            resource=resources,
            locals={"note": {"n": Expr("1 + 1"), "s": "${literal}"}},
            output={"plain": Expr("local.note.n"), "hidden": {"value": "y", "sensitive": True}},
        )

    tofu = BareTofu(engine_path, tmp_path / "run")
    tofu.write(_render([control_plane()], providers={"tiny": Guest(make)}).files)
    tofu.apply()
    assert tofu.state["outputs"]["plain"]["value"] == 2
    assert tofu.state["outputs"]["hidden"]["sensitive"] is True
    machine = next(r for r in tofu.state["resources"] if r["name"] == "machine_control-1")
    assert machine["instances"][0]["attributes"]["input"]["value"] == {"n": 2, "s": "${literal}"}
    assert "terraform_data.shared" in machine["instances"][0]["dependencies"]


def test_escaping_touches_only_what_opens_a_template() -> None:
    assert escape("$x 100% {} $$ %%") == "$x 100% {} $$ %%"
    assert escape("${a}%{b}") == "$${a}%%{b}"


# ---------------------------------------------------------------- OpenTofu providers

_CLOUD = RequiredProvider("registry.opentofu.org/example/cloud", "~> 1.0")
_TIME = RequiredProvider("registry.opentofu.org/hashicorp/time", "~> 0.14")
_REQUIRED = {"cloud": _CLOUD, "time": _TIME}


def _cloud(request: RenderRequest) -> Fragment:
    return Fragment(
        resource=_machines(request, "cloud_instance") if request.machines else {},
        provider={"cloud": {"region": "here"}},
    )


def test_only_providers_that_are_used_are_required() -> None:
    rendered = _render([control_plane()], providers={"tiny": Guest(_cloud, _REQUIRED)})
    assert rendered.required == {"cloud": _CLOUD}
    assert _config(rendered)["terraform"]["required_providers"] == {
        "cloud": {"source": _CLOUD.source, "version": "~> 1.0"}
    }


def test_a_provider_that_only_state_still_needs_is_required_and_configured() -> None:
    providers = {"tiny": TinyProvider(), "cloud": Guest(_cloud, _REQUIRED)}
    sources = (_CLOUD.source, "terraform.io/builtin/terraform")
    rendered = _render([control_plane()], providers=providers, state_providers=sources)
    assert rendered.required == {"cloud": _CLOUD}
    assert _config(rendered)["provider"] == {"cloud": {"region": "here"}}


def test_state_of_a_provider_whose_plugin_is_gone_stops_the_render() -> None:
    with pytest.raises(RenderError, match=r"registry\.opentofu\.org/gone/gone"):
        _render([control_plane()], state_providers=("registry.opentofu.org/gone/gone",))


def test_a_provider_meta_argument_counts_as_use() -> None:
    def make(request: RenderRequest) -> Fragment:
        return Fragment(resource=_machines(request, "cloud_instance", provider=Expr("time.other")))

    rendered = _render([control_plane()], providers={"tiny": Guest(make, _REQUIRED)})
    assert set(rendered.required) == {"time"}
    machine = _config(rendered)["resource"]["cloud_instance"]["machine_control-1"]
    assert machine["provider"] == "time.other"


def test_two_plugins_that_want_one_provider_get_both_version_ranges() -> None:
    class Other(Guest):
        name: ClassVar[str] = "other"

    def shared(request: RenderRequest) -> Fragment:
        return Fragment(resource=_machines(request, "cloud_instance"))

    newer = {"cloud": RequiredProvider(_CLOUD.source, ">= 1.2")}
    providers = {"tiny": Guest(shared, _REQUIRED), "other": Other(shared, newer)}
    rendered = _render([control_plane(), group_doc(provider="other:")], providers=providers)
    assert rendered.required["cloud"].version == ">= 1.2, ~> 1.0"


# ---------------------------------------------------------------- what is refused


def test_a_provider_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(RenderError, match=r'"oci".*installed: tiny') as caught:
        _render([control_plane(), group_doc(provider="oci:A1")])
    assert caught.value.field == "spec.providerClass"


def test_a_config_that_its_provider_refuses_is_told_with_the_field() -> None:
    with pytest.raises(RenderError) as caught:
        _render([control_plane(), group_doc(image=7)])
    assert caught.value.field == "spec.providerConfig.image"
    assert "workers" in caught.value.message


def _raise(request: RenderRequest) -> Fragment:
    raise ZeroDivisionError("boom")


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else "x"


_RUBBISH: dict[str, tuple[Callable[[RenderRequest], Any], str]] = {
    "raises": (_raise, "ZeroDivisionError: boom"),
    "no fragment": (lambda request: {"resource": {}}, "returned dict"),
    "nothing": (lambda request: None, "returned NoneType"),
    "missing machine": (lambda request: Fragment(), "no resource for machine_control-1"),
    "stranger named like a machine": (
        lambda r: Fragment(resource=_machines(r) | {"terraform_data": {"machine_x": {}}}),
        "machine_x is named like a machine",
    ),
    "data named like a machine": (
        lambda r: Fragment(resource=_machines(r), data={"terraform_remote_state": {"machine_control-1": {}}}),
        "named like a machine",
    ),
    "one machine twice": (
        lambda r: Fragment(resource=_machines(r) | _machines(r, "tiny_x")),
        "are the same machine",
    ),
    "counted machine": (lambda r: Fragment(resource=_machines(r, count=2)), "count or for_each"),
    "the core's own name": (
        lambda r: Fragment(
            resource={"terraform_data": {**_machines(r)["terraform_data"], "declaration": {}}}
        ),
        "the core's own",
    ),
    "bad name": (lambda r: Fragment(resource={"terraform_data": {"1 x": {}}}), "no name for OpenTofu"),
    "body that is no mapping": (lambda r: Fragment(resource={"terraform_data": {"x": 3}}), "no mapping"),
    "section that is no mapping": (lambda r: Fragment(resource=[1]), "no mapping"),  # type: ignore[arg-type] # rubbish is the point
    "key that is no string": (lambda r: Fragment(resource=_machines(r, input={1: 2})), "key 1"),
    "a set": (lambda r: Fragment(resource=_machines(r, input={"a", "b"})), "JSON cannot carry"),
    "not a number": (lambda r: Fragment(resource=_machines(r, input=float("nan"))), "JSON cannot carry"),
    "lone surrogate": (lambda r: Fragment(resource=_machines(r, input="\ud800")), "not valid Unicode"),
    "endless nesting": (lambda r: Fragment(resource=_machines(r, input=_nested(100))), "nested too deeply"),
    "unnamed provider": (lambda r: Fragment(resource=_machines(r, "cloud_x")), "without naming it"),
    "output without value": (
        lambda r: Fragment(resource=_machines(r), output={"x": {"sensitive": True}}),
        "has no value",
    ),
}


@pytest.mark.parametrize(("make", "said"), _RUBBISH.values(), ids=_RUBBISH.keys())
def test_a_guest_that_renders_rubbish_is_refused_by_name(
    make: Callable[[RenderRequest], Any], said: str
) -> None:
    with pytest.raises(RenderError, match=said) as caught:
        _render([control_plane()], providers={"tiny": Guest(make)})
    assert 'provider "tiny"' in caught.value.message


def test_two_providers_may_not_render_the_same_address() -> None:
    class Other(Guest):
        name: ClassVar[str] = "other"

    def shared(request: RenderRequest) -> Fragment:
        resources = _machines(request)
        resources["terraform_data"]["network"] = {}
        return Fragment(resource=resources)

    providers = {"tiny": Guest(shared), "other": Other(shared)}
    with pytest.raises(RenderError, match=r'terraform_data\.network is already rendered by provider "other"'):
        _render([control_plane(), group_doc(provider="other:")], providers=providers)


@pytest.mark.parametrize(
    "required",
    [
        {"cloud": "~> 1"},
        {"cloud": RequiredProvider("example/cloud", "1")},
        {"cloud": RequiredProvider(_CLOUD.source, '1"')},
        ["cloud"],
    ],
)
def test_unusable_required_providers_are_refused(required: Any) -> None:
    with pytest.raises(RenderError, match="required_providers"):
        _render([control_plane()], providers={"tiny": Guest(_cloud, required)})


def test_a_guest_never_sees_the_document_that_is_stored() -> None:
    class Greedy(TinyProvider):
        def render(self, *, request: RenderRequest) -> Fragment:
            request.machines[0].config["note"] = "changed"  # type: ignore[index] # what a careless guest may do
            return super().render(request=request)

        def project(self, *, resource: TfResource) -> MachineFacts | None:
            return None

    group = control_plane() | {"spec": group_doc("control", 1, role="controlplane", note="typed")["spec"]}
    _render([group], providers={"tiny": Greedy()})
    assert group["spec"]["providerConfig"]["note"] == "typed"
