"""Tables as text: for a terminal, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hvdtrain.observe.terminal import terminal_width, wrapped
from hvdtrain.results.columns import Column
from hvdtrain.results.read.folders import Problem
from hvdtrain.results.statistics import Interval, Statistic
from hvdtrain.results.tables.model import Part, Table, words

SCHEMA = "hvdtrain/results/2"
PROSE = 24
"""Least width of a column of prose"""
LEADING = 3
"""Settings that keep their columns the longest: usually strategy, hosts and rate"""
GAP = 2
"""Blanks between columns"""
SPREAD = {Statistic: ("mean", "median", "min", "max", "low", "high", "n"), Interval: ("mean", "low", "high")}
"""Parts of a statistic in CSV and JSON; low and high bound its 95 % interval"""


# --- terminal ---------------------------------------------------------------------------------------------------------


def terminal(table: Table) -> str:
    """The table for people: no line is wider than the terminal, and no number is broken.

    On a narrow terminal, a part joins settings in one column, then drops details, then prints a paragraph for each row.
    """
    width, dropped = terminal_width(), dict[str, None]()
    lines = [*wrapped(table.title, width), *wrapped(table.caption(), width)]
    for part in table.parts():
        lines += ["", *wrapped(part.name, width), *wrapped(part.caption, width)]
        if fitted := _fitted(part, width):
            lines += _drawn(*fitted, width)
            shown = {column.key for column in fitted[0].columns}
            dropped |= {one.heading: None for one in part.columns if one.role == "detail" and one.key not in shown}
        else:
            lines += [line for row in part.rows for line in wrapped(words(part.columns, row), width, indent=GAP * " ")]
        lines += wrapped(part.reading, width)
    lines += [""] if table.rows else ["", "nothing to show"]
    if dropped:
        lines += wrapped(f"not shown at {width} columns: {', '.join(dropped)}; see --format csv", width)
    for note in table.notes:
        lines += wrapped(note, width)
    return "\n".join(lines).strip("\n") + "\n"


def _fitted(part: Part, width: int) -> tuple[Part, list[int]] | None:
    """The part with as many details as fit, and the widths of its columns; None if not even its results fit."""
    details = [column for column in part.columns if column.role == "detail"]
    for count in range(len(details), -1, -1):
        kept = [column for column in part.columns if column.role != "detail" or column in details[:count]]
        shown = dataclasses.replace(part, columns=kept)
        for form in (shown, _joined(shown, LEADING), _joined(shown, 0)):
            widths = _widths(form, width)
            if sum(widths) + GAP * (len(widths) - 1) <= width:
                return form, widths
    return None


def _joined(part: Part, leading: int) -> Part:
    """The part with all settings, except for the leading ones, in one column of prose."""
    joined = [column for column in part.columns if column.role == "setting"][leading:]
    if not joined:
        return part
    columns = [column for column in part.columns if column not in joined]
    heading = "other settings" if leading else "settings"
    rows = [row | {"_": words(joined, row)} for row in part.rows]
    return dataclasses.replace(part, columns=[*columns, Column("_", heading, prose=True)], rows=rows)


def _widths(part: Part, width: int) -> list[int]:
    """Each column's width. Cells keep their line, prose and headings are wrapped if the table would be too wide."""
    from rich.cells import cell_len

    least, wanted = [], []
    for column, *cells in zip(part.columns, *part.text(), strict=True):
        longest = max(map(cell_len, cells), default=0)
        least.append(max(*map(cell_len, column.heading.split()), min(PROSE, longest) if column.prose else longest))
        wanted.append(max(cell_len(column.heading), longest))
    left = width - sum(least) - GAP * (len(least) - 1)
    for place in sorted(range(len(least)), key=lambda place: not part.columns[place].prose):
        more = max(0, min(left, wanted[place] - least[place]))
        least[place] += more
        left -= more
    return least


def _drawn(part: Part, widths: Sequence[int], width: int) -> list[str]:
    from rich import box, console, table

    grid = table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, own in zip(part.columns, widths, strict=True):
        side: Literal["left", "right"] = "left" if part.is_text(column) else "right"
        grid.add_column(column.heading, justify=side, width=own, overflow="fold")
    for cells in part.text():
        grid.add_row(*cells)
    drawn = io.StringIO()
    console.Console(file=drawn, width=width, color_system=None, markup=False, emoji=False).print(grid)
    return [line.rstrip() for line in drawn.getvalue().rstrip("\n").split("\n")]


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
    parts = [(column.key, name) for column in columns for name in (SPREAD[column.of] if column.of else (None,))]
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

    lines = [f"**{table.title}**", "", table.caption(), ""]
    for part in table.parts():
        lines += [line for text in (part.name, part.caption) if text for line in (text, "")]
        rule = ["---" if part.is_text(column) else "---:" for column in part.columns]
        lines += [line([column.heading for column in part.columns]), "|" + "|".join(rule) + "|"]
        lines += [*map(line, part.text()), "", *([part.reading, ""] if part.reading else [])]
    return "\n".join(lines + [f"{note}  " for note in table.notes]) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"table": terminal, "csv": comma_separated, "markdown": markdown}
