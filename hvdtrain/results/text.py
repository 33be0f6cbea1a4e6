"""Tables as text: for a terminal, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.results.read.folders import Problem
from hvdtrain.results.statistics import Interval, Statistic
from hvdtrain.results.tables.model import Column, Table

SCHEMA = "hvdtrain/results/2"
WIDE = 400
"""Characters in a line of a pipe or file"""
PROSE = 24
"""Least width of a column of prose"""
GAP = "  "
SPREAD = {Statistic: ("mean", "median", "min", "max", "low", "high", "n"), Interval: ("mean", "low", "high")}
"""Parts of a statistic in CSV and JSON; low and high bound its 95 % interval"""


# --- terminal ---------------------------------------------------------------------------------------------------------


def terminal(table: Table) -> str:
    """The table for people. Never breaks a number or a name.

    If the terminal is too narrow, the table drops the columns of `table.spare`, one after the other, and says so.
    """
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size((WIDE, 50)).columns if known else WIDE
    shown, widths = _fitted(table, width)
    lines = [table.title]
    for name, rows in shown.sections():
        lines += [f"\n{name}" if name else "", *_aligned(shown, rows, widths)]
        lines += [table.readings[name]] if name in table.readings else []
    dropped = [column.heading for column in table.columns if column not in shown.columns]
    lines += [""] if table.rows else ["", "nothing to show"]
    if dropped:
        lines.append(f"not shown at {width} columns: {', '.join(dropped)}; see a wider terminal or --format csv")
    return "\n".join(_wrapped(line, width) for line in "\n".join([*lines, *table.notes]).split("\n")).strip("\n") + "\n"


def _fitted(table: Table, width: int) -> tuple[Table, list[int]]:
    """The table without the spare columns that do not fit, and the widths of its columns."""
    spare = [key for key in table.spare if key in (column.key for column in table.columns)]
    for count in range(len(spare) + 1):
        kept = [column for column in table.columns if column.key not in spare[:count]]
        shown = dataclasses.replace(table, columns=kept)
        if (widths := _widths(shown, width)) and sum(widths) + len(GAP) * (len(widths) - 1) <= width:
            break
    return shown, widths


def _widths(table: Table, width: int) -> list[int]:
    """Each column's width. Cells keep their line, prose and headings are wrapped if the table would be too wide."""
    from rich.cells import cell_len

    if not table.columns:
        return []
    least, wanted = [], []
    for place, column in enumerate(table.columns):
        cells = [cells[place] for cells in table.text()]
        longest = max(map(cell_len, cells), default=0)
        words = [*column.heading.split(" "), *(word for cell in cells if column.prose for word in cell.split())]
        least.append(max(*map(cell_len, words), min(PROSE, longest) if column.prose else longest))
        wanted.append(max(cell_len(column.heading), longest))
    left = width - sum(least) - len(GAP) * (len(least) - 1)
    for place, most in enumerate(wanted):
        more = max(0, min(left, most - least[place]))
        least[place] += more
        left -= more
    return least


def _aligned(table: Table, rows: Sequence[dict[str, Any]], widths: Sequence[int]) -> list[str]:
    from rich.cells import cell_len

    sides = [str.ljust if table.is_text(column) else str.rjust for column in table.columns]

    def lines(cells: Sequence[str], wrap: Sequence[bool], *, bottom: bool = False) -> list[str]:
        parts = [
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) if wrapped else [cell]
            for cell, width, wrapped in zip(cells, widths, wrap, strict=True)
        ]
        height = max(map(len, parts))
        blank = ([""] * (height - len(part)) for part in parts)
        filled = [above + part if bottom else part + above for above, part in zip(blank, parts, strict=True)]
        return [
            GAP.join(
                side(cell, width - cell_len(cell) + len(cell))
                for side, cell, width in zip(sides, line, widths, strict=True)
            ).rstrip()
            for line in zip(*filled, strict=True)
        ]

    prose = [column.prose for column in table.columns]
    head = lines([column.heading for column in table.columns], [True] * len(prose), bottom=True)
    rule = "\u2500" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return [*head, rule, *(line for row in rows for line in lines(table.cells(row), prose))]


def _wrapped(line: str, width: int) -> str:
    """Wraps sentences to the width. Lines of tables stay as they are."""
    if len(line) <= width or GAP in line or "\u2500" in line:
        return line
    return "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False))


# --- for other programs -----------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A cell as JSON, in base units; null for a missing value."""
    if isinstance(value, Statistic | Interval):
        return {name: getattr(value, name) for name in SPREAD[type(value)]}
    return value


def as_document(table: Table, problems: Sequence[Problem]) -> dict[str, Any]:
    """One JSON document, with values in base units (s, B, J, fractions of 1)."""
    keys = ([table.section] if table.section else []) + [column.key for column in table.columns]
    return {
        "schema": SCHEMA,
        "table": table.name,
        "title": table.title,
        "columns": [{"key": column.key, "label": column.label} for column in table.columns],
        "rows": [{key: plain(row.get(key)) for key in keys} for row in table.rows],
        "readings": table.readings,
        "notes": table.notes,
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def comma_separated(table: Table) -> str:
    """One line per row. A statistic takes several columns: train_s_mean, train_s_median, ... train_s_n."""
    columns = ([Column(table.section, table.section)] if table.section else []) + table.columns
    parts: list[tuple[str, str | None]] = []
    for column in columns:
        types = {type(row.get(column.key)) for row in table.rows}
        names = next((names for kind, names in SPREAD.items() if kind in types), (None,))
        parts += [(column.key, name) for name in names]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(f"{key}_{name}" if name else key for key, name in parts)
    for row in table.rows:
        writer.writerow(getattr(row.get(key), name, None) if name else harmless(row.get(key)) for key, name in parts)
    return buffer.getvalue()


def harmless(value: Any) -> Any:
    """Quotes text that a spreadsheet would interpret as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(re.sub(r"([\\|`*_<>\[\]])", r"\\\1", cell) for cell in cells) + " |"

    rule = ["---" if table.is_text(column) else "---:" for column in table.columns]
    lines = [f"**{table.title}**", ""]
    for name, rows in table.sections():
        lines += [name, ""] if name else []
        lines += [line([column.heading for column in table.columns]), "|" + "|".join(rule) + "|"]
        lines += [line(table.cells(row)) for row in rows]
        lines += ["", table.readings[name], ""] if name in table.readings else [""]
    return "\n".join(lines + [f"{note}  " for note in table.notes]) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"table": terminal, "csv": comma_separated, "markdown": markdown}
