"""What machines ask about the server itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import rezuscloud
from rezuscloud.api.health import PartState
from tests.support.api import TENANT, Api, serve


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with serve(tmp_path) as running:
        yield running


async def test_alive_is_one_word_for_everybody(api: Api) -> None:
    for path in ("/healthz", "/livez"):
        answer = await api.call("GET", path, token=None)
        assert (answer.status, answer.body) == (200, b"ok")


async def test_ready_names_each_part(api: Api) -> None:
    answer = await api.call("GET", "/readyz", token=None)
    assert answer.status == 200
    assert answer.json == {
        "status": "ready",
        "parts": [
            {"name": "store", "ready": True, "message": ""},
            {"name": "engine", "ready": True, "message": "OpenTofu 1.12.6"},
        ],
    }


async def test_not_ready_says_which_part_and_why(api: Api) -> None:
    api.parts["engine"] = PartState(False, "no OpenTofu found: run make tools")
    answer = await api.call("GET", "/readyz", token=None)
    assert (answer.status, answer.json["status"]) == (503, "not ready")
    assert answer.json["parts"][1]["message"] == "no OpenTofu found: run make tools"
    answer = await api.call("GET", "/readyz?verbose", token=None)
    assert answer.status == 503
    assert answer.body.decode().splitlines() == [
        "[+]store ok",
        "[-]engine no OpenTofu found: run make tools",
        "readyz check failed",
    ]


async def test_the_version_is_one_that_kubectl_can_read(api: Api) -> None:
    version = await api.ok("GET", "/version", token=None)
    assert version["gitVersion"].startswith("v1.")
    assert version["gitVersion"].endswith(f"+rezuscloud.{rezuscloud.__version__}")
    assert version["rezuscloud"] == rezuscloud.__version__


async def test_metrics_count_requests_runs_and_watchers(api: Api) -> None:
    await api.ok("POST", "/api/v1/tenants", TENANT)
    await api.ok("GET", "/api/v1/tenants/personal")
    await api.put_system("Run", "personal", "r1", {"action": "apply"}, {"phase": "Planning"})
    async with api.stream("/api/v1/tenants?watch=true") as watch:
        await watch.content.readline()
        async with api.stream("/api/v1/namespaces/personal/runs?watch=true") as runs:
            await runs.content.readline()
            await api.set_status("Run", "personal", "r1", {"phase": "Succeeded"})
            await runs.content.readline()
            text = (await api.call("GET", "/metrics")).body.decode()
    assert 'rezuscloud_http_requests_total{code="201",kind="tenants",verb="create"} 1.0' in text
    assert 'rezuscloud_http_requests_total{code="200",kind="tenants",verb="get"} 1.0' in text
    assert 'rezuscloud_http_request_seconds_count{kind="tenants",verb="get"} 1.0' in text
    assert 'rezuscloud_runs_total{outcome="Succeeded"} 1.0' in text
    assert 'rezuscloud_runs_total{outcome="Failed"} 0.0' in text
    assert "rezuscloud_watchers 2.0" in text
    assert "rezuscloud_event_loop_lag_seconds" in text
    assert "rezuscloud_store_commit_seconds_count" in text
