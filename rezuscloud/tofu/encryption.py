"""Owns the keys of state and plan encryption: where they come from, how the engine gets them, how blobs open.

One root key per data directory; from it, by HKDF, one 256-bit key per tenant and key version. The engine
fetches its key through its `external` key provider: `cat` of an anonymous file in our memory. So the key is
in no environment (provider plugins inherit that), no argument and no file, and no command pays for
stretching. A process of the same user can still read it; the threat model says so.

It does not store blobs and does not decide when a key is rotated.
Decision: ADR 0002.
"""

from __future__ import annotations

import base64
import binascii
import errno
import fcntl
import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from rezuscloud.model.meta import Doc

ROOT_KEY_FILE = "root.key"
ROOT_SALT_FILE = "root.salt"
MIN_PASSPHRASE = 16
KEY_BYTES = 32

KEY_ID_RAW = "raw"
"""Key id of a blob sealed with a bare key, as `raw_encryption` does: it does not tell which."""
KEY_ID_PBKDF2 = "pbkdf2"
"""Key id of a blob that an operator's own OpenTofu sealed with a passphrase."""

_PAYLOAD = re.compile(rb'"encrypted_data"\s*:\s*"')
_HEAD = re.compile(rb'\{"version":\d+,"terraform_version":"[^"\\]*","serial":(\d+),"lineage":"([^"\\]+)"')
_NONCE_BYTES = 12
_MAX_FILE_BYTES = 4096
_SCRYPT = {"n": 2**16, "r": 8, "p": 1}
_SCRYPT_MEMORY = 256 * 1024 * 1024
_VERSIONED_ID = re.compile(r"k([1-9][0-9]{0,5})")
_NO_LINEAGE = re.compile(rb'"lineage"\s*:\s*""')
_MAX_ITERATIONS = 10_000_000  # a blob is input: its own header must not keep us busy for hours
_HASHES = frozenset({"sha256", "sha512"})


class RootKeyError(Exception):
    """The root key cannot be had; the server must not start. The message says what to do."""


class BadState(ValueError):
    """The bytes are no OpenTofu state."""


class CannotOpenState(Exception):
    """A sealed state for which the key is missing or wrong, or that was damaged."""


class Header(NamedTuple):
    """What a state tells without a key. `key_id` is "" for a plain one."""

    serial: int
    lineage: str
    encrypted: bool
    key_id: str


@dataclass(frozen=True)
class StateKey:
    """A key, the id under which blobs name it, and the uid of the tenant that it belongs to."""

    id: str
    key: bytes = field(repr=False)
    tenant_uid: str = ""


# ---------------------------------------------------------------- blobs


def is_encrypted(blob: bytes) -> bool:
    """Whether these bytes are a sealed state or plan. Parses all of them: use a thread for megabytes."""
    try:
        return _is_sealed(_parse(blob))
    except BadState:
        return False


def header(blob: bytes) -> Header:
    """Serial, lineage and key id of a state, sealed or plain. Raises BadState."""
    return _header(_parse(blob))


def tenant_of(blob: bytes) -> str | None:
    """Uid of the tenant that a sealed state names; None when it names none. Raises BadState."""
    document = _parse(blob)
    for meta in _metas(document).values() if _is_sealed(document) else ():
        external = meta.get("external_data")
        if isinstance(external, Mapping) and isinstance(external.get("tenant"), str):
            return str(external["tenant"]) or None
    return None


def _header(document: Doc) -> Header:
    serial, lineage = document.get("serial"), document.get("lineage")
    if not isinstance(serial, int) or isinstance(serial, bool) or serial < 0:
        raise BadState("not an OpenTofu state: it has no serial number")
    if not isinstance(lineage, str) or not lineage:
        raise BadState("not an OpenTofu state: it has no lineage")
    if not _is_sealed(document):
        return Header(serial, lineage, encrypted=False, key_id="")
    return Header(serial, lineage, encrypted=True, key_id=_sealed_key_id(document))


def _sealed_key_id(document: Doc) -> str:
    metas = _metas(document)
    return _key_id(*next(iter(metas.items()))) if metas else KEY_ID_RAW


def _key_id(alias: str, meta: Mapping[str, Any]) -> str:
    external = meta.get("external_data")
    if isinstance(external, Mapping) and isinstance(external.get("kid"), str):
        return str(external["kid"])
    return KEY_ID_PBKDF2 if "iterations" in meta else alias


def _parse(blob: bytes) -> Doc:
    """The JSON object in a blob. Sealed data, which is nearly all of a blob, is not parsed but left where it
    is, as a memoryview: parsing megabytes of it would hold the interpreter."""
    found = _PAYLOAD.search(blob)
    end = blob.find(b'"', found.end()) if found else -1
    if found and end > 0:
        outline = _loads(blob[: found.end()] + blob[end:])
        if _is_sealed(outline):
            return outline | {"encrypted_data": memoryview(blob)[found.end() : end]}
    return _loads(blob)


def _loads(text: bytes) -> Doc:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadState(f"not an OpenTofu state: {error}") from error
    if not isinstance(document, dict):
        raise BadState("not an OpenTofu state: no JSON object")
    return document


def _inner_header(plain: bytes) -> Header:
    """The header of a plain state; of one that is laid out as tofu does it, from its first bytes alone."""
    if found := _HEAD.match(plain):
        return Header(int(found[1]), found[2].decode(), encrypted=False, key_id="")
    return header(plain)


def _is_sealed(document: Doc) -> bool:
    return bool(document.get("encryption_version"))


def _metas(document: Doc) -> dict[str, dict[str, Any]]:
    """Alias → what the key provider left beside the sealed data."""
    metas = document.get("meta") or {}
    if not isinstance(metas, dict):
        raise BadState("not an OpenTofu state: meta is no object")
    try:
        decoded = {
            alias: orjson.loads(base64.b64decode(meta, validate=True)) for alias, meta in metas.items()
        }
    except (TypeError, ValueError) as error:
        raise BadState(f"not an OpenTofu state: unreadable meta: {error}") from error
    if not all(isinstance(meta, dict) for meta in decoded.values()):
        raise BadState("not an OpenTofu state: unreadable meta")
    return decoded


# ---------------------------------------------------------------- keys


class KeyRing:
    """All keys of one data directory. It opens and seals states in-process, with the engine's own format."""

    def __init__(self, root: bytes, *, passphrase: str | None = None, is_new: bool = False) -> None:
        self._root = root
        self._passphrase = passphrase
        self.is_new = is_new
        """The root key was made just now: nothing sealed before can be opened, and it wants a backup."""

    @classmethod
    def open(cls, data_dir: Path, passphrase: str | None) -> KeyRing:
        """Reads the root key of a data directory, or makes it when there is none.

        With a passphrase it is scrypt of that (takes up to 0.3 s) and a fixed salt in `root.salt`; else 32
        random bytes in `root.key`. A directory never changes from one to the other. Raises RootKeyError.
        """
        key_file, salt_file = data_dir / ROOT_KEY_FILE, data_dir / ROOT_SALT_FILE
        if passphrase is None:
            if os.path.lexists(salt_file):
                raise RootKeyError(
                    f"The states in {data_dir} are sealed with a passphrase, and none was given. "
                    "Nothing was changed. Set REZUSCLOUD_STATE_PASSPHRASE to the one used before."
                )
            content, is_new = _read_or_create(key_file, lambda: os.urandom(KEY_BYTES))
            if len(content) != KEY_BYTES:
                raise RootKeyError(
                    f"{key_file} has {len(content)} bytes; a root key has {KEY_BYTES}. Nothing was changed. "
                    "Restore it from a backup: without it the stored states cannot be opened."
                )
            return cls(content, is_new=is_new)
        if len(passphrase) < MIN_PASSPHRASE:
            raise RootKeyError(
                f"REZUSCLOUD_STATE_PASSPHRASE has {len(passphrase)} characters; "
                f"it needs at least {MIN_PASSPHRASE}."
            )
        if os.path.lexists(key_file):
            raise RootKeyError(
                f"The states in {data_dir} are sealed with the key in {ROOT_KEY_FILE}, not with a "
                "passphrase. Nothing was changed. Start without REZUSCLOUD_STATE_PASSPHRASE, or with a new "
                "data directory."
            )
        content, is_new = _read_or_create(salt_file, lambda: _new_salt_file(passphrase))
        return cls(_stretch_as(salt_file, content, passphrase), passphrase=passphrase, is_new=is_new)

    def key(self, tenant_uid: str, version: int) -> bytes:
        """The 32-byte key of a tenant in a key version (from 1)."""
        return _derive(self._root, f"rezuscloud state key\0{tenant_uid}\0{version}")

    @staticmethod
    def key_id(version: int) -> str:
        return f"k{version}"

    def state_key(self, tenant_uid: str, version: int) -> StateKey:
        return StateKey(self.key_id(version), self.key(tenant_uid, version), tenant_uid)

    def open_state(self, tenant_uid: str, blob: bytes, *, versions: int = 16) -> bytes:
        """The plain state in a blob; a plain one passes through. Blocks: use a thread for megabytes, and for
        blobs under a passphrase (up to a second).

        `versions` is how many key versions are tried on a blob that does not name its key (one that an
        operator's tofu wrote with `raw_encryption`). Raises BadState or CannotOpenState.
        """
        document = _parse(blob)
        if not _is_sealed(document):
            return blob
        return self._unseal(tenant_uid, document, versions)[1]

    def seal_state(self, tenant_uid: str, version: int, plain: bytes) -> bytes:
        """A blob that the engine reads as its own. Raises BadState when `plain` is no plain state."""
        inner = header(plain)
        if inner.encrypted:
            raise BadState("this state is sealed already")
        state_key = self.state_key(tenant_uid, version)
        blob = {
            "serial": inner.serial,
            "lineage": inner.lineage,
            "meta": {_meta_alias(state_key): base64.b64encode(orjson.dumps(_meta(state_key))).decode()},
            "encrypted_data": _encrypt(state_key, plain),
            "encryption_version": "v0",
        }
        return orjson.dumps(blob)

    def give_lineage(self, tenant_uid: str, blob: bytes, lineage: str) -> bytes:
        """A state that has no lineage, under this one; any other is returned as it is. The engine leaves such
        a state beside its first apply when we were gone before it could ask whether there is one already.

        Blocks like `open_state`. Raises BadState or CannotOpenState.
        """
        document = _parse(blob)
        if document.get("lineage") != "":
            return blob
        if not _is_sealed(document):
            return _set_lineage(blob, lineage)
        state_key, plain = self._decrypt(tenant_uid, document, _sealed_key_id(document), versions=16)
        sealed = _encrypt(state_key, _set_lineage(plain, lineage))
        return orjson.dumps(document | {"lineage": lineage, "encrypted_data": sealed})

    def hand_over(self, tenant_uid: str, version: int, current: bytes | None) -> KeyHandover:
        """What the engine needs to seal under this version and to read the state as it is stored now.

        A current state that is plain, under another version or under a passphrase becomes a fallback; see
        `KeyHandover.migrates`. Blocks like `open_state`. Raises BadState or CannotOpenState.
        """
        state_key = self.state_key(tenant_uid, version)
        if not current:
            return KeyHandover(state_key)
        document = _parse(current)
        if not _is_sealed(document):
            return KeyHandover(state_key, accepts_plain=True)
        if _header(document).key_id == state_key.id:
            return KeyHandover(state_key)
        used, _ = self._unseal(tenant_uid, document, versions=version)
        return KeyHandover(state_key, fallback=None if used.key == state_key.key else used)

    def _unseal(self, tenant_uid: str, document: Doc, versions: int) -> tuple[StateKey, bytes]:
        """The key that opens a sealed state, and the plain state."""
        outer = _header(document)
        state_key, plain = self._decrypt(tenant_uid, document, outer.key_id, versions)
        inner = _inner_header(plain)
        if (inner.serial, inner.lineage) != (outer.serial, outer.lineage):
            raise CannotOpenState(
                f"The state of tenant {tenant_uid} was altered: outside it says serial {outer.serial} of "
                f"{outer.lineage}, inside serial {inner.serial} of {inner.lineage}. Use an older version."
            )
        return state_key, plain

    def _decrypt(self, tenant_uid: str, document: Doc, key_id: str, versions: int) -> tuple[StateKey, bytes]:
        """The key that opens a sealed state, and what is inside, whatever that is."""
        sealed = _sealed_bytes(document)
        for state_key in self._candidates(tenant_uid, document, key_id, versions):
            try:
                plain = AESGCM(state_key.key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
            except (InvalidTag, ValueError):  # ValueError: too short to hold a nonce
                continue
            return state_key, plain
        raise CannotOpenState(
            f"The state of tenant {tenant_uid} (serial {document.get('serial')}, key {key_id}) does not open "
            "with the keys of this server: it was sealed with another root key or passphrase, or damaged. "
            "It is kept as it is. Start the server with the root key or passphrase that wrote it."
        )

    def _candidates(self, tenant_uid: str, document: Doc, key_id: str, versions: int) -> Iterator[StateKey]:
        """The keys that may open a blob, by what it says of itself. Raises CannotOpenState if none can."""
        if key_id == KEY_ID_RAW:
            for version in range(versions, 0, -1):
                yield self.state_key(tenant_uid, version)
        elif found := _VERSIONED_ID.fullmatch(key_id):
            yield self.state_key(tenant_uid, int(found[1]))
        elif key_id == KEY_ID_PBKDF2 and self._passphrase is not None:
            for meta in _metas(document).values():
                yield StateKey(KEY_ID_PBKDF2, _pbkdf2(self._passphrase, meta))
        else:
            what = "a passphrase" if key_id == KEY_ID_PBKDF2 else f"the key {key_id}"
            raise CannotOpenState(
                f"The state of tenant {tenant_uid} was sealed with {what} by an OpenTofu outside of this "
                "server, which does not have it. It is kept as it is. Push that state again with the key "
                "that `rezusctl state env` gives."
            )


def _encrypt(state_key: StateKey, plain: bytes) -> str:
    nonce = os.urandom(_NONCE_BYTES)
    return base64.b64encode(nonce + AESGCM(state_key.key).encrypt(nonce, plain, None)).decode()


def _set_lineage(plain: bytes, lineage: str) -> bytes:
    """In the text itself: a JSON parser might not give back every number as it was."""
    named = _NO_LINEAGE.sub(b'"lineage":"' + lineage.encode() + b'"', plain, count=1)
    if _parse(named).get("lineage") != lineage:
        raise BadState("not an OpenTofu state: its lineage is not where the engine writes it")
    return named


def _sealed_bytes(document: Doc) -> bytes:
    if document["encryption_version"] != "v0":
        raise CannotOpenState(
            f"This state is sealed in the format {document['encryption_version']!r}, which this server does "
            "not know. It is kept as it is. Use a newer server."
        )
    try:
        return binascii.a2b_base64(document.get("encrypted_data", ""), strict_mode=True)
    except (TypeError, ValueError) as error:
        raise BadState(f"not an OpenTofu state: {error}") from error


def _derive(root: bytes, info: str) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info.encode()).derive(root)


def _pbkdf2(passphrase: str, meta: Mapping[str, Any]) -> bytes:
    """The key that OpenTofu's pbkdf2 provider made, from what it left in the blob."""
    try:
        salt = base64.b64decode(meta["salt"], validate=True)
        iterations, hash_function, length = meta["iterations"], meta["hash_function"], meta["key_length"]
        if (
            hash_function not in _HASHES
            or length not in (16, 24, 32)
            or not 0 < iterations <= _MAX_ITERATIONS
        ):
            raise ValueError(f"{hash_function}, {iterations} iterations, {length} bytes")
        return hashlib.pbkdf2_hmac(hash_function, passphrase.encode(), salt, iterations, length)
    except (KeyError, TypeError, ValueError) as error:
        raise BadState(f"not an OpenTofu state: unusable pbkdf2 settings: {error}") from error


# ---------------------------------------------------------------- root key files


def _read_or_create(path: Path, make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The file's content, and whether it was made just now. Refuses a file that others could read."""
    try:
        return _read_private(path), False
    except FileNotFoundError:
        pass
    content = make()
    # O_EXCL: whoever comes second reads the first one's key instead of replacing it.
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read_private(path), False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)  # half a key would stop every later start
        raise
    return content, True


def _read_private(path: Path) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
        raise RootKeyError(f"{path} {what}. Nothing was changed. Put the file itself there.") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise RootKeyError(
                f"{path} is not a regular file. Nothing was changed. Put the file itself there."
            )
        if status.st_mode & 0o077:
            raise RootKeyError(
                f"{path} can be read or changed by others (mode {stat.S_IMODE(status.st_mode):04o}). Nothing "
                f"was changed. If nobody has copied it: chmod 600 {path}"
            )
        return os.read(handle, _MAX_FILE_BYTES)
    finally:
        os.close(handle)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _stretch(passphrase: str, salt: bytes, settings: Mapping[str, int]) -> bytes:
    return hashlib.scrypt(
        passphrase.encode(),
        salt=salt,
        n=settings["n"],
        r=settings["r"],
        p=settings["p"],
        maxmem=_SCRYPT_MEMORY,
        dklen=KEY_BYTES,
    )


def _new_salt_file(passphrase: str) -> bytes:
    """Salt and settings of the stretching, and a check value that finds a wrong passphrase at the start."""
    salt = os.urandom(16)
    check = _derive(_stretch(passphrase, salt, _SCRYPT), "rezuscloud passphrase check")
    return orjson.dumps({"salt": salt.hex(), "scrypt": _SCRYPT, "check": check.hex()}) + b"\n"


def _stretch_as(path: Path, content: bytes, passphrase: str) -> bytes:
    try:
        document = orjson.loads(content)
        root = _stretch(passphrase, bytes.fromhex(document["salt"]), document["scrypt"])
        check = bytes.fromhex(document["check"])
    except (KeyError, TypeError, ValueError) as error:
        raise RootKeyError(
            f"{path} is damaged ({error}). Nothing was changed. "
            "Restore it from a backup: without it the stored states cannot be opened."
        ) from error
    if not hmac.compare_digest(check, _derive(root, "rezuscloud passphrase check")):
        raise RootKeyError(
            "REZUSCLOUD_STATE_PASSPHRASE is not the passphrase that this data directory was started with. "
            "Nothing was changed."
        )
    return root


# ---------------------------------------------------------------- what the engine gets

_HELPER = "/bin/cat"


def _meta_alias(state_key: StateKey) -> str:
    return f"key_provider.external.{state_key.id}"


def _meta(state_key: StateKey) -> Doc:
    return {"external_data": {"kid": state_key.id, "tenant": state_key.tenant_uid}}


class KeyHandover:
    """Lends keys to engine processes for as long as the context lasts; it may be entered again and nested.

    The engine reads them when a command starts and when it reads a state, so the context must span the
    process. It keeps what it needs to write: a state is saved sealed even when we are gone by then.
    """

    def __init__(
        self, state_key: StateKey, *, fallback: StateKey | None = None, accepts_plain: bool = False
    ) -> None:
        self._state_key = state_key
        self._fallback = fallback
        self._accepts_plain = accepts_plain
        self._entered = 0
        self._files: list[int] = []
        self._text = ""

    @property
    def migrates(self) -> bool:
        """The stored state is not under the key of this handover. Plans do not show that ("no changes"), so
        an apply must run all the same; after it the state is."""
        return self._accepts_plain or self._fallback is not None

    @property
    def may_enforce(self) -> bool:
        """Whether the configuration may say `enforced`: not while a plain state is still to be read."""
        return not self._accepts_plain

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be seen in a log."""
        keys = [self._state_key, *([self._fallback] if self._fallback else [])]
        return tuple(base64.b64encode(state_key.key).decode() for state_key in keys)

    @property
    def tf_encryption(self) -> str:
        """The value of TF_ENCRYPTION; only inside the context. It holds a path, no key."""
        if not self._entered:
            raise RuntimeError("keys are lent only inside the context")
        return self._text

    def __enter__(self) -> KeyHandover:
        if not self._entered:
            try:
                self._text = json.dumps(self._configuration())
            except BaseException:
                self._close()
                raise
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered -= 1
        if not self._entered:
            self._close()

    def _configuration(self) -> Doc:
        providers = {self._state_key.id: self._lend(self._state_key)}
        methods: dict[str, Any] = {"aes_gcm": {self._state_key.id: _method_of(self._state_key)}}
        state: dict[str, Any] = {"method": f"method.aes_gcm.{self._state_key.id}"}
        if self._fallback:
            providers[self._fallback.id] = self._lend(self._fallback)
            methods["aes_gcm"][self._fallback.id] = _method_of(self._fallback)
            state["fallback"] = {"method": f"method.aes_gcm.{self._fallback.id}"}
        elif self._accepts_plain:
            methods["unencrypted"] = {"plain": {}}
            state["fallback"] = {"method": "method.unencrypted.plain"}
        return {
            "key_provider": {"external": providers},
            "method": methods,
            "state": state,
            "plan": {"method": f"method.aes_gcm.{self._state_key.id}"},
        }

    def _lend(self, state_key: StateKey) -> Doc:
        """Puts the helper's answer, the same for each call, into a file that has no name."""
        key = base64.b64encode(state_key.key).decode()
        answer = b"%s\n%s" % (
            orjson.dumps({"magic": "OpenTofu-External-Key-Provider", "version": 1}),
            orjson.dumps({"keys": {"encryption_key": key, "decryption_key": key}, "meta": _meta(state_key)}),
        )
        handle = os.memfd_create("rezuscloud-state-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files.append(handle)
        os.write(handle, answer)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
        return {"command": [_HELPER, f"/proc/{os.getpid()}/fd/{handle}"]}

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _method_of(state_key: StateKey) -> Doc:
    return {"keys": f"key_provider.external.{state_key.id}"}


def raw_encryption(key: bytes) -> str:
    """The TF_ENCRYPTION that an operator's own OpenTofu needs. It holds the key: show it only to admins."""
    numbers = list(key)
    return json.dumps(
        {
            "method": {"aes_gcm": {"m": {"keys": {"encryption_key": numbers, "decryption_key": numbers}}}},
            "state": {"method": "method.aes_gcm.m"},
            "plan": {"method": "method.aes_gcm.m"},
        }
    )
