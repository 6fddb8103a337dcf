from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rezuscloud.access.identity import Identity
from rezuscloud.model.errors import BadRequest, Conflict, Forbidden, InternalError, Unavailable
from rezuscloud.store.states import LockHeld
from tests.support.tfstate import ADMIN, MIB, House, lock_info, open_house, state, tenant_doc


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path / "data") as opened:
        yield opened


async def save(house: House, body: bytes, *, lock: str = "L1", may_empty: bool = False) -> None:
    """Lock, write, unlock: what an apply does."""
    access = house.access(may_empty=may_empty)
    await house.backend.lock(access, lock_info(lock))
    await house.backend.write(access, lock, body)
    await house.backend.unlock(access, lock)


def serial(house: House) -> int | None:
    current = house.store.states.current(house.uid)
    return current.serial if current else None


# ---------------------------------------------------------------- credentials


async def test_a_credential_is_good_for_its_run_until_it_is_revoked(house: House) -> None:
    credential = house.backend.issue("blue", house.uid, "r-1", may_empty=True)
    access = house.backend.authenticate_run(credential.username, credential.password)
    assert access is not None
    assert (access.tenant, access.run, access.may_empty) == ("blue", "r-1", True)
    assert house.backend.authenticate_run("r-2", credential.password) is None
    assert house.backend.authenticate_run(credential.username, credential.password + "x") is None
    assert credential.password not in repr(credential)
    house.backend.revoke(credential)
    house.backend.revoke(credential)
    assert house.backend.authenticate_run(credential.username, credential.password) is None


async def test_only_admins_reach_the_state_as_operators(house: House) -> None:
    assert house.operator().is_operator
    for role in ("view", "edit"):
        with pytest.raises(Forbidden, match="cannot use"):
            house.backend.operator_access(Identity("eve", "Eve", role=role, via="token"), "blue")


async def test_a_tenant_that_is_not_there_is_forbidden_and_not_missing(house: House) -> None:
    with pytest.raises(Forbidden, match="no tenant"):
        house.backend.operator_access(ADMIN, "green")


# ---------------------------------------------------------------- what is accepted


async def test_an_accepted_state_is_read_back_and_announced_as_a_version(house: House) -> None:
    body = house.seal(state(1, resources=2))
    heard: list[tuple[str, str, str]] = []
    house.backend.on_accepted.append(lambda *what: heard.append(what))
    assert await house.backend.read(house.access()) is None
    await save(house, body)
    assert await house.backend.read(house.access()) == body
    assert heard == [("blue", house.uid, "r-1")]
    (version,) = house.versions()
    assert version["metadata"]["name"] == "v1"
    assert version["metadata"]["ownerReferences"][0]["uid"] == house.uid
    spec = version["spec"]
    assert (spec["version"], spec["serial"], spec["run"], spec["encrypted"]) == (1, 1, "r-1", True)
    assert (spec["sizeBytes"], spec["engineVersion"]) == (len(body), "1.12.6")


async def test_a_repeated_upload_is_no_second_version(house: House) -> None:
    access, body = house.access(), house.seal(state(1))
    heard: list[str] = []
    house.backend.on_accepted.append(lambda tenant, uid, run: heard.append(run))
    await house.backend.lock(access, lock_info("L1"))
    await asyncio.gather(*(house.backend.write(access, "L1", body) for _ in range(5)))
    assert len(house.versions()) == 1
    assert heard == ["r-1"]


async def test_a_listener_that_fails_does_not_undo_an_accepted_state(house: House) -> None:
    heard: list[str] = []

    def fail(tenant: str, uid: str, run: str) -> None:
        raise RuntimeError("a listener's bug")

    house.backend.on_accepted += [fail, lambda *what: heard.append("second")]
    await save(house, state(1))
    assert (serial(house), heard) == (1, ["second"])


async def test_an_equal_serial_with_other_content_is_a_new_version(house: House) -> None:
    await save(house, state(3, note="a"))
    await save(house, state(3, note="b"))
    assert [each["spec"]["serial"] for each in house.versions()] == [3, 3]


async def test_a_lower_serial_is_refused(house: House) -> None:
    await save(house, state(5))
    with pytest.raises(Conflict):
        await save(house, state(4))
    assert serial(house) == 5


async def test_another_lineage_is_refused(house: House) -> None:
    await save(house, state(5))
    with pytest.raises(Conflict):
        await save(house, state(6, lineage="other"))
    assert serial(house) == 5


async def test_a_serial_may_jump_upwards(house: House) -> None:
    await save(house, state(5))
    await save(house, state(50))
    assert serial(house) == 50


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_state_that_lost_all_its_resources_is_refused_outside_a_destroy(
    house: House, is_sealed: bool
) -> None:
    def wrap(plain: bytes) -> bytes:
        return house.seal(plain) if is_sealed else plain

    await save(house, wrap(state(1, resources=2)))
    with pytest.raises(Conflict, match="lost all of the 2 resources"):
        await save(house, wrap(state(2, resources=0)))
    assert serial(house) == 1
    await house.backend.unlock(house.access(), "L1")
    await save(house, wrap(state(2, resources=0)), may_empty=True)
    assert serial(house) == 2


async def test_an_operator_may_empty_the_state_of_a_tenant_that_is_leaving(house: House) -> None:
    assert house.operator().may_empty is False
    await house.service.delete(ADMIN, "Tenant", "", "blue")
    assert house.operator().may_empty is True


async def test_a_plain_state_is_refused_once_the_stored_one_is_encrypted(house: House) -> None:
    await save(house, state(1))
    await save(house, house.seal(state(2)))
    with pytest.raises(Conflict, match="rezusctl state env blue"):
        await save(house, state(3))
    assert serial(house) == 2


async def test_a_state_under_a_strange_key_is_refused_with_what_to_do(house: House, tmp_path: Path) -> None:
    async with open_house(tmp_path / "elsewhere") as other:
        foreign = other.keys.seal_state(house.uid, 1, state(1))
    with pytest.raises(Conflict, match="rezusctl state env blue"):
        await save(house, foreign)
    assert serial(house) is None


async def test_serial_and_lineage_outside_must_be_those_inside(house: House) -> None:
    blob = json.loads(house.seal(state(1)))
    for lie in ({"serial": 9}, {"lineage": "other"}):
        with pytest.raises(Conflict, match="nothing was stored"):
            await save(house, json.dumps(blob | lie).encode())


@pytest.mark.parametrize("missing", ["serial", "lineage"])
async def test_an_encrypted_state_without_serial_or_lineage_is_refused(house: House, missing: str) -> None:
    blob = json.loads(house.seal(state(1)))
    del blob[missing]
    with pytest.raises(BadRequest):
        await save(house, json.dumps(blob).encode())


async def test_only_the_newest_versions_are_kept(house: House) -> None:
    access = house.access()
    await house.backend.lock(access, lock_info("L1"))
    for number in range(1, 34):
        await house.backend.write(access, "L1", state(number))
    assert [each["spec"]["serial"] for each in house.versions()] == list(range(4, 34))
    assert await house.backend.plain(house.uid, 3) is None
    assert (await house.backend.plain(house.uid, 4) or {})["serial"] == 4


async def test_nothing_is_stored_for_a_tenant_that_is_gone(house: House) -> None:
    access = house.access()
    await house.backend.lock(access, lock_info("L1"))
    await house.service.transact(lambda desk: desk.remove("Tenant", "", "blue"))
    with pytest.raises(Forbidden, match="gone"):
        await house.backend.write(access, "L1", state(1))
    with pytest.raises(Forbidden, match="gone"):
        await house.backend.read(access)


async def test_a_new_tenant_of_the_same_name_does_not_meet_the_old_ones_runs(house: House) -> None:
    access = house.access()
    await house.service.transact(lambda desk: desk.remove("Tenant", "", "blue"))
    await house.service.create(ADMIN, "Tenant", "", tenant_doc("blue"))
    with pytest.raises(Forbidden, match="gone"):
        await house.backend.lock(access, lock_info("L1"))


async def test_the_loop_goes_on_while_a_large_state_is_read(house: House) -> None:
    plain = state(1, resources=20_000, note="x" * 300)
    assert len(plain) > 8 * MIB
    body = house.seal(plain)
    longest, last = 0.0, time.perf_counter()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    started = time.perf_counter()
    try:
        await save(house, body)
        assert len((await house.backend.plain(house.uid) or {})["resources"]) == 20_000
    finally:
        took = time.perf_counter() - started
        ticking.cancel()
    assert longest < took / 2  # all of it in one piece would be nearly all of the time


# ---------------------------------------------------------------- lock


async def test_a_write_without_the_lock_is_refused(house: House) -> None:
    access = house.access()
    for lock_id in (None, "", "L1"):
        with pytest.raises(Conflict, match="nothing was stored"):
            await house.backend.write(access, lock_id, state(1))
    await house.backend.lock(access, lock_info("L1"))
    for lock_id in (None, "L2"):
        with pytest.raises(Conflict, match="nothing was stored"):
            await house.backend.write(access, lock_id, state(1))


async def test_knowing_the_id_of_somebody_elses_lock_is_not_holding_it(house: House) -> None:
    await house.backend.lock(house.access("r-1"), lock_info("L1"))
    for other in (house.access("r-2"), house.operator()):
        with pytest.raises(Conflict, match="locked by r-1"):
            await house.backend.write(other, "L1", state(1))
        with pytest.raises(LockHeld):
            await house.backend.lock(other, lock_info("L1"))
    with pytest.raises(Conflict, match="nothing was released"):
        await house.backend.unlock(house.access("r-2"), "L1")
    assert house.store.states.lock(house.uid) is not None


async def test_of_many_that_want_the_lock_at_once_one_gets_it(house: House) -> None:
    async def take(number: int) -> bool:
        try:
            await house.backend.lock(house.access(f"r-{number}"), lock_info(f"L{number}"))
        except LockHeld:
            return False
        return True

    assert sum(await asyncio.gather(*(take(number) for number in range(20)))) == 1


async def test_lock_and_unlock_may_be_repeated(house: House) -> None:
    access = house.access()
    await house.backend.lock(access, lock_info("L1"))
    await house.backend.lock(access, lock_info("L1"))
    await house.backend.unlock(access, "L1")
    await house.backend.unlock(access, "L1")
    assert house.store.states.lock(house.uid) is None


async def test_a_holder_with_another_id_is_told_of_the_lock_it_has(house: House) -> None:
    await house.backend.lock(house.access(), lock_info("L1"))
    with pytest.raises(LockHeld) as held:
        await house.backend.lock(house.access(), lock_info("L2"))
    assert held.value.lock.id == "L1"


@pytest.mark.parametrize("bad", [{}, {"ID": ""}, {"ID": 7}, {"ID": "x" * 300}])
async def test_a_lock_needs_an_id(house: House, bad: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="ID"):
        await house.backend.lock(house.access(), bad)


async def test_the_holders_info_is_readable_for_every_tofu(house: House) -> None:
    await house.backend.lock(house.access(), {"ID": "L1", "Created": "yesterday", "Who": 7, "Extra": "x"})
    lock = house.store.states.lock(house.uid)
    assert lock is not None
    assert set(lock.info) == {"ID", "Operation", "Info", "Who", "Version", "Created", "Path"}
    assert lock.info["Created"].endswith("Z")


async def test_an_operator_forces_a_lock_open_and_it_is_recorded(house: House) -> None:
    await house.backend.lock(house.access(), lock_info("L1"))
    with pytest.raises(Conflict, match="lock ID L1"):
        await house.backend.unlock(house.operator(), "L2")
    await house.backend.unlock(house.operator(), "L1")
    assert house.store.states.lock(house.uid) is None
    (event,) = house.events("StateUnlocked")
    assert "admin released it by force" in event["message"]


async def test_the_lock_of_a_run_that_goes_on_cannot_be_forced_open(house: House) -> None:
    credential = house.backend.issue("blue", house.uid, "r-1", may_empty=False)
    await house.backend.lock(house.access("r-1"), lock_info("L1"))
    with pytest.raises(Conflict, match="cancel that run"):
        await house.backend.unlock(house.operator(), "L1")
    house.backend.revoke(credential)
    await house.backend.unlock(house.operator(), "L1")
    assert house.store.states.lock(house.uid) is None


async def test_the_lock_of_a_dead_run_is_released_and_recorded(house: House) -> None:
    await house.backend.lock(house.access("r-1"), lock_info("L1"))
    release = house.backend.release_lock_of_run
    assert await release("blue", house.uid, "r-2", "its tofu is gone") is False
    assert await release("blue", house.uid, "r-1", "its tofu is gone") is True
    assert await release("blue", house.uid, "r-1", "its tofu is gone") is False
    (event,) = house.events("StateUnlocked")
    assert event["type"] == "Warning"
    assert "r-1" in event["message"]
    assert "its tofu is gone" in event["message"]


# ---------------------------------------------------------------- adopt


async def test_a_dead_runs_file_is_adopted_under_its_own_lock_or_none(house: House) -> None:
    access = house.access("r-1")
    await house.backend.adopt(access, house.seal(state(1)))
    assert (serial(house), house.store.states.lock(house.uid)) == (1, None)
    await house.backend.lock(access, lock_info("L1"))
    await house.backend.adopt(access, house.seal(state(2)))
    lock = house.store.states.lock(house.uid)
    assert serial(house) == 2
    assert lock is not None
    assert lock.id == "L1"


async def test_adopting_twice_changes_nothing(house: House) -> None:
    body = house.seal(state(1))
    await house.backend.adopt(house.access(), body)
    await house.backend.adopt(house.access(), body)
    assert len(house.versions()) == 1


async def test_nothing_is_adopted_against_somebody_elses_lock_or_an_older_one(house: House) -> None:
    await house.backend.lock(house.access("r-2"), lock_info("L2"))
    with pytest.raises(Conflict, match="locked by r-2"):
        await house.backend.adopt(house.access("r-1"), state(1))
    await house.backend.unlock(house.access("r-2"), "L2")
    await save(house, state(5))
    for refused in (state(4), state(6, lineage="other"), state(6, resources=0)):
        with pytest.raises(Conflict):
            await house.backend.adopt(house.access("r-1"), refused)
    assert house.store.states.lock(house.uid) is None


# ---------------------------------------------------------------- reading in clear


async def test_the_newest_plain_state_is_decoded_once_until_the_next_write(house: House) -> None:
    assert await house.backend.plain(house.uid) is None
    await save(house, house.seal(state(1)))
    first = await house.backend.plain(house.uid)
    assert first == json.loads(state(1))
    assert await house.backend.plain(house.uid) is first
    await save(house, house.seal(state(2)))
    assert (await house.backend.plain(house.uid) or {})["serial"] == 2
    assert await house.backend.plain(house.uid, 1) == first


async def test_a_damaged_body_is_not_given_out(house: House) -> None:
    await save(house, state(1))
    body = await house.store.states.body(house.uid)
    assert body is not None

    async def flipped(*args: object) -> bytes:
        return body.replace(b"n0", b"n1")

    house.store.states.body = flipped  # type: ignore[method-assign] # a disk that flips a bit
    with pytest.raises(InternalError, match="damaged"):
        await house.backend.read(house.access())


# ---------------------------------------------------------------- stopping, refusing


async def test_while_draining_holders_finish_and_nobody_starts(house: House) -> None:
    access = house.access()
    await house.backend.lock(access, lock_info("L1"))
    house.backend.drain()
    with pytest.raises(Unavailable) as refused:
        await house.backend.lock(house.operator(), lock_info("L2"))
    assert refused.value.retry_after_s
    with pytest.raises(Forbidden, match="stopping"):  # our own run ends with us: nothing to come back for
        await house.backend.lock(house.access("r-2"), lock_info("L2"))
    await house.backend.write(access, "L1", state(1))
    await house.backend.unlock(access, "L1")
    house.backend.close()
    with pytest.raises(Unavailable):
        await house.backend.read(access)
    with pytest.raises(Unavailable):
        await house.backend.write(access, "L1", state(1))


async def test_a_refusal_is_told_on_the_tenant_and_counted(house: House) -> None:
    for _ in range(2):
        await house.backend.record_refusal(house.access(), Conflict("nothing was stored: because"))
    (event,) = house.events("StateRefused")
    assert (event["count"], event["message"]) == (2, "nothing was stored: because")
    assert event["involvedObject"]["name"] == "blue"
