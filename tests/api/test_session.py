"""Login over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.meta import parse_time, utc_now
from tests.support.api import PASSWORD, Api, serve

LOGIN = "/api/v1/auth/login"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        yield running


async def test_the_right_password_gives_a_token_that_works_until_it_ends(api: Api) -> None:
    answer = await api.ok("POST", LOGIN, {"username": "admin", "password": PASSWORD}, token=None)
    assert parse_time(answer["expiresAt"]) > utc_now()
    assert (await api.call("GET", "/api/v1/tenants", token=answer["token"])).status == 200


@pytest.mark.parametrize(
    ("body", "code", "fields"),
    [
        ({"username": "admin", "password": "wrong"}, 401, []),
        ({"username": "nobody", "password": "wrong"}, 401, []),
        ({}, 422, ["username", "password"]),
        ({"username": "admin"}, 422, ["password"]),
        ({"username": 1, "password": ["x"]}, 422, ["username", "password"]),
        ({"username": "admin", "password": "x" * 73}, 422, ["password"]),
        ({"username": "", "password": "x"}, 422, ["username"]),
        ({"username": "a" * 65, "password": "x"}, 422, ["username"]),
        ([], 422, [""]),
        (b"{", 400, []),
        (b"", 400, []),
    ],
)
async def test_anything_else_is_refused_with_the_reason(
    api: Api, body: Any, code: int, fields: list[str]
) -> None:
    answer = await api.call("POST", LOGIN, body, token=None)
    assert answer.status == code, answer.body
    causes = answer.json.get("details", {}).get("causes", [])
    assert [cause["field"] for cause in causes] == fields
    assert "token" not in answer.json


async def test_guessing_is_told_when_to_come_back(api: Api) -> None:
    wrong = {"username": "admin", "password": "wrong"}
    codes = [(await api.call("POST", LOGIN, wrong, token=None)).status for _ in range(11)]
    assert codes[:10] == [401] * 10
    answer = await api.call("POST", LOGIN, wrong, token=None)
    assert (answer.status, answer.json["reason"]) == (429, "TooManyRequests")
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.json["details"]["retryAfterSeconds"] == int(answer.headers["Retry-After"])
    assert (await api.call("GET", "/api/v1/tenants")).status == 200


async def test_a_new_password_ends_tokens_at_the_next_request(api: Api) -> None:
    assert (await api.call("GET", "/api/v1/tenants")).status == 200
    await api.sessions.set_admin_password("something new")
    assert (await api.call("GET", "/api/v1/tenants")).status == 401
