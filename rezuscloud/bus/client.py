"""Owns the bus: what is new is told here to all who listen, in this process and in others.

The bus only wakes. The store's log is the truth, so a lost, doubled or late message costs delay and nothing
else. Therefore `publish` cannot fail or wait; and while the server cannot be reached, the subscribers in
this process are called directly, so a lone server works without NATS as well.

Subjects are made of kinds and uids, never of what a person typed. Payloads are small: version numbers.
It does not start a server (`server.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

log = logging.getLogger(__name__)

CHANGES = "rezuscloud.changes.>"

_FIRST_CONNECT_S = 0.5
_RETRY_S = 0.1
_LATER_S = 1.0
_FLUSH_S = 1
_PING_S = 20
_QUEUE = 4096

Callback = Callable[[str, bytes], None]


def change_subject(kind: str, uid: str) -> str:
    """The subject on which changes of one object are told."""
    return f"rezuscloud.changes.{kind.lower()}.{uid}"


@dataclass(frozen=True)
class _Subscription:
    pattern: str
    callback: Callback

    def call(self, subject: str, payload: bytes) -> None:
        try:
            self.callback(subject, payload)
        except Exception:
            log.exception("a subscriber of %s failed at %s; the others heard it", self.pattern, subject)


class Bus:
    """A connection to NATS that is looked after. Use it from the event loop's thread only."""

    def __init__(self, url: str, token: str | None) -> None:
        self._servers = [part.strip() for part in url.split(",")]
        self._token = token
        self._client: Client | None = None  # set while all subscriptions are known to it
        self._subscriptions: list[_Subscription] = []
        self._outgoing: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_QUEUE)
        self._first_connect = asyncio.Event()
        self._is_told_down = False
        self._is_closing = False

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, *, token: str | None = None) -> AsyncIterator[Bus]:
        """A bus for the length of the block. `url` may name several servers, divided by commas.

        Waits half a second for the connection; after that the block begins without one, and the bus
        goes on trying.
        """
        bus = cls(url, token)
        tasks = [
            asyncio.create_task(bus._stay_connected(), name="bus connection"),
            asyncio.create_task(bus._send(), name="bus sender"),
        ]
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(bus._first_connect.wait(), _FIRST_CONNECT_S)
            yield bus
        finally:
            bus._is_closing = True
            for task in reversed(tasks):
                task.cancel()
            await asyncio.wait(tasks)

    @property
    def is_connected(self) -> bool:
        """True while what is published goes through the server."""
        return self._client is not None and self._client.is_connected

    def publish(self, subject: str, payload: bytes) -> None:
        """Tells `payload` to all subscribers. Never raises, never waits, and promises nothing.

        Without a connection, or when the server takes nothing, this process's subscribers are called at once.
        """
        if self.is_connected:
            with suppress(asyncio.QueueFull):
                self._outgoing.put_nowait((subject, payload))
                return
        self._call_locally(subject, payload)

    async def subscribe(self, pattern: str, callback: Callback) -> None:
        """Calls `callback(subject, payload)` in the event loop for each message that `pattern` fits.

        The pattern may use NATS's wildcards. When this returns and the bus is connected, the server knows of
        the subscription. It holds for the life of the bus, over reconnections. A callback that raises is
        logged, and that is all.
        """
        subscription = _Subscription(pattern, callback)
        self._subscriptions.append(subscription)
        if self._client is not None:
            # When this fails the connection has ended, and the next one begins with all subscriptions.
            with suppress(nats.errors.Error, OSError, TimeoutError):
                await _subscribe(self._client, subscription)
                # nats-py writes the first PING past what it has pending: only the second PONG proves that
                # the server knows the subscription.
                await self._client.flush(timeout=_FLUSH_S)
                await self._client.flush(timeout=_FLUSH_S)

    # ---------------------------------------------------------------- the connection

    async def _stay_connected(self) -> None:
        """nats-py reconnects by itself, but gives up for good at some errors (a refused token is one)."""
        while True:
            try:
                await self._connect_once()
            except Exception as error:  # nats-py raises more than its own errors
                await self._tell_down(error)
            await asyncio.sleep(_LATER_S)

    async def _connect_once(self) -> None:
        """One client, from its first try until it gives up."""
        client = Client()
        closed = asyncio.Event()

        async def note_closed() -> None:
            closed.set()

        try:
            await client.connect(
                self._servers,
                name="rezuscloud",
                token=self._token,
                error_cb=self._tell_down,
                disconnected_cb=self._note_disconnected,
                reconnected_cb=self._note_connected,
                closed_cb=note_closed,
                reconnect_time_wait=_RETRY_S,  # type: ignore[arg-type]  # whole seconds in its types only
                max_reconnect_attempts=-1,
                ping_interval=_PING_S,
            )
            told = 0
            while told < len(self._subscriptions):  # more may come while we wait
                await _subscribe(client, self._subscriptions[told])
                told += 1
            self._client = client
            await self._note_connected()
            await closed.wait()
        finally:
            self._client = None
            await client.close()

    async def _note_connected(self) -> None:
        if self._is_told_down:
            log.info("the bus is connected again")
        self._is_told_down = False
        self._first_connect.set()

    async def _note_disconnected(self) -> None:
        await self._tell_down(None)

    async def _tell_down(self, error: Exception | None) -> None:
        """Once for each time it goes down: the tries follow each other within a tenth of a second."""
        if self._is_closing:
            return
        if self.is_connected:
            log.warning("the bus reports: %s", error)
        elif not self._is_told_down:
            self._is_told_down = True
            log.warning(
                "the bus is not connected (%s); changes still reach this server's own watchers, "
                "and it goes on trying",
                error or "the server went away",
            )
        else:
            log.debug("the bus is still not connected: %s", error)

    # ---------------------------------------------------------------- messages

    async def _send(self) -> None:
        while True:
            subject, payload = await self._outgoing.get()
            client = self._client
            if client is not None and client.is_connected:
                try:
                    await client.publish(subject, payload)
                    continue
                except Exception as error:
                    log.warning("%s could not be published: %s", subject, error)
            self._call_locally(subject, payload)

    def _call_locally(self, subject: str, payload: bytes) -> None:
        for subscription in list(self._subscriptions):
            if _matches(subscription.pattern, subject):
                subscription.call(subject, payload)


async def _subscribe(client: Client, subscription: _Subscription) -> None:
    async def call(message: Msg) -> None:
        subscription.call(message.subject, message.data)

    await client.subscribe(subscription.pattern, cb=call)


def _matches(pattern: str, subject: str) -> bool:
    """NATS's rule: `*` stands for one token, `>` at the end for one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, part in enumerate(wanted):
        if part == ">":
            return len(given) > position
        if position >= len(given) or part not in ("*", given[position]):
            return False
    return len(wanted) == len(given)
