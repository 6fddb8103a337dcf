"""The conformance suite finds what it is there to find: each planted fault fails the very check for it."""

from __future__ import annotations

import base64
import datetime
import os
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any, ClassVar

import pytest
import voluptuous as vol

from rezuscloud.model.machine import Address, Stage
from rezuscloud.model.tenant import Role
from rezuscloud.plugin import testing
from rezuscloud.plugin.testing import Subject
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
    RequiredProvider,
    TfResource,
)

BUILT_IN = "terraform.io/builtin/terraform"


class Good(Provider):
    """Keeps every rule. The faulty ones below differ from it in one thing each."""

    name: ClassVar[str] = "good"
    title: ClassVar[str] = "Good"
    features: ClassVar[frozenset[Feature]] = frozenset(Feature) - {Feature.LIFESPAN}

    def config_schema(self) -> vol.Schema:
        return vol.Schema(
            {
                vol.Optional("size", default=1): vol.All(int, vol.Range(min=1)),
                vol.Optional("note", default=""): str,
                vol.Optional("tags", default=dict): {str: str},
            }
        )

    def credentials_schema(self) -> vol.Schema:
        return vol.Schema({vol.Required("apiToken"): str})

    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        return {"GOOD_TOKEN": credentials["apiToken"]}

    def render(self, *, request: RenderRequest) -> Fragment:
        machines = {machine.resource_name: self.body(machine) for machine in request.machines}
        output = {"control_plane_endpoint": {"value": "192.0.2.1:6443"}} if machines else {}
        return Fragment(resource={"terraform_data": machines} if machines else {}, output=output)

    def body(self, machine: MachineRequest) -> dict[str, Any]:
        config = machine.config
        return {
            "input": {
                "by": "good",
                "note": config["note"],
                "tags": config["tags"],
                "size": Expr(str(config["size"])),
            }
        }

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        if (resource.provider, resource.type) != (BUILT_IN, "terraform_data"):
            return None
        kept = resource.attributes.get("input") or {}
        if not resource.name.startswith("machine_") or "by" not in kept.get("value", {}):
            return None
        name = resource.name.removeprefix("machine_")
        return MachineFacts(name, resource.attributes["id"], name, (Address("InternalIP", "192.0.2.1"),))

    async def observe(self, *, machines: Sequence[ObserveTarget]) -> Sequence[Observation]:
        return [Observation(target.machine, None, Stage.UNKNOWN, "NotAsked") for target in machines]

    async def preflight(
        self, *, credentials: Mapping[str, str], config: Mapping[str, Any]
    ) -> Sequence[Finding]:
        return [Finding("warning", "nothing was checked")]


def subject_of(provider: Provider) -> Subject:
    return Subject(
        provider=provider,
        valid_configs=({"size": 2, "note": "n", "tags": {"b": "2", "a": "1"}}, {}),
        invalid_configs=({"size": 0}, {"tags": {"a": 1}}),
        credentials={"apiToken": "made-up-token-1"},
    )


# ---------------------------------------------------------------- declaration and config


class UpperCaseName(Good):
    name = "Bad_Name"


class OtherContract(Good):
    contract_version = 2


class DeclaresWithoutMethod(Good):
    features = frozenset(Feature)


class MethodWithoutDeclaring(Good):
    features = frozenset({Feature.ENDPOINT, Feature.PREFLIGHT})


class ShortSource(Good):
    def required_providers(self) -> Mapping[str, RequiredProvider]:
        return {"oci": RequiredProvider("oracle/oci", "~> 8.0")}


class RefusesValid(Good):
    def config_schema(self) -> vol.Schema:
        return vol.Schema({"size": 1})


class DefaultsNotStable(Good):
    def config_schema(self) -> vol.Schema:
        return vol.Schema(
            {
                vol.Optional("size", default=1): vol.All(int, lambda size: size + 1),
                vol.Optional("note", default=""): str,
                vol.Optional("tags", default=dict): {str: str},
            }
        )


class AcceptsUnknown(Good):
    def config_schema(self) -> vol.Schema:
        return super().config_schema().extend({}, extra=vol.ALLOW_EXTRA)


class RefusesWithoutPath(Good):
    def config_schema(self) -> vol.Schema:
        inner = super().config_schema()

        def check(config: Any) -> Any:
            try:
                return inner(config)
            except vol.Invalid:
                raise vol.Invalid("wrong") from None

        return vol.Schema(check)


class SchemaRaisesKeyError(Good):
    def config_schema(self) -> vol.Schema:
        def check(config: Any) -> Any:
            return {"size": {0: None}.get(config["size"]) or config["tags"]["a"], **config}

        return vol.Schema(check)


# ---------------------------------------------------------------- fragments


class NotAFragment(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        return {}  # type: ignore[return-value]  # the planted fault


class LeafIsASet(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": {"x"}}


class NameFromText(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        return replace(super().render(request=request), output={"my output": {"value": 1}})


class MachineNotNamed(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        return Fragment(resource={"terraform_data": {m.name: self.body(m) for m in request.machines}})


class OtherNamedLikeAMachine(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        machines = {machine.resource_name: self.body(machine) for machine in request.machines}
        return Fragment(resource={"terraform_data": machines, "time_sleep": {"machine_wait": {}}})


class NeedsMachines(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        return Fragment(resource={"terraform_data": {"network": {}, **_machines_of(self, request)}})


class CountsMachines(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        machines = {
            name: {"input": {**body["input"], "of": len(request.machines)}}
            for name, body in _machines_of(self, request).items()
        }
        return Fragment(resource={"terraform_data": machines})


class RemembersCalls(Good):
    calls = 0

    def body(self, machine: MachineRequest) -> dict[str, Any]:
        self.calls += 1
        return {"input": {"by": "good", "calls": self.calls}}


class KeepsOrderOfKeys(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": [f"{key}={value}" for key, value in machine.config["tags"].items()]}


class ListsASet(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": list({f"word-{i}" for i in range(20)})}


class ReadsTheClock(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": "old" if time() > 1e10 else "new"}


class ReadsTheDate(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": datetime.datetime.now(datetime.UTC).year > 1}


class DrawsRandom(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": random.random() < 2}


class ReadsAFile(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": len(Path(__file__).read_bytes())}


class OpensASocket(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        with socket.socket() as opened:
            return {"input": opened.fileno() > 0}


class SchemaReadsAFile(Good):
    def config_schema(self) -> vol.Schema:
        return super().config_schema() if Path("/").exists() else vol.Schema({})


class RendersCredentials(Good):
    kept = ""

    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        self.kept = credentials["apiToken"]
        return super().environment(credentials=credentials)

    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": {"user": f"token:{self.kept}"}}


class RendersEncodedCredentials(RendersCredentials):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": base64.b64encode(self.kept.encode()).decode()}


class RendersVariable(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": os.environ.get("GOOD_TOKEN", "")}


class PasswordInConfig(Good):
    def config_schema(self) -> vol.Schema:
        return super().config_schema().extend({vol.Optional("root"): {vol.Optional("adminPassword"): str}})


class TextInExpression(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": Expr(f'upper("{machine.config["note"]}")')}


class TextInCommand(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        command = f"echo {machine.config['note']}"
        return {**super().body(machine), "provisioner": [{"local-exec": {"command": command}}]}


class EscapesItself(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": machine.config["note"].replace("${", "$${")}


class TextInKeyOfExpression(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": [Expr(f"local.{tag}") for tag in machine.config["tags"]]}


class NoEndpoint(Good):
    def render(self, *, request: RenderRequest) -> Fragment:
        return replace(super().render(request=request), output={})


# ---------------------------------------------------------------- other answers


class NumberInEnvironment(Good):
    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        return {"GOOD_PORT": 1}  # type: ignore[dict-item]  # the planted fault


class SetsPath(Good):
    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        return {"PATH": "/opt/good"}


class TakesForeign(Good):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return MachineFacts(resource.name, "id", "host") if "machine_" in resource.name else None


class BreaksOnForeign(Good):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return MachineFacts(resource.name, resource.attributes["ocid"], "host")


class ForgetsOne(Good):
    async def observe(self, *, machines: Sequence[ObserveTarget]) -> Sequence[Observation]:
        return (await super().observe(machines=machines))[1:]


class ObserveRaises(Good):
    async def observe(self, *, machines: Sequence[ObserveTarget]) -> Sequence[Observation]:
        raise ConnectionError("cloud not reached")


class FindingWithoutMessage(Good):
    async def preflight(
        self, *, credentials: Mapping[str, str], config: Mapping[str, Any]
    ) -> Sequence[Finding]:
        return [Finding("fatal", "")]


def _machines_of(provider: Good, request: RenderRequest) -> dict[str, dict[str, Any]]:
    return {machine.resource_name: provider.body(machine) for machine in request.machines}


PLANTED: Sequence[tuple[type[Good], Callable[[Subject], None]]] = (
    (UpperCaseName, testing.check_declaration),
    (OtherContract, testing.check_declaration),
    (DeclaresWithoutMethod, testing.check_declaration),
    (MethodWithoutDeclaring, testing.check_declaration),
    (ShortSource, testing.check_declaration),
    (RefusesValid, testing.check_valid_configs),
    (DefaultsNotStable, testing.check_valid_configs),
    (AcceptsUnknown, testing.check_invalid_configs),
    (RefusesWithoutPath, testing.check_invalid_configs),
    (SchemaRaisesKeyError, testing.check_invalid_configs),
    (NotAFragment, testing.check_fragment),
    (LeafIsASet, testing.check_fragment),
    (NameFromText, testing.check_fragment),
    (MachineNotNamed, testing.check_names),
    (OtherNamedLikeAMachine, testing.check_names),
    (NeedsMachines, testing.check_no_machines),
    (CountsMachines, testing.check_scaling),
    (RemembersCalls, testing.check_equal_bytes),
    (KeepsOrderOfKeys, testing.check_equal_bytes),
    (ListsASet, testing.check_fresh_process),
    (ReadsTheClock, testing.check_pure),
    (ReadsTheDate, testing.check_pure),
    (DrawsRandom, testing.check_pure),
    (ReadsAFile, testing.check_pure),
    (OpensASocket, testing.check_pure),
    (SchemaReadsAFile, testing.check_pure),
    (RendersCredentials, testing.check_no_secret),
    (RendersEncodedCredentials, testing.check_no_secret),
    (RendersVariable, testing.check_no_secret),
    (PasswordInConfig, testing.check_no_secret),
    (TextInExpression, testing.check_literals),
    (TextInCommand, testing.check_literals),
    (EscapesItself, testing.check_literals),
    (TextInKeyOfExpression, testing.check_literals),
    (NoEndpoint, testing.check_endpoint),
    (NumberInEnvironment, testing.check_environment),
    (SetsPath, testing.check_environment),
    (TakesForeign, testing.check_foreign_resources),
    (BreaksOnForeign, testing.check_foreign_resources),
    (ForgetsOne, testing.check_observe),
    (ObserveRaises, testing.check_observe),
    (FindingWithoutMessage, testing.check_preflight),
)


@pytest.mark.parametrize(("faulty", "check"), PLANTED, ids=lambda value: value.__name__)
def test_a_planted_fault_fails_its_check(faulty: type[Good], check: Callable[[Subject], None]) -> None:
    with pytest.raises(AssertionError) as failure:
        check(subject_of(faulty()))
    assert str(failure.value).strip(), "an author must be told what is wrong"


def test_every_check_has_a_planted_fault() -> None:
    assert {check for _, check in PLANTED} == set(testing.CHECKS)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_a_provider_that_keeps_the_contract_passes(check: Callable[[Subject], None]) -> None:
    check(subject_of(Good()))


# ---------------------------------------------------------------- with the real engine


class DiffersEachTime(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {"input": {"by": "good", "at": Expr("timestamp()")}}


class ForgetsWorkers(Good):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        return None if "workers" in resource.name else super().project(resource=resource)


class SameIdForAll(Good):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        facts = super().project(resource=resource)
        return facts and replace(facts, provider_id="same")


class TakesAnyType(Good):
    def project(self, *, resource: TfResource) -> MachineFacts | None:
        if resource.attributes.keys() >= {"id", "output", "triggers_replace"} and "machine_" in resource.name:
            name = resource.name.removeprefix("machine_")
            return MachineFacts(name, resource.attributes["id"], name)
        return None


class CannotBeDestroyed(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        return {**super().body(machine), "lifecycle": {"prevent_destroy": True}}


class EvaluatesText(Good):
    def body(self, machine: MachineRequest) -> dict[str, Any]:
        note = machine.config["note"]
        return {**super().body(machine), "provisioner": [_ignored_on_failure(note)]}


def _ignored_on_failure(note: str) -> Mapping[str, Any]:
    return {
        "local-exec": {"command": 'eval "$NOTE"', "environment": {"NOTE": note}, "on_failure": "continue"}
    }


@pytest.mark.engine
@pytest.mark.parametrize("check", testing.ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_a_provider_that_keeps_the_contract_passes_on_the_real_engine(
    check: Callable[[Subject, Path, Path], None], engine_path: Path, tmp_path: Path
) -> None:
    check(subject_of(Good()), engine_path, tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("faulty", "check", "told"),
    [
        (DiffersEachTime, testing.check_round_trip, "second plan"),
        (ForgetsWorkers, testing.check_round_trip, "state holds machines"),
        (SameIdForAll, testing.check_round_trip, "not unique"),
        (TakesAnyType, testing.check_round_trip, "for its own"),
        (CannotBeDestroyed, testing.check_round_trip, "destroy fails"),
        (EvaluatesText, testing.check_literals_in_state, "shell command"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_that_only_the_real_engine_shows_is_found(
    faulty: type[Good],
    check: Callable[[Subject, Path, Path], None],
    told: str,
    engine_path: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError, match=told):
        check(subject_of(faulty()), engine_path, tmp_path)


def test_roles_of_the_sample_tenant_are_a_control_plane_and_workers() -> None:
    machines = subject_of(Good()).requests()[0].machines
    assert [machine.role for machine in machines] == [Role.CONTROLPLANE, Role.WORKER, Role.WORKER]
