"""The benchmarks. Each takes a scratch directory and gives its results; product and bare run in turn."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.report import Result
from tests.support.server import BIN, Server, control_plane, running, workers

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = Path(os.environ.get("REZUSCLOUD_TOFU") or ROOT / ".tools/bin/tofu")
WRK_S = 3
ROUNDS = 5
STATE_BYTES = 10_000_000


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


@asynccontextmanager
async def bare(name: str, *arguments: str) -> AsyncIterator[str]:
    """A bare alternative in a process of its own; gives its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.bare", name, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def wrk(url: str, connections: int, *, token: str = "", script: Path | None = None) -> float:
    """Requests a second."""
    program = shutil.which("wrk")
    if program is None:
        raise SystemExit("wrk is needed for the benchmarks: install it from your system's packages")
    argv = [program, "-t1", f"-c{connections}", f"-d{WRK_S}s"]
    argv += ["-H", f"Authorization: Bearer {token}"] if token else []
    argv += ["-s", str(script)] if script else []
    process = await asyncio.create_subprocess_exec(*argv, url, stdout=asyncio.subprocess.PIPE)
    out = (await process.communicate())[0].decode()
    if "Non-2xx" in out:
        raise AssertionError(f"wrk met refusals:\n{out}")
    found = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert found is not None, out
    return float(found[1])


# ---------------------------------------------------------------- reconcile


async def reconcile(scratch: Path) -> list[Result]:
    """From the last 201 to Applied, against init + plan + apply of the same files by hand."""
    product, plain = [], []
    async with running(scratch / "data", ENGINE) as server:
        await server.declare("warm", control_plane(1))
        await server.until_applied("warm")
        for number in range(ROUNDS + 2):
            name = f"t{number}"
            product.append(await _time_to_applied(server, name))
            kit = await server.get(f"/api/v1/tenants/{name}/state-env")
            plain.append(await _bare_run(scratch / f"bare-{number}", kit["files"]["main.tf.json"]))
    ours, theirs = median(product) * 1000, median(plain) * 1000
    return [
        Result(
            "reconcile, new tenant, encrypted",
            f"{ours:.0f} ms",
            f"{theirs:.0f} ms",
            ours / theirs,
            1.05 + 250 / theirs,
            is_most=True,
            unit="×",
            aim=0.9,
        )
    ]


async def _time_to_applied(server: Server, name: str) -> float:
    applied = asyncio.Event()
    url = f"{server.url}/api/v1/tenants?watch=true&fieldSelector=metadata.name={name}"

    async def watch(stream: aiohttp.ClientResponse) -> float:
        async for line in stream.content:
            status = json.loads(line)["object"].get("status") or {}
            done = {c["type"]: c["status"] for c in status.get("conditions", ())}.get("Applied") == "True"
            if done and status.get("appliedRevision") == status.get("declaredRevision"):
                return time.perf_counter()
        raise AssertionError("the watch ended")

    async with server.session.get(url, headers=server.headers) as stream:
        watching = asyncio.create_task(watch(stream))
        await server.declare(name, control_plane(1), workers(2))
        started = time.perf_counter()
        ended = await watching
    applied.set()
    return ended - started


async def _bare_run(place: Path, config: str) -> float:
    await asyncio.to_thread(place.mkdir)
    doc = json.loads(config)
    doc["terraform"] = {
        key: value for key, value in doc["terraform"].items() if key not in ("backend", "encryption")
    }
    (place / "main.tf.json").write_text(json.dumps(doc))
    env = {"PATH": os.defpath, "HOME": str(place), "TF_CLI_CONFIG_FILE": os.devnull, "TF_IN_AUTOMATION": "1"}
    started = time.perf_counter()
    for words in (["init"], ["plan", "-out=p"], ["apply", "p"]):
        process = await asyncio.create_subprocess_exec(
            str(ENGINE), *words, cwd=place, env=env, stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0
    return time.perf_counter() - started


# ---------------------------------------------------------------- reads


async def reads(scratch: Path) -> list[Result]:
    """GET of one object and LIST of 100, against a handler that returns the same bytes."""
    results = []
    quiet = {"REZUSCLOUD_DEBOUNCE_S": "3600", "REZUSCLOUD_DEBOUNCE_CAP_S": "3600"}
    async with running(scratch / "data", ENGINE, **quiet) as server:
        for number in range(100):
            await server.declare(f"t{number}")
        for name, path, bound, aim in (
            ("GET one object", "/api/v1/tenants/t1", 0.30, 0.60),
            ("LIST 100 objects", "/api/v1/tenants", 0.40, None),
        ):
            body = scratch / "body"
            async with server.session.get(server.url + path, headers=server.headers) as answer:
                body.write_bytes(await answer.read())
            ours, theirs = [], []
            async with bare("answers", str(body)) as url:
                for _ in range(ROUNDS):
                    ours.append(await wrk(server.url + path, 32, token=server.token))
                    theirs.append(await wrk(url + path, 32))
            results.append(
                Result(
                    name,
                    f"{median(ours):.0f}/s",
                    f"{median(theirs):.0f}/s",
                    median(ours) / median(theirs),
                    bound,
                    is_most=False,
                    unit="×",
                    aim=aim,
                )
            )
    return results


# ---------------------------------------------------------------- writes

_WRITE_SCRIPT = """
local n = 0
request = function()
  n = n + 1
  local body = '{"metadata":{"labels":{"n":"' .. n .. '"}}}'
  local headers = {}
  headers["Content-Type"] = "application/merge-patch+json"
  headers["Authorization"] = "Bearer TOKEN"
  return wrk.format("PATCH", "/api/v1/tenants/t" .. (n % 64), headers, body)
end
"""


async def writes(scratch: Path) -> list[Result]:
    """Durable writes of a tenant, against a bare insert and commit of a row of that size."""
    one, many, theirs = [], [], []
    quiet = {"REZUSCLOUD_DEBOUNCE_S": "3600", "REZUSCLOUD_DEBOUNCE_CAP_S": "3600"}
    async with running(scratch / "data", ENGINE, **quiet) as server:
        for number in range(64):
            await server.declare(f"t{number}")
        script = scratch / "write.lua"
        script.write_text(_WRITE_SCRIPT.replace("TOKEN", server.token))
        size = len(json.dumps(await server.tenant("t1")))
        for number in range(ROUNDS):
            one.append(await wrk(server.url, 1, script=script))
            theirs.append(await _bare_inserts(scratch / f"bare-{number}.db", size))
            many.append(await wrk(server.url, 32, script=script))
    rate = median(theirs)
    return [
        Result(
            f"durable write, {clients}",
            f"{median(ours):.0f}/s",
            f"{rate:.0f}/s",
            median(ours) / rate,
            bound,
            is_most=False,
            unit="×",
            aim=aim,
        )
        for clients, ours, bound, aim in (("1 client", one, 0.25, 0.5), ("32 clients", many, 1.0, 2.0))
    ]


async def _bare_inserts(path: Path, size: int) -> float:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.bare", "inserts", str(path), str(size), str(WRK_S)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    return float((await process.communicate())[0])


async def state_upload(scratch: Path) -> list[Result]:
    """A 10 MB state to the backend, against an upload that is written to a file and synced."""
    ours, theirs = [], []
    quiet = {"REZUSCLOUD_DEBOUNCE_S": "3600", "REZUSCLOUD_DEBOUNCE_CAP_S": "3600"}
    async with (
        running(scratch / "data", ENGINE, **quiet) as server,
        bare("upload", str(scratch / "up")) as url,
    ):
        await server.declare("big")
        path = f"{server.url}/api/v1/namespaces/big/tfstate"
        auth = aiohttp.BasicAuth("bench", server.token)
        async with aiohttp.ClientSession(auth=auth) as client:
            async with client.request("LOCK", path, json={"ID": "bench", "Who": "bench"}) as answer:
                assert answer.status == 200, await answer.text()
            for number in range(ROUNDS + 2):
                body = _big_state(number + 1)
                await asyncio.sleep(1)  # the last one is still being projected, which is no part of an upload
                ours.append(await _upload(client, f"{path}?ID=bench", body))
                theirs.append(await _upload(client, url, body))
    return [
        Result(
            "10 MB state upload",
            f"{median(ours) * 1000:.0f} ms",
            f"{median(theirs) * 1000:.0f} ms",
            median(ours) / median(theirs),
            2.5,
            is_most=True,
            unit="×",
        )
    ]


def _big_state(serial: int) -> bytes:
    attributes = {"id": "a", "input": {"value": "y" * 900, "type": "string"}}
    resource = {
        "mode": "managed",
        "type": "terraform_data",
        "provider": 'provider["terraform.io/builtin/terraform"]',
        "instances": [{"schema_version": 0, "attributes": attributes}],
    }
    count = STATE_BYTES // (len(json.dumps(resource)) + 20)
    resources = [resource | {"name": f"r{n}"} for n in range(count)]
    state = {"version": 4, "terraform_version": "1.12.6", "serial": serial, "lineage": "bench", "outputs": {}}
    return json.dumps(state | {"resources": resources, "check_results": None}).encode()


async def _upload(client: aiohttp.ClientSession, url: str, body: bytes) -> float:
    started = time.perf_counter()
    async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 200, await answer.text()
    return time.perf_counter() - started


# ---------------------------------------------------------------- watches


async def watching(scratch: Path) -> list[Result]:
    """From a write to a watcher, and to 1,000 watchers at once."""
    quiet = {"REZUSCLOUD_DEBOUNCE_S": "3600", "REZUSCLOUD_DEBOUNCE_CAP_S": "3600"}
    async with running(scratch / "data", ENGINE, **quiet) as server:
        await server.declare("t1")
        path = "/api/v1/tenants/t1"

        async def write(number: int) -> None:
            await server.patch(path, {"metadata": {"labels": {"n": f"v{number}"}}})

        sse = {**server.headers, "Accept": "text/event-stream"}
        watch_url = f"{server.url}/api/v1/tenants?watch=true"
        alone = await _fan_out(1, watch_url, sse, write, 300)
        ours = await _fan_out(1000, watch_url, sse, write, 12)
        async with bare("broadcast") as url, aiohttp.ClientSession() as client:
            doc = json.dumps(await server.tenant("t1"))

            async def send(number: int) -> None:
                marked = re.sub(r'"n": "v\d+"', f'"n": "v{number}"', doc)
                async with client.post(url, data=marked.encode()) as answer:
                    await answer.read()

            theirs = await _fan_out(1000, url, {}, send, 12)
    return [
        Result(
            "write → watcher, p99",
            f"{p99(alone) * 1000:.1f} ms",
            "–",
            p99(alone) * 1000,
            50,
            is_most=True,
            unit="ms",
            aim=10,
        ),
        Result(
            "write → 1,000 watchers, p99",
            f"{p99(ours) * 1000:.0f} ms",
            f"{p99(theirs) * 1000:.0f} ms",
            p99(ours) / p99(theirs),
            2,
            is_most=True,
            unit="×",
        ),
    ]


async def _fan_out(
    count: int, url: str, headers: dict[str, str], write: Callable[[int], Awaitable[Any]], rounds: int
) -> list[float]:
    """Seconds from each write's start to its arrival at each watcher."""
    delays: list[float] = []
    arrived: dict[int, int] = {}
    started: dict[int, float] = {}
    complete = asyncio.Condition()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as client:

        async def listen() -> None:
            async with client.get(url, headers=headers) as stream:
                async with complete:
                    arrived[-1] = arrived.get(-1, 0) + 1
                    complete.notify_all()
                async for line in stream.content:
                    found = re.search(rb'"n": ?"v(\d+)"', line)
                    number = int(found[1]) if found else -2
                    if number in started:
                        delays.append(time.perf_counter() - started[number])
                        arrived[number] = arrived.get(number, 0) + 1
                        if arrived[number] >= count:
                            async with complete:
                                complete.notify_all()

        tasks = [asyncio.create_task(listen()) for _ in range(count)]
        try:
            async with complete:
                await asyncio.wait_for(complete.wait_for(lambda: arrived.get(-1, 0) >= count), 60)
            await asyncio.sleep(0.5)
            for number in range(rounds):
                started[number] = time.perf_counter()
                await write(number)
                async with complete:
                    await asyncio.wait_for(
                        complete.wait_for(lambda number=number: arrived.get(number, 0) >= count), 60
                    )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return delays


# ---------------------------------------------------------------- size and start


async def idle(scratch: Path) -> list[Result]:
    """Memory and disk writes of a server that has one tenant and nothing to do."""
    async with running(scratch / "quiet", ENGINE) as server:
        await server.declare("t1", control_plane(1), workers(2))
        await server.until_applied("t1")
        await asyncio.sleep(4)
        pids = [server.pid, *_children(server.pid)]
        before = sum(_written(pid) for pid in pids)
        await asyncio.sleep(12)
        written = sum(_written(pid) for pid in pids) - before
        rss = sum(_rss_mib(pid) for pid in pids)
    async with running(scratch / "data", ENGINE, REZUSCLOUD_RESYNC_S="5") as server:
        await server.declare("t1", control_plane(1), workers(2))
        await server.until_applied("t1")
        await asyncio.sleep(4)
        version = (await server.get("/api/v1/tenants"))["metadata"]["resourceVersion"]
        await asyncio.sleep(12)
        after = (await server.get("/api/v1/tenants"))["metadata"]["resourceVersion"]
    return [
        Result(
            "idle memory, server and NATS", f"{rss:.0f} MiB", "–", rss, 110, is_most=True, unit="MiB", aim=85
        ),
        Result(
            "rows left by clean resyncs",
            str(int(after) - int(version)),
            "–",
            int(after) - int(version),
            0,
            is_most=True,
            unit="rows",
        ),
        Result(
            "written to disk in 12 s of idling",
            f"{written} B",
            "–",
            written,
            0,
            is_most=True,
            unit="B",
        ),
    ]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _written(pid: int) -> int:
    """Bytes that reach the disk: what was written, less what was deleted before it got there."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["write_bytes"]) - int(counts["cancelled_write_bytes"])


def _rss_mib(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) / 1024 if found else 0.0


async def starts(scratch: Path) -> list[Result]:
    """From nothing to ready, against importing the same modules; and the command line."""
    ready, imports, versions, bare_python = [], [], [], []
    server = Server(scratch / "data", ENGINE)
    await server.start()
    await server.stop()
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import rezuscloud.main"], check=True)
        imports.append(time.perf_counter() - started)
        started = time.perf_counter()
        await server.start()
        ready.append(time.perf_counter() - started)
        await server.stop()
        for times, argv in (
            (versions, [str(BIN / "rezusctl"), "version"]),
            (bare_python, [sys.executable, "-c", "pass"]),
        ):
            started = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - started)
    await server.close()
    return [
        Result(
            "start → ready and logged in",
            f"{median(ready):.2f} s",
            f"import {median(imports):.2f} s",
            median(ready) / median(imports),
            2.5,
            is_most=True,
            unit="×",
        ),
        Result(
            "rezusctl version",
            f"{median(versions):.3f} s",
            f"python {median(bare_python):.3f} s",
            median(versions),
            0.3,
            is_most=True,
            unit="s",
            aim=0.12,
        ),
    ]


CASES = (reconcile, reads, writes, state_upload, watching, idle, starts)
