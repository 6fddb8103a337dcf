"""Owns the stream of a kind's changes: what was there, then each change, as JSON lines or Server-Sent Events.

It decides where a stream begins and how a gap, a silence and the end are told. Which changes there are, and
what their bytes are, is the hub's business (`resources/watch.py`); how streams stay healthy is
`http/sse.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson
from aiohttp import web

from rezuscloud.access.identity import Sessions
from rezuscloud.access.policy import authorize
from rezuscloud.api.paths import Target
from rezuscloud.api.query import read_count, read_flag
from rezuscloud.http.errors import JSON
from rezuscloud.http.keys import IDENTITY, TOLD
from rezuscloud.http.middleware import authenticate
from rezuscloud.http.sse import EVENT_STREAM, Stream, Streams, event, wants_events
from rezuscloud.model.errors import BadRequest, Expired, Unauthorized
from rezuscloud.model.meta import Match
from rezuscloud.resources.service import parse_selectors
from rezuscloud.resources.watch import Frame, SlowConsumer, Watcher, WatchHub, bookmark


class Watches:
    """The handlers of streams."""

    def __init__(self, hub: WatchHub, streams: Streams, sessions: Sessions) -> None:
        self._hub = hub
        self._streams = streams
        self._sessions = sessions

    def is_welcome(self, request: web.Request) -> Callable[[], bool]:
        """Asks again whether the request's token is good: a stream may outlive it."""

        def ask() -> bool:
            try:
                authenticate(request, self._sessions)
            except Unauthorized:
                return False
            return True

        return ask

    async def serve(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Streams a collection; a single object is streamed as the collection that holds only it."""
        request[TOLD].verb = "watch"
        authorize(request[IDENTITY], "watch", target.kind.plural, target.namespace or None)
        ask = _Ask.read(request, target)
        gap: Expired | None = None
        try:
            watcher = self._open(target, ask, ask.since, initial=ask.since is None)
        except Expired as expired:
            gap = expired
            watcher = self._open(target, ask, None, initial=False)

        def beat() -> bytes:
            if ask.wants_bookmarks:
                return ask.form.frame(bookmark(target.kind.kind, watcher.version))
            return ask.form.heartbeat

        try:
            async with self._streams.open(
                request,
                ask.form.content_type,
                on_end=watcher.close,
                lifetime_s=_lifetime_s(request),
                is_welcome=self.is_welcome(request),
                beat=beat,
                beat_s=self._streams.bookmark_s if ask.form.is_mute else None,
            ) as stream:
                watcher.on_drop = stream.drop
                if gap is not None:
                    await stream.send(ask.form.gap(gap, watcher.version))
                    if ask.form.ends_at_gap:
                        return stream.response
                await _pump(watcher, stream, ask, target)
            return stream.response
        finally:
            watcher.close()

    def _open(self, target: Target, ask: _Ask, since: int | None, *, initial: bool) -> Watcher:
        return self._hub.open(
            target.kind.kind, target.namespace, matches=ask.matches, since=since, initial=initial
        )


async def _pump(watcher: Watcher, stream: Stream, ask: _Ask, target: Target) -> None:
    """Sends what the watcher has until it ends. A client that does not keep up is dropped: it comes back with
    the last version that it has read."""
    form = ask.form
    try:
        # What is there already, or has happened since: all of it waits in the watcher now.
        while frames := await watcher.take(0):
            await stream.send(b"".join([form.frame(frame) for frame in frames]))
            if watcher.version:
                break
        if opened := form.opened(target.kind.kind, watcher.version, is_told=ask.wants_initial_end):
            await stream.send(opened)
        while frames := await watcher.take():
            await stream.send(b"".join([form.frame(frame) for frame in frames]))
    except SlowConsumer:
        return


# ---------------------------------------------------------------- what was asked


@dataclass(frozen=True)
class _Ask:
    """A stream as its query and headers ask for it. `since` None = begin with all that is there."""

    matches: Match | None
    since: int | None
    wants_bookmarks: bool
    wants_initial_end: bool
    form: _Form

    @classmethod
    def read(cls, request: web.Request, target: Target) -> _Ask:
        fields = request.query.get("fieldSelector", "")
        if target.name:
            fields = f"metadata.name={target.name},{fields}"
        is_events = wants_events(request)
        wants_initial = read_flag(request, "sendInitialEvents")
        return cls(
            matches=parse_selectors(target.kind, request.query.get("labelSelector", ""), fields),
            since=None if wants_initial else _since(request, is_events=is_events),
            wants_bookmarks=read_flag(request, "allowWatchBookmarks"),
            wants_initial_end=wants_initial,
            form=_EVENTS if is_events else _LINES,
        )


def _since(request: web.Request, *, is_events: bool) -> int | None:
    """The version after which the stream begins. A browser that comes back tells it in Last-Event-ID."""
    text = request.query.get("resourceVersion", "")
    if is_events:
        text = request.headers.get("Last-Event-ID", "").strip() or text
    if text in ("", "0"):
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadRequest(f"resourceVersion: expected a version that this server gave, not {text[:40]!r}")
    return int(text)


def _lifetime_s(request: web.Request) -> float | None:
    """No longer than asked, and no longer than the token lives."""
    asked: float | None = read_count(request, "timeoutSeconds") or None
    expires_at = request[IDENTITY].expires_at
    if expires_at is None:
        return asked
    left = expires_at - time.time()
    return left if asked is None else min(asked, left)


# ---------------------------------------------------------------- the two forms


class _Form(Protocol):
    """How things are said on a stream."""

    content_type: str
    heartbeat: bytes
    is_mute: bool
    """It has no word for a mere heartbeat."""
    ends_at_gap: bool

    def frame(self, frame: Frame) -> bytes: ...
    def opened(self, kind: str, version: int, *, is_told: bool) -> bytes: ...
    def gap(self, expired: Expired, version: int) -> bytes: ...


class _Lines:
    """Kubernetes' watch: one JSON object a line. It can say nothing but events, so silence stays silent
    unless bookmarks were asked for, and after a gap it ends."""

    content_type = JSON
    heartbeat = b""
    is_mute = True
    ends_at_gap = True

    def frame(self, frame: Frame) -> bytes:
        return frame.json_line

    def opened(self, kind: str, version: int, *, is_told: bool) -> bytes:
        return bookmark(kind, version, ends_initial=True).json_line if is_told else b""

    def gap(self, expired: Expired, version: int) -> bytes:
        return b'{"type":"ERROR","object":%s}\n' % orjson.dumps(expired.to_status())


class _Events:
    """Server-Sent Events. Each change bears its version as id; the first burst bears none until it is
    complete, so that a client that was cut off in it gets it all again."""

    content_type = EVENT_STREAM
    heartbeat = b": heartbeat\n\n"
    is_mute = False
    ends_at_gap = False
    _RETRY = b"retry: 2000\n"

    def frame(self, frame: Frame) -> bytes:
        return frame.sse

    def opened(self, kind: str, version: int, *, is_told: bool) -> bytes:
        if is_told:
            return self._RETRY + bookmark(kind, version, ends_initial=True).sse
        return self._RETRY + event(b"", id_=version)

    def gap(self, expired: Expired, version: int) -> bytes:
        """The client must list anew; what comes after this is complete from `version` on."""
        return event(orjson.dumps(expired.to_status()), type_="resync", id_=version)


_LINES: _Form = _Lines()
_EVENTS: _Form = _Events()
