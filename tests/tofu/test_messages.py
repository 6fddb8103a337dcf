"""One line of the engine's stream becomes one message, whatever else stands among the lines."""

from __future__ import annotations

import json

import pytest

from rezuscloud.tofu.messages import Diagnostic, Message, parse_line


def _line(**data: object) -> bytes:
    return json.dumps({"@level": "info", "@message": "said", **data}).encode() + b"\n"


def test_a_typed_line_becomes_a_message_with_all_its_fields() -> None:
    message = parse_line(_line(type="planned_change", change={"action": "create", "new_in_2030": 1}))
    assert message is not None
    assert message.type == "planned_change"
    assert message.data["change"]["new_in_2030"] == 1
    assert message.text == "said"


def test_a_line_without_type_is_a_message_of_no_type() -> None:
    assert parse_line(_line()) == Message(type="", data={"@level": "info", "@message": "said"})


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"panic: oh no", b'{"cut": "o', b"[1, 2]", b'"text"', b"\xff\xfe"]
)
def test_other_text_among_the_lines_is_no_message(line: bytes) -> None:
    assert parse_line(line) is None


def test_broken_utf8_does_not_lose_the_line() -> None:
    message = parse_line(b'{"type":"log","@message":"caf\xe9"}')
    assert message == Message(type="log", data={"type": "log", "@message": "caf�"})


def test_the_address_is_found_in_changes_and_in_hooks() -> None:
    resource = {"addr": "terraform_data.machine_w-1"}
    for part in ("change", "hook"):
        message = parse_line(_line(type="x", **{part: {"resource": resource}}))
        assert message is not None
        assert message.address == "terraform_data.machine_w-1"
    assert Message("log", {}).address == ""


def test_a_diagnostic_keeps_its_words_and_drops_its_code_snippet() -> None:
    message = parse_line(
        _line(
            type="diagnostic",
            diagnostic={
                "severity": "error",
                "summary": "Invalid value",
                "detail": "It is wrong.",
                "address": "terraform_data.x",
                "snippet": {"code": 'password = "hunter2"'},
            },
        )
    )
    assert message is not None
    diagnostic = Diagnostic.of(message)
    assert diagnostic == Diagnostic("error", "Invalid value", "It is wrong.", "terraform_data.x")
    assert "hunter2" not in repr(diagnostic)


def test_other_messages_are_no_diagnostics() -> None:
    assert Diagnostic.of(Message("log", {"diagnostic": {"summary": "x"}})) is None
