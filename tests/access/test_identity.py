"""Passwords, sessions and what a token proves."""

from __future__ import annotations

import asyncio
import datetime as dt
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from rezuscloud.access import identity as module
from rezuscloud.access.identity import SESSION_LIFETIME, Sessions
from rezuscloud.model.errors import Invalid, TooManyRequests, Unauthorized
from rezuscloud.store.db import Store

PASSWORD = "correct horse battery"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "data") as opened:
        yield opened


def _sessions(store: Store, tmp_path: Path) -> Sessions:
    return Sessions(store.records, store, tmp_path / "session.key", bcrypt_rounds=4)


@pytest.fixture
async def sessions(store: Store, tmp_path: Path) -> AsyncIterator[Sessions]:
    made = _sessions(store, tmp_path)
    await made.ensure_admin(PASSWORD)
    yield made
    made.close()


async def _log_in(sessions: Sessions, password: str = PASSWORD, username: str = "admin") -> str:
    return (await sessions.login(username, password, "192.0.2.1"))[0]


# ---------------------------------------------------------------- the admin


async def test_a_password_is_generated_once_and_works(store: Store, tmp_path: Path) -> None:
    sessions = _sessions(store, tmp_path)
    generated = await sessions.ensure_admin(None)
    assert generated is not None
    assert len(generated) >= 20
    assert await sessions.ensure_admin(None) is None
    assert sessions.verify(await _log_in(sessions, generated)).role == "admin"


async def test_the_given_password_holds_at_each_start_and_an_equal_one_writes_nothing(
    store: Store, tmp_path: Path
) -> None:
    sessions = _sessions(store, tmp_path)
    assert await sessions.ensure_admin(PASSWORD) is None
    token = await _log_in(sessions)
    before = store.records.get("user/admin")
    again = _sessions(store, tmp_path)
    assert await again.ensure_admin(PASSWORD) is None
    assert store.records.get("user/admin") == before
    assert again.verify(token).subject == "admin"
    await again.ensure_admin("another one")
    with pytest.raises(Unauthorized):
        again.verify(token)
    assert again.verify(await _log_in(again, "another one")).subject == "admin"


async def test_a_new_password_ends_all_sessions_at_the_next_request(sessions: Sessions) -> None:
    token = await _log_in(sessions)
    assert sessions.verify(token).subject == "admin"
    await sessions.set_admin_password("something new")
    with pytest.raises(Unauthorized):
        sessions.verify(token)


async def test_only_a_hash_is_kept(sessions: Sessions, store: Store) -> None:
    record = store.records.get("user/admin")
    assert record["hash"].startswith("$2b$")
    assert PASSWORD not in str(record)


@pytest.mark.parametrize("password", ["", "x" * 73, "ä" * 37, "a\0b", "\ud800"])
async def test_a_password_that_bcrypt_would_cut_or_refuse_is_invalid(
    sessions: Sessions, password: str
) -> None:
    with pytest.raises(Invalid) as refused:
        await sessions.login("admin", password, "192.0.2.1")
    assert refused.value.causes[0].field == "password"
    with pytest.raises(Invalid):
        await sessions.set_admin_password(password)
    with pytest.raises(Invalid):
        await sessions.ensure_admin(password)


async def test_72_bytes_are_a_password(sessions: Sessions) -> None:
    await sessions.set_admin_password("ä" * 36)
    assert sessions.verify(await _log_in(sessions, "ä" * 36))
    with pytest.raises(Unauthorized):
        await _log_in(sessions, "ä" * 35 + "bb")


# ---------------------------------------------------------------- login


async def test_wrong_name_and_wrong_password_read_the_same(sessions: Sessions) -> None:
    messages = set()
    for username, password in (("admin", "wrong"), ("nobody", "wrong"), ("nobody", PASSWORD)):
        with pytest.raises(Unauthorized) as refused:
            await _log_in(sessions, password, username)
        messages.add(refused.value.message)
    assert len(messages) == 1


async def test_an_unknown_name_costs_a_password_check_too(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    real = module._matches

    def counted(password: str, hashed: str) -> bool:
        checks.append(hashed)
        return real(password, hashed)

    monkeypatch.setattr(module, "_matches", counted)
    with pytest.raises(Unauthorized):
        await _log_in(sessions, "wrong", "nobody")
    assert len(checks) == 1


async def test_a_damaged_hash_lets_nobody_in(
    sessions: Sessions, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    record = store.records.get("user/admin") | {"hash": "rubbish"}
    await store.transact(lambda tx: store.records.put(tx, "user/admin", record))
    with pytest.raises(Unauthorized):
        await _log_in(sessions)
    assert "REZUSCLOUD_ADMIN_PASSWORD" in caplog.text


async def test_guessing_from_one_address_is_slowed_down_for_any_name(sessions: Sessions) -> None:
    for number in range(10):
        with pytest.raises(Unauthorized):
            await sessions.login(f"user{number}", "wrong", "192.0.2.9")
    with pytest.raises(TooManyRequests) as refused:
        await sessions.login("admin", PASSWORD, "192.0.2.9")
    assert (refused.value.retry_after_s or 0) >= 1
    assert await sessions.login("admin", PASSWORD, "192.0.2.1")


async def test_guessing_many_at_once_is_no_way_round(sessions: Sessions) -> None:
    tries = [sessions.login("admin", "wrong", "192.0.2.9") for _ in range(50)]
    outcomes = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(outcome, Unauthorized) for outcome in outcomes) <= 10
    assert sum(isinstance(outcome, TooManyRequests) for outcome in outcomes) >= 40


async def test_an_account_under_attack_stays_open_for_who_was_in_before(sessions: Sessions) -> None:
    await sessions.login("admin", PASSWORD, "192.0.2.1")
    for number in range(10):
        with pytest.raises(Unauthorized):
            await sessions.login("admin", "wrong", f"198.51.100.{number}")
    with pytest.raises(TooManyRequests):
        await sessions.login("admin", PASSWORD, "203.0.113.5")
    assert await sessions.login("admin", PASSWORD, "192.0.2.1")


# ---------------------------------------------------------------- tokens


def _claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    claims = {
        "iss": "rezuscloud",
        "aud": "rezuscloud-api",
        "sub": "admin",
        "iat": now,
        "exp": now + 600,
        "jti": "1",
        "epoch": 1,
    }
    return {key: value for key, value in (claims | changes).items() if value is not None}


def _sign(key: bytes, claims: dict[str, Any], *, alg: str = "HS256", typ: str = "session+jwt") -> str:
    return jwt.encode(claims, key, algorithm=alg, headers={"typ": typ})


async def test_a_token_ends_within_its_lifetime(sessions: Sessions) -> None:
    token, expires = await sessions.login("admin", PASSWORD, "192.0.2.1")
    who = sessions.verify(token)
    assert (who.subject, who.role, who.via) == ("admin", "admin", "token")
    left = expires - dt.datetime.now(dt.UTC)
    assert dt.timedelta(0) < left <= SESSION_LIFETIME
    assert who.expires_at == expires.timestamp()


async def test_a_well_made_token_of_our_key_passes(sessions: Sessions, tmp_path: Path) -> None:
    key = (tmp_path / "session.key").read_bytes()
    assert sessions.verify(_sign(key, _claims())).subject == "admin"


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": None},
        {"iat": None},
        {"sub": None},
        {"jti": None},
        {"aud": None},
        {"iss": None},
        {"epoch": None},
        {"exp": 1},
        {"exp": 10**308},
        {"exp": 1e308},
        {"exp": "9999999999"},
        {"exp": int(time.time()) + 10 * 86400},
        {"iat": int(time.time()) + 3600, "exp": int(time.time()) + 7200},
        {"aud": "other"},
        {"iss": "other"},
        {"sub": "nobody"},
        {"sub": "../admin"},
        {"epoch": 0},
        {"epoch": True},
        {"epoch": "1"},
    ],
    ids=str,
)
async def test_a_token_with_wrong_or_missing_claims_is_refused(
    sessions: Sessions, tmp_path: Path, changes: dict[str, Any]
) -> None:
    key = (tmp_path / "session.key").read_bytes()
    with pytest.raises(Unauthorized):
        sessions.verify(_sign(key, _claims(**changes)))


async def test_a_token_of_another_key_algorithm_or_type_is_refused(
    sessions: Sessions, tmp_path: Path
) -> None:
    key = (tmp_path / "session.key").read_bytes()
    unsigned = jwt.encode(_claims(), None, algorithm="none", headers={"typ": "session+jwt"})
    for token in (
        _sign(b"x" * 32, _claims()),
        _sign(key + key, _claims(), alg="HS512"),
        _sign(key, _claims(), typ="JWT"),
        unsigned,
        "",
        "a.b.c",
        "x" * 10_000,
        "\ud800",
        _sign(key, _claims())[:-2],
    ):
        with pytest.raises(Unauthorized):
            sessions.verify(token)


async def test_a_remembered_token_still_ends(
    sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await _log_in(sessions)
    sessions.verify(token)
    later = time.time() + SESSION_LIFETIME.total_seconds() + 1
    monkeypatch.setattr(module.time, "time", lambda: later)
    with pytest.raises(Unauthorized):
        sessions.verify(token)


async def test_role_and_disabled_are_read_at_each_request(sessions: Sessions, store: Store) -> None:
    token = await _log_in(sessions)
    assert sessions.verify(token).role == "admin"
    record = store.records.get("user/admin")
    await store.transact(lambda tx: store.records.put(tx, "user/admin", record | {"role": "view"}))
    assert sessions.verify(token).role == "view"
    await store.transact(lambda tx: store.records.put(tx, "user/admin", record | {"disabled": True}))
    with pytest.raises(Unauthorized):
        sessions.verify(token)
    with pytest.raises(Unauthorized):
        await _log_in(sessions)


# ---------------------------------------------------------------- the key


def _names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


async def test_the_key_file_is_made_for_the_owner_alone_and_kept(store: Store, tmp_path: Path) -> None:
    _sessions(store, tmp_path)
    path = tmp_path / "session.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_bytes()
    assert len(key) == 32
    _sessions(store, tmp_path)
    assert path.read_bytes() == key
    assert _names(tmp_path) == {"data", "session.key"}


async def test_a_key_file_that_others_can_read_is_closed(store: Store, tmp_path: Path) -> None:
    _sessions(store, tmp_path)
    path = tmp_path / "session.key"
    path.chmod(0o644)
    _sessions(store, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_damaged_key_file_stops_the_start_and_says_what_to_do(store: Store, tmp_path: Path) -> None:
    (tmp_path / "session.key").write_bytes(b"short")
    with pytest.raises(RuntimeError, match="Remove it"):
        _sessions(store, tmp_path)


async def test_a_link_instead_of_the_key_file_is_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"x" * 32)
    (tmp_path / "session.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        _sessions(store, tmp_path)
