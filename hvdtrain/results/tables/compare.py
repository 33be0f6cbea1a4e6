"""`hvdtrain results compare A B`: whether B is worse than A, for each experiment and measurement.

Two groups are the same experiment if they agree in everything that both have recorded. If each side has a single group,
these are compared if they differ only in strategy, framework, hosts, ranks or settings. A measurement is worse
if B's mean is worse than A's by more than the threshold AND the spread of the runs does not explain it: Welch's test
rejects equal means at 5 %, corrected for the number of comparisons (Holm). So equal runs are called worse in at most
5 % of the cases, however many groups there are. Beyond the threshold but within the spread, or without a spread because
a side is a single run, it is unclear, which is not a failure; more repeats would decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import RUNS, Column, label
from hvdtrain.results.comparability import CHOSEN, SOFTWARE, describe, differing, obstacles, unrecorded
from hvdtrain.results.groups import Group
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import LEVEL, Statistic, holm, p_value, summary
from hvdtrain.results.tables.columns import N, key_cells, key_columns, left_out, processors, score_columns, varying
from hvdtrain.results.tables.model import Table, cell
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


def judge(
    before: Statistic, after: Statistic, threshold: float, p: float | None, *, less_is_better: bool
) -> tuple[float | None, str]:
    """The change relative to `before` (None if that is 0), and the verdict; see the module's docstring.

    `threshold` is a fraction of 1, `p` the corrected p value. A positive change is an increase.
    """
    delta = after.mean - before.mean
    change = delta / abs(before.mean) if before.mean else None
    if delta == 0 or (change is not None and abs(change) <= threshold):
        return change, "same"
    if p is None:
        return change, "unclear (single run)"
    if change is None or p > 1 - LEVEL:
        return change, "unclear"
    return change, "worse" if (delta > 0) == less_is_better else "better"


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
        fitting = [other for other in b if not set(_different(group, other)) - set(SOFTWARE)]
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
    first = [a for a, _ in compared]
    settings = key_columns(first, varying(first))
    both = pd.concat([before.runs, after.runs])
    known, figures = scores.of(both), [(RUNS[name], less) for name, less in LESS_IS_BETTER.items()]
    primary = scores.primary(both)
    for name, column in zip(primary, score_columns(both), strict=True):
        figures.append((column, not known[name].higher_is_better))
    signed = {f"test_{name}" for name in primary if known[name].higher_is_better is None}
    found = []
    for a, b in compared:
        keys = key_cells(a, [one.key for one in settings])
        for column, less in figures:
            old, new = a.statistic(column.key), b.statistic(column.key)
            if old is None or new is None:
                continue
            sizes = (old, new)
            if column.key in signed:  # the best value is 0
                sizes = tuple(summary(map(abs, side.values(column.key))) for side in (a, b))  # type: ignore[assignment]
            row = {"figure": column.heading, "before": cell(old, column), "after": cell(new, column)}
            found.append((keys | row | {"n": f"{old.n}, {new.n}"}, sizes, less, p_value(*sizes)))
    if not found:
        raise Failure("nothing to compare: no measurement exists on both sides", exits.BAD_DATA)
    tested = [p for *_, p in found if p is not None]
    corrected, rows = iter(holm(tested)), list[dict[str, Any]]()
    for row, sizes, less, p in found:
        verdict = judge(*sizes, threshold, None if p is None else next(corrected), less_is_better=less)
        rows.append(row | {"change": verdict[0], "verdict": verdict[1]})
    worse = any(row["verdict"] == "worse" for row in rows)
    columns = [Column("figure", "measurement"), Column("before", "A"), Column("after", "B")]
    columns += [Column("change", "change", "%", 100), Column("verdict", "verdict"), N, *settings]
    counts = {verdict: sum(row["verdict"].startswith(verdict) for row in rows) for verdict in VERDICTS}
    notes = [
        f"B compared with A: {', '.join(f'{count} {verdict}' for verdict, count in counts.items() if count)}",
        f"worse: by more than {100 * threshold:g} %, and Welch's test rejects equal means at 5 %, corrected for "
        f"{len(tested)} comparisons (Holm); unclear: by more, but within the spread, or a single run, which has none",
        *_differences(compared),
        *processors([group for pair in compared for group in pair]),
        *_unpaired(before, after, compared),
        *left_out(before.runs),
        *left_out(after.runs),
    ]
    apart = [one.key for one in settings if one.role == "setting"]
    return Table("compare", f"A: {_names(before)}   B: {_names(after)}", columns, rows, notes, apart=apart), worse


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
