"""Owns the configuration that OpenTofu gets: a tenant and its providers' fragments become one `main.tf.json`.

Equal input gives equal bytes. Every plain string is literal: OpenTofu would read `${…}` and `%{…}` in values
and in object keys as templates, so both are escaped here, once, for all providers. Secrets never pass here.

The configuration also carries the declaration (`terraform_data.declaration`), so that state alone brings the
tenant back. It depends on every other resource, so the engine writes it last, also after it has destroyed
what is no longer declared: a run that stops half way leaves the old revision in state.
Decision: ADR 0005.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rezuscloud.model.declaration import Pins, active_groups, declared_revision, declared_slots
from rezuscloud.model.meta import Doc, from_wire, to_wire
from rezuscloud.model.tenant import NodeGroupSpec, TenantSpec, machine_name
from rezuscloud.plugin.types import (
    Expr,
    Fragment,
    MachineRequest,
    Provider,
    RenderRequest,
    RequiredProvider,
)

BUILT_IN = "terraform.io/builtin/terraform"
"""Source address of the provider inside OpenTofu; it needs no entry in required_providers."""
DECLARATION_TYPE, DECLARATION_NAME = "terraform_data", "declaration"
FORMAT_VERSION = 1
DECLARATION = f"{DECLARATION_TYPE}.{DECLARATION_NAME}"
MACHINE_PREFIX = "machine_"
CONFIG_FILE = "main.tf.json"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SOURCE = re.compile(r"[a-z0-9.:-]+/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+")
_VERSIONS = re.compile(r"[0-9A-Za-z.,<>=!~ +-]*")
_REFERENCES = frozenset({"depends_on", "provider", "ignore_changes", "replace_triggered_by"})
_MAX_DEPTH = 64


class RenderError(Exception):
    """The tenant cannot be rendered as declared. `field` is a path in the resource at fault, or ""."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field


@dataclass(frozen=True)
class Rendered:
    """What a working directory needs: file names and bytes, OpenTofu providers, names of the machines."""

    files: Mapping[str, bytes]
    required: Mapping[str, RequiredProvider]
    machines: tuple[str, ...]


def render(
    tenant: Doc,
    groups: Sequence[Doc],
    *,
    content: Doc,
    pins: Pins,
    providers: Mapping[str, Provider],
    encrypted: bool,
    state_providers: Collection[str] = (),
) -> Rendered:
    """The configuration of one tenant.

    `content` is `declare(…)` of the same tenant. `encrypted` makes the engine refuse to work unencrypted; it
    must be False while a plain state migrates. `state_providers` are the source addresses that the current
    state still needs (`Projection.providers`). Raises RenderError.
    """
    requests = _requests(tenant, groups, providers)
    config = _Configuration()
    for name, request in requests.items():
        config.add(providers[name], _fragment(providers[name], request), request)
    config.add_required_by_state(
        state_providers,
        providers,
        lambda provider: _fragment(provider, _request(tenant, machines=())),
    )
    config.add_declaration(make_envelope(content, pins))
    return Rendered(
        files={CONFIG_FILE: config.to_bytes(encrypted=encrypted)},
        required=dict(sorted(config.required.items())),
        machines=tuple(machine.name for request in requests.values() for machine in request.machines),
    )


def make_envelope(content: Doc, pins: Pins) -> Doc:
    """What the declaration in TF state holds. It has no counters, so an unchanged spec changes nothing."""
    return {
        "formatVersion": FORMAT_VERSION,
        "declaration": content,
        "declaredRevision": declared_revision(content),
        "pins": to_wire(pins),
    }


def escape(text: str) -> str:
    """A string that OpenTofu's template parser reads back as exactly this text."""
    return text.replace("${", "$${").replace("%{", "%%{")


# ---------------------------------------------------------------- requests


def _requests(
    tenant: Doc, groups: Sequence[Doc], providers: Mapping[str, Provider]
) -> dict[str, RenderRequest]:
    """Provider name → its request, for all providers that have machines in this tenant; in stable order."""
    slots = declared_slots(groups)
    machines: dict[str, list[MachineRequest]] = {}
    for group in active_groups(groups):
        name, spec = group["metadata"]["name"], from_wire(NodeGroupSpec, group["spec"])
        if spec.provider not in providers:
            installed = ", ".join(sorted(providers)) or "none"
            raise RenderError(
                f'NodeGroup "{name}" wants provider "{spec.provider}", which is not installed '
                f"(installed: {installed}). What exists stays as it is; install the provider's plugin.",
                "spec.providerClass",
            )
        config = _checked_config(name, spec, providers[spec.provider])
        machines.setdefault(spec.provider, []).extend(
            MachineRequest(
                name=machine_name(name, slot),
                group=name,
                role=spec.role,
                slot=slot,
                machine_class=spec.machine_class,
                config=config,
            )
            for slot in slots[name]
        )
    return {name: _request(tenant, tuple(listed)) for name, listed in sorted(machines.items()) if listed}


def _request(tenant: Doc, machines: tuple[MachineRequest, ...]) -> RenderRequest:
    return RenderRequest(
        tenant=tenant["metadata"]["name"],
        tenant_uid=tenant["metadata"]["uid"],
        spec=from_wire(TenantSpec, tenant["spec"]),
        machines=machines,
    )


def _checked_config(group: str, spec: NodeGroupSpec, provider: Provider) -> Mapping[str, Any]:
    try:
        config = provider.config_schema()(dict(spec.provider_config))
    except Exception as error:  # the schema is a guest's code; whatever it raises, the config is not usable
        path = ".".join(str(part) for part in getattr(error, "path", ()))
        raise RenderError(
            f'NodeGroup "{group}": provider "{spec.provider}" does not accept its providerConfig: {error}',
            f"spec.providerConfig.{path}" if path else "spec.providerConfig",
        ) from error
    if not isinstance(config, Mapping):
        raise RenderError(_rubbish(provider, "its config schema gives no mapping"), "spec.providerConfig")
    return config


def _fragment(provider: Provider, request: RenderRequest) -> Fragment:
    try:
        fragment = provider.render(request=request)
    except Exception as error:  # guests are isolated: their bug becomes this tenant's condition
        raise RenderError(_rubbish(provider, f"its render raised {type(error).__name__}: {error}")) from error
    if not isinstance(fragment, Fragment):
        raise RenderError(_rubbish(provider, f"its render returned {type(fragment).__name__}, no Fragment"))
    return fragment


def _rubbish(provider: Provider, what: str) -> str:
    return (
        f'provider "{provider.name}" cannot be used: {what}. Nothing was changed. '
        "This is a fault of its plugin: install another version of it."
    )


# ---------------------------------------------------------------- configuration

_Blocks = dict[str, dict[str, Any]]


@dataclass
class _Configuration:
    """The merged fragments, already in the wire form of `.tf.json`."""

    resource: _Blocks = field(default_factory=dict)
    data: _Blocks = field(default_factory=dict)
    locals: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    provider: dict[str, Any] = field(default_factory=dict)
    required: dict[str, RequiredProvider] = field(default_factory=dict)
    _owners: dict[str, str] = field(default_factory=dict)

    def add(self, provider: Provider, fragment: Fragment, request: RenderRequest) -> None:
        """Merges one provider's part. Raises RenderError where it breaks the contract or another's part."""
        used = set()
        for section, into in (("resource", self.resource), ("data", self.data)):
            for type_, name, body in _labelled(provider, section, getattr(fragment, section)):
                address = f"{type_}.{name}" if section == "resource" else f"data.{type_}.{name}"
                if address == f"{DECLARATION_TYPE}.{DECLARATION_NAME}":
                    raise RenderError(_rubbish(provider, f"{address} is the core's own"))
                self._claim(provider, address)
                into.setdefault(type_, {})[name] = _block(provider, body, address)
                used.add(_local_name(type_, body))
        _check_machines(provider, fragment, request)
        for name, value in _named(provider, "locals", fragment.locals):
            self._claim(provider, f"local.{name}")
            self.locals[name] = _value(provider, value, f"local.{name}")
        for name, value in _named(provider, "output", fragment.output):
            self._claim(provider, f"output.{name}")
            body = value if isinstance(value, Mapping) else {"value": value}
            if "value" not in body:
                raise RenderError(_rubbish(provider, f"output.{name} has no value"))
            self.output[name] = _block(provider, body, f"output.{name}")
        for local, body in _named(provider, "provider", fragment.provider):
            self._add_provider_block(provider, local, body)
            used.add(local)
        for local in sorted(used - {"terraform"}):
            self._require(provider, local)

    def add_required_by_state(
        self,
        sources: Collection[str],
        providers: Mapping[str, Provider],
        empty_fragment: Callable[[Provider], Fragment],
    ) -> None:
        """Adds the OpenTofu providers that state still needs, to remove what is no longer declared there.

        They also need their `provider` blocks, which their plugin renders for no machines.
        """
        have = {entry.source for entry in self.required.values()}
        for source in sorted(set(sources) - have - {BUILT_IN}):
            for provider in (providers[name] for name in sorted(providers)):
                known = {entry.source: local for local, entry in _requirements(provider).items()}
                if local := known.get(source):
                    self._require(provider, local)
                    blocks = dict(_named(provider, "provider", empty_fragment(provider).provider))
                    if local in blocks and local not in self.provider:
                        self._add_provider_block(provider, local, blocks[local])
                    break
            else:
                raise RenderError(
                    f"TF state still holds resources of {source}, and no installed provider knows it. "
                    "They stay as they are and nothing can be applied: install that provider's plugin again."
                )

    def add_declaration(self, envelope: Doc) -> None:
        # ASCII: OpenTofu normalises strings to NFC, and what was typed must come back as it was typed.
        text = json.dumps(envelope, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        body: dict[str, Any] = {"input": escape(text)}
        others = sorted(f"{type_}.{name}" for type_, named in self.resource.items() for name in named)
        if others:
            body["depends_on"] = others
        self.resource.setdefault(DECLARATION_TYPE, {})[DECLARATION_NAME] = body

    def to_bytes(self, *, encrypted: bool) -> bytes:
        """One attribute a line (a diagnostic quotes the line at fault), sorted, with a newline at the end."""
        terraform: dict[str, Any] = {"backend": {"http": {}}}
        if encrypted:
            terraform["encryption"] = {"state": {"enforced": True}, "plan": {"enforced": True}}
        if self.required:
            terraform["required_providers"] = {
                local: {"source": entry.source} | ({"version": entry.version} if entry.version else {})
                for local, entry in self.required.items()
            }
        document: dict[str, Any] = {"terraform": terraform}
        for section in ("resource", "data", "locals", "output", "provider"):
            if blocks := getattr(self, section):  # an empty map of labels is an error in OpenTofu
                document[section] = blocks
        text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"

    def _add_provider_block(self, provider: Provider, local: str, body: Any) -> None:
        self._claim(provider, f"provider.{local}")
        self.provider[local] = _value(provider, body, f"provider.{local}")

    def _claim(self, provider: Provider, address: str) -> None:
        owner = self._owners.setdefault(address, provider.name)
        if owner != provider.name:
            raise RenderError(_rubbish(provider, f'{address} is already rendered by provider "{owner}"'))

    def _require(self, provider: Provider, local: str) -> None:
        entry = _requirements(provider).get(local)
        if entry is None:
            raise RenderError(_rubbish(provider, f"it uses {local} without naming it in required_providers"))
        if entry.source == BUILT_IN:
            return
        for other, have in self.required.items():
            if (other == local) != (have.source == entry.source):
                raise RenderError(
                    _rubbish(provider, f"{local} ({entry.source}) collides with {other} ({have.source})")
                )
        have_version = self.required[local].version if local in self.required else ""
        ranges = dict.fromkeys(filter(None, [have_version, entry.version]))
        self.required[local] = RequiredProvider(source=entry.source, version=", ".join(ranges))


def _requirements(provider: Provider) -> Mapping[str, RequiredProvider]:
    try:
        required = provider.required_providers()
    except Exception as error:  # guests are isolated, as in _fragment
        raise RenderError(_rubbish(provider, f"its required_providers raised {error}")) from error
    if not isinstance(required, Mapping):
        raise RenderError(_rubbish(provider, "its required_providers is no mapping"))
    for local, entry in required.items():
        if (
            not isinstance(local, str)
            or not _NAME.fullmatch(local)
            or not isinstance(entry, RequiredProvider)
            or not _SOURCE.fullmatch(entry.source)
            or not _VERSIONS.fullmatch(entry.version)
        ):
            raise RenderError(_rubbish(provider, f"required_providers has {local!r}: {entry!r}"))
    return required


def _check_machines(provider: Provider, fragment: Fragment, request: RenderRequest) -> None:
    """Each machine is exactly one resource, and nothing else bears a machine's name."""
    wanted = {machine.resource_name for machine in request.machines}
    found: dict[str, str] = {}
    for section in ("resource", "data"):
        for type_, name, body in _labelled(provider, section, getattr(fragment, section)):
            if not name.startswith(MACHINE_PREFIX):
                continue
            address = f"{type_}.{name}"
            if section == "data" or name not in wanted:
                raise RenderError(_rubbish(provider, f"{address} is named like a machine and is none"))
            if name in found:
                raise RenderError(_rubbish(provider, f"{found[name]} and {address} are the same machine"))
            if "count" in body or "for_each" in body:
                raise RenderError(_rubbish(provider, f"{address} is a machine and has count or for_each"))
            found[name] = address
    if missing := sorted(wanted - found.keys()):
        raise RenderError(_rubbish(provider, f"it renders no resource for {', '.join(missing)}"))


def _local_name(type_: str, body: Mapping[str, Any]) -> str:
    """The OpenTofu provider (local name) that manages a block."""
    named = body.get("provider")
    if isinstance(named, Expr):
        named = named.text
    return re.split(r"[.\[]", named, maxsplit=1)[0] if isinstance(named, str) else type_.partition("_")[0]


# ---------------------------------------------------------------- shapes and values


def _labelled(provider: Provider, section: str, blocks: Any) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(type, name, body) of a section, checked."""
    out = []
    for type_, named in _named(provider, section, blocks):
        for name, body in _named(provider, f"{section}.{type_}", named):
            if not isinstance(body, Mapping):
                raise RenderError(_rubbish(provider, f"{section}.{type_}.{name} is no mapping"))
            out.append((type_, name, body))
    return out


def _named(provider: Provider, where: str, mapping: Any) -> list[tuple[str, Any]]:
    if not isinstance(mapping, Mapping):
        raise RenderError(_rubbish(provider, f"{where} is no mapping"))
    for name in mapping:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RenderError(_rubbish(provider, f"{name!r} in {where} is no name for OpenTofu"))
    return sorted(mapping.items())


def _block(provider: Provider, body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block's body. In the places of `_REFERENCES` OpenTofu wants references bare, without `${}`."""
    out = {}
    for key, value in body.items():
        if key == "lifecycle" and isinstance(value, Mapping):
            out[key] = _block(provider, value, f"{where}.{key}")
        else:
            out.update(_value(provider, {key: _bare(value) if key in _REFERENCES else value}, where))
    return out


def _bare(value: Any) -> Any:
    if isinstance(value, Expr):
        return value.text
    if isinstance(value, (list, tuple)):
        return [_bare(item) for item in value]
    return value


def _value(provider: Provider, value: Any, where: str, depth: int = 0) -> Any:
    """A leaf or a tree of leaves in wire form; strings escaped, `Expr` as an expression."""
    if isinstance(value, Expr):
        return "${" + _text(provider, value.text, where) + "}"
    if isinstance(value, str):
        return escape(_text(provider, value, where))
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if depth >= _MAX_DEPTH:
        raise RenderError(_rubbish(provider, f"{where} is nested too deeply"))
    if isinstance(value, (list, tuple)):
        return [_value(provider, item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        out = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise RenderError(_rubbish(provider, f"{where} has the key {key!r}, which is no string"))
            out[escape(_text(provider, key, where))] = _value(provider, item, f"{where}.{key}", depth + 1)
        return out
    raise RenderError(_rubbish(provider, f"{where} is {value!r}, which JSON cannot carry"))


def _text(provider: Provider, text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RenderError(_rubbish(provider, f"{where} is not valid Unicode")) from error
    return text
