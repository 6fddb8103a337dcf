"""The bare alternatives that the product is measured against: the least that does the same work.

Run as `python -m tests.bench.bare NAME …`; prints its address and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import time
from pathlib import Path

from aiohttp import web


async def serve(app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def answers(body_file: str) -> web.Application:
    """A handler that returns fixed bytes: the product's own answer."""
    body = Path(body_file).read_bytes()

    async def handle(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    return app


def upload(target: str) -> web.Application:
    """Writes the body to a file and syncs it."""

    def store(chunks: list[bytes]) -> None:
        with Path(target).open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())

    async def handle(request: web.Request) -> web.Response:
        chunks = [chunk async for chunk in request.content.iter_any()]
        await asyncio.to_thread(store, chunks)
        return web.Response()

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/{path:.*}", handle)
    return app


def broadcast() -> web.Application:
    """SSE without anything else: POST sends its body to everybody who listens."""
    listeners: set[web.StreamResponse] = set()

    async def listen(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        listeners.add(response)
        try:
            await asyncio.Event().wait()
        finally:
            listeners.discard(response)
        return response

    async def send(request: web.Request) -> web.Response:
        data = b"data: " + await request.read() + b"\n\n"
        for response in list(listeners):
            await response.write(data)
        return web.Response()

    app = web.Application()
    app.router.add_get("/", listen)
    app.router.add_post("/", send)
    return app


def inserts(path: str, size: int, seconds: float) -> float:
    """Inserts and commits one row after another, durably; returns rows a second."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("page_size = 16384", "journal_mode = WAL", "synchronous = FULL"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, body BLOB)")
    body = b"x" * size
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO rows (body) VALUES (?)", (body,))
        connection.execute("COMMIT")
        count += 1
    rate = count / (time.perf_counter() - started)
    connection.close()
    return rate


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    if name == "inserts":
        print(inserts(arguments[0], int(arguments[1]), float(arguments[2])))
    else:
        makers = {"answers": answers, "upload": upload, "broadcast": broadcast}
        asyncio.run(serve(makers[name](*arguments)))
