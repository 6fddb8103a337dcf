"""Owns how `rezusctl` prints: tables, YAML, JSON, names, and colour only on a terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import asyncclick as click

FORMATS = ("table", "wide", "json", "yaml", "name")


def print_table(table: Mapping[str, Any], *, wide: bool = False, with_cluster: bool = False) -> None:
    """Prints a server's Table; columns of lower priority only when `wide`."""
    columns = [(at, c) for at, c in enumerate(table["columnDefinitions"]) if wide or not c.get("priority")]
    head = ["CLUSTER"] if with_cluster else []
    rows = [head + [column["name"].upper() for _, column in columns]]
    for row in table["rows"]:
        cells = [row["object"]["metadata"].get("namespace", "")] if with_cluster else []
        rows.append(cells + [_cell(row["cells"][at]) for at, _ in columns])
    print_rows(rows)


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; the first row is the head."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else " ".join(printable(str(value)).split())


def print_document(doc: Any, output: str) -> None:
    """One document, or a List, as YAML or JSON."""
    text = json.dumps(doc, indent=2, ensure_ascii=False) + "\n" if output == "json" else to_yaml(doc)
    click.echo(text, nl=False)


def to_yaml(doc: Any) -> str:
    """YAML with its keys in the order given, and a newline at its end."""
    import yaml  # slow to import, and most commands write none

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast, where libyaml is there
    return str(yaml.dump(doc, Dumper=dumper, sort_keys=False, allow_unicode=True))


def print_names(kind_plural: str, items: Sequence[Mapping[str, Any]]) -> None:
    for item in items:
        click.echo(f"{kind_plural}/{item['metadata']['name']}")


def printable(text: str) -> str:
    """The text without characters that would command the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


class Progress:
    """One line that changes: written over on a terminal, a new line for each change elsewhere.

    Used as a context; at its end the last text stays.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._last:
            sys.stderr.write("\n")
            sys.stderr.flush()

    def show(self, text: str) -> None:
        text = " ".join(printable(text).split())
        if text == self._last:
            return
        self._last = text
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[K{text if len(text) <= width else text[: width - 1] + '…'}")
            sys.stderr.flush()
        else:
            click.echo(text, err=True)


def bar(done: int, total: int, width: int = 24) -> str:
    """A progress bar in characters, e.g. `[######------] 3/6`."""
    filled = width * done // total if total else width
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"
