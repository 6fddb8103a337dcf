"""`make run`: starts a server with the lab provider and one sample tenant, and shows how it comes up.

Uses only what a user has: the `rezuscloud` and `rezusctl` programs beside this interpreter. Ends with Ctrl-C.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import get_engine

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DATA = Path(os.environ.get("REZUSCLOUD_DATA_DIR") or ROOT / "data")
ADDRESS = os.environ.get("REZUSCLOUD_ADDR") or "127.0.0.1:8080"
URL = f"http://{ADDRESS}"
SAMPLE = "personal"
READY_S = 60


def main() -> int:
    DATA.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = ensure_engine()
    if engine is None:
        return 1
    password = admin_password()
    log = DATA / "server.log"
    env = os.environ | {
        "REZUSCLOUD_DATA_DIR": str(DATA),
        "REZUSCLOUD_ADDR": ADDRESS,
        "REZUSCLOUD_ADMIN_PASSWORD": password,
        "REZUSCLOUD_TOFU": os.environ.get("REZUSCLOUD_TOFU") or engine,
        "REZUSCLOUD_DEBOUNCE_S": os.environ.get("REZUSCLOUD_DEBOUNCE_S") or "1",
    }
    with log.open("ab") as out:
        server = subprocess.Popen([str(BIN / "rezuscloud"), "serve"], env=env, stdout=out, stderr=out)
    try:
        if not wait_until_ready(server, log):
            return 1
        create_sample(password)
        tell(password, log)
        server.wait()
    except KeyboardInterrupt:
        print("\n==> stopping (running applies save their state first)")
    finally:
        stop(server)
    return 0


def ensure_engine() -> str | None:
    """An engine that is there is taken without waiting; only a machine with none at all gets one built."""
    if found := get_engine.find():
        print(f"==> engine: {found}")
        return str(found)
    if stand_in := shutil.which("terraform"):
        print(f"==> engine: {stand_in} as a stand-in (TF state is not encrypted); `make tools` gets OpenTofu")
        return stand_in
    return str(get_engine.TARGET) if get_engine.main() == 0 else None


def admin_password() -> str:
    """The password given, or one made once and kept beside the data, so that a second start knows it."""
    if given := os.environ.get("REZUSCLOUD_ADMIN_PASSWORD"):
        return given
    kept = DATA / "demo-password"
    if not kept.exists():
        kept.touch(mode=0o600)
        kept.write_text(secrets.token_urlsafe(12))
    return kept.read_text().strip()


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> bool:
    print("==> starting the server ", end="", flush=True)
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/readyz", timeout=2):
                print(" ready")
                return True
        except OSError:
            print(".", end="", flush=True)
            time.sleep(0.2)
    print(f"\nThe server did not come up. The end of {log}:", file=sys.stderr)
    print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), file=sys.stderr)
    return False


def rezusctl(*words: str, password: str | None = None, is_silent: bool = False) -> int:
    env = os.environ | {"REZUSCTL_SERVER": URL}
    stdin = f"{password}\n".encode() if password is not None else None
    out = subprocess.DEVNULL if is_silent else None
    argv = [str(BIN / "rezusctl"), *words]
    return subprocess.run(argv, env=env, input=stdin, stdout=out, stderr=out, check=False).returncode


def create_sample(password: str) -> None:
    if rezusctl("login", "--username", "admin", "--password-stdin", password=password) != 0:
        raise SystemExit(1)
    if rezusctl("get", "cluster", SAMPLE, is_silent=True) == 0:
        return
    print(f"==> rezusctl create cluster {SAMPLE} --provider lab --control-planes 3 --workers 2 --wait")
    rezusctl(
        *(
            "create",
            "cluster",
            SAMPLE,
            "--provider",
            "lab",
            "--control-planes",
            "3",
            "--workers",
            "2",
            "--wait",
        )
    )


def tell(password: str, log: Path) -> None:
    print(
        f"""
    URL        {URL}
    user       admin
    password   {password}
    log        {log}

Try, in another terminal:
    {shown("rezusctl")} get clusters
    {shown("rezusctl")} get machines -c {SAMPLE} -o wide
    {shown("rezusctl")} watch machines -c {SAMPLE}

Ctrl-C stops the server; what is declared stays in {DATA}."""
    )


def shown(program: str) -> str:
    path = BIN / program
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    server.wait()


if __name__ == "__main__":
    sys.exit(main())
