"""A table of results: cells are text, numbers, or statistics with their spread, and each column knows its unit.

Whoever prints a table, terminal or report, takes the same `text()`: one rounding for all. With a spread, a figure has
as many decimals as give half of the spread two digits, but four significant ones at most (a ratio three).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.results.statistics import Interval, Statistic


@dataclasses.dataclass(frozen=True)
class Column:
    key: str
    """Name in CSV and JSON, there in base units: seconds, bytes, joules, fractions of 1"""
    label: str
    unit: str = ""
    """As printed: s, MB, %, kJ ..."""
    scale: float = 1.0
    """Printed = value x scale"""
    spread: bool = True
    """Whether the spread is printed beside a statistic"""
    prose: bool = False
    """Whether its text may go over several lines of a narrow terminal"""

    @property
    def heading(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclasses.dataclass
class Table:
    name: str
    title: str
    columns: list[Column]
    rows: list[dict[str, Any]]
    """By column key: str, int, float, bool, Statistic, Interval or None (not measured)"""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Reading, definitions, what was left out"""
    section: str | None = None
    """Key of a text by which successive rows belong together; it is no column"""
    readings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Section -> what its rows say, in words"""
    spare: Sequence[str] = ()
    """Keys of the columns that a narrow terminal goes without, the first of them first"""

    def sections(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """The rows by section, in order; one nameless section without any."""
        found: list[tuple[str, list[dict[str, Any]]]] = []
        for row in self.rows:
            name = str(row.get(self.section)) if self.section else ""
            if not found or found[-1][0] != name:
                found.append((name, []))
            found[-1][1].append(row)
        return found

    def text(self) -> list[list[str]]:
        """The cells as printed."""
        return [self.cells(row) for row in self.rows]

    def cells(self, row: dict[str, Any]) -> list[str]:
        return [cell(row.get(column.key), column) for column in self.columns]

    def is_text(self, column: Column) -> bool:
        """Whether the column holds words, so that it is set flush left."""
        return next((isinstance(row[column.key], str) for row in self.rows if row.get(column.key) is not None), False)


def cell(value: Any, column: Column) -> str:
    """A cell as printed; `-` for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value * column.scale:,.10g}"
    if isinstance(value, float):
        return number(value * column.scale)
    if isinstance(value, Statistic | Interval):
        return _with_spread(value, column)
    return str(value)


def _with_spread(value: Statistic | Interval, column: Column) -> str:
    mean, span = value.mean * column.scale, value.span
    if span is None or not column.spread:
        return number(mean)
    low, high = (bound * column.scale for bound in span)
    half = max(high - mean, mean - low)
    places = decimals(mean, half, 3 if isinstance(value, Interval) else 4)
    least, most = f"{low:,.{places}f}", f"{high:,.{places}f}"
    if isinstance(value, Interval):
        return f"{mean:,.{places}f} ({least}-{most})"
    if value.n == 2:
        return least if least == most else f"{least} to {most}"
    shown = half if round(half, places) or not half else 10.0**-places
    return f"{mean:,.{places}f} ± {shown:,.{places}f}"


def decimals(mean: float, half: float, digits: int) -> int:
    """Decimals for a mean with such a half of its spread: at most so many significant digits."""
    wanted = digits - 1 - _magnitude(mean) if mean else 3
    if half > 0:
        wanted = min(wanted, 1 - _magnitude(half))
    return min(12, max(0, wanted))


def number(value: float) -> str:
    """Formats a number with three significant digits, without decimals above 100."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:,.{max(0, 2 - _magnitude(value))}f}"


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


DETAIL = {"n": "n", "mean": "mean", "low": "95 % from", "high": "to", "median": "median", "min": "min", "max": "max"}


def detail(table: Table) -> Table:
    """The table turned: a row for each figure of each row, with everything known of its spread."""
    figures = {key for row in table.rows for key, value in row.items() if isinstance(value, Statistic | Interval)}
    if not figures:
        return table
    plain = [column for column in table.columns if column.key not in figures and column.key != "n"]
    rows = []
    for row in table.rows:
        about = {column.key: row.get(column.key) for column in plain}
        if table.section:
            about[table.section] = row.get(table.section)
        for column in table.columns:
            value = row.get(column.key)
            if isinstance(value, Statistic | Interval):
                numbers = {name: _scaled(getattr(value, name, None), name, column) for name in DETAIL}
                rows.append(about | {"figure": column.label, "unit": column.unit or None} | numbers)
    columns = [*plain, Column("figure", "figure"), Column("unit", "unit")]
    columns += [Column(name, label) for name, label in DETAIL.items()]
    title = f"{table.title}: every figure"
    return dataclasses.replace(table, title=title, columns=columns, rows=rows, spare=("max", "min", "median"))


def _scaled(value: Any, name: str, column: Column) -> Any:
    return value if value is None or name == "n" else value * column.scale
