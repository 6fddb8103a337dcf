"""What can be asked of tenants, runs and state versions beyond Kubernetes' verbs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rezuscloud.model.errors import Conflict
from tests.support.api import TENANT, Api, serve

RUN = "/api/v1/namespaces/personal/runs/r1"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        await running.ok("POST", "/api/v1/tenants", TENANT)
        await running.put_system("Run", "personal", "r1", {"action": "apply"}, {"phase": "Held"})
        yield running


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("/api/v1/tenants/personal/apply", None, ("apply", "admin", "personal")),
        ("/api/v1/tenants/personal/rotate-key", None, ("rotate-key", "admin", "personal")),
        ("/api/v1/tenants/personal/unlock", {"lockId": "l"}, ("unlock", "admin", "personal", "l")),
        (RUN + "/approve", {"planId": "p"}, ("approve", "admin", "personal", "r1", "p")),
        (RUN + "/deny", {"planId": "p"}, ("deny", "admin", "personal", "r1", "p")),
        (RUN + "/cancel", None, ("cancel", "admin", "personal", "r1", False)),
        (RUN + "/cancel", {"force": True}, ("cancel", "admin", "personal", "r1", True)),
        (RUN + "/retry", {}, ("retry", "admin", "personal", "r1")),
        (RUN.replace("namespaces", "tenants") + "/retry", None, ("retry", "admin", "personal", "r1")),
    ],
)
async def test_an_action_reaches_the_reconciler_and_answers_the_object(
    api: Api, path: str, body: Any, call: tuple[Any, ...]
) -> None:
    answer = await api.ok("POST", path, body)
    assert api.recorder.calls == [call]
    assert answer["metadata"]["name"] in ("personal", "r1")


async def test_actions_that_answer_something_of_their_own(api: Api) -> None:
    assert await api.ok("POST", "/api/v1/tenants/personal/recover") == {"adopted": 1}
    assert (await api.ok("GET", "/api/v1/tenants/personal/state-env"))["env"]
    assert await api.ok("GET", RUN + "/plan") == {"format_version": "1.2"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RUN + "/approve", None, "planId"),
        (RUN + "/approve", {"planId": 3}, "planId"),
        (RUN + "/deny", {"planId": ""}, "planId"),
        (RUN + "/cancel", {"force": "yes"}, "force"),
        ("/api/v1/tenants/personal/unlock", {}, "lockId"),
    ],
)
async def test_a_body_that_does_not_fit_is_invalid_with_its_field(
    api: Api, path: str, body: Any, field: str
) -> None:
    answer = await api.call("POST", path, body)
    assert (answer.status, answer.json["reason"]) == (422, "Invalid")
    assert answer.json["details"]["causes"][0]["field"] == field
    assert api.recorder.calls == []


async def test_what_the_reconciler_refuses_reaches_the_client(api: Api) -> None:
    api.recorder.error = Conflict("this plan was superseded; look at the newest run")
    answer = await api.call("POST", RUN + "/approve", {"planId": "old"})
    assert (answer.status, answer.json["message"]) == (
        409,
        "this plan was superseded; look at the newest run",
    )


async def _uid(api: Api) -> str:
    return str((await api.ok("GET", RUN))["metadata"]["uid"])


async def test_a_log_is_read_from_an_offset_and_says_where_to_go_on(api: Api) -> None:
    uid = await _uid(api)
    api.logs.append(uid, b"planning\n")
    first = await api.call("GET", RUN + "/log")
    assert (first.status, first.body, first.headers["X-Log-Offset"]) == (200, b"planning\n", "9")
    api.logs.append(uid, b"applying\n")
    second = await api.call("GET", RUN + "/log?offset=9")
    assert (second.body, second.headers["X-Log-Offset"]) == (b"applying\n", "18")
    assert (await api.call("GET", RUN + "/log?offset=18")).body == b""
    for wrong in ("-1", "x", "9" * 30):
        assert (await api.call("GET", f"{RUN}/log?offset={wrong}")).status == 400
    assert (await api.call("GET", "/api/v1/namespaces/personal/runs/none/log")).status == 404


async def test_a_run_without_a_log_has_an_empty_one(api: Api) -> None:
    answer = await api.call("GET", RUN + "/log")
    assert (answer.status, answer.body, answer.headers["X-Log-Offset"]) == (200, b"", "0")


async def test_a_followed_log_ends_when_the_run_has_ended(api: Api) -> None:
    uid = await _uid(api)
    api.logs.append(uid, b"one\n")
    async with api.stream(RUN + "/log?follow=true") as answer:
        assert await answer.content.readline() == b"one\n"
        api.logs.append(uid, b"two\n")
        assert await answer.content.readline() == b"two\n"
        api.logs.append(uid, b"three\n")
        await api.set_status("Run", "personal", "r1", {"phase": "Succeeded"})
        assert await asyncio.wait_for(answer.content.read(), 5) == b"three\n"


async def test_the_body_of_a_state_version_is_the_decrypted_state(api: Api) -> None:
    tenant = await api.ok("GET", "/api/v1/tenants/personal")
    spec = {"version": 3, "serial": 7, "lineage": "l", "sha256": "0" * 64, "sizeBytes": 9, "encrypted": True}
    await api.put_system("StateVersion", "personal", "v3", spec, {})
    path = "/api/v1/namespaces/personal/stateversions/v3/body"
    assert (await api.call("GET", path)).status == 404
    api.states.held[tenant["metadata"]["uid"], 3] = {"version": 4, "serial": 7}
    assert await api.ok("GET", path) == {"version": 4, "serial": 7}
