from __future__ import annotations

import json

import pytest

from rezuscloud.model.errors import BadRequest
from rezuscloud.resources.state_text import decode_state, read_facts, without_payload
from tests.support.tfstate import LINEAGE, state


def test_facts_are_read_from_compact_text() -> None:
    facts = read_facts(state(7, resources=3))
    assert (facts.serial, facts.lineage, facts.resource_count) == (7, LINEAGE, 3)
    assert facts.engine_version == "1.12.6"


def test_facts_are_read_from_indented_text_in_any_order() -> None:
    doc = json.loads(state(7, resources=2))
    text = json.dumps(dict(reversed(doc.items())), indent=4).encode() + b"\n"
    assert read_facts(text) == read_facts(state(7, resources=2))


def test_data_sources_do_not_count_as_resources() -> None:
    doc = json.loads(state(resources=2))
    doc["resources"][0]["mode"] = "data"
    assert read_facts(json.dumps(doc).encode()).resource_count == 1


def test_words_inside_outputs_are_not_taken_for_resources() -> None:
    doc = json.loads(state(resources=0))
    doc["outputs"] = {"x": {"value": {"resources": [{"mode": "managed"}], "serial": 99}, "type": "dynamic"}}
    facts = read_facts(json.dumps(doc).encode())
    assert (facts.serial, facts.resource_count) == (1, 0)


def test_resources_may_be_null() -> None:
    doc = json.loads(state()) | {"resources": None}
    assert read_facts(json.dumps(doc).encode()).resource_count == 0
    assert decode_state(json.dumps(doc).encode())["resources"] == []


def test_decoding_gives_what_a_json_parser_gives() -> None:
    text = state(resources=5, note='Grüße \u2028 \\ "x" 12345678901234567890')
    assert decode_state(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"{",
        b'{"version":4,"serial":1}',
        b'{"version":4,"serial":"1","lineage":"a"}',
        b'{"version":4,"serial":true,"lineage":"a"}',
        b'{"version":4,"serial":-1,"lineage":"a"}',
        b'{"version":4,"serial":1,"lineage":""}',
        b'{"version":3,"serial":1,"lineage":"a"}',
        b'{"version":4,"serial":1,"lineage":"a"} {}',
        b'{"version":4,"serial":1,"lineage":"a",}',
        b'{"version":4,"serial":1,"lineage":"a","resources":{}}',
        b'{"version":4,"serial":1,"lineage":"a","resources":[{}',
        b'{"version":4,"serial":1,"lineage":"a","resources":[{},]}',
        b'{1:2,"version":4,"serial":1,"lineage":"a"}',
        b'{"version":4,"serial":1,"lineage":"\xff"}',
        b'{"version":4,"serial":1,"lineage":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"version":4,"serial":' + b"9" * 5000 + b',"lineage":"a"}',
        state()[:-20],
    ],
)
def test_what_is_no_state_is_refused_with_a_reason(text: bytes) -> None:
    with pytest.raises(BadRequest, match="no TF state"):
        read_facts(text)


@pytest.mark.parametrize("is_indented", [False, True])
def test_a_large_text_gives_the_same_facts(is_indented: bool) -> None:
    doc = json.loads(state(9, resources=500, note="Grüße ] } x" * 300))
    doc["resources"][0]["mode"] = "data"
    doc["outputs"] = {"x": {"value": {"resources": [1], "check_results": [2]}, "type": "dynamic"}}
    doc["check_results"] = [{"object_kind": "resource", "objects": []}]
    text = json.dumps(doc, indent=2 if is_indented else None, ensure_ascii=False).encode()
    assert len(text) > 1024 * 1024
    facts = read_facts(text)
    assert (facts.serial, facts.lineage, facts.resource_count) == (9, LINEAGE, 499)


def test_a_large_text_in_another_order_gives_the_same_facts() -> None:
    doc = json.loads(state(9, resources=500, note="x" * 3000))
    text = json.dumps(dict(reversed(doc.items()))).encode()
    assert (read_facts(text).serial, read_facts(text).resource_count) == (9, 500)


@pytest.mark.parametrize("cut", [1, 20, 1000, 1_000_000])
def test_a_large_text_that_is_cut_is_refused(cut: int) -> None:
    with pytest.raises(BadRequest, match="no TF state"):
        read_facts(state(9, resources=500, note="x" * 3000)[:-cut])


def test_a_large_state_without_resources_is_seen_as_empty() -> None:
    doc = json.loads(state(resources=0))
    doc["outputs"] = {"big": {"value": "x" * 2_000_000, "type": "string"}}
    assert read_facts(json.dumps(doc).encode()).resource_count == 0


def test_an_encrypted_text_without_its_ciphertext_is_short_and_still_json() -> None:
    blob = {"serial": 1, "encrypted_data": "QUJD" * 1000, "encryption_version": "v0"}
    for indent in (None, 2):
        outline = without_payload(json.dumps(blob, indent=indent).encode())
        assert json.loads(outline) == blob | {"encrypted_data": ""}
    assert without_payload(state()) == b""
