"""Owns the rules of TF state: who may reach it, who holds its lock, and which state is accepted.

OpenTofu itself checks almost nothing when it saves, so all that protects a tenant's only memory of its
machines is checked here, and what must be true together (lock, serial, lineage, lost resources) is checked in
the transaction that stores. Every accepted state is an immutable version, announced as a StateVersion.

It does not speak HTTP (`api/tfstate.py`), keep bytes (`store/states.py`) or know ciphers
(`tofu/encryption.py`), and it does not read machines out of a state (`tofu/projection.py`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from rezuscloud.access.identity import Identity
from rezuscloud.access.policy import authorize
from rezuscloud.model.declaration import is_leaving
from rezuscloud.model.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Forbidden,
    InternalError,
    Unavailable,
)
from rezuscloud.model.meta import Doc, format_time, parse_time
from rezuscloud.resources.desk import Desk
from rezuscloud.resources.service import ResourceService
from rezuscloud.resources.state_text import StateFacts, decode_state, read_facts, without_payload
from rezuscloud.store.db import Store, Transaction
from rezuscloud.store.states import Lock, LockHeld, StateMeta
from rezuscloud.tofu.encryption import BadState, CannotOpenState, KeyRing, header, is_encrypted

log = logging.getLogger(__name__)

KEPT_VERSIONS = 30
"""State versions that a tenant keeps; older ones go when a new one is accepted."""

_MAX_LOCK_TEXT = 256
_REMEMBERED_BYTES = 16 * 1024 * 1024
"""Decoded states are remembered up to this much JSON, over all tenants."""


@dataclass(frozen=True)
class RunCredential:
    """What one run shows to the state backend; good until it is revoked."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class StateAccess:
    """Somebody who may work on one tenant's state: one of our runs, or (`run` empty) an operator."""

    tenant: str
    tenant_uid: str
    run: str
    subject: str
    """Name of the run, or of the user."""
    may_empty: bool = False
    """It may store a state that has lost all its resources: it destroys on purpose."""

    @property
    def is_operator(self) -> bool:
        return not self.run


@dataclass(frozen=True, slots=True)
class _Upload:
    """A state that somebody wants stored, as far as it was read without looking at what is stored."""

    facts: StateFacts
    sha256: str
    encrypted: bool
    key_id: str


@dataclass(frozen=True, slots=True)
class _Decoded:
    version: int
    size_bytes: int
    doc: Doc


class StateBackend:
    """The TF state of all tenants, behind its rules. Errors are those of `model/errors.py`, and LockHeld."""

    def __init__(self, service: ResourceService, store: Store, keys: KeyRing) -> None:
        self._service = service
        self._store = store
        self._keys = keys
        self._runs: dict[bytes, tuple[str, StateAccess]] = {}
        self._decoded: OrderedDict[str, _Decoded] = OrderedDict()
        self._gives_locks = True
        self._is_open = True
        self.on_accepted: list[Callable[[str, str, str], None]] = []
        """Called with (tenant, tenant uid, run) after each new version; not for a repeated upload."""

    # ------------------------------------------------------------ who

    def issue(self, tenant: str, tenant_uid: str, run: str, *, may_empty: bool) -> RunCredential:
        """A credential for one run on one tenant. It lives in memory only: a restart ends it, as it ends the
        run. `may_empty`: the run destroys, its last state may have no resources."""
        credential = RunCredential(username=run, password=secrets.token_urlsafe(32))
        access = StateAccess(tenant, tenant_uid, run, run, may_empty)
        self._runs[_fingerprint(credential.password)] = (credential.username, access)
        return credential

    def revoke(self, credential: RunCredential) -> None:
        """Ends a credential; one that has ended already is fine."""
        self._runs.pop(_fingerprint(credential.password), None)

    def authenticate_run(self, username: str, password: str) -> StateAccess | None:
        """Whose credential this is, or None."""
        found = self._runs.get(_fingerprint(password))
        if found is None or not hmac.compare_digest(found[0].encode(), username.encode("utf-8", "replace")):
            return None
        return found[1]

    def _is_going_on(self, tenant_uid: str, run: str) -> bool:
        return any(each.tenant_uid == tenant_uid and each.run == run for _, each in self._runs.values())

    def operator_access(self, identity: Identity, tenant: str) -> StateAccess:
        """Access for a person with a tofu of their own. Raises Forbidden, also for a tenant that is not
        there: "not found" would tell tofu to create everything anew."""
        authorize(identity, "use", "tenants/tfstate", tenant)
        stored = self._store.objects.get("Tenant", "", tenant)
        if stored is None:
            raise Forbidden(f'there is no tenant "{tenant}", so it has no TF state; check the address')
        return StateAccess(
            tenant, stored.doc["metadata"]["uid"], "", identity.subject, may_empty=is_leaving(stored.doc)
        )

    # ------------------------------------------------------------ whether

    def drain(self) -> None:
        """From now on no lock is given; who holds one may finish. For a server that waits for its runs."""
        self._gives_locks = False

    def close(self) -> None:
        """From now on everything is refused, with the advice to come back."""
        self._gives_locks = self._is_open = False

    def _check_open(self, *, wants_lock: bool = False) -> None:
        if not (self._gives_locks if wants_lock else self._is_open):
            raise Unavailable("RezusCloud is stopping; the stored state is safe. Try again.", retry_after_s=2)

    # ------------------------------------------------------------ read

    async def read(self, access: StateAccess) -> bytes | None:
        """The newest state as it was stored (ciphertext when encrypted), or None when there is none."""
        self._check_open()
        stored = self._store.objects.get("Tenant", "", access.tenant)
        _check_tenant(stored.doc if stored else None, access)
        found = await self._body(access.tenant_uid, None)
        return found[1] if found else None

    async def plain(self, tenant_uid: str, version: int | None = None) -> Doc | None:
        """A state as JSON, decrypted: the newest, or one of the kept versions; None when there is none.

        The newest is remembered until the next write; nobody may change what is returned.
        Raises Conflict when it does not open with our keys.
        """
        current = self._store.states.current(tenant_uid)
        known = self._decoded.get(tenant_uid)
        if known and current and known.version == current.version and version in (None, known.version):
            self._decoded.move_to_end(tenant_uid)
            return known.doc
        found = await self._body(tenant_uid, version)
        if found is None:
            return None
        meta, body = found

        def decode() -> Doc:
            return decode_state(self._keys.open_state(tenant_uid, body) if meta.encrypted else body)

        try:
            doc = await asyncio.to_thread(decode)
        except (BadState, CannotOpenState) as error:
            raise Conflict(str(error)) from None
        if self._store.states.current(tenant_uid) == meta:
            self._remember(tenant_uid, _Decoded(meta.version, len(body), doc))
        return doc

    def _remember(self, tenant_uid: str, decoded: _Decoded) -> None:
        self._decoded[tenant_uid] = decoded
        self._decoded.move_to_end(tenant_uid)
        while sum(each.size_bytes for each in self._decoded.values()) > _REMEMBERED_BYTES:
            self._decoded.popitem(last=False)

    async def _body(self, tenant_uid: str, version: int | None) -> tuple[StateMeta, bytes] | None:
        meta = self._store.states.current(tenant_uid)
        if meta is None:
            return None
        if version not in (None, meta.version):
            kept = {each.version: each for each in await self._store.states.history(tenant_uid)}
            if version not in kept:
                return None
            meta = kept[version]
        body = await self._store.states.body(tenant_uid, meta.version)
        if body is None:
            return None
        if await asyncio.to_thread(_sha256, body) != meta.sha256:
            raise InternalError(
                f"state version {meta.version} is damaged in the database (its sha256 differs), so it is not "
                "given out; nothing was changed. Restore the data directory from a backup."
            )
        return meta, body

    # ------------------------------------------------------------ write

    def check_lock(self, access: StateAccess, lock_id: str | None) -> None:
        """Whether a write under this lock may be accepted: asked before its body is read. Raises Conflict."""
        self._check_open()
        _check_lock(self._store.states.lock(access.tenant_uid), access, lock_id)

    async def write(
        self, access: StateAccess, lock_id: str | None, body: bytes, *, md5_base64: str | None = None
    ) -> None:
        """Stores a state as the next version; the same bytes once more are a repeated upload and change
        nothing. `md5_base64` is what the sender says of `body`.

        Raises BadRequest for what is no state or was damaged on its way, Conflict for what must not replace
        the stored one.
        """
        self.check_lock(access, lock_id)
        upload = await self._examine(access, body, md5_base64)
        await self._transact(access, lambda desk: self._put(desk, access, lock_id, body, upload))

    async def adopt(self, access: StateAccess, body: bytes) -> None:
        """Stores what one of our runs saved to a file (errored.tfstate) because its upload was refused.

        The same rules hold, but for the lock: that of the run itself, or none. Repeating it changes nothing.
        A state of a first apply that never got a lineage is given one, the same each time.
        """
        self._check_open()
        body = await asyncio.to_thread(self._with_lineage, access, body)
        upload = await self._examine(access, body, None)

        def store(desk: Desk) -> bool:
            held = self._store.states.lock(access.tenant_uid, desk.tx)
            if held is not None:
                return self._put(desk, access, held.id, body, upload)
            borrowed = _make_lock({"ID": f"adopt-{secrets.token_hex(8)}"}, access, desk.tx)
            self._store.states.take_lock(desk.tx, access.tenant_uid, borrowed)
            is_new = self._put(desk, access, borrowed.id, body, upload)
            self._store.states.release_lock(desk.tx, access.tenant_uid, borrowed.id)
            return is_new

        await self._transact(access, store)

    def _put(
        self, desk: Desk, access: StateAccess, lock_id: str | None, body: bytes, upload: _Upload
    ) -> bool:
        """Checks against what is stored and stores, in one transaction. False for a repeated upload."""
        tx, states = desk.tx, self._store.states
        tenant = _check_tenant(tx.get("Tenant", "", access.tenant), access)
        _check_lock(states.lock(access.tenant_uid, tx), access, lock_id)
        _check_loss(states.current(access.tenant_uid, tx), upload, access)
        meta, is_new = states.accept(
            tx,
            access.tenant_uid,
            body,
            serial=upload.facts.serial,
            lineage=upload.facts.lineage,
            sha256=upload.sha256,
            encrypted=upload.encrypted,
            key_id=upload.key_id,
            run=access.run,
            lock_id=lock_id,
            resource_count=upload.facts.resource_count,
            keep=KEPT_VERSIONS,
        )
        if is_new:
            _announce(desk, tenant, meta, upload.facts.engine_version)
        return is_new

    async def _transact(self, access: StateAccess, store: Callable[[Desk], bool]) -> None:
        if not await self._service.transact(store):
            return
        self._decoded.pop(access.tenant_uid, None)
        for callback in self.on_accepted:
            try:
                callback(access.tenant, access.tenant_uid, access.run)
            except Exception:
                # It is stored: tofu must not be told otherwise.
                log.exception("a listener failed on a new state of tenant %s", access.tenant)

    async def _examine(self, access: StateAccess, body: bytes, md5_base64: str | None) -> _Upload:
        """All that can be known of a state without looking at what is stored. Raises BadRequest, Conflict.

        Side by side, for on a large state each part takes as long as its upload.
        """
        work = (
            asyncio.to_thread(_check_md5, body, md5_base64),
            asyncio.to_thread(_sha256, body),
            asyncio.to_thread(self._read_upload, access, body),
        )
        problem, sha256, reading = await asyncio.gather(*work, return_exceptions=True)
        if isinstance(problem, BaseException):
            raise problem
        if isinstance(sha256, BaseException):
            raise sha256
        if isinstance(reading, BaseException):
            raise reading
        facts, key_id = reading
        return _Upload(facts, sha256, key_id is not None, key_id or "")

    def _read_upload(self, access: StateAccess, body: bytes) -> tuple[StateFacts, str | None]:
        """What a state says of itself, and its key's id; None for a plain one."""
        outline = without_payload(body)
        if not is_encrypted(outline):
            return read_facts(body), None
        try:
            key_id = header(outline).key_id
            plain = self._keys.open_state(access.tenant_uid, body)
        except BadState as error:
            raise BadRequest(str(error)) from None
        except CannotOpenState as error:
            log.info("tenant %s: %s", access.tenant, error)
            raise Conflict(
                f"nothing was stored: RezusCloud must be able to open this state, and its key ({key_id}) is "
                f"none of ours or does not fit. It wants the key of `rezusctl state env {access.tenant}`: "
                "repeat it with that environment."
            ) from None
        return read_facts(plain), key_id

    def _with_lineage(self, access: StateAccess, body: bytes) -> bytes:
        lineage = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{access.tenant_uid}/{access.run}"))
        try:
            return self._keys.give_lineage(access.tenant_uid, body, lineage)
        except (BadState, CannotOpenState):
            return body  # what is wrong with it is said when it is read

    async def record_refusal(self, access: StateAccess, error: ApiError) -> None:
        """Tells on the tenant why a state was refused: tofu itself only shows people a number."""
        log.warning("state of tenant %s from %s refused: %s", access.tenant, access.subject, error.message)

        def record(desk: Desk) -> None:
            tenant = desk.tx.get("Tenant", "", access.tenant)
            if tenant is not None and tenant["metadata"]["uid"] == access.tenant_uid:
                desk.record_event(
                    tenant, reason="StateRefused", message=error.message, warning=True, action="SaveState"
                )

        try:
            await self._service.transact(record)
        except ApiError as failed:
            log.warning("and the refusal could not be recorded: %s", failed.message)

    # ------------------------------------------------------------ lock

    async def lock(self, access: StateAccess, info: Doc) -> None:
        """Gives the lock to who asks; the same request once more is fine.

        `info` is tofu's LockInfo. Raises LockHeld when somebody else holds it.
        """
        if access.run and self._is_open and not self._gives_locks:
            # For good: a run that is told to come back does not hear that it is interrupted, and holds us up.
            raise Forbidden("RezusCloud is stopping, and this run with it; nothing was locked")
        self._check_open(wants_lock=True)
        if not isinstance(info.get("ID"), str) or not 0 < len(info["ID"]) <= _MAX_LOCK_TEXT:
            raise BadRequest("a lock needs an ID: a text of 1 to 256 characters")

        def take(desk: Desk) -> None:
            _check_tenant(desk.tx.get("Tenant", "", access.tenant), access)
            held = self._store.states.lock(access.tenant_uid, desk.tx)
            if held is not None and not _is_holder(held, access):
                raise LockHeld(held)
            self._store.states.take_lock(desk.tx, access.tenant_uid, _make_lock(info, access, desk.tx))

        await self._service.transact(take)

    async def unlock(self, access: StateAccess, lock_id: str) -> None:
        """Releases the lock of that ID; an empty ID means whatever lock there is. Nothing held is fine.

        Operators may release the lock of others (force-unlock) but for a run that is going on, and it is
        recorded on the tenant. A run may only release its own. Raises Conflict.
        """
        self._check_open()

        def free(desk: Desk) -> None:
            held = self._store.states.lock(access.tenant_uid, desk.tx)
            if held is None:
                return
            is_own = _is_holder(held, access)
            if lock_id not in ("", held.id) or not (is_own or access.is_operator):
                raise Conflict(f"nothing was released: {_describe(held)}")
            if not is_own and self._is_going_on(access.tenant_uid, held.run):
                raise Conflict(f"nothing was released: {held.run} is going on; cancel that run instead")
            self._store.states.release_lock(desk.tx, access.tenant_uid, held.id)
            if not is_own:
                self._tell_release(desk, access.tenant, held, f"{access.subject} released it by force")

        await self._service.transact(free)

    async def release_lock_of_run(self, tenant: str, tenant_uid: str, run: str, why: str) -> bool:
        """Frees the lock that one of our runs left behind when it died; False when it holds none.

        `why` is told on the tenant. Look for its errored.tfstate first: it must be adopted before anybody
        else may write.
        """

        def free(desk: Desk) -> bool:
            held = self._store.states.lock(tenant_uid, desk.tx)
            if held is None or held.run != run:
                return False
            self._store.states.release_lock(desk.tx, tenant_uid, held.id)
            self._tell_release(desk, tenant, held, why)
            return True

        return await self._service.transact(free)

    def _tell_release(self, desk: Desk, tenant: str, held: Lock, why: str) -> None:
        log.warning("lock %s of %s on the state of tenant %s released: %s", held.id, held.holder, tenant, why)
        doc = desk.tx.get("Tenant", "", tenant)
        if doc is not None:
            message = f"the state lock of {held.holder} was released: {why}"
            desk.record_event(doc, reason="StateUnlocked", message=message, warning=True, action="Unlock")


# ---------------------------------------------------------------- rules


def _check_tenant(tenant: Doc | None, access: StateAccess) -> Doc:
    if tenant is None or tenant["metadata"]["uid"] != access.tenant_uid:
        raise Forbidden(f'tenant "{access.tenant}" is gone, and its TF state with it; nothing was stored')
    return tenant


def _is_holder(lock: Lock, access: StateAccess) -> bool:
    return lock.run == access.run and (bool(lock.run) or lock.holder == access.subject)


def _check_lock(lock: Lock | None, access: StateAccess, lock_id: str | None) -> None:
    if not lock_id:
        raise Conflict(
            "a state is only accepted under a lock, nothing was stored: use tofu without -lock=false, with "
            "TF_HTTP_LOCK_ADDRESS and TF_HTTP_UNLOCK_ADDRESS set"
        )
    if lock is None:
        raise Conflict(
            "nothing was stored: the lock of this upload was released meanwhile. Refresh, then apply again."
        )
    if lock.id != lock_id or not _is_holder(lock, access):
        raise Conflict(f"nothing was stored: {_describe(lock)}")


def _describe(lock: Lock) -> str:
    return f"the state is locked by {lock.holder} since {format_time(lock.created)} (lock ID {lock.id})"


def _check_loss(stored: StateMeta | None, upload: _Upload, access: StateAccess) -> None:
    """What the newest state must not lose: its encryption, and all its resources at once."""
    if stored is None:
        return
    if stored.encrypted and not upload.encrypted:
        raise Conflict(
            f"nothing was stored: the stored state is encrypted and this one is not. Get the key with "
            f"`rezusctl state env {access.tenant}` and repeat it with that environment."
        )
    if stored.resource_count and not upload.facts.resource_count and not access.may_empty:
        raise Conflict(
            f"nothing was stored: this state has lost all of the {stored.resource_count} resources, and no "
            "destroy was asked for. To destroy, delete the tenant: "
            f"`rezusctl delete cluster {access.tenant}`."
        )


# ---------------------------------------------------------------- small things


def _announce(desk: Desk, tenant: Doc, meta: StateMeta, engine_version: str) -> None:
    namespace = tenant["metadata"]["name"]
    spec = {
        "version": meta.version,
        "serial": meta.serial,
        "lineage": meta.lineage,
        "sha256": meta.sha256,
        "sizeBytes": meta.size_bytes,
        "encrypted": meta.encrypted,
        "run": meta.run,
        "engineVersion": engine_version,
    }
    desk.put("StateVersion", namespace, f"v{meta.version}", spec=spec, owner=tenant)
    for old in desk.list("StateVersion", namespace):
        if old["spec"]["version"] <= meta.version - KEPT_VERSIONS:
            desk.remove("StateVersion", namespace, old["metadata"]["name"])


def _make_lock(info: Doc, access: StateAccess, tx: Transaction) -> Lock:
    """A lock whose info every tofu can read: what it shows to the next one that asks."""
    texts = {key: info.get(key) for key in ("Operation", "Info", "Who", "Version", "Path")}
    shown: Doc = {"ID": info["ID"]}
    shown |= {key: text[:_MAX_LOCK_TEXT] if isinstance(text, str) else "" for key, text in texts.items()}
    try:
        parse_time(info["Created"])
        shown["Created"] = info["Created"]
    except (KeyError, TypeError, ValueError):
        shown["Created"] = format_time(tx.now)
    return Lock(id=info["ID"], info=shown, holder=access.subject, run=access.run, created=tx.now)


def _fingerprint(password: str) -> bytes:
    return hashlib.sha256(password.encode("utf-8", "surrogatepass")).digest()


def _check_md5(body: bytes, md5_base64: str | None) -> None:
    if md5_base64 is None:
        return
    md5 = hashlib.md5(body, usedforsecurity=False).digest()
    if md5_base64.strip() != base64.b64encode(md5).decode():
        raise BadRequest("the state was damaged on its way: its Content-MD5 differs. Send it again.")


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
