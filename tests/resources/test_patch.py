"""The two patch languages, by the examples of their RFCs and beyond."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rezuscloud.model.errors import BadRequest, Invalid, TooLarge, UnsupportedMediaType
from rezuscloud.resources.patch import JSON_PATCH, MERGE_PATCH, apply_operations, apply_patch, merge


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_follows_the_examples_of_rfc_7396(target: Any, patch: Any, result: Any) -> None:
    before = copy.deepcopy(target)
    assert merge(target, patch) == result
    assert target == before


@pytest.mark.parametrize(
    ("target", "operations", "result"),
    [
        ({"foo": "bar"}, [{"op": "add", "path": "/baz", "value": "qux"}], {"foo": "bar", "baz": "qux"}),
        (
            {"foo": ["bar", "baz"]},
            [{"op": "add", "path": "/foo/1", "value": "qux"}],
            {"foo": ["bar", "qux", "baz"]},
        ),
        ({"foo": ["bar"]}, [{"op": "add", "path": "/foo/-", "value": ["a"]}], {"foo": ["bar", ["a"]]}),
        ({"baz": "qux", "foo": "bar"}, [{"op": "remove", "path": "/baz"}], {"foo": "bar"}),
        ({"foo": [1, 2, 3]}, [{"op": "remove", "path": "/foo/1"}], {"foo": [1, 3]}),
        ({"a": 1}, [{"op": "replace", "path": "/a", "value": 2}], {"a": 2}),
        (
            {"foo": {"bar": "baz", "waldo": "fred"}, "qux": {"corge": "grault"}},
            [{"op": "move", "from": "/foo/waldo", "path": "/qux/thud"}],
            {"foo": {"bar": "baz"}, "qux": {"corge": "grault", "thud": "fred"}},
        ),
        ({"a": [1, 2, 3]}, [{"op": "move", "from": "/a/0", "path": "/a/2"}], {"a": [2, 3, 1]}),
        ({"a": {"b": 1}}, [{"op": "copy", "from": "/a", "path": "/c"}], {"a": {"b": 1}, "c": {"b": 1}}),
        ({"a": 10}, [{"op": "test", "path": "/a", "value": 10.0}], {"a": 10}),
        ({"/": 9, "~1": 10}, [{"op": "test", "path": "/~01", "value": 10}], {"/": 9, "~1": 10}),
        ({"a": 1}, [{"op": "replace", "path": "", "value": {"b": 2}}], {"b": 2}),
        ({"a": None}, [{"op": "test", "path": "/a", "value": None}], {"a": None}),
    ],
)
def test_json_patch_follows_the_examples_of_rfc_6902(target: Any, operations: Any, result: Any) -> None:
    before = copy.deepcopy(target)
    assert apply_operations(target, operations) == result
    assert target == before


@pytest.mark.parametrize(
    "operations",
    [
        [{"op": "test", "path": "/a", "value": 2}],
        [{"op": "test", "path": "/a", "value": True}],
        [{"op": "remove", "path": "/missing"}],
        [{"op": "replace", "path": "/missing", "value": 1}],
        [{"op": "add", "path": "/missing/x", "value": 1}],
        [{"op": "add", "path": "/list/7", "value": 1}],
        [{"op": "add", "path": "/list/01", "value": 1}],
        [{"op": "add", "path": "/a/b", "value": 1}],
        [{"op": "remove", "path": "/list/-"}],
        [{"op": "remove", "path": ""}],
        [{"op": "move", "from": "/deep", "path": "/deep/er"}],
    ],
)
def test_a_json_patch_that_does_not_fit_is_invalid_and_changes_nothing(operations: Any) -> None:
    target = {"a": 1, "list": [1], "deep": {}}
    before = copy.deepcopy(target)
    with pytest.raises(Invalid, match="operation 0"):
        apply_operations(target, operations)
    assert target == before


@pytest.mark.parametrize(
    "operations",
    [
        {},
        [1],
        [{"op": "jump", "path": "/a"}],
        [{"op": "add", "path": "a", "value": 1}],
        [{"op": "add"}],
        ["x"],
    ],
)
def test_a_json_patch_that_cannot_be_read_is_a_bad_request(operations: Any) -> None:
    with pytest.raises(BadRequest):
        apply_operations({"a": 1}, operations)


def test_copies_of_copies_cannot_grow_without_bound() -> None:
    doubling = [{"op": "copy", "from": "", "path": f"/x{n}"} for n in range(64)]
    with pytest.raises((TooLarge, BadRequest)):
        apply_operations({"seed": "x" * 1000}, doubling)


def test_other_patch_languages_are_refused_with_those_that_are_understood() -> None:
    with pytest.raises(UnsupportedMediaType, match=r"merge-patch\+json"):
        apply_patch({}, {}, "application/strategic-merge-patch+json")
    assert apply_patch({"a": 1}, {"a": None}, f"{MERGE_PATCH}; charset=utf-8") == {}
    with pytest.raises(Invalid):
        apply_patch({"a": 1}, [{"op": "replace", "path": "", "value": 3}], JSON_PATCH)
