"""The hallway: who passes, what errors look like, what is logged."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest
from aiohttp import web

from rezuscloud.access.identity import Identity
from rezuscloud.http.access_log import LOGGER, AccessLog
from rezuscloud.http.keys import IDENTITY, RULES, TOLD, Access, Permission, Route, mount
from rezuscloud.http.metrics import Metrics
from rezuscloud.http.middleware import hallway
from rezuscloud.http.server import listen
from rezuscloud.model.errors import Cause, Conflict, Invalid, TooManyRequests, Unauthorized


class _Verifier:
    def verify(self, token: str) -> Identity:
        if token not in ("admin-token", "view-token"):
            raise Unauthorized("the token is not valid")
        return Identity("jane", "Jane", role=token.removesuffix("-token"), via="token")


@dataclass
class _Site:
    session: aiohttp.ClientSession
    url: str
    metrics: Metrics
    access_log: AccessLog
    lines: io.StringIO

    async def get(self, path: str, token: str | None = "admin-token") -> tuple[aiohttp.ClientResponse, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.get(self.url + path, headers=headers) as answer:
            return answer, await answer.read()


async def _who(request: web.Request) -> web.Response:
    request[TOLD].kind, request[TOLD].verb = "things", "get"
    return web.Response(text=request[IDENTITY].subject)


async def _public(request: web.Request) -> web.Response:
    return web.Response(text="for all")


async def _fails(request: web.Request) -> web.Response:
    raise {
        "invalid": Invalid.of("Thing", "a", [Cause("spec.x", "must be more")]),
        "busy": TooManyRequests("later", retry_after_s=7),
        "conflict": Conflict("changed meanwhile"),
        "bug": RuntimeError("secret internals"),
        "slow": TimeoutError(),
        "gone": web.HTTPGone(),
        "large": web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2),
    }[request.match_info["how"]]


async def _breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"half")
    raise RuntimeError("in the middle")


@pytest.fixture
async def site() -> AsyncIterator[_Site]:
    metrics, lines = Metrics(), io.StringIO()
    access_log = AccessLog(stream=lines)
    app = web.Application(middlewares=[hallway(_Verifier(), metrics, access_log)])
    app[RULES] = {}
    for route in (
        Route("GET", "/who", _who, Access.BY_KIND),
        Route("GET", "/public", _public, Access.PUBLIC),
        Route("GET", "/secret", _who, Permission("unlock", "tenants")),
        Route("GET", "/fails/{how}", _fails, Access.PUBLIC),
        Route("GET", "/half", _breaks_off, Access.PUBLIC),
    ):
        mount(app, route)
    app.router.add_get("/forgotten", _public)
    async with listen(app, "127.0.0.1", 0) as listener, aiohttp.ClientSession() as session:
        yield _Site(session, listener.url, metrics, access_log, lines)


async def test_without_a_token_only_public_routes_pass(site: _Site) -> None:
    for path in ("/who", "/secret", "/forgotten", "/not/there"):
        answer, body = await site.get(path, None)
        assert answer.status == 401
        assert json.loads(body)["reason"] == "Unauthorized"
        assert answer.headers.getall("WWW-Authenticate")[0] == 'Bearer realm="rezuscloud"'
    assert (await site.get("/public", None))[1] == b"for all"


@pytest.mark.parametrize(
    "header",
    ["Bearer nonsense", "Bearer", "Basic ???", "Basic " + base64.b64encode(b"\xff").decode(), "Digest x", ""],
)
async def test_a_wrong_credential_is_unauthorized(site: _Site, header: str) -> None:
    async with site.session.get(site.url + "/who", headers={"Authorization": header}) as answer:
        assert answer.status == 401


async def test_basic_with_the_token_as_password_passes(site: _Site) -> None:
    credential = base64.b64encode(b"anybody:admin-token").decode()
    headers = {"Authorization": f"Basic {credential}"}
    async with site.session.get(site.url + "/who", headers=headers) as answer:
        assert (answer.status, await answer.text()) == (200, "jane")


async def test_a_route_with_a_permission_asks_the_policy(site: _Site) -> None:
    assert (await site.get("/secret", "admin-token"))[0].status == 200
    answer, body = await site.get("/secret", "view-token")
    assert answer.status == 403
    assert 'User "jane" cannot unlock resource "tenants"' in json.loads(body)["message"]


async def test_a_route_without_a_rule_is_closed(site: _Site) -> None:
    assert (await site.get("/forgotten"))[0].status == 403


async def test_an_unknown_path_is_not_found_and_an_unknown_method_not_allowed(site: _Site) -> None:
    answer, body = await site.get("/not/there")
    assert answer.status == 404
    assert json.loads(body)["message"] == "the server could not find the requested resource"
    async with site.session.put(site.url + "/who", headers={"Authorization": "Bearer admin-token"}) as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET"
        assert (await answer.json())["reason"] == "MethodNotAllowed"


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("invalid", 422, "Invalid"),
        ("busy", 429, "TooManyRequests"),
        ("conflict", 409, "Conflict"),
        ("bug", 500, "InternalError"),
        ("slow", 503, "ServiceUnavailable"),
        ("gone", 410, "Gone"),
        ("large", 413, "RequestEntityTooLarge"),
    ],
)
async def test_every_error_is_a_status_with_a_message(site: _Site, how: str, code: int, reason: str) -> None:
    answer, body = await site.get(f"/fails/{how}")
    status = json.loads(body)
    assert answer.status == code
    assert answer.content_type == "application/json"
    assert (status["kind"], status["status"], status["code"], status["reason"]) == (
        "Status",
        "Failure",
        code,
        reason,
    )
    assert status["message"]


async def test_too_many_requests_says_when_in_the_header(site: _Site) -> None:
    answer, body = await site.get("/fails/busy")
    assert answer.headers["Retry-After"] == "7"
    assert json.loads(body)["details"]["retryAfterSeconds"] == 7


async def test_an_unexpected_error_tells_the_log_and_not_the_client(
    site: _Site, caplog: pytest.LogCaptureFixture
) -> None:
    answer, body = await site.get("/fails/bug")
    request_id = answer.headers["X-Request-Id"]
    assert b"secret internals" not in body
    assert request_id in json.loads(body)["message"]
    logged = next(record for record in caplog.records if record.levelno == logging.ERROR)
    assert request_id in logged.getMessage()
    assert logged.exc_info is not None
    assert "secret internals" in str(logged.exc_info[1])


async def test_an_answer_that_fails_half_way_does_not_look_whole(site: _Site) -> None:
    with pytest.raises(aiohttp.ClientError):
        await site.get("/half")


async def test_every_answer_bears_safe_headers_and_no_version(site: _Site) -> None:
    for path in ("/who", "/public", "/not/there", "/fails/bug"):
        headers = (await site.get(path))[0].headers
        assert headers["Server"] == ""
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Request-Id"]


async def test_the_access_log_is_one_line_without_query_or_token(
    site: _Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    answer, _ = await site.get("/who?token=hidden&x=%0ay")
    site.access_log.flush()
    [line] = site.lines.getvalue().splitlines()
    assert "GET /who 200 " in line
    assert line.endswith(f"user=jane from=127.0.0.1 request={answer.headers['X-Request-Id']}")
    assert "hidden" not in line
    assert "admin-token" not in line


async def test_requests_are_counted_by_kind_verb_and_code(site: _Site) -> None:
    await site.get("/who")
    await site.get("/not/there")
    async with site.session.request("PROPFIND", site.url + "/x") as answer:
        assert answer.status == 401
    text = site.metrics.expose().decode()
    assert 'rezuscloud_http_requests_total{code="200",kind="things",verb="get"} 1.0' in text
    assert 'rezuscloud_http_requests_total{code="404",kind="none",verb="get"} 1.0' in text
    assert 'rezuscloud_http_requests_total{code="401",kind="none",verb="other"} 1.0' in text
    assert "propfind" not in text.lower()
