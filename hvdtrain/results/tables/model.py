"""A table of results. Cells are text, numbers, or statistics with their spread, and each column has a unit.

Terminal and report print the same `text()`, so both round alike. A value with a spread gets enough decimals to show two
digits of half the spread, but at most four significant digits (three for a ratio).
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
    """Name in CSV and JSON, where values are in base units: seconds, bytes, joules, fractions of 1"""
    label: str
    unit: str = ""
    """As printed: s, MB, %, kJ ..."""
    scale: float = 1.0
    """Printed value = value x scale"""
    spread: bool = True
    """Whether to print the spread of a statistic"""
    prose: bool = False
    """Whether a narrow terminal may wrap its text"""

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
    """Definitions, warnings, and runs that do not count"""
    section: str | None = None
    """Key of the title that successive rows share; it is not a column"""
    readings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Section -> the conclusion from its rows, in a sentence"""
    spare: Sequence[str] = ()
    """Keys of the columns that a narrow terminal drops, in this order"""

    def sections(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """The rows by section, in order; a single section without a name if the table has none."""
        sections: list[tuple[str, list[dict[str, Any]]]] = []
        for row in self.rows:
            name = str(row.get(self.section)) if self.section else ""
            if not sections or sections[-1][0] != name:
                sections.append((name, []))
            sections[-1][1].append(row)
        return sections

    def text(self) -> list[list[str]]:
        """The cells as printed."""
        return [self.cells(row) for row in self.rows]

    def cells(self, row: dict[str, Any]) -> list[str]:
        return [cell(row.get(column.key), column) for column in self.columns]

    def is_text(self, column: Column) -> bool:
        """Whether the column contains text, and is therefore aligned to the left."""
        return next((isinstance(row[column.key], str) for row in self.rows if row.get(column.key) is not None), False)


def cell(value: Any, column: Column) -> str:
    """A cell as printed; `-` for a missing value."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
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
