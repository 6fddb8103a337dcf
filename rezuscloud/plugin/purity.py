"""Owns how the conformance suite sees that a method is not pure: that it reads a clock, draws a random number
or does I/O. Only `testing.py` uses it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_IMPURE_MODULES = frozenset({"time", "posix", "nt", "_socket", "_random", "io", "_io"})
_IMPURE_METHODS = re.compile(r"(datetime|date)\.(now|utcnow|today)|Random\.\w+|(System)?Random|socket\.\w+")
_PURE_NAMES = frozenset({"fspath", "strptime", "mktime", "struct_time", "gmtime", "strftime"})
_watchers: dict[int, set[str]] = {}


@contextmanager
def watch_impurity() -> Iterator[set[str]]:
    """Collects what the current thread calls that a pure function does not.

    A profile function sees every call of a built-in, also one that was imported by name long before
    (`from time import time`), which patching would miss; an audit hook sees sockets, files and children.
    """
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or str(frame.f_globals.get("__name__", "")).partition(".")[0] == "logging":
            return
        name, module = getattr(called, "__qualname__", ""), getattr(called, "__module__", None)
        if (module in _IMPURE_MODULES and name not in _PURE_NAMES) or _IMPURE_METHODS.fullmatch(name):
            seen.add(f"{module}.{name}" if module else name)

    _install_audit_hook()
    _watchers[threading.get_ident()] = seen
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        del _watchers[threading.get_ident()]


def _audit(event: str, _arguments: Iterable[Any]) -> None:
    seen = _watchers.get(threading.get_ident())
    if seen is not None and re.match(r"open$|socket\.|subprocess\.|os\.|shutil\.|tempfile\.|urllib\.", event):
        seen.add(event)


_installed: list[bool] = []


def _install_audit_hook() -> None:
    if not _installed:  # an audit hook cannot be taken away again
        sys.addaudithook(_audit)
        _installed.append(True)
