"""The real OpenTofu, started plainly and with local state: what the tofu room's output is held against."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rezuscloud.tofu.messages import Message, parse_line


class BareTofu:
    """One working directory and its local state."""

    def __init__(self, engine: Path, cwd: Path) -> None:
        self._engine = engine
        self.cwd = cwd
        cwd.mkdir(mode=0o700, exist_ok=True)
        local: dict[str, Any] = {"terraform": {"backend": {"local": {}}}}
        (cwd / "backend_override.tf.json").write_text(json.dumps(local))

    def write(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (self.cwd / name).write_bytes(content)

    def run(self, *args: str, encryption: str = "", code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; `code` is the exit code that it must have."""
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.cwd),
            "TF_CLI_CONFIG_FILE": "/dev/null",
            "TF_INPUT": "0",
        }
        if encryption:
            env["TF_ENCRYPTION"] = encryption
        done = subprocess.run(
            [str(self._engine), args[0], "-no-color", *args[1:]],
            cwd=self.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert code is None or done.returncode == code, f"{args}: {done.stdout}\n{done.stderr}"
        return done

    def apply(self, encryption: str = "", code: int = 0) -> list[Message]:
        """init, plan and apply of that plan; gives the plan's messages. `code` is that of the apply."""
        self.run("init", encryption=encryption)
        messages = self.plan(encryption=encryption)
        self.run("apply", "plan.bin", encryption=encryption, code=code)
        return messages

    def plan(self, *args: str, encryption: str = "") -> list[Message]:
        self.run("plan", "-out=plan.bin", "-json-into=plan.jsonl", *args, encryption=encryption)
        lines = (self.cwd / "plan.jsonl").read_bytes().splitlines()
        return [message for message in map(parse_line, lines) if message]

    def expect_no_changes(self, encryption: str = "") -> None:
        self.run("plan", "-detailed-exitcode", encryption=encryption)

    @property
    def state_file(self) -> Path:
        return self.cwd / "terraform.tfstate"

    @property
    def state_bytes(self) -> bytes:
        return self.state_file.read_bytes()

    @property
    def state(self) -> dict[str, Any]:
        """The local state when it is plain."""
        return dict(json.loads(self.state_bytes))
