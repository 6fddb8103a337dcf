"""Owns what a plan means for a cluster: the engine's messages as machines added, changed, replaced, removed.

Pure. It reads the typed stream of `tofu plan` and says what must be approved and why; it neither runs plans
nor decides who may approve. Machines are recognised by their resource's name, `machine_<name>`.
Decision: ADR 0006.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rezuscloud.model.errors import InternalError
from rezuscloud.model.meta import Doc
from rezuscloud.model.operations import MachineAction, PlannedMachine, PlanSummary, Risk
from rezuscloud.tofu.messages import Message
from rezuscloud.tofu.render import DECLARATION, MACHINE_PREFIX

_ACTIONS = {
    "create": MachineAction.ADD,
    "update": MachineAction.CHANGE,
    "move": MachineAction.CHANGE,
    "import": MachineAction.CHANGE,
    "replace": MachineAction.REPLACE,
    # The stream writes "noop" for "forget the old one, create a new one", and for nothing else.
    "noop": MachineAction.REPLACE,
    "delete": MachineAction.REMOVE,
    "remove": MachineAction.REMOVE,
}
_LOSES = frozenset({MachineAction.REPLACE, MachineAction.REMOVE})
_REASONS = {
    "tainted": "its last creation did not finish",
    "requested": "its replacement was asked for",
    "cannot_update": "a changed setting cannot change in place",
    "replace_triggered_by": "something that it is bound to changes",
    "delete_because_no_resource_config": "it is no longer declared",
}
_SHOWN_NAMES = 10


@dataclass(frozen=True)
class _Change:
    address: str
    machine: str
    """Name of the machine, "" for any other resource."""
    action: str
    """As the engine writes it."""
    reason: str

    @property
    def effect(self) -> MachineAction:
        """An action that we do not know yet counts as the worst one."""
        return _ACTIONS.get(self.action, MachineAction.REPLACE)


def summarize(
    messages: Iterable[Message],
    *,
    plan_id: str,
    wanted: Collection[str],
    destroy: bool,
    unfinished: Collection[str] = (),
) -> PlanSummary:
    """The plan in cluster language. `wanted` are the names of all declared machines.

    A machine that goes although it is declared, or is replaced, makes the plan dangerous. In a plan that
    destroys the tenant every machine was asked to go. `unfinished` are machines whose creation never ended:
    the caller knows that nothing is lost when they are made again. A stream that is not whole is never
    trusted: its plan must be approved.
    """
    messages = list(messages)
    changes = [change for change in _changes(messages, "planned_change") if change.action != "read"]
    drift = {change.address for change in _changes(messages, "resource_drift")}
    machines = _machines(changes, drift)
    asked_to_stay = frozenset() if destroy else frozenset(wanted)
    guard = [*_incomplete(messages, changes), *_lost(machines, asked_to_stay, unfinished)]
    lost = [machine for machine in machines if machine.action in _LOSES]
    others = [change for change in changes if not change.machine and change.address != DECLARATION]
    if guard:
        risk = Risk.DANGEROUS
    elif lost:
        risk = Risk.REMOVES
    else:
        risk = Risk.LOW if changes else Risk.NONE
    return PlanSummary(
        id=plan_id,
        summary=_sentence(machines, others, has_changes=bool(changes)),
        machines=tuple(machines),
        risk=risk,
        destroys=len(lost),
        changes=len(changes),
        guard=tuple(guard),
    )


def _changes(messages: Sequence[Message], kind: str) -> Iterator[_Change]:
    for message in messages:
        change = message.data.get("change")
        if message.type != kind or not isinstance(change, Mapping):
            continue
        resource: Mapping[str, Any] = change.get("resource") or {}
        name, address = str(resource.get("resource_name", "")), message.address
        is_machine = name.startswith(MACHINE_PREFIX) and not address.startswith("data.")
        yield _Change(
            address=address,
            machine=name.removeprefix(MACHINE_PREFIX) if is_machine else "",
            action=str(change.get("action", "")),
            reason=str(change.get("reason", "")),
        )


def _machines(changes: Sequence[_Change], drift: Collection[str]) -> list[PlannedMachine]:
    """One entry a machine. Two resources of one name (its provider or type changed) are a replacement."""
    found: dict[str, PlannedMachine] = {}
    for change in changes:
        if not change.machine:
            continue
        action, reason = change.effect, _reason(change, has_drifted=change.address in drift)
        if (other := found.get(change.machine)) and other.action is not action:
            action, reason = MachineAction.REPLACE, "it is made anew as another resource"
        found[change.machine] = PlannedMachine(change.machine, action, reason)
    return sorted(found.values(), key=lambda machine: _natural(machine.name))


def _reason(change: _Change, *, has_drifted: bool) -> str:
    if change.reason:
        return _REASONS.get(change.reason, change.reason.replace("_", " "))
    match change.effect:
        case MachineAction.ADD:
            return "it vanished outside of RezusCloud" if has_drifted else "it is declared and not there yet"
        case MachineAction.CHANGE:
            return "it was changed outside of RezusCloud" if has_drifted else "a setting of it changed"
        case MachineAction.REMOVE:
            return "the tenant is deleted"
        case MachineAction.REPLACE:
            return "the engine forgets the old one and makes a new one"


def _lost(
    machines: Sequence[PlannedMachine], asked_to_stay: Collection[str], unfinished: Collection[str]
) -> Iterator[str]:
    for machine in machines:
        if machine.action is MachineAction.REPLACE and machine.name not in unfinished:
            yield f"replaces machine {machine.name} and all that is on it, because {machine.reason}"
        elif machine.action is MachineAction.REMOVE and machine.name in asked_to_stay:
            yield f"removes machine {machine.name}, which is still declared"


def _incomplete(messages: Sequence[Message], changes: Sequence[_Change]) -> Iterator[str]:
    """The engine ends a plan with its own count; a stream that disagrees has lost lines."""
    counts: Mapping[str, Any] = {}
    for message in messages:
        counted = message.data.get("changes")
        if (
            message.type == "change_summary"
            and isinstance(counted, Mapping)
            and counted.get("operation") == "plan"
        ):
            counts = counted
    actions = [change.action for change in changes]
    seen = {
        "add": actions.count("create") + actions.count("replace") + actions.count("noop"),
        "change": actions.count("update"),
        "remove": actions.count("delete") + actions.count("replace"),
    }
    if not counts:
        yield "the engine did not finish its account of this plan; look at the whole plan first"
    elif any(counts.get(key) != count for key, count in seen.items()):
        yield "the engine's account of this plan is not whole; look at the whole plan first"


# ---------------------------------------------------------------- the whole plan

MASK = "(sensitive value)"
_TELLING = 6
"""Shorter texts are only masked where they stand alone: "on" would black out half a plan."""
_SIDES = ("before", "after")
_CHANGE_KEYS = ("address", "mode", "type", "name", "index", "provider_name", "deposed", "action_reason")


def masked_changes(plan: Doc) -> Doc:
    """What `show -json` tells of a saved plan, cut down to its changes, with sensitive values masked.

    All else in there (variables, configuration, whole states) repeats values in clear. The engine's marks do
    not follow a value everywhere (a `terraform_data` copies its input to an unmarked output), so a text that
    is sensitive in one place is masked in all. Raises InternalError for a format that is not known.
    """
    version = str(plan.get("format_version"))
    if version.partition(".")[0] != "1":
        raise InternalError(
            f"the engine writes plans in format {version}; this server reads 1.x. The plan is kept; "
            "its summary still holds."
        )
    resources = {key: plan.get(key) or [] for key in ("resource_changes", "resource_drift")}
    outputs: Doc = plan.get("output_changes") or {}
    changes = [each["change"] for listed in resources.values() for each in listed] + list(outputs.values())
    sides = [(change.get(side), change.get(f"{side}_sensitive")) for change in changes for side in _SIDES]
    secrets = {text for value, marks in sides for text in _secret_texts(value, marks) if text}
    masked: Doc = {"format_version": version, "errored": bool(plan.get("errored"))}
    for key, listed in resources.items():
        masked[key] = [
            {name: each[name] for name in _CHANGE_KEYS if name in each}
            | {"change": _masked_change(each["change"], secrets)}
            for each in listed
        ]
    masked["output_changes"] = {name: _masked_change(each, secrets) for name, each in outputs.items()}
    return masked


def _masked_change(change: Mapping[str, Any], secrets: Collection[str]) -> Doc:
    masked: Doc = {"actions": change["actions"]}
    for side in _SIDES:
        masked[side] = _masked(change.get(side), change.get(f"{side}_sensitive"), secrets)
    return masked | {key: change[key] for key in ("after_unknown", "replace_paths") if key in change}


def _secret_texts(value: Any, marks: Any) -> Iterator[str]:
    """All text that the engine marks. `marks` has the shape of the value, with true where it is sensitive."""
    if marks is True and isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for item, mark in _with_marks(value, marks):
            yield from _secret_texts(item, mark)


def _masked(value: Any, marks: Any, secrets: Collection[str]) -> Any:
    if marks is True:
        return None if value is None else MASK
    if isinstance(value, Mapping):
        pairs = zip(value, _with_marks(value, marks), strict=True)
        return {key: _masked(item, mark, secrets) for key, (item, mark) in pairs}
    if isinstance(value, list):
        return [_masked(item, mark, secrets) for item, mark in _with_marks(value, marks)]
    if isinstance(value, str) and any(
        text == value or (len(text) >= _TELLING and text in value) for text in secrets
    ):
        return MASK
    return value


def _with_marks(value: Mapping[str, Any] | list[Any], marks: Any) -> list[tuple[Any, Any]]:
    """The items of a value, each with its part of the marks."""
    if isinstance(value, Mapping):
        return [(v, marks.get(k) if isinstance(marks, Mapping) else marks) for k, v in value.items()]
    each = marks if isinstance(marks, list) else [marks] * len(value)
    return list(zip_longest(value, each[: len(value)]))


# ---------------------------------------------------------------- words

_VERBS = {
    MachineAction.ADD: "adds",
    MachineAction.CHANGE: "changes",
    MachineAction.REPLACE: "replaces",
    MachineAction.REMOVE: "removes",
}


def _sentence(machines: Sequence[PlannedMachine], others: Sequence[_Change], *, has_changes: bool) -> str:
    if not has_changes:
        return "changes nothing"
    parts = []
    for action, verb in _VERBS.items():
        suffix = " in place" if action is MachineAction.CHANGE else ""
        if names := [machine.name for machine in machines if machine.action is action]:
            parts.append(f"{verb} {_count(len(names), 'machine')}{suffix} ({_listed(names)})")
    for action, verb in _VERBS.items():
        if addresses := [change.address for change in others if change.effect is action]:
            parts.append(f"{verb} {_count(len(addresses), 'other resource')} ({_listed(addresses)})")
    if not parts:
        return "changes no machine, only the declaration"
    return ", ".join(parts) + ", changes nothing else"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _natural(name: str) -> list[tuple[int, str]]:
    """workers-2 before workers-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
