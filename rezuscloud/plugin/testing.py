"""Owns the conformance suite: what every provider must do, as checks that a plugin's own tests run.

    class TestMyProvider(ProviderConformance):
        provider = MyProvider()
        valid_configs = [{"size": 2}]
        invalid_configs = [{"size": -1}, {"sise": 2}]

Each check is a plain function `check_*(subject)` that raises AssertionError with what is wrong and what to
do; the class only gives them to pytest. The last ones need a real OpenTofu: they apply the first valid
config, and are skipped loudly where there is none.

This module is the one exception on its floor: it uses `rezuscloud.tofu`, since the round trip must go through
what the core really does. Nothing but tests imports it.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import voluptuous as vol

from rezuscloud.model.declaration import Pins, declare
from rezuscloud.model.machine import Address, Stage
from rezuscloud.model.tenant import Role, TenantSpec
from rezuscloud.plugin.manager import OPTIONAL_METHODS, check_provider
from rezuscloud.plugin.purity import watch_impurity
from rezuscloud.plugin.types import (
    Expr,
    Feature,
    Finding,
    Fragment,
    MachineFacts,
    MachineRequest,
    Observation,
    ObserveTarget,
    Provider,
    RenderRequest,
    TfResource,
)
from rezuscloud.tofu.projection import project
from rezuscloud.tofu.render import Rendered, RenderError, render

MARKER = "rezuscloud-was-here"
HOSTILE_TEXTS = (
    f'${{file("/etc/hostname")}} %{{ if true }}x%{{ endif }} $(touch {MARKER}) `id` "quoted" \\n; é',
    f"${{{MARKER}}}",
)
"""Tried in turn on each text of a config; the first that the provider's own schema accepts is used."""
_SHELL_TEXT = f"$(touch {MARKER})"
"""The first hostile text has so many quotes that no shell would get as far as running it."""

_TENANT, _TENANT_UID = "conformance", "6f1f3c1e-8a0b-4a52-9a44-0d8a52c0f6ce"
_CREATED = "2026-01-01T00:00:00Z"
_GROUPS = {"control-plane": (Role.CONTROLPLANE, 1), "workers": (Role.WORKER, 2)}
_TALOS, _KUBERNETES = "v1.13.9", "v1.36.3"
_OBSERVE_LIMIT_S = 30
_ENGINE_LIMIT_S = 300
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SECRET_KEY = re.compile(r"(?i)(password|passphrase|secret|token|(private|api|secret)_?key)$")
_OWN_VARIABLES = re.compile(r"(PATH|HOME|TMPDIR|LD_.*|TF_(?!VAR_).*)")


@dataclass(frozen=True)
class Subject:
    """A provider with what the checks need to know of it."""

    provider: Provider
    valid_configs: Sequence[Mapping[str, Any]]
    """The first one is applied for real, so it must succeed."""
    invalid_configs: Sequence[Mapping[str, Any]] = ()
    credentials: Mapping[str, str] = field(default_factory=dict)
    """Made-up ones, in the form of `credentials_schema()`, with values that occur nowhere else."""
    machine_class: str = ""

    def request(self, config: Mapping[str, Any], *, workers: int = 2) -> RenderRequest:
        """One control plane and some workers, with this config after the provider's schema."""
        checked = self.provider.config_schema()(dict(config))
        machines = [
            MachineRequest(
                name=f"{group}-{slot}",
                group=group,
                role=role,
                slot=slot,
                machine_class=self.machine_class,
                config=checked,
            )
            for group, (role, count) in _GROUPS.items()
            for slot in range(1, (workers if role is Role.WORKER else count) + 1)
        ]
        spec = TenantSpec(talos_version=_TALOS, kubernetes_version=_KUBERNETES)
        return RenderRequest(tenant=_TENANT, tenant_uid=_TENANT_UID, spec=spec, machines=tuple(machines))

    def requests(self) -> list[RenderRequest]:
        return [self.request(config) for config in self.valid_configs]


# ---------------------------------------------------------------- what it declares and accepts


def check_declaration(subject: Subject) -> None:
    """Name, title, contract version, features and schemas are as the core wants them at start."""
    provider = subject.provider
    try:
        check_provider(provider)
    except ValueError as problem:
        raise AssertionError(str(problem)) from None
    for feature, method in OPTIONAL_METHODS.items():
        overridden = getattr(type(provider), method) is not getattr(Provider, method)
        assert not overridden or feature in provider.features, (
            f"{method}() is written but Feature.{feature.name} is not declared; the core will never call it"
        )


def check_valid_configs(subject: Subject) -> None:
    """Each valid config is accepted, left as it was, and stays the same when checked twice."""
    schema = subject.provider.config_schema()
    assert subject.valid_configs, "give at least one valid config; the suite renders from it"
    for config in subject.valid_configs:
        before = json.dumps(config)
        try:
            checked = schema(config)
            again = schema(checked)
        except vol.Invalid as problem:
            raise AssertionError(f"config_schema() refuses the valid config {config}: {problem}") from None
        assert json.dumps(config) == before, f"config_schema() changes what was typed: {before} → {config}"
        assert again == checked, f"config_schema() gives something else the second time: {checked} → {again}"
    if subject.credentials:
        subject.provider.credentials_schema()(dict(subject.credentials))


def check_invalid_configs(subject: Subject) -> None:
    """Each invalid config, and any unknown field, is refused with the path of the field at fault."""
    schema = subject.provider.config_schema()
    unknown = [{**config, "noSuchField": 1} for config in subject.valid_configs[:1]]
    for config in [*subject.invalid_configs, *unknown]:
        try:
            schema(dict(config))
        except vol.Invalid as problem:
            errors = problem.errors if isinstance(problem, vol.MultipleInvalid) else [problem]
            assert all(error.path for error in errors), (
                f"config_schema() refuses {config} without a path ({problem}); nobody sees which field"
            )
        except Exception as error:
            raise AssertionError(
                f"config_schema() raised {error!r} for {config}; it may raise voluptuous.Invalid only"
            ) from error
        else:
            raise AssertionError(f"config_schema() accepts the invalid config {config}")


# ---------------------------------------------------------------- what it renders


def check_fragment(subject: Subject) -> None:
    """render() gives a Fragment of JSON values and Expr, with valid names."""
    for request in subject.requests():
        fragment = _rendered(subject, request)
        for section in ("resource", "data", "locals", "output", "provider"):
            blocks = getattr(fragment, section)
            assert isinstance(blocks, Mapping), f"Fragment.{section} is no mapping: {blocks!r}"
            for name, body in blocks.items():
                assert isinstance(name, str) and _NAME.fullmatch(name), f"{section}: {name!r} is no name"
                if section in ("resource", "data"):
                    assert isinstance(body, Mapping), f"{section}.{name} is no mapping of names"
                    for inner in body:
                        assert isinstance(inner, str) and _NAME.fullmatch(inner), (
                            f"{section}.{name}: {inner!r} is no name; derive names from ids, never from text"
                        )
        for path, leaf in _leaves(_as_mapping(fragment)):
            assert leaf is None or isinstance(leaf, (str, bool, int, float, Expr)), (
                f"{path} is {leaf!r}; leaves are JSON values or Expr"
            )
            assert leaf == leaf and leaf not in (float("inf"), float("-inf")), (
                f"{path} is {leaf!r}, no number"
            )


def check_names(subject: Subject) -> None:
    """Each machine is exactly one resource named `request.machines[i].resource_name`; nothing else is."""
    for request in subject.requests():
        wanted = {machine.resource_name for machine in request.machines}
        found: dict[str, str] = {}
        for type_, named in _rendered(subject, request).resource.items():
            for name, body in named.items():
                assert (type_, name) != ("terraform_data", "declaration"), (
                    "terraform_data.declaration is the core's own"
                )
                if not name.startswith("machine_"):
                    continue
                assert name in wanted, f"{type_}.{name} begins with machine_ but is no machine of the request"
                assert name not in found, f"{found.get(name)} and {type_}.{name} are the same machine"
                assert not {"count", "for_each"} & set(body), f"{type_}.{name} is a machine and counts"
                found[name] = f"{type_}.{name}"
        assert wanted == set(found), f"no resource is named {', '.join(sorted(wanted - set(found)))}"


def check_no_machines(subject: Subject) -> None:
    """A request without machines gives no resources: the core asks so to remove the last ones."""
    for request in subject.requests():
        fragment = _rendered(subject, replace(request, machines=()))
        assert not any(fragment.resource.values()), "resources are rendered for a tenant without machines"


def check_scaling(subject: Subject) -> None:
    """One more worker leaves the resources of all other machines alone."""
    for config in subject.valid_configs:
        before = _machines(_rendered(subject, subject.request(config, workers=2)))
        after = _machines(_rendered(subject, subject.request(config, workers=3)))
        for name, body in before.items():
            assert after.get(name) == body, f"adding workers-3 changes {name}: {body} → {after.get(name)}"


def check_equal_bytes(subject: Subject) -> None:
    """Equal input gives equal bytes, whatever was rendered before and in whatever order keys come."""
    requests = subject.requests()
    first = [_bytes(_rendered(subject, request)) for request in requests]
    again = [_bytes(_rendered(subject, request)) for request in reversed(requests)][::-1]
    assert first == again, _difference("the same request rendered twice differs", first, again)
    turned = [replace(r, machines=tuple(_turned(m) for m in r.machines)) for r in requests]
    other = [_bytes(_rendered(subject, request)) for request in turned]
    assert first == other, _difference("the order of keys in the config shows", first, other)


def check_fresh_process(subject: Subject) -> None:
    """Other processes, with another hash seed, environment and time, give equal bytes."""
    here = [_bytes(_rendered(subject, request)) for request in subject.requests()]
    for seed in ("1", "2"):
        there = _in_fresh_process(subject, seed)
        assert here == there, _difference(
            f"a fresh process with PYTHONHASHSEED={seed} renders something else (the order of a set, "
            "a clock, randomness or the environment shows)",
            here,
            there,
        )


def check_pure(subject: Subject) -> None:
    """render(), environment() and the schemas read no clock, draw no random number and do no I/O."""
    provider = subject.provider

    def work() -> None:
        provider.required_providers()
        provider.credentials_schema()
        provider.environment(credentials=dict(subject.credentials))
        for request in subject.requests():
            provider.render(request=request)

    work()  # what is imported lazily is imported now
    with watch_impurity() as seen:
        work()
    assert not seen, f"not pure: it calls {', '.join(sorted(seen))}; take what is needed from the request"


def check_no_secret(subject: Subject) -> None:
    """No credential is in what is rendered, nor a field for one in providerConfig."""
    provider = subject.provider
    secrets = [*subject.credentials.values(), MARKER]
    variables = provider.environment(credentials=dict(subject.credentials))
    with mock.patch.dict(os.environ, dict.fromkeys(variables, MARKER)):
        for request in subject.requests():
            text = _bytes(_rendered(subject, request)).decode()
            for secret in secrets:
                for form in (secret, base64.b64encode(secret.encode()).decode().rstrip("=")):
                    assert len(secret) < 6 or form not in text, (
                        "render() gives a credential away; secrets travel by environment() only"
                    )
    for key in _schema_keys(provider.config_schema().schema):
        assert not _SECRET_KEY.search(key), (
            f"config_schema() has the field {key!r}; a secret belongs into credentials_schema()"
        )


def check_literals(subject: Subject) -> None:
    """Text that a person typed stays literal: never in an Expr, a shell command or a name, nor escaped."""
    for config in subject.valid_configs:
        hostile = hostile_config(subject.provider.config_schema(), config)
        for path, leaf in _leaves(_as_mapping(_rendered(subject, subject.request(hostile)))):
            if isinstance(leaf, Expr):
                assert MARKER not in leaf.text, f"{path} puts typed text into an expression: {leaf.text}"
            elif isinstance(leaf, str) and MARKER in leaf:
                key = path.rpartition(".")[2]
                assert not re.match(r"(command|inline|interpreter|script)\b", key), (
                    f"{path} puts typed text into a command; hand it over by the environment"
                )
                forms = [form for text in HOSTILE_TEXTS for form in (text, json.dumps(text)[1:-1])]
                forms += [json.dumps(text, ensure_ascii=False)[1:-1] for text in HOSTILE_TEXTS]
                assert any(re.search("(?<![$%])" + re.escape(form), leaf) for form in forms), (
                    f"{path} changes typed text to {leaf!r}; the core escapes, the provider must not"
                )


def check_endpoint(subject: Subject) -> None:
    """Feature.ENDPOINT: a tenant without an endpoint gets the output `control_plane_endpoint`."""
    if Feature.ENDPOINT not in subject.provider.features:
        return
    for request in subject.requests():
        assert "control_plane_endpoint" in _rendered(subject, request).output, (
            "Feature.ENDPOINT is declared, but there is no output control_plane_endpoint"
        )


# ---------------------------------------------------------------- what else it answers


def check_environment(subject: Subject) -> None:
    """environment() gives variables for the child: text to text, none of those that the core sets."""
    variables = subject.provider.environment(credentials=dict(subject.credentials))
    assert isinstance(variables, Mapping), f"environment() returned {variables!r}, no mapping"
    for name, value in variables.items():
        assert isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), (
            f"environment(): {name!r} is no variable's name"
        )
        assert isinstance(value, str) and "\0" not in value, f"environment(): {name} is not text"
        assert not _OWN_VARIABLES.fullmatch(name), f"environment(): {name} is set by the core"


def check_foreign_resources(subject: Subject) -> None:
    """project() answers None for what is no machine of this provider, however it looks."""
    for resource in _foreign_resources(subject):
        try:
            facts = subject.provider.project(resource=resource)
        except Exception as error:
            raise AssertionError(
                f"project() raised {error!r} for {resource.address} of {resource.provider}, not its own"
            ) from error
        assert facts is None, (
            f"project() takes {resource.address} of {resource.provider} for its own: {facts}"
        )


def check_observe(subject: Subject) -> None:
    """Feature.OBSERVE: exactly one honest Observation for each machine that was asked for."""
    provider = subject.provider
    if Feature.OBSERVE not in provider.features:
        return
    targets = [
        ObserveTarget(
            tenant=_TENANT,
            machine=machine.name,
            provider_id=f"id-{machine.name}",
            role=machine.role,
            addresses=(Address("InternalIP", "192.0.2.1"),),
            config=config,
        )
        for config in subject.valid_configs[:1]
        for machine in subject.request(config).machines
    ]
    for asked in (targets, targets[:1], []):
        try:
            answers = asyncio.run(asyncio.wait_for(provider.observe(machines=asked), _OBSERVE_LIMIT_S))
        except Exception as error:
            raise AssertionError(
                f"observe() raised {error!r}; a machine that cannot be reached is Observation(ready=None)"
            ) from error
        assert all(isinstance(answer, Observation) for answer in answers), f"observe() returned {answers!r}"
        have, want = sorted(answer.machine for answer in answers), sorted(t.machine for t in asked)
        assert have == want, f"observe() was asked for {want} and answered for {have}"
        for answer in answers:
            assert answer.ready in (True, False, None) and isinstance(answer.stage, Stage), f"bad: {answer}"
            assert answer.reason, f"an Observation says its reason in one word: {answer}"


def check_preflight(subject: Subject) -> None:
    """Feature.PREFLIGHT: findings are errors or warnings with a message."""
    if Feature.PREFLIGHT not in subject.provider.features:
        return
    for config in subject.valid_configs[:1]:
        call = subject.provider.preflight(credentials=dict(subject.credentials), config=config)
        for finding in asyncio.run(asyncio.wait_for(call, _OBSERVE_LIMIT_S)):
            assert isinstance(finding, Finding), f"preflight() returned {finding!r}, not a Finding"
            assert finding.severity in ("error", "warning") and finding.message, f"bad: {finding}"


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_declaration,
    check_valid_configs,
    check_invalid_configs,
    check_fragment,
    check_names,
    check_no_machines,
    check_scaling,
    check_equal_bytes,
    check_fresh_process,
    check_pure,
    check_no_secret,
    check_literals,
    check_endpoint,
    check_environment,
    check_foreign_resources,
    check_observe,
    check_preflight,
)
"""All checks that need no OpenTofu."""


# ---------------------------------------------------------------- with the real OpenTofu


def check_round_trip(subject: Subject, engine: Path, work_dir: Path) -> None:
    """Applied for real, state gives back exactly the declared machines, and a second plan changes nothing."""
    config = subject.valid_configs[0]
    rendered = _render_as_core(subject, config)
    with _applied(subject, rendered, engine, work_dir) as state:
        _check_projection(subject, state, rendered)
        _run_engine(
            engine, work_dir, "plan", "-detailed-exitcode", why="a second plan wants to change something"
        )


def check_literals_in_state(subject: Subject, engine: Path, work_dir: Path) -> None:
    """Hostile text goes through OpenTofu unchanged and runs nothing."""
    for texts in (HOSTILE_TEXTS, (_SHELL_TEXT,)):
        config = hostile_config(subject.provider.config_schema(), subject.valid_configs[0], texts)
        rendered = _render_as_core(subject, config)
        fragment = _rendered(subject, subject.request(config))
        with _applied(subject, rendered, engine, work_dir) as state:
            _check_projection(subject, state, rendered)
            in_state = {leaf for _, leaf in _leaves(state) if isinstance(leaf, str)}
        for name, body in _machines(fragment).items():
            kept = {key: value for key, value in body.items() if key not in ("provisioner", "lifecycle")}
            for path, leaf in _leaves(kept):
                if isinstance(leaf, str) and MARKER in leaf:
                    assert leaf in in_state, f"{name}: {path} is {leaf!r}, which state does not hold"
        assert not list(work_dir.rglob(MARKER)), "typed text was run as a shell command"


ENGINE_CHECKS: tuple[Callable[[Subject, Path, Path], None], ...] = (check_round_trip, check_literals_in_state)
"""Checks that apply the first valid config with a real OpenTofu, in a directory of their own."""


def find_engine(provider: Provider) -> Path:
    """The OpenTofu of REZUSCLOUD_TOFU, of PATH or of `.tools/bin` here or above; skips the test if none."""
    here = [parent / ".tools/bin/tofu" for parent in [Path.cwd(), *Path.cwd().parents]]
    named = os.environ.get("REZUSCLOUD_TOFU") or shutil.which("tofu")
    engine = next((path for path in ([Path(named)] if named else here) if path.is_file()), None)
    if engine is None:
        pytest.skip("NOT PROVED: no OpenTofu found; name one in REZUSCLOUD_TOFU")
    if provider.required_providers() and not os.environ.get("REZUSCLOUD_PROVIDER_MIRROR"):
        pytest.skip(
            "NOT PROVED: this provider needs OpenTofu providers; name their folder in "
            "REZUSCLOUD_PROVIDER_MIRROR (and only such as need no real cloud to apply)"
        )
    return engine.resolve()


def _render_as_core(subject: Subject, config: Mapping[str, Any]) -> Rendered:
    def document(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        metadata = {"name": name, "uid": f"{_TENANT_UID[:-1]}{len(name) % 10}", "creationTimestamp": _CREATED}
        return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": dict(spec)}

    tenant = document("Tenant", _TENANT, {"talosVersion": _TALOS, "kubernetesVersion": _KUBERNETES})
    tenant["metadata"]["uid"] = _TENANT_UID
    provider_class = f"{subject.provider.name}:{subject.machine_class}"
    groups = [
        document(
            "NodeGroup",
            name,
            {
                "role": role.value,
                "replicas": count,
                "providerClass": provider_class,
                "providerConfig": dict(config),
            },
        )
        for name, (role, count) in _GROUPS.items()
    ]
    try:
        return render(
            tenant,
            groups,
            content=declare(tenant, groups, ()),
            pins=Pins(contract="v1.13", bootstrap_machine="control-plane-1"),
            providers={subject.provider.name: subject.provider},
            encrypted=False,
        )
    except RenderError as problem:
        raise AssertionError(f"the core refuses what is rendered: {problem.message}") from problem


@contextmanager
def _applied(
    subject: Subject, rendered: Rendered, engine: Path, work_dir: Path
) -> Iterator[Mapping[str, Any]]:
    """Applies into a local state and yields it; destroys everything at the end, whatever happened."""
    for name, body in rendered.files.items():
        (work_dir / name).write_bytes(body)
    override: dict[str, Any] = {"terraform": {"backend": {"local": {}}}}
    (work_dir / "local_override.tf.json").write_text(json.dumps(override))
    mirror = os.environ.get("REZUSCLOUD_PROVIDER_MIRROR", str(work_dir))
    (work_dir / "cli.tfrc").write_text(
        f"provider_installation {{\n  filesystem_mirror {{\n    path = {json.dumps(mirror)}\n  }}\n}}\n"
    )
    secrets = subject.provider.environment(credentials=dict(subject.credentials))
    _run_engine(engine, work_dir, "init", why="init fails", secrets=secrets)
    try:
        _run_engine(engine, work_dir, "apply", "-auto-approve", why="apply fails", secrets=secrets)
        yield json.loads((work_dir / "terraform.tfstate").read_text())
    finally:
        _run_engine(engine, work_dir, "destroy", "-auto-approve", why="destroy fails", secrets=secrets)


def _run_engine(
    engine: Path, work_dir: Path, *arguments: str, why: str, secrets: Mapping[str, str] | None = None
) -> None:
    environment = {
        **(secrets or {}),
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(work_dir),
        "TF_CLI_CONFIG_FILE": str(work_dir / "cli.tfrc"),
        "TF_IN_AUTOMATION": "1",
        "TF_INPUT": "0",
        "CHECKPOINT_DISABLE": "1",
    }
    done = subprocess.run(
        [engine, *arguments, "-no-color"],
        cwd=work_dir,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_ENGINE_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{why}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def _check_projection(subject: Subject, state: Mapping[str, Any], rendered: Rendered) -> None:
    provider = subject.provider
    found = project(dict(state), tenant_uid=_TENANT_UID, providers={provider.name: provider})
    have, want = sorted(machine.name for machine in found.machines), sorted(rendered.machines)
    assert have == want, f"state holds machines {want}, project() gives {have}"
    ids = [machine.spec.provider_id for machine in found.machines]
    assert all(ids) and len(set(ids)) == len(ids), f"provider ids are not unique: {ids}"
    for machine in found.machines:
        assert machine.spec.hostname, f"{machine.name} has no hostname"
        for address in machine.spec.addresses:
            assert address.type in ("InternalIP", "ExternalIP", "Hostname"), f"{machine.name}: {address}"
            if address.type != "Hostname":
                ipaddress.ip_address(address.address)
    for resource in _foreign_resources(subject, state):
        facts: MachineFacts | None = provider.project(resource=resource)
        assert facts is None, (
            f"project() takes {resource.address} of {resource.provider} for its own: {facts}"
        )


# ---------------------------------------------------------------- for pytest


class ProviderConformance:
    """Subclass it as `Test…`, set `provider`, `valid_configs`, `invalid_configs`, and run pytest."""

    provider: ClassVar[Provider]
    valid_configs: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    invalid_configs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    credentials: ClassVar[Mapping[str, str]] = {}
    machine_class: ClassVar[str] = ""

    @property
    def subject(self) -> Subject:
        return Subject(
            provider=self.provider,
            valid_configs=self.valid_configs,
            invalid_configs=self.invalid_configs,
            credentials=self.credentials,
            machine_class=self.machine_class,
        )

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
    def test_conforms(self, check: Callable[[Subject], None]) -> None:
        check(self.subject)

    @pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
    def test_conforms_with_the_real_engine(
        self, check: Callable[[Subject, Path, Path], None], tmp_path: Path
    ) -> None:
        check(self.subject, find_engine(self.provider), tmp_path)


# ---------------------------------------------------------------- tools of the checks


def hostile_config(
    schema: vol.Schema, config: Mapping[str, Any], texts: Sequence[str] = HOSTILE_TEXTS
) -> dict[str, Any]:
    """The config with every text replaced that the schema lets be: values, and keys of free maps."""
    hostile: dict[str, Any] = json.loads(json.dumps(config))

    def accepts() -> bool:
        try:
            schema(hostile)
        except vol.Invalid:
            return False
        return True

    def visit(node: Any) -> None:
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            if isinstance(value, (dict, list)):
                visit(value)
            elif isinstance(value, str):
                for text in texts:
                    node[key] = text
                    if accepts():
                        break
                    node[key] = value
            if isinstance(node, dict) and texts[0] not in node:
                node[texts[0]] = node.pop(key)
                if not accepts():
                    node[key] = node.pop(texts[0])

    visit(hostile)
    return hostile


def _rendered(subject: Subject, request: RenderRequest) -> Fragment:
    fragment = subject.provider.render(request=request)
    assert isinstance(fragment, Fragment), f"render() returned {fragment!r}, not a Fragment"
    return fragment


def _machines(fragment: Fragment) -> dict[str, Mapping[str, Any]]:
    """Resource name → body, of all resources that are machines."""
    return {
        name: body
        for named in fragment.resource.values()
        for name, body in named.items()
        if name.startswith("machine_")
    }


def _as_mapping(fragment: Fragment) -> Mapping[str, Any]:
    return {key: getattr(fragment, key) for key in ("resource", "data", "locals", "output", "provider")}


def _bytes(fragment: Fragment) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, Expr):
            return {"Expr": value.text}
        raise AssertionError(f"{value!r} is neither a JSON value nor an Expr")

    return json.dumps(_as_mapping(fragment), sort_keys=True, ensure_ascii=False, default=plain).encode()


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a tree; keys of mappings are leaves too, since OpenTofu reads them as templates."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{path}.(key)", key
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, node


def _turned(value: Any) -> Any:
    """The same value with the keys of all its mappings in the opposite order."""
    if isinstance(value, MachineRequest):
        return replace(value, config=_turned(value.config))
    if isinstance(value, Mapping):
        return {key: _turned(item) for key, item in reversed(list(value.items()))}
    if isinstance(value, (list, tuple)):
        return type(value)(_turned(item) for item in value)
    return value


def _difference(what: str, one: Sequence[bytes], other: Sequence[bytes]) -> str:
    for a, b in zip(one, other, strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            cut = slice(max(0, at - 60), at + 60)
            return f"{what}:\n  …{a[cut].decode(errors='replace')}…\n  …{b[cut].decode(errors='replace')}…"
    return what


def _schema_keys(node: Any) -> Iterator[str]:
    if isinstance(node, vol.Schema):
        node = node.schema
    if isinstance(node, Mapping):
        for key, value in node.items():
            name = key.schema if isinstance(key, vol.Marker) else key
            if isinstance(name, str):
                yield name
            yield from _schema_keys(value)
    elif isinstance(node, (list, tuple)):
        for item in node:
            yield from _schema_keys(item)


def _foreign_resources(subject: Subject, state: Mapping[str, Any] | None = None) -> Iterator[TfResource]:
    """Resources that are not this provider's, some as like its own as can be."""
    built_in = "terraform.io/builtin/terraform"
    declaration = {"id": "1", "input": {"value": "{}", "type": "string"}, "output": None}
    yield TfResource(
        "terraform_data.declaration", "terraform_data", "declaration", None, built_in, declaration
    )
    yield TfResource(
        "terraform_data.machine_x-1", "terraform_data", "machine_x-1", None, built_in, {"id": "1"}
    )
    yield TfResource("time_sleep.machine_x-1", "time_sleep", "machine_x-1", None, "example.org/a/time", {})
    for resource in (state or {}).get("resources", ()):
        for instance in resource["instances"]:
            attributes = instance["attributes"]
            name = resource["name"]
            if name.startswith("machine_"):
                yield TfResource(f"other.{name}", "other_type", name, None, "example.org/a/b", attributes)
                yield TfResource(f"{resource['type']}.x", resource["type"], "x", None, built_in, attributes)


# ---------------------------------------------------------------- a fresh process


def _in_fresh_process(subject: Subject, seed: str) -> list[bytes]:
    module = sys.modules[type(subject.provider).__module__]
    work = {
        "module": module.__name__,
        "file": getattr(module, "__file__", None),
        "subject": pickle.dumps((subject.provider, subject.requests())),
    }
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONHASHSEED": seed,
        "TZ": "Pacific/Apia",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from rezuscloud.plugin.testing import _answer; _answer()"],
        input=pickle.dumps(work),
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"the provider fails in a fresh process:\n{done.stderr.decode()[-2000:]}"
    answer: list[bytes] = pickle.loads(done.stdout)  # noqa: S301 — written by our own child just now
    return answer


def _answer() -> None:
    """The child's side: renders what stands on stdin."""
    import importlib.util

    work = pickle.load(sys.stdin.buffer)  # noqa: S301 — written by our own parent
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    try:
        importlib.import_module(work["module"])
    except ImportError:  # e.g. a test file, which pytest loads by its path
        spec = importlib.util.spec_from_file_location(work["module"], work["file"])
        assert spec is not None and spec.loader is not None
        module = sys.modules[work["module"]] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    provider, requests = pickle.loads(work["subject"])  # noqa: S301 — as above
    out.write(pickle.dumps([_bytes(provider.render(request=request)) for request in requests]))
