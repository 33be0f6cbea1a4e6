"""Tables as text for a terminal, CSV, JSON, Markdown and LaTeX."""

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

from hvdtrain.results.folders import Problem
from hvdtrain.results.statistics import Interval, Statistic
from hvdtrain.results.table import Column, Table

SCHEMA = "hvdtrain/results/1"
WIDE = 400
"""Characters in a line where there is no terminal whose width must be kept"""
SPREAD = {Statistic: ("mean", "median", "min", "max", "low", "high", "n"), Interval: ("mean", "low", "high")}
"""What is known of a figure, in CSV and JSON; low and high bound its 95 % interval"""


# --- terminal ---------------------------------------------------------------------------------------------------------


def terminal(table: Table) -> str:
    """For people, with the terminal's width kept: no word and no number is ever broken or cut.

    A table that is too wide goes without the columns of `table.spare`, one after the other, and says so below. If that
    is not enough, each row becomes a block with a line for each column, all of them.
    """
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size((WIDE, 50)).columns if told else WIDE
    shown = _narrowed(table, width)
    widths = _widths(shown, width)
    parts = [table.title]
    for name, rows in shown.sections():
        parts += [f"\n{name}"] if name else [""]
        parts += _aligned(shown, rows, widths) if widths else _blocks(table, rows, width)
        parts += [table.readings[name]] if name in table.readings else []
    parts += ["", *_left_out(table, shown, width, bool(widths)), *table.notes]
    lines = [line for part in parts for line in part.split("\n")]
    return "\n".join(_wrapped(line, width) for line in lines).strip("\n") + "\n"


GAP = "  "
PROSE = 24
"""Characters that a column of prose has at least; a row with a longer word there stands over the whole width"""


def _narrowed(table: Table, width: int) -> Table:
    """The table without as many of its spare columns as it takes to fit; the whole table if it never fits."""
    spare = [key for key in table.spare if key in (column.key for column in table.columns)]
    for count in range(len(spare) + 1):
        kept = [column for column in table.columns if column.key not in spare[:count]]
        found = dataclasses.replace(table, columns=kept)
        if _widths(found, width):
            return found
    return table


def _left_out(table: Table, shown: Table, width: int, fits: bool) -> list[str]:
    if not table.rows:
        return ["nothing to show"]
    if not fits:
        return [f"one block per row, since the table does not fit into {width} columns; --format csv has it whole"]
    names = [column.heading for column in table.columns if column not in shown.columns]
    if not names:
        return []
    return [f"left out at {width} columns: {', '.join(names)}; a wider terminal or --format csv has them"]


def _wrapped(line: str, width: int) -> str:
    """Wraps prose to the width; indented lines (tables, commands) stay as they are."""
    if len(line) <= width or line.startswith(" ") or "\u2500" in line:
        return line
    return "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False))


def _widths(table: Table, width: int) -> list[int]:
    """Of the columns, with every cell on one line (prose: on several), headings on several where there is no room;
    empty if too wide."""
    from rich.cells import cell_len

    cells = [max(map(cell_len, column), default=0) for column in zip(*table.text(), strict=True)]
    words = [
        min(PROSE, longest) if column.prose else longest for column, longest in zip(table.columns, cells, strict=False)
    ]
    heads = [column.heading for column in table.columns]
    least = [max(cell, *map(cell_len, head.split(" "))) for cell, head in zip(words, heads, strict=False)]
    left = width - sum(least) - len(GAP) * (len(least) - 1)
    if left < 0:
        return []
    for place, column in enumerate(table.columns[: len(least)]):
        wanted = max(cell_len(heads[place]), cells[place] if column.prose else 0)
        more = min(left, max(0, wanted - least[place]))
        least[place] += more
        left -= more
    return least


def _aligned(table: Table, rows: Sequence[dict[str, Any]], widths: Sequence[int]) -> list[str]:
    from rich.cells import cell_len

    sides = [str.ljust if table.is_text(column) else str.rjust for column in table.columns]

    def lines(cells: Sequence[str], lifted: bool = False) -> list[str]:
        split = [
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) if prose else [cell]
            for cell, width, prose in zip(cells, widths, proses, strict=True)
        ]
        height = max(map(len, split))
        filled = [
            [""] * (height - len(part)) + part if lifted else part + [""] * (height - len(part)) for part in split
        ]
        return [
            GAP.join(
                side(cell, width - cell_len(cell) + len(cell))
                for side, cell, width in zip(sides, line, widths, strict=True)
            ).rstrip()
            for line in zip(*filled, strict=True)
        ]

    proses = [True] * len(widths)
    head = lines([column.heading for column in table.columns], lifted=True)
    proses = [column.prose for column in table.columns]
    rule = "\u2500" * (sum(widths) + len(GAP) * (len(widths) - 1))
    found = [*head, rule]
    for cells in map(table.cells, rows):
        wide = any(
            len(word) > width
            for cell, width, prose in zip(cells, widths, proses, strict=True)
            for word in cell.split()
            if prose
        )
        found += [cells[0], *_below(cells[1:], len(rule))] if wide else lines(cells)
    return found


def _below(cells: Sequence[str], width: int) -> list[str]:
    """Puts each cell on lines of its own, indented."""
    split = (textwrap.wrap(cell, width - len(GAP), break_long_words=False, break_on_hyphens=False) for cell in cells)
    return [GAP + line for lines in split for line in lines]


def _blocks(table: Table, rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    """Makes a block of each row: a line per column; a cell that does not fit behind its heading goes below it."""
    most = max(len(column.heading) for column in table.columns)
    found = []
    for row in rows:
        for column, cell in zip(table.columns, table.cells(row), strict=True):
            line = f"{column.heading:<{most}}{GAP}{cell}"
            if len(line) <= width:
                found.append(line)
            else:
                found += [column.heading, *_below([cell], width)]
        found.append("")
    return found[:-1]


# --- for programs -----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A cell as JSON: base units, null for what was not measured."""
    if isinstance(value, Statistic | Interval):
        return {name: getattr(value, name) for name in SPREAD[type(value)]}
    return value


def as_document(table: Table, problems: Sequence[Problem]) -> dict[str, Any]:
    """One JSON document: figures in base units (s, B, J, fractions of 1)."""
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
    """One line per row; a figure is several columns: train_s_mean, train_s_median, ... train_s_n."""
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
    """Quotes text that a spreadsheet would take for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


# --- for papers -------------------------------------------------------------------------------------------------------


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


def latex(table: Table) -> str:
    """A `tabular` with \\hline rules, which needs no package; notes are comments."""
    sides = "".join("l" if table.is_text(column) else "r" for column in table.columns)
    lines = [f"% {latex_text(table.title)}", rf"\begin{{tabular}}{{{sides}}}", r"\hline"]
    lines += [_latex_row([column.heading for column in table.columns]), r"\hline"]
    for name, rows in table.sections():
        if name:
            lines += [rf"\multicolumn{{{len(table.columns)}}}{{l}}{{{latex_text(name)}}} \\"]
        lines += [_latex_row(table.cells(row)) for row in rows]
    lines += [r"\hline", r"\end{tabular}"]
    notes = "\n".join((*table.readings.values(), *table.notes)).splitlines()
    return "\n".join(lines + [f"% {note}" for note in notes]) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(latex_text, cells)) + r" \\"


LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
}


def latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


FORMATS: dict[str, Callable[[Table], str]] = {
    "table": terminal,
    "csv": comma_separated,
    "markdown": markdown,
    "latex": latex,
}
