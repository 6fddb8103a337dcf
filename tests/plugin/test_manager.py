"""Plugins that are good, blocked or broken in any way: what the manager makes of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent, indent

import pytest

from rezuscloud.model.tenant import TenantSpec
from rezuscloud.plugin import manager
from rezuscloud.plugin.manager import PluginFailed, PluginInfo, PluginManager, PluginStatus
from rezuscloud.plugin.types import Feature, Provider, RenderRequest, TfResource

_numbers = itertools.count()
Install = Callable[..., EntryPoint]

HEADER = """
import asyncio, sys, time
import voluptuous as vol
from rezuscloud.plugin.hookspecs import hookimpl
from rezuscloud.plugin.types import *
"""
PROVIDER = """
class P(Provider):
    name = "{name}"
    title = "P"
    def config_schema(self): return vol.Schema({{}})
    def render(self, *, request): return Fragment()
    def project(self, *, resource): return None
{extra}
"""
HOOK = """
@hookimpl
def rezuscloud_register_providers():
    return [P()]
"""
REQUEST = RenderRequest("t", "uid", TenantSpec("v1.13.9", "v1.36.3"), ())
RESOURCE = TfResource("a.b", "a", "b", None, "x", {})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes a plugin's module and gives its entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def write(name: str, source: str | None = None, *, extra: str = "", hook: str = HOOK) -> EntryPoint:
        if source is None:
            provider = PROVIDER.format(name=name, extra=indent(dedent(extra), "    "))
            source = HEADER + provider + hook
        module = f"guest_{name}_{next(_numbers)}"  # one that hangs holds its import lock for a while
        (tmp_path / f"{module}.py").write_text(source)
        made.append(module)
        return EntryPoint(name, module, "rezuscloud")

    yield write
    for module in made:
        sys.modules.pop(module, None)


def load(*found: EntryPoint, limit_s: float = 5) -> PluginManager:
    return PluginManager.load(found=found, limit_s=limit_s)


def the_failure(*found: EntryPoint, limit_s: float = 5) -> str:
    loaded = load(*found, limit_s=limit_s)
    (info,) = loaded.describe()
    assert info.status is PluginStatus.FAILED
    assert not loaded.providers
    return info.error


def by_name(loaded: PluginManager) -> dict[str, PluginInfo]:
    return {info.name: info for info in loaded.describe()}


# ---------------------------------------------------------------- loading


def test_the_installed_lab_is_found_by_its_entry_point() -> None:
    loaded = PluginManager.load()
    lab = by_name(loaded)["lab"]
    assert (lab.status, lab.package, lab.error) == (PluginStatus.LOADED, "rezuscloud-lab", "")
    assert lab.version
    assert [provider.name for provider in lab.providers] == ["lab"]
    assert Feature.OBSERVE in lab.providers[0].features
    assert loaded.providers["lab"].render(request=REQUEST).resource == {}


def test_a_blocked_plugin_is_listed_but_never_imported(install: Install) -> None:
    entry = install("evil", "raise SystemExit('imported')")
    loaded = PluginManager.load({"evil"}, found=[entry])
    assert by_name(loaded)["evil"].status is PluginStatus.BLOCKED
    assert entry.module not in sys.modules


def test_a_plugin_is_blocked_by_the_name_of_its_package_too() -> None:
    assert by_name(PluginManager.load({"rezuscloud-lab"}))["lab"].status is PluginStatus.BLOCKED


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("import no_such_module", "no_such_module"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise BaseException('odd')", "odd"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("this is no python", "SyntaxError"),
    ],
)
def test_a_plugin_that_fails_on_import_is_left_out_and_the_next_one_loads(
    install: Install, statement: str, told: str
) -> None:
    loaded = load(install("bad", statement), install("good"))
    assert told in by_name(loaded)["bad"].error
    assert list(loaded.providers) == ["good"]


@pytest.mark.parametrize("where", ["import", "hook", "schema"])
def test_a_plugin_that_hangs_is_left_out_in_time(install: Install, where: str) -> None:
    entry = {
        "import": lambda: install("bad", "import time; time.sleep(3)"),
        "hook": lambda: install("bad", hook=HOOK.replace("return", "time.sleep(3); return")),
        "schema": lambda: install("bad", extra="def config_schema(self): time.sleep(3)"),
    }[where]()
    began = time.monotonic()
    assert "longer than 0.3 s" in the_failure(entry, limit_s=0.3)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ("@hookimpl\ndef rezuscloud_register_provider(): return [P()]", "unknown hook"),
        ("def rezuscloud_register_providers(): return [P()]", "not marked with @hookimpl"),
        ("@hookimpl\ndef rezuscloud_register_providers(app): return [P()]", "app"),
        ("", "implements no hook"),
        ("@hookimpl\ndef rezuscloud_register_providers(): pass", "returned nothing"),
        ("@hookimpl\ndef rezuscloud_register_providers(): return P()", "returned a P"),
        ("@hookimpl\ndef rezuscloud_register_providers(): return [P]", "not a Provider"),
        ("@hookimpl\ndef rezuscloud_register_providers(): return [P(), P()]", "twice"),
        ("@hookimpl\ndef rezuscloud_register_providers(): raise ValueError('odd')", "ValueError: odd"),
    ],
)
def test_a_wrong_hook_fails_at_start_and_says_why(install: Install, hook: str, told: str) -> None:
    assert told in the_failure(install("bad", hook=hook))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("name = 'Not a label'", "DNS label"),
        ("title = ''", "title"),
        ("contract_version = 99", "contract version 99"),
        ("features = {'fly'}", "features"),
        ("features = frozenset({Feature.OBSERVE})", "does not override observe"),
        ("delivery = 'post'", "delivery"),
        ("def observe(self, *, machines): return []", "async def"),
        ("def render(self, request_, /): return Fragment()", "request by keyword"),
        ("def config_schema(self): return {}", "voluptuous"),
        ("def required_providers(self): return {'oci': 'oracle/oci'}", "RequiredProvider"),
        ("def required_providers(self): return []", "mapping"),
        ("def config_schema(self): raise RuntimeError('odd')", "RuntimeError: odd"),
    ],
)
def test_a_provider_that_breaks_the_contract_is_left_out(install: Install, extra: str, told: str) -> None:
    assert told in the_failure(install("bad", extra=extra))


def test_a_provider_without_its_abstract_methods_is_left_out(install: Install) -> None:
    source = HEADER + "class P(Provider):\n    name = 'p'\n    title = 'P'\n" + HOOK
    assert "abstract" in the_failure(install("bad", source))


def test_of_two_plugins_with_one_provider_name_the_first_stays(install: Install) -> None:
    second = install("b", HEADER + PROVIDER.format(name="a", extra="") + HOOK)
    loaded = load(second, install("a"))
    assert "already provided by plugin 'a'" in by_name(loaded)["b"].error
    assert list(loaded.providers) == ["a"]


def test_what_a_plugin_prints_reaches_neither_output_nor_logs(
    install: Install, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    extra = """
        def render(self, *, request):
            print("s3cret"); sys.stderr.write("s3cret"); sys.stdout.buffer.write(b"s3cret")
            return Fragment()
        features = frozenset({Feature.OBSERVE})
        async def observe(self, *, machines):
            print("s3cret"); await asyncio.sleep(0); print("s3cret", file=sys.stderr)
            return []
    """
    hook = 'print("s3cret"); sys.stderr.write("s3cret")\n' + HOOK
    provider = load(install("p", extra=extra, hook=hook)).providers["p"]
    provider.render(request=REQUEST)
    asyncio.run(provider.observe(machines=[]))
    print("mine")
    shown = capfd.readouterr()
    assert "s3cret" not in shown.out + shown.err + caplog.text
    assert "mine" in shown.out


# ---------------------------------------------------------------- later calls


def guarded(install: Install, extra: str) -> Provider:
    return load(install("p", extra=extra)).providers["p"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise KeyError('tags')", "KeyError: 'tags'"),
        ("raise SystemExit(1)", "SystemExit"),
        ("return None", "returned nothing, not Fragment"),
        ("return {}", "returned a dict, not Fragment"),
    ],
)
def test_a_render_that_fails_names_provider_and_method(install: Install, body: str, told: str) -> None:
    provider = guarded(install, f"def render(self, *, request): {body}")
    with pytest.raises(PluginFailed) as failure:
        provider.render(request=REQUEST)
    assert (failure.value.provider, failure.value.method) == ("p", "render")
    assert told in str(failure.value)


def test_a_project_that_returns_rubbish_is_told(install: Install) -> None:
    with pytest.raises(PluginFailed, match="returned a str, not MachineFacts"):
        guarded(install, "def project(self, *, resource): return 'x'").project(resource=RESOURCE)


def test_a_hanging_render_is_given_up_and_not_called_again_before_it_came_back(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "CALL_LIMIT_S", 0.2)
    provider = guarded(install, "def render(self, *, request): time.sleep(1); return Fragment()")
    with pytest.raises(PluginFailed, match=r"longer than 0\.2 s"):
        provider.render(request=REQUEST)
    began = time.monotonic()
    with pytest.raises(PluginFailed, match="has not come back"):
        provider.project(resource=RESOURCE)
    assert time.monotonic() - began < 0.1
    deadline = began + 5
    while True:
        try:
            assert provider.project(resource=RESOURCE) is None
            break
        except PluginFailed:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_credentials_never_stand_in_an_error(install: Install) -> None:
    extra = "def environment(self, *, credentials): raise ValueError('x' * 490 + credentials['token'])"
    with pytest.raises(PluginFailed) as failure:
        guarded(install, extra).environment(credentials={"token": "very-s3cret-token"})
    assert "very" not in str(failure.value)
    assert failure.value.__cause__ is None and failure.value.__suppress_context__


def test_an_environment_of_other_things_than_strings_is_refused(install: Install) -> None:
    provider = guarded(install, "def environment(self, *, credentials): return {'PORT': 1}")
    with pytest.raises(PluginFailed, match="than strings"):
        provider.environment(credentials={})


OBSERVES = "features = frozenset({{Feature.OBSERVE}})\nasync def observe(self, *, machines):\n    {}"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ConnectionError('unreachable')", "ConnectionError: unreachable"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("return ['x']", "not a list of Observation"),
        ("return None", "returned nothing"),
        ("raise asyncio.CancelledError", "cancelled itself"),
        ("await asyncio.sleep(60)", "no answer within 0.1 s"),
        (
            "while True:\n"
            "        try: await asyncio.sleep(60)\n"
            "        except asyncio.CancelledError: await asyncio.sleep(0.2); return []",
            "no answer within 0.1 s",
        ),
    ],
)
async def test_an_observe_that_fails_or_hangs_is_told(
    install: Install, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    monkeypatch.setattr(manager, "AWAIT_LIMIT_S", 0.1)
    provider = guarded(install, OBSERVES.format(body))
    with pytest.raises(PluginFailed, match=told):
        await provider.observe(machines=[])


async def test_cancelling_the_caller_cancels_the_guest(install: Install) -> None:
    body = "P.entered.set()\n    try: await asyncio.sleep(60)\n    finally: P.left.set()"
    entry = install("p", extra="entered, left = asyncio.Event(), asyncio.Event()\n" + OBSERVES.format(body))
    provider = load(entry).providers["p"]
    guest = sys.modules[entry.module].P
    task = asyncio.create_task(provider.observe(machines=[]))
    await asyncio.wait_for(guest.entered.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(guest.left.wait(), 5)
