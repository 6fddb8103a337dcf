"""A lab tenant and the real engine, without the server: what the core renders, applied into a local state."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rezuscloud_lab.provider import LabProvider

from rezuscloud.model.declaration import Pins, declare
from rezuscloud.tofu.projection import Projection, project
from rezuscloud.tofu.render import render

UID = "0b4ef6a2-5b0c-4f6f-8f43-8f9e2b1f0a11"
PROVIDERS = {"lab": LabProvider()}


class LabTenant:
    """One directory with one tenant: one control plane, `workers` workers."""

    def __init__(self, engine: Path, directory: Path) -> None:
        self.engine = engine
        self.directory = directory
        override = {"terraform": {"backend": {"local": {}}}}
        (directory / "local_override.tf.json").write_text(json.dumps(override))

    def declare(self, config: Mapping[str, Any], *, workers: int = 1) -> None:
        tenant = _document("Tenant", "t", {"talosVersion": "v1.13.9", "kubernetesVersion": "v1.36.3"})
        groups = [
            _document("NodeGroup", name, _group(role, count, config))
            for name, role, count in (("cp", "controlplane", 1), ("workers", "worker", workers))
        ]
        rendered = render(
            tenant,
            groups,
            content=declare(tenant, groups, ()),
            pins=Pins(contract="v1.13", bootstrap_machine="cp-1"),
            providers=PROVIDERS,
            encrypted=False,
        )
        for name, body in rendered.files.items():
            (self.directory / name).write_bytes(body)

    def tofu(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.engine, *arguments, "-no-color"],
            cwd=self.directory,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "TF_CLI_CONFIG_FILE": os.devnull,
            "TF_INPUT": "0",
            "TF_IN_AUTOMATION": "1",
        }

    def machines_planned(self) -> dict[str, list[str]]:
        """Machine → what the plan would do to it, e.g. ["update"] or ["delete", "create"]."""
        done = self.tofu("plan", "-out=p")
        assert done.returncode == 0, done.stdout + done.stderr
        plan = json.loads(self.tofu("show", "-json", "p").stdout)
        return {
            change["name"]: change["change"]["actions"]
            for change in plan["resource_changes"]
            if change["name"].startswith("machine_") and change["change"]["actions"] != ["no-op"]
        }

    def project(self) -> Projection:
        state = json.loads((self.directory / "terraform.tfstate").read_text())
        return project(state, tenant_uid=UID, providers=PROVIDERS)


def _group(role: str, count: int, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": role, "replicas": count, "providerClass": "lab:small", "providerConfig": dict(config)}


def _document(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "uid": UID, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": dict(spec)}
