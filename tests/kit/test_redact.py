"""Redaction: every form of a secret, wherever the stream is cut."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import pairwise
from urllib.parse import quote, quote_plus

import pytest

from rezuscloud.kit.redact import MASK, Redactor

SECRET = 'p&ss "wörd"/<1>+'
MARK = MASK.encode()


def streamed(redactor: Redactor, data: bytes, *cuts: int) -> bytes:
    edges = [0, *sorted(cuts), len(data)]
    parts = [redactor.feed(data[a:b]) for a, b in pairwise(edges)]
    return b"".join(parts) + redactor.flush()


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET, ensure_ascii=False)[1:-1],
        SECRET.replace('"', '\\"').replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quote(SECRET)),
        base64.b64encode(SECRET.encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode(),
    ],
)
def test_each_form_of_a_secret_is_hidden(form: str) -> None:
    assert Redactor([SECRET]).text(f"before {form} after") == f"before {MASK} after"


@pytest.mark.parametrize("before", ["", "u", "us", "user:"])
def test_a_secret_inside_a_longer_base64_text_is_hidden(before: str) -> None:
    secret = "correct horse battery"
    encoded = base64.b64encode(f"{before}{secret} and more".encode()).decode()
    told = Redactor([secret]).text(encoded)
    assert MASK in told
    left = told.replace(MASK, "")
    for start in range(len(secret) - 5):
        assert secret[start : start + 6].encode() not in base64.b64decode(left + "=" * (-len(left) % 4))
    assert len(left) <= len(encoded) - len(secret) * 8 // 6 + 4


def test_every_cut_of_the_stream_gives_the_same_bytes() -> None:
    data = f"x {SECRET}{SECRET} y {json.dumps(SECRET)} z".encode()
    whole = streamed(Redactor([SECRET]), data)
    assert SECRET.encode() not in whole
    for first in range(len(data) + 1):
        for second in (first, first + 1, first + 5):
            assert streamed(Redactor([SECRET]), data, first, second) == whole


def test_a_stream_fed_byte_by_byte_gives_the_same_bytes() -> None:
    data = f"one {SECRET} two".encode()
    assert streamed(Redactor([SECRET]), data, *range(len(data))) == f"one {MASK} two".encode()


def test_random_streams_with_overlapping_secrets_are_hidden_wherever_they_are_cut() -> None:
    chance = random.Random(1)
    secrets = ["aabbaa", "aabbaab", "bbaabb", "abababab", "aaaaaa"]
    for _ in range(300):
        data = bytes(chance.choice(b"abc ") for _ in range(chance.randrange(1, 60)))
        cuts = [chance.randrange(len(data) + 1) for _ in range(chance.randrange(5))]
        visible = bytearray(data)
        for secret in secrets:
            for at in range(len(data)):
                if data.startswith(secret.encode(), at):
                    visible[at : at + len(secret)] = b"#" * len(secret)
        told = streamed(Redactor(secrets), data + b"\n", *cuts)
        # Whatever stands between masks is what was visible, in order, and nothing else.
        assert told.replace(MARK, b"") == bytes(visible).replace(b"#", b"") + b"\n"


def test_ordinary_text_is_not_held_back() -> None:
    redactor = Redactor(["secret-value"])
    assert redactor.feed(b"Creating...\n") == b"Creating...\n"


def test_only_the_possible_beginning_of_a_secret_is_held_back() -> None:
    redactor = Redactor(["secret-value"])
    assert redactor.feed(b"token secr") == b"token "
    assert redactor.feed(b"etary\n") == b"secretary\n"


def test_an_endless_run_of_secrets_does_not_grow_what_is_held() -> None:
    redactor = Redactor(["aaaaaa"])
    for _ in range(1000):
        redactor.feed(b"a" * 100)
    assert len(redactor._held) < 6
    assert redactor.flush() == b""


def test_half_a_secret_at_the_end_of_the_stream_is_hidden() -> None:
    redactor = Redactor(["secret-value"])
    assert redactor.feed(b"token secret-v") + redactor.flush() == b"token " + MARK


def test_an_end_too_short_to_be_a_secret_is_told() -> None:
    redactor = Redactor(["secret-value"])
    assert redactor.feed(b"a sec") + redactor.flush() == b"a sec"


def test_the_longer_of_two_secrets_is_hidden_whole() -> None:
    assert Redactor(["secret", "secret-value"]).text("secret-value, secret") == f"{MASK}, {MASK}"
    assert streamed(Redactor(["secret", "secret-value"]), b"secret-value", 6) == MARK


def test_overlapping_secrets_are_hidden_whole() -> None:
    assert Redactor(["abcdef", "defghi"]).text("-abcdefghi-") == f"-{MASK}-"


def test_short_secrets_are_not_sought() -> None:
    assert Redactor(["admin", ""]).text("admin") == "admin"
    assert Redactor([]).feed(b"anything") == b"anything"


def test_the_lines_of_a_key_are_hidden_when_they_are_indented() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nBKcwggSjAgEAAoIBAQC7\n-----END KEY-----\n"
    told = Redactor([key]).text("+ key = <<-EOT\n" + "".join(f"    {line}\n" for line in key.splitlines()))
    assert "MIIEvQ" not in told
    assert "BKcwgg" not in told
    assert Redactor([key]).text(f"a {key} b") == f"a {MASK} b"


def test_a_secret_is_hidden_without_the_newline_of_its_file() -> None:
    assert Redactor(["secret-value\n"]).text("'secret-value'") == f"'{MASK}'"


def test_json_values_are_redacted_all_through() -> None:
    value = {"a": ["secret-value", 1, None, True, 1.5], "secret-value": {"b": "x secret-value"}}
    assert Redactor(["secret-value"]).value(value) == {
        "a": [MASK, 1, None, True, 1.5],
        MASK: {"b": f"x {MASK}"},
    }
    assert value["a"] == ["secret-value", 1, None, True, 1.5]


def test_text_does_not_disturb_a_stream() -> None:
    redactor = Redactor(["secret-value"])
    assert redactor.feed(b"secret-") == b""
    assert redactor.text("value") == "value"
    assert redactor.feed(b"value") == MARK
