"""Owns the way back: from TF state to machines, and to the declaration that state carries.

Pure. Machines exist only by this projection. It reads plain state (`encryption.py` opens sealed ones), stores
nothing and observes nothing: how a machine is doing never comes from here.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rezuscloud.model.machine import Address, MachineSpec
from rezuscloud.model.meta import API_VERSION, LABEL_NODE_GROUP, LABEL_ROLE, LABEL_TENANT, Doc, to_wire
from rezuscloud.model.tenant import NodeGroupSpec, Role
from rezuscloud.plugin.types import MachineFacts, Provider, TfResource
from rezuscloud.tofu.render import DECLARATION, FORMAT_VERSION, MACHINE_PREFIX

_PROVIDER = re.compile(r'(?:module\..*\.)?provider\["([^"]+)"\].*')


class ProjectionError(Exception):
    """State that cannot be read as machines. The message says what is at fault and what to do."""


@dataclass(frozen=True)
class ProjectedMachine:
    """One machine as TF state has it. `tainted`: its creation did not finish; the next run replaces it."""

    name: str
    spec: MachineSpec
    uid: str
    tainted: bool


@dataclass(frozen=True)
class Projection:
    machines: tuple[ProjectedMachine, ...]
    """By node group and slot."""
    declaration: Doc | None
    """The envelope as `render` wrote it: declaration, pins, declaredRevision; None if state has none."""
    resource_count: int
    """Managed objects in state, the declaration and what awaits its destruction included."""
    providers: frozenset[str]
    """Source addresses of all OpenTofu providers that state needs."""

    @property
    def applied_revision(self) -> str | None:
        """The declaredRevision that state carries."""
        return None if self.declaration is None else str(self.declaration.get("declaredRevision"))


def project(state: Doc, *, tenant_uid: str, providers: Mapping[str, Provider]) -> Projection:
    """Machines and declaration of a plain state (version 4). Raises ProjectionError."""
    if state.get("version") != 4:
        raise ProjectionError(
            f"TF state has format {state.get('version')!r}; this server reads format 4. Nothing was changed. "
            "Use a newer server."
        )
    try:
        objects, sources = list(_objects(state)), frozenset(_all_providers(state))
    except (AttributeError, KeyError, TypeError) as error:
        raise ProjectionError(
            f"TF state is damaged ({error!r}). Go back to an older state version."
        ) from error
    declaration = _declaration(objects)
    groups = _declared_groups(declaration)
    machines: dict[str, ProjectedMachine] = {}
    for managed in objects:
        if managed.is_deposed or not managed.resource.name.startswith(MACHINE_PREFIX):
            continue
        name = managed.resource.name.removeprefix(MACHINE_PREFIX)
        group, _, slot = name.rpartition("-")
        if not group or not slot.isdecimal():
            raise ProjectionError(
                f"TF state holds {managed.resource.address}, which is named like a machine and is none of "
                "ours (<group>-<slot>). Nothing was changed. Remove it from that state or rename it."
            )
        spec = groups.get(group)
        provider, facts = _facts(managed.resource, spec, providers)
        if facts is None:
            continue
        if name in machines and managed.resource.tainted:
            continue  # made anew as another type and not there yet: the finished one is the machine
        machines[name] = ProjectedMachine(
            name=name,
            spec=MachineSpec(
                node_group=group,
                # A group that left takes its role along; only workers' groups can leave a living tenant.
                role=spec.role if spec else Role.WORKER,
                slot=int(slot),
                provider=provider,
                provider_id=facts.provider_id,
                hostname=facts.hostname,
                addresses=tuple(facts.addresses),
                shape=facts.shape,
                zone=facts.zone,
            ),
            uid=machine_uid(tenant_uid, name, facts.provider_id),
            tainted=managed.resource.tainted,
        )
    return Projection(
        machines=tuple(
            sorted(machines.values(), key=lambda machine: (machine.spec.node_group, machine.spec.slot))
        ),
        declaration=declaration,
        resource_count=len(objects),
        providers=sources,
    )


def machine_uid(tenant_uid: str, name: str, provider_id: str) -> str:
    """The same machine has the same uid, also after a rebuild; a replaced one has another."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{tenant_uid}/{name}/{provider_id}"))


def bring_back(envelope: Doc, machines: Iterable[ProjectedMachine]) -> tuple[Doc, list[Doc], list[Doc]]:
    """Tenant, NodeGroups and Machines as they were declared and projected, from TF state alone.

    What the desk fills in by itself (finalizers, generation, resourceVersion) is not in them.
    """
    content = envelope["declaration"]
    tenant = _document("Tenant", content["tenant"])
    name = tenant["metadata"]["name"]
    groups = [_document("NodeGroup", group, namespace=name) for group in content["nodeGroups"]]
    marks = {marked["name"]: marked for marked in content["machines"]}
    return tenant, groups, [_machine_document(name, machine, marks.get(machine.name)) for machine in machines]


def system_labels(tenant: str, spec: MachineSpec) -> dict[str, str]:
    """The labels that every Machine bears."""
    return {LABEL_TENANT: tenant, LABEL_NODE_GROUP: spec.node_group, LABEL_ROLE: spec.role.value}


def _document(kind: str, declared: Doc, namespace: str | None = None) -> Doc:
    metadata = dict(declared["metadata"])
    if namespace is not None:
        metadata["namespace"] = namespace
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": declared["spec"]}


def _machine_document(tenant: str, machine: ProjectedMachine, marked: Doc | None) -> Doc:
    marked = marked or {}
    metadata = {
        "name": machine.name,
        "namespace": tenant,
        "uid": machine.uid,
        "labels": system_labels(tenant, machine.spec) | marked.get("labels", {}),
    }
    if annotations := marked.get("annotations"):
        metadata["annotations"] = annotations
    return {"apiVersion": API_VERSION, "kind": "Machine", "metadata": metadata, "spec": to_wire(machine.spec)}


# ---------------------------------------------------------------- reading state


@dataclass(frozen=True)
class _Managed:
    resource: TfResource
    is_deposed: bool


def _objects(state: Doc) -> Iterator[_Managed]:
    """All objects that OpenTofu manages, with those that only await their destruction."""
    for resource in state.get("resources") or ():
        if resource.get("mode") != "managed":
            continue
        base = f"{resource['type']}.{resource['name']}"
        if resource.get("module"):
            base = f"{resource['module']}.{base}"
        for instance in resource.get("instances") or ():
            index = instance.get("index_key")
            yield _Managed(
                resource=TfResource(
                    address=base if index is None else f"{base}[{json.dumps(index)}]",
                    type=resource["type"],
                    name=resource["name"],
                    index=index,
                    provider=_source(instance.get("provider") or resource.get("provider") or ""),
                    attributes=instance.get("attributes") or {},
                    tainted=instance.get("status") == "tainted",
                ),
                is_deposed=bool(instance.get("deposed")),
            )


def _all_providers(state: Doc) -> Iterator[str]:
    for resource in state.get("resources") or ():
        for place in (resource, *(resource.get("instances") or ())):
            if place.get("provider"):
                yield _source(place["provider"])


def _source(text: str) -> str:
    """`provider["registry.opentofu.org/oracle/oci"].alias` → the address in it."""
    found = _PROVIDER.fullmatch(text)
    return found[1] if found else text


def _declaration(objects: Iterable[_Managed]) -> Doc | None:
    for managed in objects:
        resource = managed.resource
        if managed.is_deposed or resource.address != DECLARATION:
            continue
        try:
            # `input` is of any type, so state wraps it: {"value": …, "type": …}.
            envelope = json.loads(resource.attributes["input"]["value"])
            version = envelope["formatVersion"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProjectionError(
                f"The declaration in TF state cannot be read ({error!r}). Nothing was changed. "
                "Apply the tenant again, or go back to an older state version."
            ) from error
        if version != FORMAT_VERSION:
            raise ProjectionError(
                f"The declaration in TF state has format {version!r}; this server reads {FORMAT_VERSION}. "
                "Nothing was changed. Use the server version that wrote it, or a newer one."
            )
        return dict(envelope)
    return None


def _declared_groups(envelope: Doc | None) -> dict[str, NodeGroupSpec]:
    if envelope is None:
        return {}
    return {
        group["metadata"]["name"]: NodeGroupSpec(
            role=Role(group["spec"]["role"]),
            replicas=group["spec"]["replicas"],
            provider_class=group["spec"]["providerClass"],
        )
        for group in envelope["declaration"]["nodeGroups"]
    }


def _facts(
    resource: TfResource, group: NodeGroupSpec | None, providers: Mapping[str, Provider]
) -> tuple[str, MachineFacts | None]:
    """The facts of a machine, by the provider that its group declares; without one, by whoever knows it."""
    names = [group.provider] if group and group.provider in providers else sorted(providers)
    for name in names:
        facts = _ask(name, providers[name], resource)
        if facts is not None:
            return name, facts
    return "", None


def _ask(name: str, provider: Provider, resource: TfResource) -> MachineFacts | None:
    cause = None
    try:
        facts = provider.project(resource=resource)
    except Exception as error:  # guests are isolated: their bug becomes this tenant's condition
        # Its text may quote attributes, and with them secrets; the traceback has it for those who may look.
        what, cause = f"it raised {type(error).__name__}", error
    else:
        if facts is None or _is_sound(facts, resource):
            return facts
        what = "what it returned are not the facts of that machine"
    if resource.tainted:
        return None  # a creation that broke off may leave nothing to read
    raise ProjectionError(
        f'Provider "{name}" cannot read {resource.address} from TF state: {what}. The machine itself is '
        "untouched. This is a fault of that plugin: install another version of it."
    ) from cause


def _is_sound(facts: Any, resource: TfResource) -> bool:
    return (
        isinstance(facts, MachineFacts)
        and facts.machine == resource.name.removeprefix(MACHINE_PREFIX)
        and isinstance(facts.provider_id, str)
        and isinstance(facts.hostname, str)
        and all(isinstance(address, Address) for address in facts.addresses)
    )
