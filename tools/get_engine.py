"""Gets the real OpenTofu into .tools/bin: found before fetched, fetched before built.

1. An OpenTofu that is new enough, in .tools/ or on PATH, is taken as it is.
2. The official release archive for this platform, verified by its checksum file (10 s to connect).
3. With Go: built from the module that tools/tofu/go.mod pins, every part of it by hash.
Standard library only, so that it also runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

VERSION = "1.12.6"
WANTED = (1, 12)
ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / ".tools" / "bin" / "tofu"
RELEASES = f"https://github.com/opentofu/opentofu/releases/download/v{VERSION}"
CONNECT_S = 10
GO_PACKAGES = 1870
"""About how many packages the build compiles; only for the progress shown."""


def main() -> int:
    if found := find():
        print(f"==> OpenTofu is there: {found}")
        return 0
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    if fetch() or build():
        print(f"==> OpenTofu {VERSION} is in {TARGET.relative_to(ROOT)}")
        return 0
    print(
        "OpenTofu could not be had: the release cannot be reached, and there is no Go toolchain (1.26.6 or\n"
        "newer). The server still starts, says so in /readyz, and applies nothing. What to do: install\n"
        "OpenTofu from your system's packages, or set REZUSCLOUD_TOFU to the program.",
        file=sys.stderr,
    )
    return 1


def find() -> Path | None:
    """An OpenTofu that is new enough: the one named, made here before, or on PATH."""
    candidates = [os.environ.get("REZUSCLOUD_TOFU"), str(TARGET), shutil.which("tofu")]
    for candidate in candidates:
        if (
            candidate
            and Path(candidate).is_file()
            and (version := version_of(candidate))
            and version >= WANTED
        ):
            return Path(candidate)
    return None


def version_of(program: str) -> tuple[int, ...] | None:
    """The version of an OpenTofu program; None for anything else."""
    env = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": os.environ.get("HOME", "/"),
        "TF_CLI_CONFIG_FILE": "/dev/null",
    }
    try:
        out = subprocess.run(
            [program, "version"], capture_output=True, text=True, timeout=30, env=env, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    first = next((line for line in out.stdout.splitlines() if line.startswith("OpenTofu v")), None)
    if first is None:
        return None
    return tuple(int(part) for part in first.removeprefix("OpenTofu v").split("-")[0].split("."))


def fetch() -> bool:
    """The official archive, if it can be reached and its checksum is right."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"tofu_{VERSION}_{platform.system().lower()}_{machine}.zip"
    print(f"==> fetching {name}")
    try:
        sums = download(f"{RELEASES}/tofu_{VERSION}_SHA256SUMS").decode()
        archive = download(f"{RELEASES}/{name}")
    except (OSError, urllib.error.URLError) as error:
        print(f"    cannot be reached ({error}); building it instead")
        return False
    wanted = next((line.split()[0] for line in sums.splitlines() if line.endswith(name)), None)
    if hashlib.sha256(archive).hexdigest() != wanted:
        print("    its checksum is wrong, so it is not used; building it instead")
        return False
    with zipfile.ZipFile(io.BytesIO(archive)) as pack:
        install(pack.read("tofu"))
    return True


def download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=CONNECT_S) as answer:
        return bytes(answer.read())


def install(program: bytes) -> None:
    part = TARGET.with_suffix(".part")
    part.write_bytes(program)
    part.chmod(0o755)
    part.replace(TARGET)


def build() -> bool:
    """Builds it with Go, showing how far it has come."""
    go = shutil.which("go")
    if go is None:
        return False
    print("==> building OpenTofu with Go: about six minutes the first time, seconds afterwards")
    module = ROOT / "tools" / "tofu"
    part = TARGET.with_suffix(".part")
    command = [
        *(go, "build", "-v", "-trimpath", "-mod=readonly"),
        *("-ldflags", "-s -w -X github.com/opentofu/opentofu/version.dev=no"),
        *("-o", str(part), "github.com/opentofu/opentofu/cmd/tofu"),
    ]
    env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": ""}
    started, compiled, last = time.monotonic(), 0, ""
    with subprocess.Popen(command, cwd=module, env=env, text=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            last = line.strip()
            is_download = last.startswith("go: downloading")
            compiled += not is_download
            what = "downloading" if is_download else f"compiled {compiled} of about {GO_PACKAGES} packages"
            show(f"    {what}, {time.monotonic() - started:.0f} s")
    show("", end=True)
    if process.returncode != 0:
        print(f"    the build failed: {last}")
        return False
    part.replace(TARGET)
    return True


def show(text: str, *, end: bool = False) -> None:
    """One line that is written over on a terminal; elsewhere only every hundredth of it would be noise."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[K{text}" + ("\r" if end else ""))
        sys.stdout.flush()
    elif not end and (int(time.monotonic()) % 30 == 0):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
