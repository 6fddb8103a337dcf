"""Owns the settings: the environment read once into one frozen `Settings`, and the table that documents them.

A wrong value stops the start, with the variable's name and what it may be. Nothing else reads the environment
for configuration.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import voluptuous as vol

PREFIX = "REZUSCLOUD_"


class SettingsError(Exception):
    """One or more variables cannot be used. The message has a line for each."""


@dataclass(frozen=True)
class Settings:
    """Everything that can be set, with units in the names."""

    host: str
    port: int
    data_dir: Path
    admin_password: str | None
    tofu: Path | None
    provider_mirror: Path | None
    nats_url: str | None
    state_passphrase: str | None
    state_max_mib: int
    debounce_s: float
    debounce_cap_s: float
    resync_s: float
    max_runs: int
    run_timeout_s: float
    stop_grace_s: float
    log_format: str
    log_level: str
    plugins_blocked: frozenset[str]

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            shown.append(f"{field.name}={'***' if value and field.name in _SECRET_FIELDS else repr(value)}")
        return f"Settings({', '.join(shown)})"


@dataclass(frozen=True)
class Variable:
    """One environment variable. `read` turns its text into field values, or raises vol.Invalid."""

    name: str
    default: str
    meaning: str
    allowed: str
    read: Callable[[str], Mapping[str, Any]]
    secret: bool = False


def _one(field: str, convert: Callable[[str], Any]) -> Callable[[str], Mapping[str, Any]]:
    def read(text: str) -> Mapping[str, Any]:
        try:
            return {field: convert(text)}
        except (ValueError, TypeError) as error:
            raise vol.Invalid(str(error)) from error

    return read


def _address(text: str) -> Mapping[str, Any]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise vol.Invalid("not host:port")
    return {"host": host.strip("[]"), "port": int(port)}


def _number(low: float, high: float, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return convert


def _whole(low: int, high: int) -> Callable[[str], int]:
    return lambda text: int(_number(low, high, int)(text))


def _choice(*words: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError("unknown word")
        return text

    return convert


def _optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: convert(text) if text else None


def _directory(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ValueError("exists and is not a directory")
    return path


def _existing_directory(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        raise ValueError("no such directory")
    return path


def _program(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ValueError("no such executable file")
    return path


def _passphrase(text: str) -> str:
    if len(text) < 16:
        raise ValueError("too short")
    return text


def _password(text: str) -> str:
    if not 8 <= len(text.encode()) <= 72:
        raise ValueError("wrong length")
    return text


def _nats_url(text: str) -> str:
    if not text.startswith(("nats://", "tls://")):
        raise ValueError("not a NATS URL")
    return text


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "REZUSCLOUD_ADDR", "127.0.0.1:8080", "Where the API listens.", "host:port, port 0 for any", _address
    ),
    Variable(
        "REZUSCLOUD_DATA_DIR",
        "data",
        "Everything that must survive: database, keys, run logs. Created with mode 0700.",
        "a directory, or a path where one can be made",
        _one("data_dir", _directory),
    ),
    Variable(
        "REZUSCLOUD_ADMIN_PASSWORD",
        "",
        "Password of `admin`. Empty: one is generated at the first start and printed once.",
        "8 to 72 bytes, or empty",
        _one("admin_password", _optional(_password)),
        secret=True,
    ),
    Variable(
        "REZUSCLOUD_TOFU",
        "",
        "The OpenTofu program. Empty: `tofu` on PATH, then `.tools/bin/tofu`, then `terraform` on PATH.",
        "path of an executable file, or empty",
        _one("tofu", _optional(_program)),
    ),
    Variable(
        "REZUSCLOUD_PROVIDER_MIRROR",
        "",
        "A folder of OpenTofu providers in filesystem-mirror layout. Empty: the public registry.",
        "an existing directory, or empty",
        _one("provider_mirror", _optional(_existing_directory)),
    ),
    Variable(
        "REZUSCLOUD_NATS_URL",
        "",
        "An external NATS cluster. Empty: a nats-server of our own, as a child on loopback.",
        "nats://… or tls://…, or empty",
        _one("nats_url", _optional(_nats_url)),
    ),
    Variable(
        "REZUSCLOUD_STATE_PASSPHRASE",
        "",
        "State keys are derived from this. Empty: from a random root key kept in the data directory.",
        "16 characters or more, or empty",
        _one("state_passphrase", _optional(_passphrase)),
        secret=True,
    ),
    Variable(
        "REZUSCLOUD_STATE_MAX_MIB",
        "64",
        "Largest TF state that is accepted, in MiB.",
        "1 to 1024",
        _one("state_max_mib", _whole(1, 1024)),
    ),
    Variable(
        "REZUSCLOUD_DEBOUNCE_S",
        "5",
        "How long a tenant must be quiet before a change is applied, in seconds.",
        "0 to 3600",
        _one("debounce_s", _number(0, 3600)),
    ),
    Variable(
        "REZUSCLOUD_DEBOUNCE_CAP_S",
        "30",
        "The longest that a stream of changes can put off its apply, in seconds.",
        "0 to 86400, not less than REZUSCLOUD_DEBOUNCE_S",
        _one("debounce_cap_s", _number(0, 86400)),
    ),
    Variable(
        "REZUSCLOUD_RESYNC_S",
        "300",
        "How often each tenant is compared with the real world, in seconds. 0: never.",
        "0, or 5 to 604800",
        _one("resync_s", _number(0, 604800)),
    ),
    Variable(
        "REZUSCLOUD_MAX_RUNS",
        "0",
        "How many runs may go on at once. 0: by the machine's memory and cores.",
        "0 to 64",
        _one("max_runs", _whole(0, 64)),
    ),
    Variable(
        "REZUSCLOUD_RUN_TIMEOUT_S",
        "3600",
        "A plan or apply that takes longer is interrupted, in seconds.",
        "1 to 86400",
        _one("run_timeout_s", _number(1, 86400)),
    ),
    Variable(
        "REZUSCLOUD_STOP_GRACE_S",
        "600",
        "How long an interrupted tofu may take to save its state before it is killed, in seconds.",
        "1 to 3600",
        _one("stop_grace_s", _number(1, 3600)),
    ),
    Variable(
        "REZUSCLOUD_LOG_FORMAT",
        "text",
        "Form of the log on standard error.",
        "text or json",
        _one("log_format", _choice("text", "json")),
    ),
    Variable(
        "REZUSCLOUD_LOG_LEVEL",
        "info",
        "What is logged.",
        "debug, info, warning or error",
        _one("log_level", _choice("debug", "info", "warning", "error")),
    ),
    Variable(
        "REZUSCLOUD_PLUGINS_BLOCKED",
        "",
        "Plugins that are not loaded, by entry-point name.",
        "names, separated by commas",
        _one("plugins_blocked", _names),
    ),
)

_SECRET_FIELDS = frozenset(v.name.removeprefix(PREFIX).lower() for v in VARIABLES if v.secret)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Reads the environment. Raises SettingsError naming every variable that cannot be used."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, variable.default)
        try:
            values.update(variable.read(text))
        except vol.Invalid as error:
            shown = "the value" if variable.secret else repr(text)
            problems.append(f"{variable.name}: {shown} cannot be used ({error}); allowed: {variable.allowed}")
    if not problems:
        if values["debounce_cap_s"] < values["debounce_s"]:
            problems.append(
                "REZUSCLOUD_DEBOUNCE_CAP_S: less than REZUSCLOUD_DEBOUNCE_S; allowed: that or more"
            )
        if 0 < values["resync_s"] < 5:
            problems.append("REZUSCLOUD_RESYNC_S: too often; allowed: 0, or 5 to 604800")
    if problems:
        raise SettingsError("\n".join(problems))
    return Settings(**values)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that bears our prefix and is none of ours.

    They only deserve a warning: Kubernetes gives every container such names for a Service called rezuscloud.
    """
    known = {variable.name for variable in VARIABLES}
    return [
        f"{name} is no setting and is ignored; did you mean {_nearest(name, known)}?"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]


def _nearest(name: str, known: set[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0)[0]


def settings_table() -> str:
    """The reference table in Markdown, as docs/reference/settings.md shows it."""
    lines = ["| Variable | Default | Meaning | Allowed |", "| --- | --- | --- | --- |"]
    for v in VARIABLES:
        default = f"`{v.default}`" if v.default else "–"
        lines.append(f"| `{v.name}` | {default} | {v.meaning} | {v.allowed} |")
    return "\n".join(lines) + "\n"
