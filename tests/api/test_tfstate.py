from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from rezuscloud.access.identity import Identity
from rezuscloud.api.tfstate import operator_routes
from rezuscloud.http.access_log import AccessLog
from rezuscloud.http.keys import RULES, mount
from rezuscloud.http.metrics import Metrics
from rezuscloud.http.middleware import hallway
from rezuscloud.http.server import listen
from rezuscloud.model.errors import InsufficientStorage, Unauthorized
from tests.support.tfstate import (
    ADMIN,
    MIB,
    Door,
    House,
    Tofu,
    Wire,
    basic,
    lock_info,
    md5,
    open_door,
    open_house,
    serve_runs,
    state,
)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
async def door(house: House) -> AsyncIterator[Door]:
    async with serve_runs(house) as url, open_door(house, url) as opened:
        yield opened


@asynccontextmanager
async def serve_operators(house: House, *, max_bytes: int = 64 * MIB) -> AsyncIterator[str]:
    """The main port with nothing on it but the state; `good` is an admin's token, `weak` an editor's."""

    class Tokens:
        def verify(self, token: str) -> Identity:
            if token == "good":
                return ADMIN
            if token == "weak":
                return Identity("eve", "Eve", role="edit", via="token")
            raise Unauthorized("the token is not valid")

    app = web.Application(middlewares=[hallway(Tokens(), Metrics(), AccessLog(stream=StringIO()))])
    app[RULES] = {}
    for route in operator_routes(house.backend, max_bytes=max_bytes):
        mount(app, route)
    async with listen(app, "127.0.0.1", 0) as listener:
        yield listener.url


# ---------------------------------------------------------------- the round of an apply


async def test_an_apply_locks_reads_writes_reads_and_unlocks(door: Door, house: House) -> None:
    body = house.seal(state(1))
    assert await door.status("LOCK", lock_info("L1")) == 200
    assert (await door.send("GET"))[:2] == (204, b"")
    assert await door.status("POST", body, lock="L1", headers={"Content-MD5": md5(body)}) == 200
    status, read, headers = await door.send("GET")
    assert (status, read, headers["Content-Type"]) == (200, body, "application/json")
    assert "Content-MD5" not in headers
    assert await door.status("UNLOCK", lock_info("L1")) == 200


async def test_each_verb_may_be_repeated(door: Door, house: House) -> None:
    body = state(1)
    for method, data, lock in (
        ("LOCK", lock_info("L1"), None),
        ("POST", body, "L1"),
        ("GET", None, None),
        ("UNLOCK", lock_info("L1"), None),
    ):
        for _ in range(2):
            assert await door.status(method, data, lock=lock) == 200
    assert len(house.versions()) == 1


async def test_a_held_lock_is_423_with_the_holders_info(door: Door, house: House) -> None:
    info = lock_info("L1", Who="somebody@there")
    await house.backend.lock(house.access("r-0"), info)
    status, body, _ = await door.send("LOCK", lock_info("L2"))
    assert status == 423
    assert orjson.loads(body) == info


async def test_a_post_without_the_lock_is_409_with_a_reason(door: Door, house: House) -> None:
    for lock in (None, "L1"):
        status, body, _ = await door.send("POST", state(1), lock=lock)
        assert status == 409
        assert b"nothing was stored" in body
    assert house.versions() == []
    assert house.events("StateRefused")


async def test_unlock_goes_by_the_id_alone_and_also_without_a_body(door: Door, house: House) -> None:
    await door.send("LOCK", lock_info("L1"))
    assert await door.status("UNLOCK", lock_info("L2")) == 409
    assert await door.status("UNLOCK", {"ID": "L1", "Created": "0001-01-01T00:00:00Z"}) == 200
    await door.send("LOCK", lock_info("L2"))
    assert await door.status("UNLOCK") == 200
    assert house.store.states.lock(house.uid) is None


async def test_delete_is_405_with_the_reason(door: Door) -> None:
    status, body, headers = await door.send("DELETE")
    assert status == 405
    assert b"delete the tenant" in body
    assert headers["Allow"] == "GET, POST, LOCK, UNLOCK"


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"Who":"x"}', b'{"ID":7}'])
async def test_a_lock_request_that_cannot_be_read_is_400(door: Door, data: bytes) -> None:
    assert await door.status("LOCK", data) == 400


# ---------------------------------------------------------------- who


async def test_wrong_credentials_are_401_and_never_404(door: Door, house: House) -> None:
    credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
    for wrong in (
        basic("r-1", "guess"),
        basic("r-2", credential.password),
        basic("", ""),
        basic("r-1", "\u0000ü"),
        "",
        "Basic",
        "Basic %%%",
        f"Bearer {credential.password}",
        "Basic " + base64.b64encode(b"\xff:\xff").decode(),
    ):
        for method in ("GET", "POST", "LOCK", "UNLOCK", "DELETE", "PUT"):
            status, _, headers = await door.send(method, auth=wrong)
            assert status == 401, method
            assert headers["WWW-Authenticate"].startswith("Basic")


async def test_a_revoked_credential_is_401(house: House) -> None:
    async with serve_runs(house) as url, aiohttp.ClientSession() as client:
        credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        door = Door(url, client, basic(credential.username, credential.password))
        assert await door.status("GET") == 204
        house.backend.revoke(credential)
        assert await door.status("GET") == 401


async def test_another_tenants_address_or_a_wrong_path_is_403_and_never_404(door: Door) -> None:
    for wrong in ("/state/another", "/state/", "/state", "/", "/state/a/b", "/state/%2e%2e"):
        url = door.url[: door.url.index("/state/")] + wrong
        for method in ("GET", "POST", "LOCK", "UNLOCK"):
            assert await Door(url, door.client, door.auth).status(method) == 403, wrong


async def test_who_asks_is_settled_before_the_body_is_sent(house: House) -> None:
    async with serve_runs(house) as url:
        host, port = url.removeprefix("http://").partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        path = url[url.index("/state/") :]
        writer.write(f"POST {path}?ID=L1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode())
        writer.write(b"Content-Length: 1000000\r\n\r\n")
        answer = await asyncio.wait_for(reader.readline(), 5)
        assert b" 401 " in answer
        writer.write(b"x" * 1_000_000)
        await reader.read()
        writer.close()


# ---------------------------------------------------------------- bodies


async def test_a_body_that_differs_from_its_md5_is_400_and_not_stored(door: Door, house: House) -> None:
    await door.send("LOCK", lock_info("L1"))
    body = state(1)
    for wrong in (md5(b"other"), "rubbish"):
        status, text, _ = await door.send("POST", body, lock="L1", headers={"Content-MD5": wrong})
        assert status == 400
        assert b"Content-MD5" in text
    assert house.versions() == []


async def test_a_state_over_the_limit_is_413_announced_or_not(house: House) -> None:
    async with serve_runs(house, max_bytes=MIB) as url, open_door(house, url) as door:
        await door.send("LOCK", lock_info("L1"))

        async def in_chunks() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b"x" * 65536

        status, text, _ = await door.send("POST", b"x" * (MIB + 1), lock="L1")
        assert (status, b"larger than 1 MiB" in text) == (413, True)
        async with door.client.post(
            door.url, data=in_chunks(), params={"ID": "L1"}, headers={"Authorization": door.auth}
        ) as answer:
            assert answer.status == 413
        (event,) = house.events("StateRefused")
        assert "REZUSCLOUD_STATE_MAX_MIB" in event["message"]


async def test_an_upload_that_breaks_off_stores_nothing_and_the_next_one_works(house: House) -> None:
    async with serve_runs(house) as url, open_door(house, url) as door:
        await door.send("LOCK", lock_info("L1"))
        host, port = url.removeprefix("http://").partition("/")[0].split(":")
        path, body = url[url.index("/state/") :], state(1)
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path}?ID=L1 HTTP/1.1\r\nHost: x\r\nAuthorization: {door.auth}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-10])
        await writer.drain()
        writer.transport.abort()
        assert await door.status("POST", body, lock="L1") == 200
        assert len(house.versions()) == 1


async def test_an_upload_that_cannot_be_unpacked_is_400(door: Door, house: House) -> None:
    await door.send("LOCK", lock_info("L1"))
    headers = {"Content-Encoding": "gzip"}
    status, text, _ = await door.send("POST", b"no gzip at all", lock="L1", headers=headers)
    assert (status, b"cannot be read" in text) == (400, True)
    assert house.versions() == []


async def test_a_state_of_many_megabytes_comes_back_byte_for_byte(door: Door, house: House) -> None:
    body = house.seal(state(1, resources=2000, note="y" * 5000))
    assert len(body) > 12 * MIB
    await door.send("LOCK", lock_info("L1"))
    assert await door.status("POST", body, lock="L1", headers={"Content-MD5": md5(body)}) == 200
    assert (await door.send("GET"))[1] == body


async def test_stopping_is_503_with_a_time_to_come_back(door: Door, house: House) -> None:
    house.backend.close()
    for method, data in (("GET", None), ("LOCK", lock_info("L1")), ("POST", state(1)), ("UNLOCK", None)):
        status, _, headers = await door.send(method, data, lock="L1")
        assert (status, headers["Retry-After"]) == (503, "2")


async def test_a_full_store_is_507(door: Door, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await door.send("LOCK", lock_info("L1"))

    async def full(*args: object) -> None:
        raise InsufficientStorage("the disk is full")

    monkeypatch.setattr(house.store, "transact", full)
    status, text, _ = await door.send("POST", state(1), lock="L1")
    assert (status, text) == (507, b"the disk is full\n")


async def test_what_nobody_foresaw_is_500_without_its_insides(
    door: Door, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(house.backend, "read", broken)
    status, text, _ = await door.send("GET")
    assert status == 500
    assert b"secret" not in text


# ---------------------------------------------------------------- operators on the main port


@pytest.mark.parametrize("scope", ["namespaces", "tenants"])
async def test_an_operator_works_with_a_token_as_password_or_as_bearer(house: House, scope: str) -> None:
    async with serve_operators(house) as base, aiohttp.ClientSession() as client:
        door = Door(f"{base}/api/v1/{scope}/blue/tfstate", client, basic("anybody", "good"))
        assert await door.status("LOCK", lock_info("L1")) == 200
        assert await door.status("POST", state(1), lock="L1") == 200
        assert await door.status("UNLOCK", lock_info("L1")) == 200
        status, body, _ = await door.send("GET", auth="Bearer good")
        assert (status, body) == (200, state(1))
        (version,) = house.versions()
        assert version["spec"]["run"] == ""


async def test_on_the_main_port_too_wrong_is_401_or_403_and_never_404(house: House) -> None:
    async with serve_operators(house) as base, aiohttp.ClientSession() as client:
        door = Door(f"{base}/api/v1/namespaces/blue/tfstate", client, basic("x", "bad"))
        elsewhere = Door(f"{base}/api/v1/namespaces/green/tfstate", client, basic("x", "good"))
        odd = Door(f"{base}/api/v1/namespaces/..%2fblue/tfstate", client, basic("x", "good"))
        for method in ("GET", "POST", "LOCK", "UNLOCK"):
            assert await door.status(method) == 401
            assert await door.status(method, auth=basic("x", "weak")) == 403
            assert await elsewhere.status(method) == 403
            assert await odd.status(method) == 403
        assert await door.status("DELETE", auth=basic("x", "good")) == 405


async def test_a_runs_credential_is_nothing_on_the_main_port(house: House) -> None:
    credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
    async with serve_operators(house) as base, aiohttp.ClientSession() as client:
        auth = basic(credential.username, credential.password)
        assert await Door(f"{base}/api/v1/namespaces/blue/tfstate", client, auth).status("GET") == 401


# ---------------------------------------------------------------- the real tofu


@pytest.mark.engine
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_tofu_applies_changes_and_destroys_through_the_backend(
    house: House, engine_path: Path, tmp_path: Path, is_encrypted: bool
) -> None:
    wire = Wire()
    key = house.keys.key(house.uid, 1) if is_encrypted else None
    async with serve_runs(house, wire=wire) as url:
        credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        tofu = Tofu.at(engine_path, tmp_path / "run", url, credential, key=key)
        await tofu.ok("init")
        await tofu.ok("plan", "-out=plan")
        await tofu.ok("apply", "plan")
        plain = await house.backend.plain(house.uid)
        assert plain is not None
        assert {each["name"] for each in plain["resources"]} == {"one", "two"}
        assert "No changes" in await tofu.ok("plan", "-lock=false")
        current = house.store.states.current(house.uid)
        assert current is not None
        assert (current.encrypted, current.resource_count) == (is_encrypted, 2)

        code, output = await tofu.run("apply", "-destroy", "-auto-approve")
        assert code == 1, output
        assert "409" in output
        assert "lost all of the 2 resources" in house.events("StateRefused")[0]["message"]
        house.backend.revoke(credential)

        destroyer = house.backend.issue("blue", house.uid, "r-2", may_empty=True)
        tofu.env |= {"TF_HTTP_USERNAME": destroyer.username, "TF_HTTP_PASSWORD": destroyer.password}
        await tofu.ok("apply", "-destroy", "-auto-approve")
        plain = await house.backend.plain(house.uid)
        assert plain is not None
        assert plain["resources"] == []
    assert house.store.states.lock(house.uid) is None
    assert {status for _, status in wire.seen} <= {200, 204, 409}


@pytest.mark.engine
async def test_answers_lost_after_acting_are_repeated_and_all_ends_well(
    house: House, engine_path: Path, tmp_path: Path
) -> None:
    wire = Wire()
    async with serve_runs(house, wire=wire) as url:
        credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        tofu = Tofu.at(engine_path, tmp_path / "run", url, credential, key=house.keys.key(house.uid, 1))
        await tofu.ok("init")
        wire.cut.update({"LOCK": 1, "GET": 1, "POST": 1, "UNLOCK": 1})
        await tofu.ok("apply", "-auto-approve")
    assert [method for method, status in wire.seen if status == 0] == ["LOCK", "GET", "POST", "UNLOCK"]
    assert len(house.versions()) == 1
    assert house.store.states.lock(house.uid) is None


@pytest.mark.engine
async def test_the_lock_of_a_killed_tofu_stays_until_its_run_is_given_up(
    house: House, engine_path: Path, tmp_path: Path
) -> None:
    wire = Wire()
    key = house.keys.key(house.uid, 1)
    slow = {
        "terraform": {"backend": {"http": {}}},
        "resource": {
            "terraform_data": {"one": {"provisioner": {"local-exec": {"command": "touch here; sleep 600"}}}}
        },
    }
    async with serve_runs(house, wire=wire) as url:
        dead = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        tofu = Tofu.at(engine_path, tmp_path / "run", url, dead, key=key, config=slow)
        await tofu.ok("init")
        async with tofu.started("apply", "-auto-approve"):
            await asyncio.wait_for(wire.first("LOCK").wait(), 30)
            while not (tofu.cwd / "here").exists():
                await asyncio.sleep(0.02)
        house.backend.revoke(dead)
        lock = house.store.states.lock(house.uid)
        assert lock is not None
        assert lock.run == "r-1"

        alive = house.backend.issue("blue", house.uid, "r-2", may_empty=False)
        tofu.env |= {"TF_HTTP_USERNAME": alive.username, "TF_HTTP_PASSWORD": alive.password}
        tofu.configure({"terraform": {"backend": {"http": {}}}, "resource": {"terraform_data": {"one": {}}}})
        code, output = await tofu.run("apply", "-auto-approve")
        assert code == 1
        assert "Error acquiring the state lock" in output
        assert lock.id in output
        assert await house.backend.release_lock_of_run("blue", house.uid, "r-1", "its tofu was killed")
        await tofu.ok("apply", "-auto-approve")
    assert house.events("StateUnlocked")


@pytest.mark.engine
async def test_a_wrong_credential_creates_nothing(house: House, engine_path: Path, tmp_path: Path) -> None:
    config = {
        "terraform": {"backend": {"http": {}}},
        "resource": {"terraform_data": {"one": {"provisioner": {"local-exec": {"command": "touch made"}}}}},
    }
    async with serve_runs(house) as url:
        credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        tofu = Tofu.at(engine_path, tmp_path / "run", url, credential, key=None, config=config)
        await tofu.ok("init")
        house.backend.revoke(credential)
        code, output = await tofu.run("apply", "-auto-approve")
        assert (code, "requires auth" in output) == (1, True), output
        code, output = await tofu.run("apply", "-auto-approve", "-lock=false")
        assert (code, "requires auth" in output) == (1, True), output

        other = house.backend.issue("green", "another-uid", "r-9", may_empty=False)
        tofu.env |= {"TF_HTTP_USERNAME": other.username, "TF_HTTP_PASSWORD": other.password}
        code, output = await tofu.run("apply", "-auto-approve")
        assert (code, "invalid auth" in output) == (1, True), output
    assert not (tofu.cwd / "made").exists()
    assert house.versions() == []


@pytest.mark.engine
async def test_what_was_too_large_is_adopted_from_errored_tfstate(
    house: House, engine_path: Path, tmp_path: Path
) -> None:
    key = house.keys.key(house.uid, 1)
    config = {
        "terraform": {"backend": {"http": {}}},
        "resource": {"terraform_data": {"one": {"input": "x" * 100_000}}},
    }
    async with serve_runs(house, max_bytes=MIB // 16) as url:
        credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        tofu = Tofu.at(engine_path, tmp_path / "run", url, credential, key=key, config=config)
        await tofu.ok("init")
        code, output = await tofu.run("apply", "-auto-approve")
        assert (code, "413" in output) == (1, True), output
        assert house.versions() == []
        assert "larger than 0.0625 MiB" in house.events("StateRefused")[0]["message"]

        errored = (tofu.cwd / "errored.tfstate").read_bytes()
        await house.backend.adopt(house.access("r-1"), errored)
        assert "No changes" in await tofu.ok("plan")
    (version,) = house.versions()
    assert version["spec"]["encrypted"] is True


@pytest.mark.engine
async def test_an_operators_tofu_pulls_pushes_and_forces_a_lock_open(
    house: House, engine_path: Path, tmp_path: Path
) -> None:
    key = house.keys.key(house.uid, 1)
    async with serve_runs(house) as url, serve_operators(house) as base:
        credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
        runner = Tofu.at(engine_path, tmp_path / "run", url, credential, key=key)
        await runner.ok("init")
        await runner.ok("apply", "-auto-approve")

        operator = Tofu.at(
            engine_path,
            tmp_path / "operator",
            f"{base}/api/v1/namespaces/blue/tfstate",
            house.backend.issue("blue", house.uid, "none", may_empty=False),
            key=key,
        )
        operator.env |= {"TF_HTTP_USERNAME": "me", "TF_HTTP_PASSWORD": "good"}
        await operator.ok("init")
        assert "No changes" in await operator.ok("plan")

        pulled = json.loads(await operator.ok("state", "pull"))
        pulled["serial"] += 1
        pulled["outputs"] = {"by_hand": {"value": "yes", "type": "string"}}
        (operator.cwd / "new.tfstate").write_text(json.dumps(pulled))
        await operator.ok("state", "push", "new.tfstate")
        plain = await house.backend.plain(house.uid)
        assert plain is not None
        assert plain["outputs"]["by_hand"]["value"] == "yes"

        await house.backend.lock(house.access("r-1"), lock_info("held-by-r-1"))
        house.backend.revoke(credential)
        code, output = await operator.run("plan")
        assert code == 1
        assert "held-by-r-1" in output
        await operator.ok("force-unlock", "-force", "held-by-r-1")
        await operator.ok("plan")
    assert "admin released it by force" in house.events("StateUnlocked")[0]["message"]
    assert [each["spec"]["run"] for each in house.versions()] == ["r-1", ""]


@pytest.mark.engine
async def test_an_operator_without_the_key_cannot_replace_an_encrypted_state(
    house: House, engine_path: Path, tmp_path: Path
) -> None:
    body = house.seal(state(1))
    await house.backend.lock(house.access(), lock_info("L1"))
    await house.backend.write(house.access(), "L1", body)
    await house.backend.unlock(house.access(), "L1")
    async with serve_operators(house) as base:
        operator = Tofu.at(
            engine_path,
            tmp_path / "operator",
            f"{base}/api/v1/namespaces/blue/tfstate",
            house.backend.issue("blue", house.uid, "none", may_empty=False),
            key=None,
        )
        operator.env |= {"TF_HTTP_USERNAME": "me", "TF_HTTP_PASSWORD": "good"}
        code, output = await operator.run("init")
        assert code == 1
        assert "encrypted" in output
    assert await house.backend.read(house.access()) == body
