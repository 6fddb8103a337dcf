"""Runs the benchmarks and writes docs/reference/benchmarks.md. `python -m tests.bench [NAME …]` runs some."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.bench import cases
from tests.bench.report import Result, write_page

ROOT = Path(__file__).resolve().parent.parent.parent


async def main(names: list[str]) -> int:
    chosen = [case for case in cases.CASES if not names or case.__name__ in names]
    results: list[Result] = []
    for case in chosen:
        print(f"==> {case.__name__.replace('_', ' ')}", flush=True)
        with tempfile.TemporaryDirectory(prefix="rezuscloud-bench-") as scratch:
            for result in await case(Path(scratch)):
                print(f"    {result.line()}", flush=True)
                results.append(result)
    if not names:
        write_page(ROOT / "docs/reference/benchmarks.md", results)
        print("==> wrote docs/reference/benchmarks.md")
    missed = [result for result in results if not result.is_met]
    for result in missed:
        print(f"missed: {result.line()}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
