"""Owns what a spec may hold: fields, values and the rules between fields of one document.

Unknown fields and wrong values are told apart, because Kubernetes answers them differently (400 and 422),
and all of them are reported at once. Nothing is coerced and no default is filled in: what a person typed is
stored as typed. Rules between objects, and between old and new, are in `admission.py`.
"""

from __future__ import annotations

import copy
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import voluptuous as vol

from rezuscloud.model.errors import Cause
from rezuscloud.model.meta import (
    Doc,
    is_dns_label,
    is_dns_subdomain,
    is_label_value,
    is_qualified_name,
)
from rezuscloud.model.tenant import ApplyPolicy, Role, TenantSpec
from rezuscloud.plugin.types import Provider
from rezuscloud.resources import causes
from rezuscloud.resources.causes import Path

MAX_REPLICAS = 500

TALOS_KUBERNETES: Mapping[int, tuple[int, int]] = {
    10: (28, 33),
    11: (29, 34),
    12: (30, 35),
    13: (31, 36),
    14: (32, 37),
    15: (33, 38),
}
"""Talos 1.x → the Kubernetes minors that its nodes accept (pkg/machinery/compatibility)."""

TALOS_UPGRADE_FROM: Mapping[int, int] = {10: 8, 11: 9, 12: 10, 13: 11, 14: 12, 15: 13}
"""Talos 1.x → the oldest minor that it can be upgraded from."""


@dataclass
class Findings:
    """What is wrong with a document: fields that nobody knows, and values that cannot be."""

    unknown: list[Path] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.unknown += other.unknown
        self.causes += other.causes


def check_spec(kind: str, spec: Any, providers: Mapping[str, Provider]) -> Findings:
    """All that is wrong with the spec of a kind that people write (Tenant, NodeGroup)."""
    schema, rules = _SPECS[kind]
    findings = _run(schema, spec, ("spec",))
    if isinstance(spec, dict):
        findings.causes += rules(spec)
        if kind == "NodeGroup":
            findings.add(_check_provider(spec, providers))
    return findings


def parse_version(text: Any) -> tuple[int, int, int] | None:
    """`v1.36.3` or `1.36.3` as numbers; None for anything else."""
    found = _VERSION.fullmatch(text) if isinstance(text, str) else None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def provider_of(spec: Mapping[str, Any]) -> str:
    """The provider's name in a NodeGroup's spec; "" when there is none to be read."""
    given = spec.get("providerClass")
    return given.partition(":")[0] if isinstance(given, str) else ""


# ---------------------------------------------------------------- voluptuous → findings


class _Reasoned(vol.Invalid):
    """A refusal that already knows its cause, made from its final path and value."""

    def __init__(self, make: Callable[[Path], Cause], path: list[Any] | None = None) -> None:
        super().__init__("refused", path=path)
        self.make = make


_EXTRA = "extra keys not allowed"
_IN_WORDS = {
    "expected a dictionary": "must be an object",
    "expected dict": "must be an object",
    "expected a list": "must be a list",
    "expected list": "must be a list",
    "expected str": "must be a string",
    "expected int": "must be a whole number",
    "expected float": "must be a number",
    "expected bool": "must be true or false",
}


def _run(schema: vol.Schema, value: Any, prefix: Path) -> Findings:
    findings = Findings()
    try:
        schema(value)
    except vol.MultipleInvalid as refused:
        for error in refused.errors:
            _collect(error, value, prefix, findings)
    except vol.Invalid as refused:
        _collect(refused, value, prefix, findings)
    return findings


def _collect(error: vol.Invalid, value: Any, prefix: Path, findings: Findings) -> None:
    # A missing or surplus key arrives as the schema's marker; its text is the key.
    path: Path = prefix + tuple(part if isinstance(part, int) else str(part) for part in error.path)
    if isinstance(error, _Reasoned):
        findings.causes.append(error.make(path))
    elif error.error_message == _EXTRA:
        findings.unknown.append(path)
    elif isinstance(error, vol.RequiredFieldInvalid):
        findings.causes.append(causes.required(path))
    else:
        why = _IN_WORDS.get(error.error_message, error.error_message)
        findings.causes.append(causes.invalid(path, _value_at(value, path[len(prefix) :]), why))


def _value_at(value: Any, path: Path) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _refuse(value: Any, why: str, *at: str | int) -> _Reasoned:
    return _Reasoned(lambda path: causes.invalid(path, value, why), path=list(at))


def _refuse_all(errors: list[vol.Invalid]) -> None:
    if errors:
        raise vol.MultipleInvalid(errors)


# ---------------------------------------------------------------- single values

_VERSION = re.compile(r"v?(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})")
_PROVIDER_CLASS = re.compile(r"([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)(?::([^\s:][^\x00-\x1f\x7f]{0,127})?)?")
_PORT = re.compile(r"\d{1,5}")


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise _refuse(value, "must be true or false")
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise _refuse(value, "must be a string")
    return value


def _one_of(*allowed: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise _Reasoned(lambda path: causes.not_supported(path, value, allowed))
        return value

    return check


def _version(value: Any) -> Any:
    if parse_version(value) is None:
        raise _refuse(value, "must be a version such as v1.36.3 or 1.36.3")
    return value


def _replicas(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(value, "must be a whole number")
    if not 0 <= value <= MAX_REPLICAS:
        raise _refuse(value, f"must be between 0 and {MAX_REPLICAS}")
    return value


def _endpoint(value: Any) -> Any:
    text = _text(value)
    if "://" in text or "/" in text:
        raise _refuse(value, "must be host or host:port, without scheme and path")
    host, port = text, "6443"
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else "" if rest or not closed else port
        known = _is_address(host, 6)
    else:
        if text.count(":") == 1:
            host, _, port = text.partition(":")
        known = _is_address(host, 4) or _is_address(host, 6) or is_dns_subdomain(host)
    if not known or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise _refuse(value, "must be host or host:port, e.g. api.example.org or 192.0.2.10:6443")
    return value


def _is_address(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _subnets(value: Any) -> Any:
    if not isinstance(value, list):
        raise _refuse(value, "must be a list of networks such as 10.244.0.0/16")
    if not 1 <= len(value) <= 2:
        raise _refuse(value, "must hold one network, or two for dual stack")
    errors: list[vol.Invalid] = []
    networks = []
    for index, item in enumerate(value):
        if (network := _network(item)) is None:
            errors.append(_refuse(item, "must be a network such as 10.244.0.0/16, without host bits", index))
        else:
            networks.append(network)
    if len(networks) == 2 and networks[0].version == networks[1].version:
        errors.append(_refuse(value[1], "two networks must be one of IPv4 and one of IPv6", 1))
    _refuse_all(errors)
    return value


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _network(text: Any) -> _Network | None:
    if not isinstance(text, str) or "/" not in text:
        return None
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def _credentials(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _refuse(value, "must be an object: provider → name of a Credential")
    errors: list[vol.Invalid] = []
    for provider, name in value.items():
        if not is_dns_label(provider):
            errors.append(_refuse(provider, "must be the name of a provider", provider))
        elif not isinstance(name, str) or not is_dns_label(name):
            errors.append(_refuse(name, "must be the name of a Credential", provider))
    _refuse_all(errors)
    return value


def _labels(value: Any) -> Any:
    if not isinstance(value, dict):
        raise _refuse(value, "must be an object of strings")
    errors: list[vol.Invalid] = []
    for key, item in value.items():
        if not is_qualified_name(key):
            errors.append(_refuse(key, "is no label key: [prefix/]name, name up to 63 characters", key))
        elif not isinstance(item, str) or not is_label_value(item):
            errors.append(_refuse(item, "is no label value: a string of up to 63 of [A-Za-z0-9-_.]", key))
    _refuse_all(errors)
    return value


def _taint_key(value: Any) -> Any:
    if not is_qualified_name(_text(value)):
        raise _refuse(value, "is no taint key: [prefix/]name, name up to 63 characters")
    return value


def _taint_value(value: Any) -> Any:
    if not is_label_value(_text(value)):
        raise _refuse(value, "is no taint value: up to 63 of [A-Za-z0-9-_.]")
    return value


def _provider_class(value: Any) -> Any:
    if not _PROVIDER_CLASS.fullmatch(_text(value)):
        raise _refuse(value, "must be provider or provider:class, e.g. oci:VM.Standard.A1.Flex")
    return value


# ---------------------------------------------------------------- Tenant

_TENANT = vol.Schema(
    {
        vol.Required("talosVersion"): _version,
        vol.Required("kubernetesVersion"): _version,
        "controlPlaneEndpoint": _endpoint,
        "podSubnets": _subnets,
        "serviceSubnets": _subnets,
        "credentials": _credentials,
        "applyPolicy": _one_of(*(policy.value for policy in ApplyPolicy)),
        "paused": _flag,
        "deletionProtection": _flag,
    }
)


def _tenant_rules(spec: Doc) -> list[Cause]:
    return [*_version_rules(spec), *_subnet_rules(spec)]


def _version_rules(spec: Doc) -> Iterable[Cause]:
    talos, kubernetes = parse_version(spec.get("talosVersion")), parse_version(spec.get("kubernetesVersion"))
    if talos is None:
        return
    accepted = TALOS_KUBERNETES.get(talos[1]) if talos[0] == 1 else None
    if accepted is None:
        known = [f"1.{minor}" for minor in TALOS_KUBERNETES]
        yield causes.not_supported(("spec", "talosVersion"), spec["talosVersion"], known)
    elif kubernetes is not None and (kubernetes[0] != 1 or not accepted[0] <= kubernetes[1] <= accepted[1]):
        yield causes.invalid(
            ("spec", "kubernetesVersion"),
            spec["kubernetesVersion"],
            f"Talos 1.{talos[1]} runs Kubernetes 1.{accepted[0]} to 1.{accepted[1]}",
        )


def _subnet_rules(spec: Doc) -> Iterable[Cause]:
    """Pods and services must not share addresses; a list that is not given counts with its default."""
    defaults = {"podSubnets": TenantSpec.pod_subnets, "serviceSubnets": TenantSpec.service_subnets}
    pods, services = (
        [network for network in map(_network, given) if network is not None]
        if isinstance(given := spec.get(name, defaults[name]), (list, tuple))
        else []
        for name in ("podSubnets", "serviceSubnets")
    )
    named = "serviceSubnets" if "serviceSubnets" in spec else "podSubnets"
    for pod in pods:
        for service in services:
            if pod.version == service.version and pod.overlaps(service):
                yield causes.invalid(
                    ("spec", named), spec.get(named), f"pods ({pod}) and services ({service}) overlap"
                )


# ---------------------------------------------------------------- NodeGroup

_NODE_GROUP = vol.Schema(
    {
        vol.Required("role"): _one_of(*(role.value for role in Role)),
        vol.Required("replicas"): _replicas,
        vol.Required("providerClass"): _provider_class,
        "providerConfig": dict,
        "nodeLabels": _labels,
        "nodeTaints": [
            {
                vol.Required("key"): _taint_key,
                "value": _taint_value,
                vol.Required("effect"): _one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
            }
        ],
    }
)


def _node_group_rules(spec: Doc) -> list[Cause]:
    found: list[Cause] = []
    replicas = spec.get("replicas")
    if spec.get("role") == Role.CONTROLPLANE and isinstance(replicas, int) and replicas % 2 == 0:
        found.append(
            causes.invalid(
                ("spec", "replicas"),
                replicas,
                "a control plane has an odd number of machines (1, 3, 5), so that etcd can keep a majority",
            )
        )
    seen: set[tuple[Any, Any]] = set()
    taints = spec.get("nodeTaints")
    for index, taint in enumerate(taints if isinstance(taints, list) else ()):
        if isinstance(taint, dict):
            mark = (str(taint.get("key")), str(taint.get("effect")))
            if mark in seen:
                found.append(causes.duplicate(("spec", "nodeTaints", index), ":".join(mark)))
            seen.add(mark)
    return found


def _check_provider(spec: Doc, providers: Mapping[str, Provider]) -> Findings:
    """The provider must be installed, and its own schema judges `providerConfig`."""
    name = provider_of(spec)
    if not name or not _PROVIDER_CLASS.fullmatch(spec["providerClass"]):
        return Findings()
    provider = providers.get(name)
    if provider is None:
        installed = sorted(providers)
        return Findings(causes=[causes.not_supported(("spec", "providerClass"), name, installed)])
    config, path = spec.get("providerConfig", {}), ("spec", "providerConfig")
    if not isinstance(config, dict):
        return Findings()
    try:
        # A copy: a guest's schema may change what it is given.
        return _run(provider.config_schema(), copy.deepcopy(config), path)
    except (Exception, SystemExit) as error:
        # A guest's bug must not look like ours, and must not pass as "valid".
        why = (
            f"provider {name} failed while checking it ({type(error).__name__}: {error}); "
            "nothing was stored; this is a fault of the provider plugin"
        )
        return Findings(causes=[causes.invalid(path, config, why)])


_SPECS: Mapping[str, tuple[vol.Schema, Callable[[Doc], list[Cause]]]] = {
    "Tenant": (_TENANT, _tenant_rules),
    "NodeGroup": (_NODE_GROUP, _node_group_rules),
}
