"""Keys never leave memory, and our blobs and the real engine's are the same thing."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rezuscloud.model.meta import Doc
from rezuscloud.plugin.types import Provider
from rezuscloud.tofu.encryption import (
    KEY_ID_PBKDF2,
    KEY_ID_RAW,
    BadState,
    CannotOpenState,
    Header,
    KeyHandover,
    KeyRing,
    RootKeyError,
    StateKey,
    header,
    is_encrypted,
    raw_encryption,
    tenant_of,
)
from rezuscloud.tofu.render import render
from tests.support.bare_tofu import BareTofu
from tests.support.tiny_provider import (
    TENANT_UID,
    TinyProvider,
    content_and_pins,
    control_plane,
    tenant_doc,
)

PASSPHRASE = "correct horse battery staple"
PROVIDERS: dict[str, Provider] = {"tiny": TinyProvider()}
PLAIN = json.dumps({"version": 4, "serial": 7, "lineage": "line", "resources": []}).encode()


NAMELESS = json.dumps({"version": 4, "serial": 0, "lineage": "", "resources": []}, indent=2).encode()


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(os.urandom(32))


@pytest.fixture
def tofu(engine_path: Path, tmp_path: Path) -> BareTofu:
    """A working directory with the rendered files of one tenant, encryption enforced."""
    tofu = BareTofu(engine_path, tmp_path / "run")
    _write(tofu)
    return tofu


def _write(tofu: BareTofu, *, encrypted: bool = True) -> None:
    tenant, groups = tenant_doc(), [control_plane()]
    wanted = content_and_pins(tenant, groups)
    tofu.write(render(tenant, groups, **wanted, providers=PROVIDERS, encrypted=encrypted).files)


def _lent_files() -> int:
    """How many keys this process lends at the moment."""
    links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("rezuscloud-state-key" in link for link in links)


def _lent_key(handover: KeyHandover) -> bytes:
    """The key as the helper would give it."""
    document = json.loads(handover.tf_encryption)
    (external,) = document["key_provider"]["external"].values()
    answer = subprocess.run(external["command"], capture_output=True, check=True).stdout
    lines = answer.splitlines()
    assert json.loads(lines[0]) == {"magic": "OpenTofu-External-Key-Provider", "version": 1}
    return base64.b64decode(json.loads(lines[1])["keys"]["encryption_key"])


# ---------------------------------------------------------------- root key


def test_a_root_key_is_made_once_private_and_kept(tmp_path: Path) -> None:
    first = KeyRing.open(tmp_path, None)
    again = KeyRing.open(tmp_path, None)
    file = tmp_path / "root.key"
    assert (first.is_new, again.is_new) == (True, False)
    assert first.key("t", 1) == again.key("t", 1)
    assert file.stat().st_size == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o070])
def test_a_root_key_that_others_can_reach_is_refused_and_kept(tmp_path: Path, mode: int) -> None:
    KeyRing.open(tmp_path, None)
    file = tmp_path / "root.key"
    before = file.read_bytes()
    file.chmod(mode)
    with pytest.raises(RootKeyError, match="chmod 600"):
        KeyRing.open(tmp_path, None)
    assert file.read_bytes() == before


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_root_key_of_the_wrong_size_is_refused_and_kept(tmp_path: Path, size: int) -> None:
    file = tmp_path / "root.key"
    file.touch(0o600)
    file.write_bytes(b"x" * size)
    with pytest.raises(RootKeyError, match=f"{size} bytes"):
        KeyRing.open(tmp_path, None)
    assert file.stat().st_size == size


def test_a_root_key_that_is_a_link_or_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "root.key"
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RootKeyError, match="link"):
        KeyRing.open(tmp_path, None)
    file.unlink()
    file.mkdir()
    with pytest.raises(RootKeyError, match="regular file"):
        KeyRing.open(tmp_path, None)


def test_a_root_key_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        KeyRing.open(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_passphrase_gives_the_same_keys_each_time_and_stands_in_no_file(tmp_path: Path) -> None:
    started = time.perf_counter()
    first = KeyRing.open(tmp_path, PASSPHRASE)
    assert time.perf_counter() - started > 0.02, "stretching that costs nothing protects nothing"
    again = KeyRing.open(tmp_path, PASSPHRASE)
    assert first.key("t", 1) == again.key("t", 1)
    (file,) = tmp_path.iterdir()
    assert file.name == "root.salt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert PASSPHRASE.encode() not in file.read_bytes()


def test_equal_passphrases_in_two_directories_give_different_keys(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        keys.add(KeyRing.open(tmp_path / name, PASSPHRASE).key("t", 1))
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (PASSPHRASE, "another long passphrase", "not the passphrase"),
        (PASSPHRASE, None, "Set REZUSCLOUD_STATE_PASSPHRASE"),
        (None, PASSPHRASE, "Start without REZUSCLOUD_STATE_PASSPHRASE"),
        (None, "too short", "at least 16"),
    ],
)
def test_a_directory_opens_only_with_what_it_was_started_with(
    tmp_path: Path, before: str | None, after: str | None, said: str
) -> None:
    KeyRing.open(tmp_path, before)
    with pytest.raises(RootKeyError, match=said):
        KeyRing.open(tmp_path, after)
    KeyRing.open(tmp_path, before)


def test_a_damaged_salt_file_is_refused_and_kept(tmp_path: Path) -> None:
    KeyRing.open(tmp_path, PASSPHRASE)
    file = tmp_path / "root.salt"
    file.write_bytes(b"{}")
    with pytest.raises(RootKeyError, match="damaged"):
        KeyRing.open(tmp_path, PASSPHRASE)
    assert file.read_bytes() == b"{}"


def test_each_tenant_and_each_version_has_its_own_key(ring: KeyRing) -> None:
    keys = {ring.key(uid, version) for uid in ("a", "b", "a\x001") for version in (1, 2, 11)}
    assert len(keys) == 9
    assert {len(key) for key in keys} == {32}
    assert ring.key_id(2) == "k2"


# ---------------------------------------------------------------- blobs


def test_a_sealed_state_opens_and_tells_serial_lineage_and_key_without_one(ring: KeyRing) -> None:
    blob = ring.seal_state("t", 3, PLAIN)
    assert ring.open_state("t", blob) == PLAIN
    assert header(blob) == Header(7, "line", encrypted=True, key_id="k3")
    assert is_encrypted(blob)
    assert b"resources" not in blob


def test_a_sealed_state_tells_its_tenant_without_a_key(ring: KeyRing) -> None:
    assert tenant_of(ring.seal_state("t", 1, PLAIN)) == "t"
    assert tenant_of(PLAIN) is None
    with pytest.raises(BadState):
        tenant_of(b"no state")


def test_a_plain_state_passes_through(ring: KeyRing) -> None:
    assert ring.open_state("t", PLAIN) is PLAIN
    assert header(PLAIN) == Header(7, "line", encrypted=False, key_id="")
    assert not is_encrypted(PLAIN)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"x"',
        b"{}",
        b'{"serial": "1", "lineage": "l"}',
        b'{"serial": true, "lineage": "l"}',
        b'{"serial": -1, "lineage": "l"}',
        b'{"serial": 1}',
        b'{"serial": 1, "lineage": ""}',
        b"\xff",
    ],
)
def test_bytes_that_are_no_state_are_told_apart(body: bytes) -> None:
    assert not is_encrypted(body)
    with pytest.raises(BadState):
        header(body)


@pytest.mark.parametrize(
    "meta", [{"k": "*"}, {"k": 1}, ["k"], {"k": base64.b64encode(b"[]").decode()}, {"k": "e30"}]
)
def test_a_blob_with_unreadable_meta_is_no_state(ring: KeyRing, meta: Any) -> None:
    blob = json.loads(ring.seal_state("t", 1, PLAIN)) | {"meta": meta}
    with pytest.raises(BadState):
        ring.open_state("t", json.dumps(blob).encode())


def _cut(blob: Doc) -> None:
    blob["encrypted_data"] = "AAAA"


def _flip(blob: Doc) -> None:
    data = bytearray(base64.b64decode(blob["encrypted_data"]))
    data[20] ^= 1
    blob["encrypted_data"] = base64.b64encode(data).decode()


def _serial(blob: Doc) -> None:
    blob["serial"] = 1


def _format(blob: Doc) -> None:
    blob["encryption_version"] = "v9"


@pytest.mark.parametrize(
    ("damage", "said"),
    [(_cut, "damaged"), (_flip, "damaged"), (_serial, "altered.*serial 1 .*serial 7"), (_format, "'v9'")],
)
def test_a_damaged_or_altered_blob_is_refused_with_a_reason(
    ring: KeyRing, damage: Callable[[Doc], None], said: str
) -> None:
    blob = json.loads(ring.seal_state("t", 1, PLAIN))
    damage(blob)
    with pytest.raises(CannotOpenState, match=said):
        ring.open_state("t", json.dumps(blob).encode())


def test_another_root_key_or_another_tenant_cannot_open_a_state(ring: KeyRing) -> None:
    blob = ring.seal_state("t", 1, PLAIN)
    for uid, other in (("t", KeyRing(os.urandom(32))), ("u", ring)):
        with pytest.raises(CannotOpenState, match=r"another root key.*kept as it is"):
            other.open_state(uid, blob)


def test_a_sealed_state_is_not_sealed_twice(ring: KeyRing) -> None:
    with pytest.raises(BadState, match="already"):
        ring.seal_state("t", 1, ring.seal_state("t", 1, PLAIN))


def test_a_blob_may_not_make_us_stretch_for_hours() -> None:
    settings = {"salt": "AAAA", "iterations": 10**12, "hash_function": "sha512", "key_length": 32}
    blob = json.loads(KeyRing(os.urandom(32)).seal_state("t", 1, PLAIN))
    blob["meta"] = {"k": base64.b64encode(json.dumps(settings).encode()).decode()}
    ring = KeyRing(os.urandom(32), passphrase=PASSPHRASE)
    with pytest.raises(BadState, match="iterations"):
        ring.open_state("t", json.dumps(blob).encode())


# ---------------------------------------------------------------- handover, without the engine


def test_the_key_is_lent_by_a_path_and_stands_in_no_text(ring: KeyRing) -> None:
    key = ring.key("t", 1)
    with ring.hand_over("t", 1, None) as handover:
        text = handover.tf_encryption
        assert _lent_key(handover) == key
        for form in (base64.b64encode(key).decode(), key.hex(), json.dumps(list(key))):
            assert form not in text
        assert handover.secrets == (base64.b64encode(key).decode(),)
        assert repr(key) not in repr(StateKey("k1", key))


def test_nothing_is_lent_outside_the_context(ring: KeyRing) -> None:
    handover = ring.hand_over("t", 1, None)
    with pytest.raises(RuntimeError):
        _ = handover.tf_encryption
    before = _lent_files()
    with handover:
        assert _lent_files() == before + 1
        with handover:  # a second process at the same time
            pass
        assert _lent_key(handover) == ring.key("t", 1)
    assert _lent_files() == before
    with handover:  # and a later one
        assert _lent_key(handover) == ring.key("t", 1)


def test_what_is_lent_cannot_be_changed_by_who_reads_it(ring: KeyRing) -> None:
    with ring.hand_over("t", 1, None) as handover:
        (external,) = json.loads(handover.tf_encryption)["key_provider"]["external"].values()
        with pytest.raises(OSError, match="not permitted"), Path(external["command"][1]).open("r+b") as file:
            file.write(b"{")
            file.flush()


def test_what_must_migrate_is_seen_from_the_current_state(ring: KeyRing) -> None:
    sealed = ring.seal_state("t", 1, PLAIN)
    cases = [
        (None, 1, False, True),
        (sealed, 1, False, True),
        (sealed, 2, True, True),
        (PLAIN, 1, True, False),
    ]
    for current, version, migrates, may_enforce in cases:
        handover = ring.hand_over("t", version, current)
        assert (handover.migrates, handover.may_enforce) == (migrates, may_enforce)


def test_a_state_that_cannot_be_opened_is_said_before_anything_runs(ring: KeyRing) -> None:
    foreign = KeyRing(os.urandom(32)).seal_state("t", 1, PLAIN)
    with pytest.raises(CannotOpenState):
        ring.hand_over("t", 2, foreign)


# ---------------------------------------------------------------- with the real engine


@pytest.mark.engine
def test_the_engine_seals_state_and_plan_with_the_lent_key_and_we_open_both(
    tofu: BareTofu, ring: KeyRing
) -> None:
    with ring.hand_over(TENANT_UID, 1, None) as handover:
        tofu.apply(handover.tf_encryption)
        tofu.expect_no_changes(handover.tf_encryption)
    assert is_encrypted((tofu.cwd / "plan.bin").read_bytes())
    assert header(tofu.state_bytes).key_id == "k1"
    assert tenant_of(tofu.state_bytes) == TENANT_UID
    plain = json.loads(ring.open_state(TENANT_UID, tofu.state_bytes))
    assert header(tofu.state_bytes)[:2] == (plain["serial"], plain["lineage"])
    assert {resource["name"] for resource in plain["resources"]} == {"declaration", "machine_control-1"}


@pytest.mark.engine
def test_provider_plugins_inherit_no_key(engine_path: Path, tmp_path: Path, ring: KeyRing) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    command = "env > environment"
    step = {"terraform_data": {"x": {"provisioner": {"local-exec": {"command": command}}}}}
    tofu.write({"x.tf.json": json.dumps({"resource": step}).encode()})
    with ring.hand_over(TENANT_UID, 1, None) as handover:
        tofu.apply(handover.tf_encryption)
    inherited = (tofu.cwd / "environment").read_text()
    key = ring.key(TENANT_UID, 1)
    assert "TF_ENCRYPTION" in inherited
    for form in (base64.b64encode(key).decode(), key.hex(), json.dumps(list(key))):
        assert form not in inherited


@pytest.mark.engine
def test_a_state_is_saved_sealed_even_when_we_are_gone_by_then(
    engine_path: Path, tmp_path: Path, ring: KeyRing
) -> None:
    tofu = BareTofu(engine_path, tmp_path / "run")
    wait = "touch started; until [ -e go ]; do sleep 0.05; done"
    step = {"terraform_data": {"x": {"provisioner": {"local-exec": {"command": wait}}}}}
    tofu.write({"x.tf.json": json.dumps({"resource": step}).encode()})
    with ring.hand_over(TENANT_UID, 1, None) as handover:
        tofu.run("init", encryption=handover.tf_encryption)
        apply = subprocess.Popen(
            [str(engine_path), "apply", "-auto-approve"],
            cwd=tofu.cwd,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tofu.cwd), "TF_ENCRYPTION": handover.tf_encryption},
            stdout=subprocess.DEVNULL,
        )
        while not (tofu.cwd / "started").exists():
            assert apply.poll() is None
            time.sleep(0.02)
    (tofu.cwd / "go").touch()
    assert apply.wait(timeout=60) == 0
    assert b"terraform_data" in ring.open_state(TENANT_UID, tofu.state_bytes)


@pytest.mark.engine
def test_the_engine_goes_on_from_a_state_that_we_sealed(tofu: BareTofu, ring: KeyRing) -> None:
    """Rollback: an old content becomes a new version, with a higher serial, without any tofu."""
    with ring.hand_over(TENANT_UID, 1, None) as handover:
        tofu.apply(handover.tf_encryption)
        old = json.loads(ring.open_state(TENANT_UID, tofu.state_bytes))
        old["serial"] += 5
        old["resources"] = [r for r in old["resources"] if r["name"] == "declaration"]
        tofu.state_file.write_bytes(ring.seal_state(TENANT_UID, 1, json.dumps(old).encode()))
        tofu.apply(handover.tf_encryption)
        tofu.expect_no_changes(handover.tf_encryption)
    assert header(tofu.state_bytes).serial > old["serial"]
    assert header(tofu.state_bytes).lineage == old["lineage"]


@pytest.mark.engine
def test_a_plain_state_migrates_by_one_apply_without_changes(tofu: BareTofu, ring: KeyRing) -> None:
    _write(tofu, encrypted=False)
    tofu.apply()
    before = header(tofu.state_bytes)
    handover = ring.hand_over(TENANT_UID, 1, tofu.state_bytes)
    assert (handover.migrates, handover.may_enforce) == (True, False)
    with handover:
        tofu.expect_no_changes(handover.tf_encryption)  # the migration is invisible to a plan
        tofu.apply(handover.tf_encryption)
    after = header(tofu.state_bytes)
    assert (after.encrypted, after.key_id, after.lineage) == (True, "k1", before.lineage)
    _write(tofu, encrypted=True)
    settled = ring.hand_over(TENANT_UID, 1, tofu.state_bytes)
    assert not settled.migrates
    with settled:
        tofu.apply(settled.tf_encryption)
    assert header(tofu.state_bytes) == after


@pytest.mark.engine
def test_a_key_rotates_by_one_apply_without_changes_while_encryption_stays_enforced(
    tofu: BareTofu, ring: KeyRing
) -> None:
    with ring.hand_over(TENANT_UID, 1, None) as first:
        tofu.apply(first.tf_encryption)
    old = tofu.state_bytes
    with ring.hand_over(TENANT_UID, 2, old) as rotation:
        assert rotation.migrates
        assert len(rotation.secrets) == 2
        tofu.apply(rotation.tf_encryption)
    assert header(tofu.state_bytes).key_id == "k2"
    assert header(tofu.state_bytes).lineage == header(old).lineage
    with ring.hand_over(TENANT_UID, 2, tofu.state_bytes) as second:
        assert not second.migrates
        tofu.expect_no_changes(second.tf_encryption)
    for blob in (old, tofu.state_bytes):  # old versions stay readable
        assert b"machine_control-1" in ring.open_state(TENANT_UID, blob)


@pytest.mark.engine
def test_an_operators_own_engine_works_with_the_raw_key_and_ours_goes_on_from_there(
    tofu: BareTofu, ring: KeyRing
) -> None:
    with ring.hand_over(TENANT_UID, 2, None) as ours:
        tofu.apply(ours.tf_encryption)
        theirs = raw_encryption(ring.key(TENANT_UID, 2))
        tofu.expect_no_changes(theirs)
        tofu.run("apply", "-auto-approve", "-replace=terraform_data.machine_control-1", encryption=theirs)
        assert (header(tofu.state_bytes).key_id, tenant_of(tofu.state_bytes)) == (KEY_ID_RAW, None)
        assert b"machine_control-1" in ring.open_state(TENANT_UID, tofu.state_bytes)
        tofu.expect_no_changes(ours.tf_encryption)
    assert not ring.hand_over(TENANT_UID, 2, tofu.state_bytes).migrates
    with ring.hand_over(TENANT_UID, 3, tofu.state_bytes) as rotation:
        assert rotation.migrates
        tofu.apply(rotation.tf_encryption)
    assert header(tofu.state_bytes).key_id == "k3"


@pytest.mark.engine
@pytest.mark.slow
def test_a_state_that_an_operator_sealed_with_a_passphrase_opens_and_migrates(
    tofu: BareTofu, tmp_path: Path
) -> None:
    settings = {
        "key_provider": {"pbkdf2": {"mine": {"passphrase": PASSPHRASE}}},
        "method": {"aes_gcm": {"m": {"keys": "key_provider.pbkdf2.mine"}}},
        "state": {"method": "method.aes_gcm.m"},
        "plan": {"method": "method.aes_gcm.m"},
    }
    tofu.run("init", encryption=json.dumps(settings))
    tofu.run("apply", "-auto-approve", encryption=json.dumps(settings))
    assert header(tofu.state_bytes).key_id == KEY_ID_PBKDF2
    ring = KeyRing.open(tmp_path, PASSPHRASE)
    assert b"machine_control-1" in ring.open_state(TENANT_UID, tofu.state_bytes)
    with pytest.raises(CannotOpenState, match="passphrase"):
        KeyRing(os.urandom(32)).open_state(TENANT_UID, tofu.state_bytes)
    with pytest.raises(CannotOpenState, match="another root key or passphrase"):
        KeyRing(b"", passphrase="wrong").open_state(TENANT_UID, tofu.state_bytes)
    with ring.hand_over(TENANT_UID, 1, tofu.state_bytes) as handover:
        assert handover.migrates
        assert PASSPHRASE not in handover.tf_encryption
        tofu.apply(handover.tf_encryption)
    assert header(tofu.state_bytes).key_id == "k1"


@pytest.mark.engine
def test_the_engine_with_a_wrong_key_stops_before_it_changes_anything(tofu: BareTofu, ring: KeyRing) -> None:
    with ring.hand_over(TENANT_UID, 1, None) as handover:
        tofu.apply(handover.tf_encryption)
    before = tofu.state_bytes
    with KeyHandover(StateKey("k1", os.urandom(32))) as wrong:
        done = tofu.run("plan", encryption=wrong.tf_encryption, code=1)
    assert "message authentication failed" in " ".join(done.stderr.split())
    assert tofu.state_bytes == before


# ---------------------------------------------------------------- without lineage


def test_a_state_without_lineage_gets_one_and_keeps_every_other_byte(ring: KeyRing) -> None:
    named = ring.give_lineage(TENANT_UID, NAMELESS, "line")
    assert named == NAMELESS.replace(b'"lineage": ""', b'"lineage":"line"')
    assert header(named) == Header(0, "line", encrypted=False, key_id="")


def test_a_sealed_state_without_lineage_gets_one_inside_and_outside(ring: KeyRing) -> None:
    key = ring.state_key(TENANT_UID, 2)
    outside = json.loads(ring.seal_state(TENANT_UID, 2, PLAIN)) | {"serial": 0, "lineage": ""}
    nonce = os.urandom(12)
    sealed = base64.b64encode(nonce + AESGCM(key.key).encrypt(nonce, NAMELESS, None)).decode()
    blob = json.dumps(outside | {"encrypted_data": sealed}).encode()
    with pytest.raises(BadState):
        ring.open_state(TENANT_UID, blob)
    named = ring.give_lineage(TENANT_UID, blob, "line")
    assert header(named) == Header(0, "line", encrypted=True, key_id="k2")
    assert json.loads(ring.open_state(TENANT_UID, named))["lineage"] == "line"


def test_a_state_that_has_a_lineage_keeps_it(ring: KeyRing) -> None:
    for blob in (PLAIN, ring.seal_state(TENANT_UID, 1, PLAIN)):
        assert ring.give_lineage(TENANT_UID, blob, "another") == blob
