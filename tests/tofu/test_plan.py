"""A plan is told in cluster language, from recordings of the real engine's stream (OpenTofu 1.12.6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rezuscloud.model.errors import InternalError
from rezuscloud.model.meta import Doc
from rezuscloud.model.operations import MachineAction, PlanSummary, Risk
from rezuscloud.plugin.types import Fragment, Provider, RenderRequest
from rezuscloud.tofu.messages import Message, parse_line
from rezuscloud.tofu.plan import MASK, masked_changes, summarize
from rezuscloud.tofu.render import render
from tests.support.bare_tofu import BareTofu
from tests.support.tiny_provider import (
    TinyProvider,
    content_and_pins,
    control_plane,
    group_doc,
    tenant_doc,
)


def _change(name: str, action: str, reason: str = "", *, type_: str = "terraform_data") -> str:
    """A planned_change line as the engine writes it, without what nobody reads."""
    resource = {"addr": f"{type_}.{name}", "resource_type": type_, "resource_name": name}
    change: Doc = {"resource": resource, "action": action}
    return json.dumps({"type": "planned_change", "change": change | ({"reason": reason} if reason else {})})


def _total(add: int = 0, change: int = 0, remove: int = 0, forget: int = 0) -> str:
    changes = {"add": add, "change": change, "import": 0, "remove": remove, "forget": forget}
    return json.dumps({"type": "change_summary", "changes": changes | {"operation": "plan"}})


_GONE = "delete_because_no_resource_config"
DECLARATION = _change("declaration", "update")
RECORDED = {
    "new": [
        *(_change(f"machine_{name}", "create") for name in ("workers-2", "control-1", "workers-1")),
        _change("declaration", "create"),
        _total(add=4),
    ],
    "nothing": [_total()],
    "labels": [DECLARATION, _total(change=1)],
    "grow and change": [
        _change("machine_workers-3", "create"),
        _change("machine_workers-1", "update"),
        _change("machine_workers-2", "update"),
        DECLARATION,
        _total(add=1, change=3),
    ],
    "other image": [
        *(_change(f"machine_workers-{slot}", "replace", "cannot_update") for slot in (2, 3, 1)),
        DECLARATION,
        _total(add=3, change=1, remove=3),
    ],
    "shrink": [_change("machine_workers-3", "delete", _GONE), DECLARATION, _total(change=1, remove=1)],
    "tainted": [
        _change("machine_more-1", "replace", "tainted"),
        DECLARATION,
        _total(add=1, change=1, remove=1),
    ],
    "requested": [_change("machine_control-1", "replace", "requested"), _total(add=1, remove=1)],
    "forget and create": [
        *(_change(f"machine_workers-{slot}", "noop", "cannot_update") for slot in (1, 2)),
        DECLARATION,
        _total(add=2, change=1, forget=2),
    ],
    "forget": [
        _change("machine_more-1", "remove", "forgot_because_lifecycle_destroy_in_state"),
        DECLARATION,
        _total(change=1, forget=1),
    ],
    "destroy": [
        _change("declaration", "delete"),
        *(_change(f"machine_{name}", "delete") for name in ("more-1", "control-1", "workers-2", "workers-1")),
        _total(remove=5),
    ],
}
WANTED = frozenset({"control-1", "workers-1", "workers-2", "workers-3"})


def _messages(lines: list[str]) -> list[Message]:
    return [message for message in (parse_line(line.encode()) for line in lines) if message]


def _summarize(lines: list[str], **kwargs: Any) -> PlanSummary:
    arguments: dict[str, Any] = {"plan_id": "p1", "wanted": WANTED, "destroy": False} | kwargs
    return summarize(_messages(lines), **arguments)


# ---------------------------------------------------------------- recordings


class _Kept(TinyProvider):
    """Machines that OpenTofu forgets instead of destroying them."""

    name: ClassVar[str] = "tiny"

    def render(self, *, request: RenderRequest) -> Fragment:
        fragment = super().render(request=request)
        for body in fragment.resource["terraform_data"].values():
            body["lifecycle"] = {"destroy": False}
        return fragment


def _record(
    tofu: BareTofu, groups: list[Doc], *args: str, provider: Provider | None = None, **labels: str
) -> list[str]:
    tenant = tenant_doc(labels=labels) if labels else tenant_doc()
    providers = {"tiny": provider or TinyProvider()}
    rendered = render(
        tenant, groups, **content_and_pins(tenant, groups), providers=providers, encrypted=False
    )
    tofu.write(rendered.files)
    lines = []
    for message in tofu.plan(*args):
        if message.type == "planned_change":
            change = message.data["change"]
            resource = change["resource"]
            assert message.address == f"{resource['resource_type']}.{resource['resource_name']}"
            lines.append(_change(resource["resource_name"], change["action"], change.get("reason", "")))
        elif message.type == "change_summary":
            lines.append(json.dumps({"type": message.type, "changes": message.data["changes"]}))
    return lines


@pytest.mark.engine
@pytest.mark.slow
def test_the_recordings_are_what_the_engine_says(engine_path: Path, tmp_path: Path) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    control, said = control_plane(), {}
    workers, three = group_doc(), group_doc("workers", 3, note="x")
    two = group_doc("workers", 2, note="x")

    said["new"] = _record_first(tofu, [control, workers])
    said["nothing"] = _record(tofu, [control, workers])
    said["labels"] = _record(tofu, [control, workers], env="home")
    said["grow and change"] = _record(tofu, [control, three])
    tofu.run("apply", "plan.bin")
    said["other image"] = _record(tofu, [control, group_doc("workers", 3, note="x", image="v2")])
    said["shrink"] = _record(tofu, [control, two])
    _record(tofu, [control, two, group_doc("more", 1, fail=True)])
    tofu.run("apply", "plan.bin", code=1)
    more = [control, two, group_doc("more", 1)]
    said["tainted"] = _record(tofu, more)
    tofu.run("apply", "plan.bin")
    said["requested"] = _record(tofu, more, "-replace=terraform_data.machine_control-1")
    said["destroy"] = _record(tofu, more, "-destroy")
    _record(tofu, more, provider=_Kept())
    tofu.run("apply", "plan.bin")
    newer = [control, group_doc("workers", 2, note="x", image="v3"), more[2]]
    said["forget and create"] = _record(tofu, newer, provider=_Kept())
    said["forget"] = _record(tofu, [control, two], provider=_Kept())

    # Resources without an order among them come in any order.
    assert {name: sorted(lines) for name, lines in said.items()} == {
        name: sorted(lines) for name, lines in RECORDED.items()
    }


def _record_first(tofu: BareTofu, groups: list[Doc]) -> list[str]:
    tofu.run("init")
    lines = _record(tofu, groups)
    tofu.run("apply", "plan.bin")
    return lines


# ---------------------------------------------------------------- summaries


@pytest.mark.parametrize(
    ("recording", "risk", "destroys", "changes", "summary"),
    [
        ("new", Risk.LOW, 0, 4, "adds 3 machines (control-1, workers-1, workers-2), changes nothing else"),
        ("nothing", Risk.NONE, 0, 0, "changes nothing"),
        ("labels", Risk.LOW, 0, 1, "changes no machine, only the declaration"),
        (
            "grow and change",
            Risk.LOW,
            0,
            4,
            "adds 1 machine (workers-3), changes 2 machines in place (workers-1, workers-2), "
            "changes nothing else",
        ),
        (
            "other image",
            Risk.DANGEROUS,
            3,
            4,
            "replaces 3 machines (workers-1, workers-2, workers-3), changes nothing else",
        ),
    ],
)
def test_a_plan_is_told_by_what_happens_to_machines(
    recording: str, risk: Risk, destroys: int, changes: int, summary: str
) -> None:
    told = _summarize(RECORDED[recording])
    assert (told.risk, told.destroys, told.changes, told.summary) == (risk, destroys, changes, summary)
    assert bool(told.guard) == (risk is Risk.DANGEROUS)
    assert told.id == "p1"


def test_a_machine_that_was_asked_to_go_needs_no_approval() -> None:
    told = _summarize(RECORDED["shrink"], wanted=WANTED - {"workers-3"})
    assert (told.risk, told.destroys, told.guard) == (Risk.REMOVES, 1, ())
    (machine,) = told.machines
    assert (machine.action, machine.reason) == (MachineAction.REMOVE, "it is no longer declared")
    assert told.summary == "removes 1 machine (workers-3), changes nothing else"


def test_a_declared_machine_that_goes_must_be_approved() -> None:
    told = _summarize(RECORDED["shrink"])
    assert told.risk is Risk.DANGEROUS
    assert told.guard == ("removes machine workers-3, which is still declared",)


def test_each_replacement_must_be_approved_with_its_reason() -> None:
    told = _summarize(RECORDED["requested"])
    assert told.guard == (
        "replaces machine control-1 and all that is on it, because its replacement was asked for",
    )


def test_a_creation_that_never_ended_may_be_repeated_when_the_caller_knows_that() -> None:
    assert _summarize(RECORDED["tainted"]).risk is Risk.DANGEROUS
    told = _summarize(RECORDED["tainted"], unfinished={"more-1"})
    assert (told.risk, told.guard, told.destroys) == (Risk.REMOVES, (), 1)
    assert told.machines[0].reason == "its last creation did not finish"


def test_deleting_a_tenant_approves_its_own_destroy() -> None:
    told = _summarize(RECORDED["destroy"], destroy=True)
    assert (told.risk, told.destroys, told.changes, told.guard) == (Risk.REMOVES, 4, 5, ())
    assert {machine.reason for machine in told.machines} == {"the tenant is deleted"}
    assert told.summary.startswith("removes 4 machines (control-1, more-1, workers-1, workers-2)")


def test_forgetting_a_machine_and_making_another_is_a_replacement_though_the_engine_says_noop() -> None:
    told = _summarize(RECORDED["forget and create"])
    assert [machine.action for machine in told.machines] == [MachineAction.REPLACE] * 2
    assert told.risk is Risk.DANGEROUS


def test_a_forgotten_machine_is_a_removed_one() -> None:
    assert _summarize(RECORDED["forget"]).machines[0].action is MachineAction.REMOVE


def test_a_machine_that_becomes_another_type_of_resource_is_replaced() -> None:
    lines = [
        _change("machine_workers-1", "delete", _GONE),
        _change("machine_workers-1", "create", type_="tiny_instance"),
        _total(add=1, remove=1),
    ]
    for order in (lines, [lines[1], lines[0], lines[2]]):
        told = _summarize(order)
        assert [machine.action for machine in told.machines] == [MachineAction.REPLACE]
        assert (told.destroys, told.changes, told.risk) == (1, 2, Risk.DANGEROUS)


def test_an_action_that_is_not_known_yet_counts_as_a_replacement() -> None:
    told = _summarize([_change("machine_workers-1", "transmogrify"), _total()])
    assert told.machines[0].action is MachineAction.REPLACE
    assert told.risk is Risk.DANGEROUS


def test_a_stream_that_was_cut_or_has_lost_lines_must_be_approved() -> None:
    for lines in (RECORDED["other image"][1:], RECORDED["new"][:-1], []):
        told = _summarize(lines, wanted=())
        assert told.risk is Risk.DANGEROUS
        assert "look at the whole plan first" in told.guard[0]


def test_other_resources_are_told_apart_from_machines() -> None:
    lines = [
        _change("network", "create", type_="tiny_network"),
        _change("old", "delete", type_="tiny_network"),
        _change("machine_x", "read", type_="data.tiny_image"),
        _total(add=1, remove=1),
    ]
    told = _summarize(lines)
    assert told.machines == ()
    assert (told.changes, told.risk) == (2, Risk.LOW)
    assert told.summary == (
        "adds 1 other resource (tiny_network.network), "
        "removes 1 other resource (tiny_network.old), changes nothing else"
    )


def test_a_long_list_of_machines_is_cut_and_counted_in_natural_order() -> None:
    lines = [_change(f"machine_w-{slot}", "create") for slot in range(12, 0, -1)] + [_total(add=12)]
    told = _summarize(lines)
    assert told.summary.startswith("adds 12 machines (w-1, w-2, w-3,")
    assert told.summary.endswith("w-10 and 2 more), changes nothing else")


def test_drift_is_given_as_the_reason() -> None:
    drifted = [
        _change("machine_workers-1", "delete").replace("planned_change", "resource_drift"),
        _change("machine_workers-2", "update").replace("planned_change", "resource_drift"),
    ]
    repair = [_change("machine_workers-1", "create"), _change("machine_workers-2", "update")]
    told = _summarize([*drifted, *repair, _total(add=1, change=1)])
    assert [machine.reason for machine in told.machines] == [
        "it vanished outside of RezusCloud",
        "it was changed outside of RezusCloud",
    ]
    assert told.risk is Risk.LOW


# ---------------------------------------------------------------- the whole plan


@pytest.mark.engine
def test_a_shown_plan_keeps_its_changes_and_masks_what_is_sensitive(
    engine_path: Path, tmp_path: Path
) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    config = {
        "variable": {"secret": {"type": "string", "default": "hunter2", "sensitive": True}},
        "resource": {"terraform_data": {"x": {"input": {"open": "seen", "hidden": ["a", "${var.secret}"]}}}},
        "output": {"o": {"value": "${var.secret}", "sensitive": True}},
    }
    tofu.write({"x.tf.json": json.dumps(config).encode()})
    tofu.apply()
    tofu.plan("-replace=terraform_data.x")
    shown = json.loads(tofu.run("show", "-json", "plan.bin").stdout)
    assert "hunter2" in json.dumps(shown)

    masked = masked_changes(shown)

    assert "hunter2" not in json.dumps(masked)
    (change,) = masked["resource_changes"]
    assert (change["address"], change["action_reason"]) == ("terraform_data.x", "replace_by_request")
    assert change["change"]["actions"] == ["delete", "create"]
    assert change["change"]["before"]["input"] == {"open": "seen", "hidden": ["a", MASK]}


def test_a_plan_in_an_unknown_format_is_refused() -> None:
    with pytest.raises(InternalError, match=r"format 2\.0"):
        masked_changes({"format_version": "2.0"})
