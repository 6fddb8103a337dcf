"""Owns who is asking: the admin's password, the sessions made from it, and what a token proves.

What a token proves is only a name. Role, disabled and epoch are read from the records at each request, so
a change of password ends every session at the next request. It does not decide what a person may do
(`policy.py`), and it does not know headers or cookies (`http/middleware.py`).
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import logging
import os
import secrets
import stat
import time
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bcrypt
import jwt

from rezuscloud.access.throttle import Throttle
from rezuscloud.model.errors import Cause, Invalid, TooManyRequests, Unauthorized

if TYPE_CHECKING:
    from rezuscloud.store.db import Store, Transaction
    from rezuscloud.store.records import Records

_log = logging.getLogger(__name__)

ADMIN = "admin"
MAX_PASSWORD_BYTES = 72
"""bcrypt reads no further; a longer password would be cut in silence."""
SESSION_LIFETIME = dt.timedelta(hours=24)
_ISSUER = "rezuscloud"
_AUDIENCE = "rezuscloud-api"
_TOKEN_TYPE = "session+jwt"  # noqa: S105 - a media type, no secret
_KEY_BYTES = 32
_MAX_TOKEN_CHARS = 4096
_CACHED_TOKENS = 4096
_LEEWAY_S = 30
_WAITING_LOGINS = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking. `role` comes from our own records at each request, never from a token."""

    subject: str
    display_name: str
    role: str
    """admin | edit | view | system"""
    via: str
    """How it was proved: token | system."""
    expires_at: float | None = None
    """Unix time at which the proof ends; None = never."""


SYSTEM = Identity("system", "RezusCloud", role="system", via="system")
"""The server itself: writes status, projections and events."""


@dataclass(frozen=True, slots=True)
class _Proof:
    identity: Identity
    epoch: int


class Sessions:
    """Login with a password, and the tokens that stand for it afterwards.

    `key_path` is the file of the signing key: made with mode 0600 when missing. Losing it only logs everybody
    out. `bcrypt_rounds` is the cost of a hash; each login costs about 0.27 s of CPU at 12.
    """

    def __init__(self, records: Records, store: Store, key_path: Path, *, bcrypt_rounds: int = 12) -> None:
        self._records = records
        self._store = store
        self._key = _load_key(key_path)
        self._rounds = bcrypt_rounds
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bcrypt")
        self._waiting = 0
        self._by_account = Throttle(free=10, cap_s=30)
        self._by_address = Throttle(free=10, cap_s=300)
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._proofs: OrderedDict[bytes, _Proof] = OrderedDict()

    def close(self) -> None:
        """Ends the hashing thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ the admin

    async def ensure_admin(self, password: str | None) -> str | None:
        """Makes sure that there is an admin; returns a generated password that must be shown once, or None.

        A given password becomes the admin's at each start; nothing is written when it is so already.
        Raises Invalid when it cannot be used.
        """
        user = self._user(ADMIN)
        if password is not None:
            _check_shape(ADMIN, password)
            if user is None or not await self._in_thread(_matches, password, user["hash"]):
                await self.set_admin_password(password)
            return None
        if user is not None:
            return None
        generated = secrets.token_urlsafe(18)
        await self.set_admin_password(generated)
        return generated

    async def set_admin_password(self, password: str) -> None:
        """Stores the new password and ends all sessions of the admin. Raises Invalid for an unusable one."""
        _check_shape(ADMIN, password)
        hashed = await self._in_thread(_hash, password, self._rounds)

        def store(tx: Transaction) -> None:
            before = self._user(ADMIN) or {"epoch": 0}
            user = {"role": "admin", "displayName": "Administrator", "disabled": False}
            user |= before | {"hash": hashed, "epoch": before["epoch"] + 1}
            self._records.put(tx, _record_key(ADMIN), user)

        await self._store.transact(store)

    # ------------------------------------------------------------ login

    async def login(self, username: str, password: str, address: str) -> tuple[str, dt.datetime]:
        """A token for the right password, and when it ends.

        Raises Invalid for a shape that cannot be right, Unauthorized for a wrong name or password (without
        telling which, also not by time), TooManyRequests with a wait for who tried too often.
        """
        _check_shape(username, password)
        self._slow_down(username, address)
        user = self._user(username)
        # An unknown name costs the same check, against the only hash there is; its outcome is thrown away.
        against = user or self._user(ADMIN)
        is_right = against is not None and await self._in_thread(_matches, password, against["hash"])
        if user is None or not is_right or user["disabled"]:
            raise Unauthorized("wrong username or password")
        self._by_account.forgive(username)
        self._by_address.forgive(address)
        self._known[username, address] = None
        while len(self._known) > 256:
            self._known.popitem(last=False)
        return self._issue(username, user["epoch"])

    def _slow_down(self, username: str, address: str) -> None:
        waits = [self._by_address.wait_s(address)]
        # Strangers must not lock the owner out: where the account was opened before, only the address counts.
        if (username, address) not in self._known:
            waits.append(self._by_account.wait_s(username))
        if self._waiting >= _WAITING_LOGINS:
            waits.append(1.0)
        if (wait_s := max(waits)) > 0:
            after = max(1, ceil(wait_s))
            raise TooManyRequests(
                f"too many logins failed; try again in {after} s. Open sessions go on working.",
                retry_after_s=after,
            )
        self._by_account.charge(username)
        self._by_address.charge(address)

    def _issue(self, username: str, epoch: int) -> tuple[str, dt.datetime]:
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        expires = now + SESSION_LIFETIME
        claims = {
            "iss": _ISSUER,
            "aud": _AUDIENCE,
            "sub": username,
            "iat": now,
            "exp": expires,
            "jti": uuid.uuid4().hex,
            "epoch": epoch,
        }
        return jwt.encode(claims, self._key, algorithm="HS256", headers={"typ": _TOKEN_TYPE}), expires

    # ------------------------------------------------------------ verify

    def verify(self, token: str) -> Identity:
        """Whose token this is. Raises Unauthorized, always with the same sentence.

        A token that was verified before costs one hash; only valid ones are remembered.
        """
        if len(token) > _MAX_TOKEN_CHARS:
            raise _refused()
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        proof = self._proofs.get(digest)
        if proof is None:
            proof = self._prove(token)
            self._proofs[digest] = proof
            while len(self._proofs) > _CACHED_TOKENS:
                self._proofs.popitem(last=False)
        identity = proof.identity
        user = self._user(identity.subject)
        expires_at = identity.expires_at
        if (
            user is None
            or user["disabled"]
            or user["epoch"] != proof.epoch
            or expires_at is None
            or expires_at <= time.time()
        ):
            self._proofs.pop(digest, None)
            raise _refused()
        if user["role"] != identity.role:
            self._proofs.pop(digest, None)
            return self.verify(token)
        return identity

    def _prove(self, token: str) -> _Proof:
        try:
            decoded = jwt.decode_complete(
                token,
                self._key,
                algorithms=["HS256"],
                audience=_AUDIENCE,
                issuer=_ISSUER,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iat", "sub", "jti", "aud", "iss"]},
            )
        except (jwt.PyJWTError, ValueError, OverflowError) as error:
            raise _refused() from error
        claims = decoded["payload"]
        subject, epoch, issued, ends = claims["sub"], claims.get("epoch"), claims["iat"], claims["exp"]
        if (
            decoded["header"].get("typ") != _TOKEN_TYPE
            or any(type(number) is not int for number in (epoch, issued, ends))
            or not 0 < ends - issued <= SESSION_LIFETIME.total_seconds()
        ):
            raise _refused()
        user = self._user(subject)
        if user is None:
            raise _refused()
        identity = Identity(
            subject,
            str(user["displayName"]),
            role=str(user["role"]),
            via="token",
            expires_at=float(ends),
        )
        return _Proof(identity, epoch)

    # ------------------------------------------------------------ inside

    def _user(self, username: str) -> dict[str, Any] | None:
        user: dict[str, Any] | None = self._records.get(_record_key(username))
        return user

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._waiting -= 1


def _record_key(username: str) -> str:
    return f"user/{username}"


def _refused() -> Unauthorized:
    return Unauthorized("the token is not valid or has ended: log in again")


def _check_shape(username: str, password: str) -> None:
    causes = []
    if not 0 < len(username) <= 64 or not username.isprintable():
        causes.append(Cause("username", "must have 1 to 64 printable characters"))
    try:
        size = len(password.encode())
    except UnicodeEncodeError:
        size = -1
    if not 0 < size <= MAX_PASSWORD_BYTES or "\0" in password:
        causes.append(Cause("password", f"must have 1 to {MAX_PASSWORD_BYTES} bytes in UTF-8, no NUL"))
    if causes:
        raise Invalid.of("Login", "", causes)


def _hash(password: str, rounds: int) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds)).decode()


def _matches(password: str, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password.encode(), hashed.encode())
    except ValueError:
        _log.error("the stored password hash cannot be read; set REZUSCLOUD_ADMIN_PASSWORD and start again")
        return False


def _load_key(path: Path) -> bytes:
    """The signing key; made when missing, and never readable for others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _make_key(path)
    with os.fdopen(descriptor, "rb") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            os.fchmod(file.fileno(), 0o600)
            _log.warning("%s was readable for others; now it is not. Remove it to end all sessions.", path)
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise RuntimeError(
            f"the session key {path} is damaged; nothing else is. Remove it: everybody must log in again."
        )
    return key


def _make_key(path: Path) -> bytes:
    key = secrets.token_bytes(_KEY_BYTES)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return key
