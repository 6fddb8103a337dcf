"""Names, selectors, conditions, times, and the one translation between wire and Python."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from enum import StrEnum

import pytest

from rezuscloud.model.meta import (
    Condition,
    SelectorError,
    camel,
    canonical_json,
    digest,
    format_time,
    from_wire,
    get_path,
    is_dns_label,
    is_dns_subdomain,
    is_label_value,
    is_qualified_name,
    parse_field_selector,
    parse_label_selector,
    parse_time,
    set_condition,
    snake,
    to_wire,
)

NOW = dt.datetime(2026, 12, 1, 12, 0, tzinfo=dt.UTC)
LATER = NOW + dt.timedelta(hours=1)


def labelled(**labels: str) -> dict[str, object]:
    return {"metadata": {"name": "x", "labels": labels}}


@pytest.mark.parametrize(
    ("selector", "matching", "other"),
    [
        ("env=home", {"env": "home"}, {"env": "work"}),
        ("env==home", {"env": "home"}, {}),
        ("env!=home", {}, {"env": "home"}),
        ("env in (home, lab)", {"env": "lab"}, {"env": "work"}),
        ("env notin (home)", {}, {"env": "home"}),
        ("env", {"env": ""}, {}),
        ("!env", {}, {"env": "x"}),
        ("size>3", {"size": "4"}, {"size": "3"}),
        ("size<3", {"size": "2"}, {"size": "x"}),
        ("env=home,tier=web", {"env": "home", "tier": "web"}, {"env": "home"}),
        ("env in (a,b),tier", {"env": "b", "tier": "x"}, {"env": "b"}),
        ("env=", {"env": ""}, {"env": "x"}),
        ("a.example.org/b=c", {"a.example.org/b": "c"}, {}),
    ],
)
def test_label_selectors_mean_what_kubernetes_means(
    selector: str, matching: dict[str, str], other: dict[str, str]
) -> None:
    matches = parse_label_selector(selector)
    assert matches(labelled(**matching))
    assert not matches(labelled(**other))


@pytest.mark.parametrize(
    "selector", ["a=b=c", "=x", "a in b", "a in (b", "-a=b", "a=b c", "a>x", "a in (b))"]
)
def test_a_label_selector_that_cannot_be_read_is_refused(selector: str) -> None:
    with pytest.raises(SelectorError):
        parse_label_selector(selector)


def test_an_empty_selector_matches_everything() -> None:
    assert parse_label_selector("")(labelled())
    assert parse_field_selector("", ())(labelled())


def test_field_selectors_ignore_a_trailing_comma_and_match_what_is_absent_with_nothing() -> None:
    matches = parse_field_selector("metadata.name=x,", ["metadata.name"])
    assert matches({"metadata": {"name": "x"}})
    absent = parse_field_selector("involvedObject.namespace=", ["involvedObject.namespace"])
    assert absent({"metadata": {}, "involvedObject": {}})
    assert not absent({"metadata": {}, "involvedObject": {"namespace": "t"}})


def test_field_selectors_compare_booleans_and_numbers_as_text() -> None:
    doc = {"metadata": {}, "spec": {"paused": True, "slot": 2}}
    assert parse_field_selector("spec.paused=true,spec.slot!=3", ["spec.paused", "spec.slot"])(doc)


@pytest.mark.parametrize("selector", ["spec.foo=1", "metadata.name", "metadata.name>1"])
def test_a_field_selector_outside_of_what_is_supported_is_refused(selector: str) -> None:
    with pytest.raises(SelectorError):
        parse_field_selector(selector, ["metadata.name"])


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [
        ("a", True),
        ("a-1", True),
        ("1a", True),
        ("a" * 63, True),
        ("a" * 64, False),
        ("-a", False),
        ("a-", False),
        ("A", False),
        ("a.b", False),
        ("", False),
        ("ä", False),
        ("a\n", False),
    ],
)
def test_dns_labels(name: str, is_valid: bool) -> None:
    assert is_dns_label(name) is is_valid


def test_other_names() -> None:
    assert is_dns_subdomain("a.b-c.d") and not is_dns_subdomain("a..b") and not is_dns_subdomain("")
    assert is_qualified_name("example.org/A_b.c") and is_qualified_name("a")
    assert not is_qualified_name("/a") and not is_qualified_name("a/") and not is_qualified_name("a/b/c")
    assert is_label_value("") and is_label_value("a.B_c-1") and not is_label_value("-a")


def condition(status: str, reason: str = "R") -> Condition:
    return Condition("Ready", status, reason, "m", 1)


def test_a_condition_changes_its_time_only_with_its_status() -> None:
    first = set_condition([], condition("False"), NOW)
    same = set_condition(first, condition("False", "Other"), LATER)
    changed = set_condition(same, condition("True"), LATER)
    assert first[0]["lastTransitionTime"] == same[0]["lastTransitionTime"] == format_time(NOW)
    assert same[0]["reason"] == "Other"
    assert changed[0]["lastTransitionTime"] == format_time(LATER)


def test_conditions_keep_their_order() -> None:
    conditions = [{"type": "A", "status": "True"}, *set_condition([], condition("False"), NOW), {"type": "Z"}]
    changed = set_condition(conditions, condition("True"), NOW)
    assert [c["type"] for c in changed] == ["A", "Ready", "Z"]


def test_times_are_read_in_any_rfc_3339_form_and_written_in_one() -> None:
    for text in ("2026-12-01T12:00:00Z", "2026-12-01T13:00:00.123456+01:00"):
        assert format_time(parse_time(text)) == "2026-12-01T12:00:00Z"
    with pytest.raises(ValueError, match="without offset"):
        parse_time("2026-12-01T12:00:00")


def test_equal_values_have_equal_bytes_and_digests() -> None:
    assert canonical_json({"b": 1, "a": [True, None]}) == b'{"a":[true,null],"b":1}'
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_names_are_translated_in_both_directions() -> None:
    for pair in (
        ("node_group", "nodeGroup"),
        ("provider_id", "providerId"),
        ("a", "a"),
        ("pod_subnets", "podSubnets"),
    ):
        assert camel(pair[0]) == pair[1]
        assert snake(pair[1]) == pair[0]


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    some_number: int


@dataclass(frozen=True)
class Outer:
    the_colour: Colour
    inner_ones: tuple[Inner, ...] = ()
    at: dt.datetime | None = None
    maybe: Inner | None = None


def test_dataclasses_come_back_from_the_wire_as_they_went() -> None:
    outer = Outer(Colour.RED, (Inner(1), Inner(2)), NOW)
    wire = to_wire(outer)
    assert wire == {
        "theColour": "red",
        "innerOnes": [{"someNumber": 1}, {"someNumber": 2}],
        "at": "2026-12-01T12:00:00Z",
    }
    assert from_wire(Outer, wire) == outer
    with pytest.raises(KeyError, match="theColour"):
        from_wire(Outer, {})


def test_a_path_through_what_is_not_there_is_nothing() -> None:
    assert get_path({"a": {"b": 0}}, "a.b") == 0
    assert get_path({"a": 1}, "a.b.c") is None
