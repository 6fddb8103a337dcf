"""The template works for a stranger: copied out of the repository, renamed, installed, and found."""

from __future__ import annotations

import json
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LIST_PLUGINS = """
import json
from rezuscloud.plugin.manager import PluginManager
found = PluginManager.load().describe()
print(json.dumps({plugin.name: [plugin.status, plugin.package, plugin.error] for plugin in found}))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of a fresh environment that sees what is installed here, but installs into itself."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    inside = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    sites = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in sites]
    (inside / "outer.pth").write_text("\n".join([*lines, str(ROOT)]))
    return home / "bin" / "python"


def _run(*argv: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.engine
@pytest.mark.slow
def test_a_copy_that_is_renamed_as_its_readme_says_installs_conforms_and_is_found(
    tmp_path: Path, python: Path, engine_path: Path
) -> None:
    copy = tmp_path / "elsewhere" / "acme"
    shutil.copytree(
        ROOT / "plugins/_template", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    rename = re.search(r"## 1\..*?```sh\n(.*?)```", (copy / "README.md").read_text(), re.DOTALL)
    assert rename is not None
    _run("/bin/sh", "-euc", rename[1], cwd=copy)
    assert not [path for path in copy.rglob("*.py") if re.search("(?i)example", path.read_text())]

    # A person's `pip install .` fetches its build tool; here nothing is fetched.
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    _run(python, "-m", "pip", "install", *offline, ".", cwd=copy)
    plugins = json.loads(_run(python, "-c", LIST_PLUGINS, cwd=tmp_path))
    assert plugins["acme"] == ["loaded", "rezuscloud-acme", ""]
    assert plugins["lab"][0] == "loaded"

    told = _run(
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests",
        cwd=copy,
        REZUSCLOUD_TOFU=str(engine_path),
    )
    assert re.search(r"\d+ passed", told)
    assert "skipped" not in told
