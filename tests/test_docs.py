"""The docs tell the truth: pages are fresh, links lead somewhere, commands exist, and the tour works."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncclick as click
import pytest

from rezuscloud.cli.main import cli as rezusctl
from rezuscloud.commands.grammar import cli as rezuscloud
from rezuscloud.model import errors
from rezuscloud.model.operations import Risk, RunPhase
from rezuscloud.model.tenant import HeldBy
from rezuscloud.resources.registry import REGISTRY
from rezuscloud.settings import VARIABLES, Settings
from tests.support.server import BIN, PASSWORD, running

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "rezuscloud"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("plugins/*/README.md")]
SOURCES = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("tools/*.py")])
PROGRAMS = {"rezusctl": rezusctl, "rezuscloud": rezuscloud}

MAX_LINES = 800
REFUSED_NAMES = {"utils", "helpers", "common", "base", "misc"}


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---------------------------------------------------------------- generated pages


def test_generated_pages_are_what_the_code_says() -> None:
    made = subprocess.run(
        [sys.executable, "tools/make_docs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


def test_every_setting_is_documented_and_read() -> None:
    page = (DOCS / "reference/settings.md").read_text()
    assert [v.name for v in VARIABLES if f"| `{v.name}` |" not in page] == []
    fields = {field.name for field in dataclasses.fields(Settings)}
    filled = {key for v in VARIABLES if v.default for key in v.read(v.default)}
    named = {v.name.removeprefix("REZUSCLOUD_").lower() for v in VARIABLES}
    assert fields <= filled | named


def test_every_variable_that_a_page_names_is_a_setting() -> None:
    known = {v.name for v in VARIABLES}
    named = {name for page in PAGES for name in re.findall(r"\bREZUSCLOUD_[A-Z_]*[A-Z]\b", page.read_text())}
    assert named - known == set()


def test_every_kind_is_documented() -> None:
    page = (DOCS / "reference/kinds.md").read_text()
    assert [kind.kind for kind in REGISTRY if f"\n## {kind.kind}\n" not in page] == []


def test_every_error_hold_phase_and_risk_is_documented() -> None:
    page = (DOCS / "reference/errors.md").read_text()
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in page.splitlines()}
    known = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    api_errors = [kind for kind in known if issubclass(kind, errors.ApiError) and kind is not errors.ApiError]
    assert [e.__name__ for e in api_errors if (str(e.code), e.reason) not in rows] == []
    first = {row[0] for row in rows if row}
    assert [word.value for word in (*HeldBy, *RunPhase) if word.value not in first] == []
    assert [risk.value for risk in Risk if f"`{risk.value}`" not in page] == []


# ---------------------------------------------------------------- links and commands


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_page_of_the_docs_can_be_reached_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        waiting += [(page.parent / target).resolve() for target in targets if "://" not in target]
    written_by_bench = {DOCS / "reference/benchmarks.md"}
    assert set(DOCS.rglob("*.md")) - seen - written_by_bench == set()


def commands_of(page: Path) -> Iterator[list[str]]:
    """Every `rezusctl …` and `rezuscloud …` that a page shows, in shell blocks and between backticks."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.M | re.S)
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    shown = [line for block in blocks for line in block.splitlines()]
    shown += re.findall(r"`((?:rezusctl|rezuscloud) [^`]+)`", " ".join(outside.split()))
    for line in shown:
        for part in re.split(r"[|;&()]+|\$\(", line):
            if (words := part.split()) and words[0] in PROGRAMS:
                yield shlex.split(part.split(" > ")[0].replace('"$', "").replace('"', ""))


def complaint(words: list[str]) -> str:
    """What is wrong with a command line, or ""."""
    command: click.Command = PROGRAMS[words[0]]
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if "|" in rest[0]:
            missing = [
                verb for verb in rest[0].split("|") if command.get_command(_context(command), verb) is None
            ]
            return f"no verbs {missing}" if missing else ""
        found = command.get_command(_context(command), rest[0])
        if found is None:
            return f"no verb {rest[0]!r}"
        command, rest = found, rest[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {
        "-h",
        "--help",
        "--version",
    }
    unknown = [word for word in rest if word.startswith("-") and word != "-" and word not in known]
    return f"no options {unknown}" if unknown else ""


def _context(command: click.Command) -> click.Context:
    return click.Context(command)


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    wrong = {" ".join(words): why for words in commands_of(page) if (why := complaint(words))}
    assert wrong == {}


def test_every_make_verb_that_a_page_shows_exists() -> None:
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    shown = {
        verb for page in PAGES for verb in re.findall(r"(?:`|^)make ([a-z]+)(?:`|$)", page.read_text(), re.M)
    }
    assert shown - verbs == set()


def test_the_readme_names_the_test_command_alone_and_ci_runs_it() -> None:
    assert "```sh\nmake test\n```" in (ROOT / "README.md").read_text()
    assert "exec make test" in (ROOT / ".ci/run").read_text()


# ---------------------------------------------------------------- the tour

END = "@@end"


def tour() -> list[tuple[str, str]]:
    """The shell blocks of the README's tour, each with the output that is shown below it."""
    text = (ROOT / "README.md").read_text()
    section = text.partition("## The five-minute tour")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```\n(?:```text\n(.*?)```)?", section, re.S)


def looks_like(shown: str, output: str) -> str:
    """The first shown line that the output does not have in its place, or "". `…` stands for anything; alone
    in a line also for any number of lines. White space counts once."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    at, may_skip = 0, False
    for line in filter(None, (" ".join(line.split()) for line in shown.splitlines())):
        if line == "…":
            may_skip = True
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.split("…")))
        places = range(at, len(lines) if may_skip else min(at + 1, len(lines)))
        found = next((place for place in places if pattern.fullmatch(lines[place])), None)
        if found is None:
            return line
        at, may_skip = found + 1, False
    return ""


def test_an_expected_output_is_compared_line_by_line() -> None:
    assert looks_like("a  …\n…\nc", "a 1\nb\nc\nd") == ""
    assert looks_like("a …\nc", "a 1\nb\nc") == "c"


@pytest.mark.engine
async def test_the_readmes_tour_works_line_by_line(tmp_path: Path, engine_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tofu").symlink_to(engine_path)
    env = {
        "PATH": f"{BIN}:{tools}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "REZUSCTL_CONFIG": str(tmp_path / "config.json"),
        "TF_CLI_CONFIG_FILE": os.devnull,
    }
    async with running(tmp_path / "data", engine_path, REZUSCLOUD_DEBOUNCE_S="0.5") as server:
        env["REZUSCTL_SERVER"] = server.url
        log_in = f"echo '{PASSWORD}' | rezusctl login --password-stdin"
        await run_script(f"{log_in}\nrezusctl {sample_of_make_run()}", env, tmp_path)
        blocks = tour()
        script = "\n".join(f"{commands}\necho '{END}' $?" for commands, _ in blocks)
        output = await run_script(script, env, tmp_path)
    answers = re.split(rf"^{END} (\d+)\n", output, flags=re.M)
    assert len(answers) == 2 * len(blocks) + 1, output
    for (commands, shown), answer, code in zip(blocks, answers[::2], answers[1::2], strict=False):
        missing = looks_like(shown, answer)
        assert not missing, f"{commands}\nshould print: {missing}\nbut printed:\n{answer}"
        assert code == ("1" if "Error:" in shown else "0"), f"{commands}\nended with {code}:\n{answer}"


def sample_of_make_run() -> str:
    """What `make run` has done before the tour begins."""
    demo = (ROOT / "tools/run_demo.py").read_text()
    found = re.search(r"rezusctl (create cluster \{SAMPLE\}[^\"]*)", demo)
    assert found
    return found[1].replace("{SAMPLE}", "personal")


async def run_script(script: str, env: dict[str, str], cwd: Path) -> str:
    """What a shell prints for these lines, errors included, colours left out."""
    shell = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-s",
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(shell.communicate(f"{script}\n".encode()), 100)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.decode())


# ---------------------------------------------------------------- the house


@pytest.mark.parametrize("source", SOURCES, ids=where)
def test_a_module_opens_with_a_docstring(source: Path) -> None:
    assert ast.get_docstring(ast.parse(source.read_text())), "say what it owns, what it does not, and why"


def test_no_file_is_too_long_or_has_a_name_that_says_nothing() -> None:
    code = [*SOURCES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/*.py")]
    assert [where(path) for path in code if len(path.read_text().splitlines()) > MAX_LINES] == []
    assert [where(path) for path in code if path.stem in REFUSED_NAMES] == []


def test_every_module_imports_alone_in_a_fresh_process() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]

    def load(module: str) -> str:
        command = [sys.executable, "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"{module}: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        assert [problem for problem in threads.map(load, modules) if problem] == []


def test_rezusctl_imports_nothing_heavy() -> None:
    heavy = "aiohttp", "aiosqlite", "cryptography", "nats", "orjson", "pluggy", "prometheus_client", "yaml"
    code = (
        "import sys, rezuscloud.cli.main as m\n"
        "for verb in m.cli.list_commands(None): m.cli.get_command(None, verb)\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
