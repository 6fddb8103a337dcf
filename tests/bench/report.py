"""Owns how a measurement is told: what was measured, against what, the bound and whether it is met."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp


@dataclass(frozen=True)
class Result:
    """One line of the table. `value` is compared with `bound`; `is_most` says from which side."""

    name: str
    product: str
    bare: str
    value: float
    bound: float
    is_most: bool
    unit: str
    aim: float | None = None

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound if self.is_most else self.value >= self.bound

    def line(self) -> str:
        sign = "≤" if self.is_most else "≥"
        aim = f", aim {self.aim:g}" if self.aim is not None else ""
        met = "met" if self.is_met else "MISSED"
        return (
            f"{self.name}: product {self.product}, bare {self.bare}; {self.value:.3g} {self.unit} "
            f"({sign} {self.bound:g}{aim}): {met}"
        )


def write_page(path: Path, results: Sequence[Result]) -> None:
    """Writes the page with the machine it was measured on."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`: the product and a bare alternative run in turn, medians are compared. "
        "Ratios hold elsewhere, single times do not.",
        "",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, aiohttp "
        f"{aiohttp.__version__}, SQLite {sqlite3.sqlite_version}.",
        "",
        "| What | Product | Bare | Measured | Bound | Aim | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        sign = "≤" if r.is_most else "≥"
        aim = f"{sign} {r.aim:g}" if r.aim is not None else "–"
        met = "met" if r.is_met else "**missed**"
        cells = [r.name, r.product, r.bare, f"{r.value:.3g} {r.unit}", f"{sign} {r.bound:g}", aim, met]
        lines.append(f"| {' | '.join(cells)} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
