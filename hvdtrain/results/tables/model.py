"""A table of results. Cells are text, numbers, or statistics with their spread, and each column has a unit.

Terminal and report print the same `text()`, so both round alike. A value with a spread gets enough decimals to show two
digits of half the spread, but at most four significant digits (three for a ratio, and at least two).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.results.columns import Column
from hvdtrain.results.comparability import WORK
from hvdtrain.results.statistics import Interval, Statistic


@dataclasses.dataclass
class Part:
    """Rows that people see as a table of their own."""

    name: str
    """Empty if the table has no sections"""
    caption: str
    """The settings that its rows have in common, but not all rows of the table"""
    columns: list[Column]
    rows: list[dict[str, Any]]
    reading: str
    """The conclusion from its rows, in a sentence"""

    def text(self) -> list[list[str]]:
        """The cells as printed."""
        return [[cell(row.get(column.key), column) for column in self.columns] for row in self.rows]

    def is_text(self, column: Column) -> bool:
        """Whether the column contains text, and is therefore aligned to the left."""
        return next((isinstance(row[column.key], str) for row in self.rows if row.get(column.key) is not None), False)


@dataclasses.dataclass
class Table:
    name: str
    title: str
    columns: list[Column]
    rows: list[dict[str, Any]]
    """By column key: str, int, float, bool, Statistic, Interval or None (not measured)"""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Definitions, warnings, and runs that do not count"""
    section: str | None = None
    """Key of the title that the rows of a part share; it is not a column"""
    readings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Section -> the conclusion from its rows, in a sentence"""
    apart: Sequence[str] = WORK
    """Keys of the settings that rows of a part share, if the table has no sections"""

    def parts(self) -> list[Part]:
        """The rows by section, or by the settings in `apart`, in order."""
        sections: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            names = [self.section] if self.section else self.apart
            sections.setdefault(tuple(row.get(name) for name in names), []).append(row)
        common, parts = self._common(self.rows), []
        for key, rows in sections.items():
            name, equal = str(key[0]) if self.section else "", self._common(rows)
            columns = [one for one in self.columns if one not in equal and self._is_shown(one, rows)]
            caption = words([one for one in equal if one not in common], rows[0])
            parts.append(Part(name, caption, columns, rows, self.readings.get(name, "")))
        return parts

    def caption(self) -> str:
        """The settings that all rows have in common."""
        return words(self._common(self.rows), self.rows[0]) if self.rows else ""

    def _common(self, rows: Sequence[dict[str, Any]]) -> list[Column]:
        settings = [column for column in self.columns if column.role == "setting"]
        return [one for one in settings if len({cell(row.get(one.key), one) for row in rows}) == 1]

    def _is_shown(self, column: Column, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether people need the column: it has a value, or is a result that no row of the table has."""
        measured = any(row.get(column.key) is not None for row in rows)
        missing = column.role == "result" and all(row.get(column.key) is None for row in self.rows)
        return column.role != "data" and (measured or missing)


def words(columns: Sequence[Column], row: dict[str, Any]) -> str:
    """`strategy allreduce, rate 10 Mbit/s`: the row's values, without missing ones."""
    known = [column for column in columns if row.get(column.key) is not None]
    return ", ".join(f"{one.label} {cell(row[one.key], one)} {one.unit}".rstrip() for one in known)


def cell(value: Any, column: Column) -> str:
    """A cell as printed; `-` for a missing value."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float() if column.role == "setting":
            return f"{value * column.scale:,.10g}"
        case int():
            return f"{value * column.scale:,.10g}"
        case float():
            return number(value * column.scale)
        case Statistic() | Interval():
            return _with_spread(value, column)
    return str(value)


def _with_spread(value: Statistic | Interval, column: Column) -> str:
    mean, span = value.mean * column.scale, value.span
    if span is None or not column.spread:
        return number(mean)
    low, high = (bound * column.scale for bound in span)
    half = max(high - mean, mean - low)
    places = decimals(mean, half, 3 if isinstance(value, Interval) else 4)
    if isinstance(value, Interval) and mean:
        places = max(places, 1 - _magnitude(mean))
    least, most = f"{low:,.{places}f}", f"{high:,.{places}f}"
    if isinstance(value, Interval):
        return f"{mean:,.{places}f} ({least}-{most})"
    if value.n == 2:
        return least if least == most else f"{least} to {most}"
    shown = half if round(half, places) or not half else 10.0**-places
    return f"{mean:,.{places}f} ± {shown:,.{places}f}"


def decimals(mean: float, half: float, digits: int) -> int:
    """Decimals for a mean with this half of its spread, with at most `digits` significant digits."""
    wanted = digits - 1 - _magnitude(mean) if mean else 3
    if half > 0:
        wanted = min(wanted, 1 - _magnitude(half))
    return min(12, max(0, wanted))


def number(value: float) -> str:
    """A number with three significant digits; without decimals above 100."""
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
