"""Owns the watch: replay of the log from a version, then live, without a gap between the two.

The store's log is the truth. A commit of this server wakes the hub at once, and the bus tells all others to
look; a lost message delays an event by `SAFETY_TICK_S` and loses nothing. Each event is encoded once, for all
who watch. A watcher that does not read is dropped and comes back with the version that it has seen. How
frames travel (JSON lines, SSE) is not decided here.
Decision: ADR 0008.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import orjson

from rezuscloud.bus.client import CHANGES, Bus, change_subject
from rezuscloud.model.errors import Expired
from rezuscloud.model.events import ChangeType, ResourceEvent
from rezuscloud.model.meta import API_VERSION, Doc, Match
from rezuscloud.store.db import Store
from rezuscloud.store.resources import Stored

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Live frames that may wait for one watcher; with more it is dropped."""
SAFETY_TICK_S = 0.5
BUS_INTERVAL_S = 0.01
"""The bus is told once for all commits of this time: a message costs more than a commit."""
DELIVERIES_AT_ONCE = 2000
"""After so many the event loop gets its turn."""


class SlowConsumer(Exception):
    """This watcher did not read fast enough and was dropped; it may resume from what it has seen."""


class Frame:
    """One event as it goes on the wire, encoded when first asked for and then shared.

    `version` is where a client may resume after it; 0 inside an initial list, from whose middle nobody can
    resume.
    """

    __slots__ = ("_json_line", "_object", "_sse", "doc", "type", "version")

    def __init__(self, type_: str, version: int, doc: Doc, raw: bytes | None = None) -> None:
        self.type = type_
        self.version = version
        self.doc = doc
        self._object = raw
        self._json_line = b""
        self._sse = b""

    @property
    def json_line(self) -> bytes:
        """`{"type":…,"object":…}` and a newline."""
        if not self._json_line:
            raw = self._object if self._object is not None else orjson.dumps(self.doc)
            self._json_line = b'{"type":"' + self.type.encode() + b'","object":' + raw + b"}\n"
            self._object = None
        return self._json_line

    @property
    def sse(self) -> bytes:
        """A server-sent event: its name is the type, its data the JSON line, its id the version."""
        if not self._sse:
            marker = b"id: %d\n" % self.version if self.version else b""
            self._sse = marker + b"event: " + self.type.encode() + b"\ndata: " + self.json_line + b"\n"
        return self._sse


def bookmark(kind: str, version: int, *, ends_initial: bool = False) -> Frame:
    """Tells a client how far it is without telling of a change."""
    meta: Doc = {"resourceVersion": str(version)}
    if ends_initial:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    return Frame("BOOKMARK", version, {"kind": kind, "apiVersion": API_VERSION, "metadata": meta})


class Watcher:
    """One client's view: what was there when it came, then every change, in order. Iterate it, or `take`.

    Only live frames count for the bound; the first list and the replay wait for as long as they need.
    """

    def __init__(
        self,
        hub: WatchHub,
        kind: str,
        namespace: str | None,
        matches: Match | None,
        first: Sequence[Stored],
        replay: Iterable[Frame],
        version: int,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.on_drop: Callable[[], None] | None = None
        """Called once when the watcher is dropped: whoever is stuck in a write can abort it."""
        self._hub = hub
        self._matches = matches
        self._first = deque(first)
        self._waiting: deque[Frame] = deque(replay)
        self._bound = MAX_WAITING + len(self._waiting)
        self._start = version
        self._wake = asyncio.Event()
        self._dropped = False
        self._closed = False

    @property
    def version(self) -> int:
        """Everything up to here has been taken or did not concern this watcher: fit for a bookmark."""
        if self._first:
            return 0
        return self._waiting[0].version - 1 if self._waiting else max(self._start, self._hub.version)

    async def take(self, timeout_s: float | None = None) -> list[Frame]:
        """All frames that wait, at least one; an empty list at the time limit or when closed.

        Raises SlowConsumer when it was dropped.
        """
        if not self._has_frames and not self._closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        if self._dropped:
            raise SlowConsumer
        frames = [self._initial(stored) for stored in self._take_first()]
        if not self._first:
            frames += self._waiting
            self._waiting.clear()
            self._bound = MAX_WAITING
            if not self._closed:
                self._wake.clear()
        return frames

    async def __aiter__(self) -> AsyncIterator[Frame]:
        while frames := await self.take():
            for frame in frames:
                yield frame

    def close(self) -> None:
        """Ends the watch; who waits in `take` gets an empty list. Closing twice is fine."""
        self._closed = True
        self._hub.forget(self)
        self._wake.set()

    def offer(self, event: ResourceEvent, frames: Frames) -> None:
        """The hub's side: one committed event."""
        if event.version <= self._start:
            return
        namespace = event.doc["metadata"].get("namespace", "")
        if self.namespace is not None and self.namespace != namespace:
            return
        type_ = seen_as(event, self._matches)
        if type_ is None:
            return
        if len(self._waiting) >= self._bound:
            self.drop()
            return
        self._waiting.append(frames.of(type_))
        self._wake.set()

    def drop(self) -> None:
        """Gives the watcher up and frees what waits for it."""
        self._dropped = True
        self._first.clear()
        self._waiting.clear()
        self.close()
        if self.on_drop is not None:
            self.on_drop()

    @property
    def _has_frames(self) -> bool:
        return bool(self._first or self._waiting)

    def _take_first(self) -> list[Stored]:
        return [self._first.popleft() for _ in range(min(len(self._first), MAX_WAITING))]

    def _initial(self, stored: Stored) -> Frame:
        return Frame(ChangeType.ADDED, 0, stored.doc, stored.raw)


class Frames:
    """The frames of one event, one for each type that a selector may turn it into."""

    __slots__ = ("_event", "_made")

    def __init__(self, event: ResourceEvent) -> None:
        self._event = event
        self._made: dict[ChangeType, Frame] = {}

    def of(self, type_: ChangeType) -> Frame:
        frame = self._made.get(type_)
        if frame is None:
            frame = self._made[type_] = Frame(type_, self._event.version, self._event.doc)
        return frame


def seen_as(event: ResourceEvent, matches: Match | None) -> ChangeType | None:
    """What an event is to somebody who sees only objects that match; None when it is nothing.

    When the log no longer knows the object as it was, the answer errs on telling too much.
    """
    if matches is None:
        return event.type
    is_seen = event.type is not ChangeType.DELETED and matches(event.doc)
    if event.type is ChangeType.ADDED:
        return event.type if is_seen else None
    was_seen = event.before is None or matches(event.before)
    if is_seen:
        known = event.before is not None
        return ChangeType.ADDED if known and not was_seen else ChangeType.MODIFIED
    return ChangeType.DELETED if was_seen else None


class WatchHub:
    """Reads the log from where it is, and tells all watchers and subscribers."""

    def __init__(self, store: Store, bus: Bus) -> None:
        self._store = store
        self._bus = bus
        self._version = store.log.version
        self._wake = asyncio.Event()
        self._listens = False
        self._watchers: dict[str, set[Watcher]] = {}
        self._subscribers: list[Callable[[ResourceEvent], None]] = []
        self._untold: ResourceEvent | None = None
        """The newest change of which the bus has yet to be told."""
        store.on_commit.append(self._publish)

    @property
    def version(self) -> int:
        """Everything up to here has been told."""
        return self._version

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return sum(map(len, self._watchers.values()))

    async def run(self) -> None:
        """Tells what the log holds, for ever."""
        if not self._listens:
            await self._bus.subscribe(CHANGES, self._on_message)
            self._listens = True
        while True:
            self._wake.clear()
            await self._tell()
            try:
                async with asyncio.timeout(SAFETY_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def open(
        self,
        kind: str,
        namespace: str | None,
        *,
        matches: Match | None = None,
        since: int | None = None,
        initial: bool,
    ) -> Watcher:
        """A watcher of one kind in one tenant (None: in all).

        `initial` begins with an ADDED for each object that exists; else the changes after `since` come first
        (None: only what happens from now on). Raises Expired when the log does not reach back to `since`.
        """
        now = self._store.log.version
        first: Sequence[Stored] = ()
        replay: list[Frame] = []
        # Snapshot, replay and position are taken without an await between them: nothing falls in a gap.
        if initial:
            first = self._store.objects.list(kind, namespace)
            if matches is not None:
                first = [stored for stored in first if matches(stored.doc)]
        elif since is not None:
            if since > now:
                raise Expired(f"version {since} is of another history of this server; list again")
            for event in self._store.log.since(since, kind):
                if namespace in (None, event.doc["metadata"].get("namespace", "")):
                    type_ = seen_as(event, matches)
                    if type_ is not None:
                        replay.append(Frame(type_, event.version, event.doc))
        watcher = Watcher(self, kind, namespace, matches, first, replay, now)
        self._watchers.setdefault(kind, set()).add(watcher)
        return watcher

    def subscribe(self, callback: Callable[[ResourceEvent], None]) -> None:
        """`callback` is called in the event loop for every event of every kind, in order."""
        self._subscribers.append(callback)

    def forget(self, watcher: Watcher) -> None:
        """Called by a watcher that ends."""
        self._watchers.get(watcher.kind, set()).discard(watcher)

    def close(self) -> None:
        """Ends all watches, at shutdown."""
        for watchers in list(self._watchers.values()):
            for watcher in list(watchers):
                watcher.close()

    def _publish(self, events: Sequence[ResourceEvent]) -> None:
        self._wake.set()  # those who watch here need no trip over the bus
        if self._untold is None:
            asyncio.get_running_loop().call_later(BUS_INTERVAL_S, self._tell_bus)
        self._untold = events[-1]

    def _tell_bus(self) -> None:
        # One message wakes for all that was committed meanwhile: who hears it reads the log up to its end.
        newest, self._untold = self._untold, None
        if newest is not None:
            subject = change_subject(newest.kind, newest.doc["metadata"]["uid"])
            self._bus.publish(subject, str(newest.version).encode())

    def _on_message(self, subject: str, payload: bytes) -> None:
        self._wake.set()

    async def _tell(self) -> None:
        delivered = 0
        while self._version < self._store.log.version:
            try:
                events = self._store.log.since(self._version)
            except Expired:
                self._lose_track()
                return
            for event in events:
                delivered += self._tell_one(event)
                if delivered >= DELIVERIES_AT_ONCE:
                    delivered = 0
                    await asyncio.sleep(0)

    def _tell_one(self, event: ResourceEvent) -> int:
        self._version = event.version
        for callback in self._subscribers:
            try:
                callback(event)
            except Exception:
                log.exception("a subscriber failed at version %d; the others go on", event.version)
        watchers = self._watchers.get(event.kind)
        if not watchers:
            return 1
        frames = Frames(event)
        for watcher in list(watchers):
            watcher.offer(event, frames)
        return 1 + len(watchers)

    def _lose_track(self) -> None:
        """The log was pruned beyond what was told: all watchers must list anew."""
        log.error(
            "watch fell behind the change log (at %d, log at %d); all watchers must list again",
            self._version,
            self._store.log.version,
        )
        self._version = self._store.log.version
        for watchers in list(self._watchers.values()):
            for watcher in list(watchers):
                watcher.drop()
