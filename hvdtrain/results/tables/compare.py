"""`hvdtrain results compare A B`: whether B is worse than A, for each experiment and measurement.

Two groups are the same experiment if they agree in everything that both have recorded. If each side has a single group,
these are compared if they differ only in strategy, framework, hosts, ranks or settings. A measurement is worse
if B's mean is worse than A's by more than the threshold AND the spread of the runs does not explain it: the 95 %
interval of the difference of the means (Welch) excludes 0. Beyond the threshold but within the spread it is unclear,
which is not a failure; more repeats would decide. A single run has no spread, so the threshold alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import label
from hvdtrain.results.comparability import CHOSEN, describe, differing, obstacles, unrecorded
from hvdtrain.results.groups import Group
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import Statistic, difference, summary
from hvdtrain.results.tables.columns import (
    FIGURES,
    N,
    key_cells,
    key_column,
    left_out,
    processors,
    score_columns,
    varying,
)
from hvdtrain.results.tables.model import Column, Table, cell
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

LESS_IS_BETTER = {
    "train_s": True,
    "end_to_end_s": True,
    "samples_per_s": False,
    "energy_j": True,
    "peak_rss_bytes": True,
}
"""Primary scores have their own direction"""
VERDICTS = ("worse", "unclear", "same", "better")


def judge(before: Statistic, after: Statistic, threshold: float, *, less_is_better: bool) -> tuple[float | None, str]:
    """The change relative to `before` (None if that is 0), and the verdict; see the module's docstring.

    `threshold` is a fraction of 1. A positive change is an increase.
    """
    delta = difference(after, before)
    change = delta.mean / abs(before.mean) if before.mean else None
    if delta.mean == 0 or (change is not None and abs(change) <= threshold):
        return change, "same"
    if change is None or (delta.span and delta.span[0] <= 0 <= delta.span[1]):
        return change, "unclear"
    return change, "worse" if (delta.mean > 0) == less_is_better else "better"


def pairs(before: Loaded, after: Loaded) -> list[tuple[Group, Group]]:
    """Groups of the same experiment, or the only group of each side if they are comparable. Raises Failure (65)."""
    a, b = (groups.by(groups.usable(loaded.runs)) for loaded in (before, after))
    roots = [_names(loaded) for loaded in (before, after)]
    if len(a) == len(b) == 1:
        if names := obstacles(a[0], b[0], CHOSEN):
            what = f"{roots[0]} and {roots[1]} differ in {describe(a[0], b[0], names)}"
            raise Failure(f"nothing to compare: {what}", exits.BAD_DATA)
        return [(a[0], b[0])]
    matched = []
    for group in a:
        fitting = [other for other in b if not _different(group, other)]
        exact = [other for other in fitting if other.key == group.key]
        if len(fitting) == 1 or exact:
            matched.append((group, (exact or fitting)[0]))
    if not matched:
        what = f"{roots[0]} has {len(a)} groups of complete runs and {roots[1]} has {len(b)}, but they share none"
        near = min(((x, y) for x in a for y in b), key=lambda pair: len(_different(*pair)), default=None)
        more = f"; the most similar groups differ in {describe(*near, _different(*near))}" if near else ""
        raise Failure(f"nothing to compare: {what}{more}; hint: see `hvdtrain results table`", exits.BAD_DATA)
    return matched


def _different(a: Group, b: Group) -> list[str]:
    """Columns and settings in which the groups differ, if both have recorded them."""
    names = [name for name in a.key if name not in ("settings", "rate_mbit")]
    inner = [name for name in a.settings if name in b.settings and a.settings[name] != b.settings[name]]
    return differing(a, b, names) + inner + ["rate_mbit"] * (a.key["rate_mbit"] != b.key["rate_mbit"])


def compare(before: Loaded, after: Loaded, threshold: float) -> tuple[Table, bool]:
    """The table, and whether anything is worse. Raises Failure (65) if nothing can be compared."""
    compared = pairs(before, after)
    shown = varying([a for a, _ in compared])
    both = pd.concat([before.runs, after.runs])
    known, figures = scores.of(both), [(FIGURES[name], less) for name, less in LESS_IS_BETTER.items()]
    primary = scores.primary(both)
    for name, column in zip(primary, score_columns(both), strict=True):
        figures.append((column, not known[name].higher_is_better))
    signed = {f"test_{name}" for name in primary if known[name].higher_is_better is None}
    rows = []
    for a, b in compared:
        for column, less in figures:
            old, new = a.statistic(column.key), b.statistic(column.key)
            if old is None or new is None:
                continue
            sizes = (old, new)
            if column.key in signed:  # the best value is 0
                sizes = tuple(summary(map(abs, side.values(column.key))) for side in (a, b))  # type: ignore[assignment]
            change, verdict = judge(*sizes, threshold, less_is_better=less)
            verdict += " (single run)" if min(old.n, new.n) < 2 and verdict in ("worse", "better") else ""
            row = key_cells(a, shown) | {"figure": column.heading, "change": change, "verdict": verdict}
            rows.append(row | {"before": cell(old, column), "after": cell(new, column), "n": f"{old.n}, {new.n}"})
    if not rows:
        raise Failure("nothing to compare: no measurement exists on both sides", exits.BAD_DATA)
    worse = any(row["verdict"].startswith("worse") for row in rows)
    columns = [*map(key_column, shown), Column("figure", "measurement"), Column("before", "A"), Column("after", "B")]
    columns += [N, Column("change", "change", "%", 100), Column("verdict", "verdict")]
    counts = {verdict: sum(row["verdict"].startswith(verdict) for row in rows) for verdict in VERDICTS}
    notes = [
        f"B compared with A: {', '.join(f'{count} {verdict}' for verdict, count in counts.items() if count)}",
        f"worse: by more than {100 * threshold:g} %, and the 95 % interval of the difference of the means (Welch) "
        "excludes 0; unclear: by more, but within the spread; single run: no spread, so the threshold decides",
        *_differences(compared),
        *processors([group for pair in compared for group in pair]),
        *_unpaired(before, after, compared),
        *left_out(before.runs),
        *left_out(after.runs),
    ]
    return Table("compare", f"A: {_names(before)}   B: {_names(after)}", columns, rows, notes, spare=("n",)), worse


def _names(loaded: Loaded) -> str:
    return ", ".join(map(str, loaded.roots))


def _differences(compared: Sequence[tuple[Group, Group]]) -> list[str]:
    """Notes on the settings in which compared groups differ."""
    names = sorted({name for pair in compared for name in _different(*pair)})
    notes = [f"warning: A and B differ in {', '.join(map(label, names))}"] if names else []
    missing = sorted({name for a, b in compared for name in unrecorded(a, b, CHOSEN)})
    if missing:
        notes.append(f"warning: recorded on one side only, and assumed equal: {', '.join(map(label, missing))}")
    return notes


def _unpaired(before: Loaded, after: Loaded, compared: Sequence[tuple[Group, Group]]) -> list[str]:
    notes = []
    for place, (side, loaded) in enumerate((("A", before), ("B", after))):
        paired = len({id(pair[place]) for pair in compared})
        if more := len(groups.by(groups.usable(loaded.runs))) - paired:
            notes.append(f"groups in {side} only: {more}")
    return notes
