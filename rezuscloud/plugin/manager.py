"""Owns finding, checking and isolating plugins: one that fails is reported and left out, the house stands.

Each entry point of the group `rezuscloud` is imported and asked in a thread of its own, with a time limit,
and has a pluggy manager of its own, so that no plugin can spoil another's start. What it registers is checked
against the contract; what is left stands in `providers`, each behind a guard: whichever room calls it, an
exception, a hang or a wrong type comes out as `PluginFailed` and nothing else.

It does not protect against hostile code: a plugin runs in our process and is trusted as the core is. It
protects against mistakes. A hung thread cannot be ended in Python; it is left behind, and the provider
refuses further calls until that thread has come back. An async method that blocks blocks the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from types import NoneType
from typing import Any, Generic, Protocol, TextIO, TypeVar, cast

import pluggy
import voluptuous as vol

from rezuscloud.kit.redact import Redactor
from rezuscloud.model.meta import is_dns_label
from rezuscloud.plugin import hookspecs
from rezuscloud.plugin.types import (
    CONTRACT_VERSION,
    Delivery,
    Feature,
    Finding,
    Fragment,
    LifespanContext,
    MachineFacts,
    Observation,
    ObserveTarget,
    Provider,
    RenderRequest,
    RequiredProvider,
    TfResource,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

LOAD_LIMIT_S = 20.0
"""For importing a plugin, and again for asking and checking it."""
CALL_LIMIT_S = 10.0
"""For one call of a pure method."""
AWAIT_LIMIT_S = 30.0
"""For one call of an async method."""

OPTIONAL_METHODS: Mapping[Feature, str] = {
    Feature.PREFLIGHT: "preflight",
    Feature.OBSERVE: "observe",
    Feature.LIFESPAN: "lifespan",
}
"""The method that a provider which declares the feature must override."""

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "render": ("request",),
    "environment": ("credentials",),
    "project": ("resource",),
    "preflight": ("credentials", "config"),
    "observe": ("machines",),
    "lifespan": ("context",),
}

_SOURCE = re.compile(r"[a-z0-9.:-]+/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+")
_LOCAL_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class PluginFailed(Exception):
    """A plugin did not do what the contract asks. The message names it, what it did and what to do."""

    def __init__(self, provider: str, method: str, message: str) -> None:
        super().__init__(
            f"provider {provider!r} failed in {method}: {message}. Tenants of other providers go on; "
            f"update or correct the plugin that provides {provider!r}"
        )
        self.provider = provider
        self.method = method
        self.message = message


class PluginStatus(StrEnum):
    LOADED = "loaded"
    BLOCKED = "blocked"
    FAILED = "failed"


@dataclass(frozen=True)
class ProviderInfo:
    """What a list of plugins shows of one provider."""

    name: str
    title: str
    contract_version: int
    features: tuple[Feature, ...]
    required_providers: Mapping[str, RequiredProvider]


@dataclass(frozen=True)
class PluginInfo:
    """One entry point. `error` says why a failed one was left out; `providers` is what a loaded one gives."""

    name: str
    package: str
    version: str
    status: PluginStatus
    error: str = ""
    providers: tuple[ProviderInfo, ...] = ()


class PluginManager:
    """All plugins that were found, and the providers of those that could be used."""

    def __init__(self, plugins: Sequence[PluginInfo], providers: Mapping[str, Provider]) -> None:
        self._plugins = tuple(plugins)
        self.providers = providers
        """Provider name → guarded provider. Its methods raise `PluginFailed` and nothing else."""

    @classmethod
    def load(
        cls,
        blocked: Collection[str] = (),
        *,
        found: Iterable[EntryPoint] | None = None,
        limit_s: float = LOAD_LIMIT_S,
    ) -> PluginManager:
        """Finds, imports and checks all plugins but the blocked ones, which are not even imported.

        `blocked` holds names of entry points or of their packages. `found` replaces what is installed. Blocks
        for up to 2 × `limit_s` for each plugin that hangs; call it before the event loop has other work.
        """
        if found is None:
            found = entry_points(group=hookspecs.PROJECT)
        plugins: list[PluginInfo] = []
        providers: dict[str, Provider] = {}
        owners: dict[str, str] = {}
        for entry in sorted(found, key=lambda entry: (entry.name, _package(entry))):
            facts = (entry.name, _package(entry), entry.dist.version if entry.dist else "")
            if entry.name in blocked or _package(entry) in blocked:
                plugins.append(PluginInfo(*facts, status=PluginStatus.BLOCKED))
                continue
            try:
                guards = _guards_of(entry, limit_s)
                for guard in guards:
                    if guard.name in owners:
                        raise _Unusable(
                            f"provider {guard.name!r} is already provided by plugin {owners[guard.name]!r}; "
                            "block one of the two"
                        )
            except (_Unusable, _Hung, _Raised) as problem:
                log.error("plugin %s is left out: %s", entry.name, problem)
                plugins.append(PluginInfo(*facts, status=PluginStatus.FAILED, error=str(problem)))
                continue
            providers |= {guard.name: guard for guard in guards}
            owners |= {guard.name: entry.name for guard in guards}
            infos = tuple(guard.info for guard in guards)
            plugins.append(PluginInfo(*facts, status=PluginStatus.LOADED, providers=infos))
        return cls(plugins, providers)

    def describe(self) -> list[PluginInfo]:
        """Every plugin that was found, by name, also those that are blocked or failed."""
        return list(self._plugins)


# ---------------------------------------------------------------- from an entry point to guarded providers


class _Unusable(Exception):
    """The plugin came up, but breaks the contract; the message says where."""


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""


def _guards_of(entry: EntryPoint, limit_s: float) -> list[_Guard]:
    plugin = _run_limited(entry.load, f"importing plugin {entry.name}", limit_s)

    def ask() -> list[_Guard]:
        guards = [_guarded(provider) for provider in _ask_for_providers(entry.name, plugin)]
        names = [guard.name for guard in guards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _Unusable(f"it registers provider {twice[0]!r} twice")
        return guards

    try:
        return _run_limited(ask, f"registering plugin {entry.name}", limit_s)
    except _Raised as raised:
        if isinstance(raised.error, _Unusable):
            raise raised.error from None
        raise


def _ask_for_providers(name: str, plugin: object) -> Sequence[Provider]:
    hooks = pluggy.PluginManager(hookspecs.PROJECT)
    hooks.add_hookspecs(hookspecs)
    known = sorted(hook for hook in vars(hooks.hook) if hook.startswith("rezuscloud_"))
    try:
        hooks.register(plugin, name=name)
        hooks.check_pending()
    except pluggy.PluginValidationError as problem:
        raise _Unusable(f"{problem} (known hooks: {', '.join(known)})") from None
    implemented = {caller.name for caller in hooks.get_hookcallers(plugin) or ()}
    for attribute in sorted(set(dir(plugin)) - implemented):
        if attribute.startswith("rezuscloud_") and callable(getattr(plugin, attribute)):
            raise _Unusable(f"{attribute} is not marked with @hookimpl (known hooks: {', '.join(known)})")
    if not implemented:
        raise _Unusable(f"it implements no hook (known hooks: {', '.join(known)})")
    providers: list[Provider] = []
    for answer in hooks.hook.rezuscloud_register_providers() or [None]:
        if not isinstance(answer, (list, tuple)):
            raise _Unusable(
                f"rezuscloud_register_providers returned {_kind(answer)}, not a list of providers"
            )
        providers += answer
    return providers


def check_provider(provider: object) -> None:
    """Raises ValueError with what is wrong when this object cannot serve as a provider.

    Sees the declaration alone: names, versions, features, schemas. How it behaves is the conformance suite's.
    """
    if not isinstance(provider, Provider):
        raise ValueError(f"{_kind(provider)} is not a Provider of rezuscloud.plugin.types")
    where = type(provider).__qualname__
    name = getattr(provider, "name", None)
    if not isinstance(name, str) or not is_dns_label(name):
        raise ValueError(f"{where}.name is {name!r}, not a DNS label ([a-z0-9-], at most 63 characters)")
    if not isinstance(getattr(provider, "title", None), str) or not provider.title.strip():
        raise ValueError(f"{where}.title is missing")
    if provider.contract_version != CONTRACT_VERSION:
        raise ValueError(
            f"provider {name!r} speaks contract version {provider.contract_version!r}, this RezusCloud "
            f"{CONTRACT_VERSION}; install the version of the plugin that fits"
        )
    if not isinstance(provider.features, (set, frozenset)) or set(provider.features) - set(Feature):
        raise ValueError(f"{where}.features is {provider.features!r}, not a set of Feature")
    if not isinstance(provider.delivery, Delivery):
        raise ValueError(f"{where}.delivery is {provider.delivery!r}, not a Delivery")
    for feature, method in OPTIONAL_METHODS.items():
        if feature in provider.features and getattr(type(provider), method) is getattr(Provider, method):
            raise ValueError(f"{where} declares {feature.value!r} but does not override {method}()")
    for method in ("preflight", "observe"):
        if not inspect.iscoroutinefunction(getattr(provider, method)):
            raise ValueError(f"{where}.{method} is not `async def`")
    for method, arguments in _ARGUMENTS.items():
        try:
            inspect.signature(getattr(provider, method)).bind(**dict.fromkeys(arguments))
        except TypeError as problem:
            raise ValueError(
                f"{where}.{method} must take {', '.join(arguments)} by keyword: {problem}"
            ) from None
    for method in ("config_schema", "credentials_schema"):
        if not isinstance(schema := getattr(provider, method)(), vol.Schema):
            raise ValueError(f"{where}.{method}() returned {_kind(schema)}, not a voluptuous Schema")
    required = provider.required_providers()
    if not isinstance(required, Mapping):
        raise ValueError(f"{where}.required_providers() returned {_kind(required)}, not a mapping")
    for local, need in required.items():
        if not isinstance(local, str) or not _LOCAL_NAME.fullmatch(local):
            raise ValueError(f"{where}.required_providers(): {local!r} is not a local name")
        if not isinstance(need, RequiredProvider) or not _SOURCE.fullmatch(need.source) or not need.version:
            raise ValueError(
                f"{where}.required_providers()[{local!r}] is {need!r}; it takes RequiredProvider "
                "with the full source HOST/NAMESPACE/TYPE and a version range"
            )


def _guarded(provider: Provider) -> _Guard:
    try:
        check_provider(provider)
    except ValueError as problem:
        raise _Unusable(str(problem)) from None
    told = {fact: getattr(provider, fact) for fact in ("name", "title", "contract_version", "delivery")}
    kind = type(
        f"Guarded{type(provider).__name__}", (_Guard,), {**told, "features": frozenset(provider.features)}
    )
    return cast(_Guard, kind(provider))


# ---------------------------------------------------------------- the guard


class _Guard(Provider):
    """A provider as the rest of the house sees it. What never changes is asked once, at start."""

    def __init__(self, inner: Provider) -> None:
        self._inner = inner
        self._config_schema = inner.config_schema()
        self._credentials_schema = inner.credentials_schema()
        self._required_providers = dict(inner.required_providers())
        self._hung: _Hung | None = None

    @property
    def info(self) -> ProviderInfo:
        return ProviderInfo(
            name=self.name,
            title=self.title,
            contract_version=self.contract_version,
            features=tuple(sorted(self.features)),
            required_providers=self._required_providers,
        )

    def config_schema(self) -> vol.Schema:
        return self._config_schema

    def credentials_schema(self) -> vol.Schema:
        return self._credentials_schema

    def required_providers(self) -> Mapping[str, RequiredProvider]:
        return self._required_providers

    def render(self, *, request: RenderRequest) -> Fragment:
        answer: Fragment = self._call("render", (Fragment,), request=request)
        return answer

    def environment(self, *, credentials: Mapping[str, str]) -> Mapping[str, str]:
        answer: Mapping[str, str] = self._call(
            "environment", (Mapping,), secrets=tuple(credentials.values()), credentials=credentials
        )
        if not all(isinstance(part, str) for pair in answer.items() for part in pair):
            raise PluginFailed(self.name, "environment", "it returned something else than strings")
        return answer

    def project(self, *, resource: TfResource) -> MachineFacts | None:
        answer: MachineFacts | None = self._call("project", (MachineFacts, NoneType), resource=resource)
        return answer

    async def preflight(
        self, *, credentials: Mapping[str, str], config: Mapping[str, Any]
    ) -> Sequence[Finding]:
        return await self._await(
            lambda: self._inner.preflight(credentials=credentials, config=config),
            "preflight",
            Finding,
            secrets=tuple(credentials.values()),
        )

    async def observe(self, *, machines: Sequence[ObserveTarget]) -> Sequence[Observation]:
        return await self._await(lambda: self._inner.observe(machines=machines), "observe", Observation)

    def lifespan(self, *, context: LifespanContext) -> AbstractAsyncContextManager[None]:
        answer: AbstractAsyncContextManager[None] = self._call(
            "lifespan", (AbstractAsyncContextManager,), context=context
        )
        return answer

    def _call(
        self, method: str, kinds: tuple[type, ...], *, secrets: Sequence[str] = (), **arguments: Any
    ) -> Any:
        if self._hung is not None and self._hung.thread.is_alive():
            raise PluginFailed(self.name, method, f"an earlier call has not come back ({self._hung})")
        self._hung = None
        what = f"{self.name}.{method}"
        try:
            answer = _run_limited(lambda: getattr(self._inner, method)(**arguments), what, CALL_LIMIT_S)
        except _Hung as hung:
            self._hung = hung
            raise PluginFailed(self.name, method, str(hung)) from None
        except _Raised as raised:
            raise self._failed(method, raised.error, secrets) from None
        if not isinstance(answer, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise PluginFailed(self.name, method, f"it returned {_kind(answer)}, not {wanted}")
        return answer

    async def _await(
        self,
        call: Callable[[], Awaitable[Sequence[T]]],
        method: str,
        kind: type[T],
        *,
        secrets: Sequence[str] = (),
    ) -> Sequence[T]:
        async def silenced() -> Sequence[T]:
            _sink.set(_Sink())
            try:
                return await call()
            except (SystemExit, KeyboardInterrupt) as error:  # in a task they would end the event loop
                raise _Raised(error) from None

        _silence_guests()
        task = asyncio.create_task(silenced(), name=f"{self.name}.{method}")
        try:
            # Not asyncio.timeout: that waits for ever for a task that swallows its cancellation.
            await asyncio.wait({task}, timeout=AWAIT_LIMIT_S)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_look_away)
        if not task.done():
            raise PluginFailed(self.name, method, f"no answer within {AWAIT_LIMIT_S:g} s")
        if task.cancelled():
            raise PluginFailed(self.name, method, "it cancelled itself")
        if error := task.exception():
            raise self._failed(method, error.error if isinstance(error, _Raised) else error, secrets)
        answer = task.result()
        if not isinstance(answer, (list, tuple)) or not all(isinstance(item, kind) for item in answer):
            raise PluginFailed(
                self.name, method, f"it returned {_kind(answer)}, not a list of {kind.__name__}"
            )
        return answer

    def _failed(self, method: str, error: BaseException, secrets: Sequence[str]) -> PluginFailed:
        return PluginFailed(self.name, method, _tell(error, secrets))


def _look_away(task: asyncio.Task[Any]) -> None:
    """Takes the exception of a task that was given up, so that asyncio does not log it with its values."""
    if not task.cancelled():
        task.exception()


# ---------------------------------------------------------------- guest code in a thread of its own


class _Hung(Exception):
    def __init__(self, what: str, limit_s: float, thread: threading.Thread) -> None:
        super().__init__(f"{what} took longer than {limit_s:g} s")
        self.thread = thread


class _Raised(Exception):
    """Guest code raised; `error` may be anything down to SystemExit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(_tell(error))
        self.error = error


class _Answer(Generic[T]):
    value: T
    error: BaseException | None = None


def _run_limited(work: Callable[[], T], what: str, limit_s: float) -> T:
    """Runs guest code in a daemon thread. Raises `_Hung` or `_Raised`. What it prints is thrown away.

    Blocks its caller: from the event loop, call it by `asyncio.to_thread`.
    """
    answer: _Answer[T] = _Answer()

    def body() -> None:
        sink = _Sink()
        _sink.set(sink)
        try:
            answer.value = work()
        except BaseException as error:
            answer.error = error
        if sink.size:
            log.debug("%s printed %d characters; not shown, they may hold secrets", what, sink.size)

    _silence_guests()
    context = copy_context()  # a guest's log lines keep the run and request they belong to
    thread = threading.Thread(target=context.run, args=(body,), name=f"guest {what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise _Hung(what, limit_s, thread)
    if answer.error is not None:
        raise _Raised(answer.error)
    return answer.value


def _tell(error: BaseException, secrets: Sequence[str] = ()) -> str:
    """One line: the exception without these secrets, and the place in the guest's code that raised it."""
    text = " ".join(Redactor(secrets).text(str(error)).split())[:500]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{line} ({frames[-1].filename.rpartition('/')[2]} line {frames[-1].lineno})" if frames else line


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__qualname__}"


class _Sink(io.TextIOBase):
    """Swallows what a guest prints, text or bytes, and counts it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.size = 0

    def write(self, text: Any, /) -> int:
        self.size += len(text)
        return len(text)

    @property
    def buffer(self) -> _Sink:
        return self


_sink: ContextVar[_Sink | None] = ContextVar("rezuscloud_guest_sink", default=None)


class _Writable(Protocol):
    def write(self, text: str, /) -> int: ...


class _GuestFilter:
    """Stands before stdout or stderr; what runs as a guest gets its sink, all others the real stream."""

    def __init__(self, real: _Writable) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(_sink.get() or self._real, name)


def _silence_guests() -> None:
    for stream in ("stdout", "stderr"):
        real = getattr(sys, stream)
        if not isinstance(real, _GuestFilter):
            setattr(sys, stream, cast(TextIO, _GuestFilter(real)))
