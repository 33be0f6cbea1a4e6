"""Tables as text for a terminal, CSV, JSON, Markdown and LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
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
    """For people: aligned, wrapped to the terminal's width, each section with its reading, the notes below."""
    from rich.console import Console
    from rich.text import Text

    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size((WIDE, 50)).columns if told else WIDE
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False, markup=False, emoji=False, force_terminal=False)
    console.print(Text(table.title))
    widths = _widths(table, width)
    for name, rows in table.sections():
        console.print(Text(f"\n{name}" if name else ""))
        if widths:
            buffer.write(_aligned(table, rows, widths) + "\n")
        else:
            console.print(_drawn(table, rows))
        if name in table.readings:
            console.print(Text(table.readings[name]))
    if not table.rows:
        console.print(Text("nothing to show"))
    for note in ("", *table.notes):
        console.print(Text(note))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n") + "\n"


GAP = "  "


def _widths(table: Table, width: int) -> list[int]:
    """Of the columns, with every cell on one line, headings on two or one where there is room; empty if too wide."""
    from rich.cells import cell_len

    cells = [max(map(cell_len, column), default=0) for column in zip(*table.text(), strict=True)]
    heads = [column.heading for column in table.columns]
    least = [max(cell, *map(cell_len, head.split(" "))) for cell, head in zip(cells, heads, strict=False)]
    left = width - sum(least) - len(GAP) * (len(least) - 1)
    for lines in (2, 1):
        for place, head in enumerate(heads[: len(least)]):
            wanted = range(least[place], cell_len(head) + 1)
            more = next((w - least[place] for w in wanted if len(textwrap.wrap(head, w)) <= lines), 0)
            if more <= left:
                least[place] += more
                left -= more
    return least if left >= 0 else []


def _aligned(table: Table, rows: Sequence[dict[str, Any]], widths: Sequence[int]) -> str:
    sides = [str.ljust if table.is_text(column) else str.rjust for column in table.columns]

    def line(cells: Sequence[str]) -> str:
        return GAP.join(side(cell, width) for side, cell, width in zip(sides, cells, widths, strict=True))

    heads = [textwrap.wrap(column.heading, width) for column, width in zip(table.columns, widths, strict=True)]
    height = max(map(len, heads))
    lifted = [[""] * (height - len(head)) + head for head in heads]
    rule = "\u2500" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return "\n".join([*map(line, zip(*lifted, strict=True)), rule, *(line(table.cells(row)) for row in rows)])


def _drawn(table: Table, rows: Sequence[dict[str, Any]]) -> Any:
    """For a terminal too narrow for the cells: wrapped by rich."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns:
        side: Any = "left" if table.is_text(column) else "right"
        drawn.add_column(Text(column.heading), justify=side, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, table.cells(row)))
    return drawn


# --- for programs -----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A cell as JSON: base units, null for what was not measured."""
    if isinstance(value, Statistic | Interval):
        return {name: getattr(value, name) for name in SPREAD[type(value)]}
    return value


def as_document(table: Table, problems: Sequence[Problem] = ()) -> dict[str, Any]:
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
    headings: list[str] = []
    spread = {column.key: _spread(table, column) for column in columns}
    for column in columns:
        headings += [f"{column.key}_{name}" for name in spread[column.key]] or [column.key]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(headings)
    for row in table.rows:
        writer.writerow(value for column in columns for value in _flat(row.get(column.key), spread[column.key]))
    return buffer.getvalue()


def _spread(table: Table, column: Column) -> tuple[str, ...]:
    types = {type(row.get(column.key)) for row in table.rows}
    return next((names for kind, names in SPREAD.items() if kind in types), ())


def _flat(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    if not names:
        yield harmless(value)
    for name in names:
        yield getattr(value, name, None)


def harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula, quoted as it wants it."""
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
    return "\n".join(lines + [f"% {note}" for note in (*table.readings.values(), *table.notes)]) + "\n"


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
    "json": lambda table: json.dumps(as_document(table), indent=2) + "\n",
}
