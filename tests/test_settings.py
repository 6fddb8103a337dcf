"""Settings: read once, refused with words."""

from __future__ import annotations

from pathlib import Path

import pytest

from rezuscloud.settings import VARIABLES, SettingsError, read_settings, unknown_variables


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = read_settings({})
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert (settings.debounce_s, settings.debounce_cap_s, settings.resync_s) == (5, 30, 300)
    assert settings.data_dir == Path("data").absolute()
    assert settings.tofu is None
    assert settings.plugins_blocked == frozenset()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("REZUSCLOUD_ADDR", "8080", "host:port"),
        ("REZUSCLOUD_ADDR", "localhost:99999", "host:port"),
        ("REZUSCLOUD_DATA_DIR", "/dev/null", "a directory"),
        ("REZUSCLOUD_ADMIN_PASSWORD", "short", "8 to 72 bytes"),
        ("REZUSCLOUD_ADMIN_PASSWORD", "x" * 73, "8 to 72 bytes"),
        ("REZUSCLOUD_TOFU", "/nowhere/tofu", "executable"),
        ("REZUSCLOUD_PROVIDER_MIRROR", "/nowhere", "directory"),
        ("REZUSCLOUD_NATS_URL", "http://x", "nats://"),
        ("REZUSCLOUD_STATE_PASSPHRASE", "fifteen chars..", "16 characters"),
        ("REZUSCLOUD_STATE_MAX_MIB", "0", "1 to 1024"),
        ("REZUSCLOUD_DEBOUNCE_S", "-1", "0 to 3600"),
        ("REZUSCLOUD_DEBOUNCE_S", "nan", "0 to 3600"),
        ("REZUSCLOUD_DEBOUNCE_CAP_S", "1", "that or more"),
        ("REZUSCLOUD_RESYNC_S", "1", "0, or 5"),
        ("REZUSCLOUD_MAX_RUNS", "1.5", "0 to 64"),
        ("REZUSCLOUD_LOG_FORMAT", "xml", "text or json"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_it_may_be(
    name: str, value: str, allowed: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({name: value})
    assert name in str(refused.value)
    assert allowed in str(refused.value)


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({"REZUSCLOUD_ADDR": "x", "REZUSCLOUD_MAX_RUNS": "x"})
    assert len(str(refused.value).splitlines()) == 2


def test_secrets_are_neither_shown_by_repr_nor_by_a_refusal() -> None:
    passphrase = "correct horse battery staple"
    settings = read_settings({"REZUSCLOUD_STATE_PASSPHRASE": passphrase})
    assert passphrase not in repr(settings)
    with pytest.raises(SettingsError) as refused:
        read_settings({"REZUSCLOUD_STATE_PASSPHRASE": "too short"})
    assert "too short" not in str(refused.value).replace("(too short)", "")


def test_a_misspelt_variable_is_told_with_the_nearest_one_but_does_not_stop_the_start() -> None:
    environ = {"REZUSCLOUD_DEBOUNCES": "1", "REZUSCLOUD_PORT": "tcp://10.0.0.1:80"}
    lines = unknown_variables(environ)
    assert any("REZUSCLOUD_DEBOUNCES" in line and "REZUSCLOUD_DEBOUNCE_S" in line for line in lines)
    read_settings(environ)


def test_every_field_is_set_by_exactly_one_variable() -> None:
    settings = read_settings({})
    fields = [field for variable in VARIABLES for field in variable.read(variable.default)]
    assert sorted(fields) == sorted(settings.__dataclass_fields__)
