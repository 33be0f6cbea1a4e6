"""`hvdtrain results compare A B`: whether B is worse than A, experiment by experiment and figure by figure.

Experiments are the same if their groups agree in all that both have recorded. Two single groups are compared even so
if they are alike but for what one would compare (strategy, hosts, ...). A figure is worse if B's mean is worse than A's
by more than the threshold AND the spread of the runs does not explain it: the 95 % interval of the difference of the
means (Welch) does not hold 0. Beyond the threshold but within the spread it is unclear, which is no failure: more
repeats would tell. With a single run on a side there is no spread, and the threshold alone decides; that is said.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from hvdtrain.results import alike, groups, missing, scores
from hvdtrain.results.groups import Group
from hvdtrain.results.load import Loaded
from hvdtrain.results.statistics import Statistic, difference, summary
from hvdtrain.results.table import Column, Table, cell
from hvdtrain.results.tables import FIGURES, apart, key_cells, key_column, left_out, processors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

LESS_IS_BETTER = {
    "train_s": True,
    "end_to_end_s": True,
    "samples_per_s": False,
    "energy_j": True,
    "peak_rss_bytes": True,
}
"""And the primary metrics, as they say"""
VERDICTS = ("worse", "unclear", "same", "better")


def judge(before: Statistic, after: Statistic, threshold: float, *, less_is_better: bool) -> tuple[float | None, str]:
    """The change, relative to before (None if before is 0), and the verdict of the rule at the head of this file.

    `threshold` is a fraction of 1, and a change above 0 is more.
    """
    apart_ = difference(after, before)
    change = apart_.mean / abs(before.mean) if before.mean else None
    if apart_.mean == 0 or (change is not None and abs(change) <= threshold):
        return change, "same"
    if change is None or (apart_.span and apart_.span[0] <= 0 <= apart_.span[1]):
        return change, "unclear"
    return change, "worse" if (apart_.mean > 0) == less_is_better else "better"


def pairs(before: Loaded, after: Loaded) -> list[tuple[Group, Group]]:
    """Groups of the same experiment; two single groups are a pair if they are alike. Raises Failure (65)."""
    a, b = (groups.by(groups.usable(loaded.runs)) for loaded in (before, after))
    roots = [_names(loaded) for loaded in (before, after)]
    if len(a) == len(b) == 1:
        if names := alike.apart(a[0], b[0], alike.CHOSEN):
            differ = alike.words(a[0], b[0], names)
            more = missing.again(b[0], a[0], names)
            more = f"; missing is B like A: `{more}`" if more else ""
            raise Failure(f"nothing to compare: {roots[0]} and {roots[1]} differ in {differ}{more}", exits.BAD_DATA)
        return [(a[0], b[0])]
    found = []
    for group in a:
        fitting = [other for other in b if not _different(group, other)]
        exact = [other for other in fitting if other.key == group.key]
        if len(fitting) == 1 or exact:
            found.append((group, (exact or fitting)[0]))
    if not found:
        what = f"{roots[0]} has {len(a)} groups of complete runs and {roots[1]} has {len(b)}, none of them the same"
        near = min(((x, y) for x in a for y in b), key=lambda pair: len(_different(*pair)), default=None)
        more = f"; the nearest differ in {alike.words(*near, _different(*near))}" if near else ""
        raise Failure(f"nothing to compare: {what}{more}; see `hvdtrain results table` of each", exits.BAD_DATA)
    return found


def _different(a: Group, b: Group) -> list[str]:
    """Columns and settings in which the groups differ; one that either has not recorded is none."""
    names = [name for name in a.key if name not in ("settings", "rate_mbit")]
    inner = [name for name in a.settings if name in b.settings and a.settings[name] != b.settings[name]]
    return alike.differing(a, b, names) + inner + ["rate_mbit"] * (a.key["rate_mbit"] != b.key["rate_mbit"])


def compare(before: Loaded, after: Loaded, threshold: float) -> tuple[Table, bool]:
    """The table, and whether something is worse. Raises Failure (65) if nothing can be compared."""
    found = pairs(before, after)
    shown = apart([a for a, _ in found])
    both = pd.concat([before.runs, after.runs])
    known, figures = scores.of(both), [(FIGURES[name], less) for name, less in LESS_IS_BETTER.items()]
    for name, column in zip(scores.primary_metrics(both), scores.figures(both), strict=True):
        figures.append((column, not known[name].higher_is_better))
    signed = {f"test_{name}" for name in scores.primary_metrics(both) if known[name].higher_is_better is None}
    rows = []
    for a, b in found:
        for column, less in figures:
            old, new = a.statistic(column.key), b.statistic(column.key)
            if old is None or new is None:
                continue
            before_, after_ = (
                (summary(map(abs, side.values(column.key))) or told) if column.key in signed else told
                for side, told in ((a, old), (b, new))
            )
            change, verdict = judge(before_, after_, threshold, less_is_better=less)
            verdict += " (single run)" if min(old.n, new.n) < 2 and verdict in ("worse", "better") else ""
            row = key_cells(a, shown) | {"figure": column.heading, "change": change, "verdict": verdict}
            rows.append(row | {"before": cell(old, column), "after": cell(new, column), "n": f"{old.n}, {new.n}"})
    if not rows:
        raise Failure("nothing to compare: no figure was measured on both sides", exits.BAD_DATA)
    worse = any(row["verdict"].startswith("worse") for row in rows)
    columns = [*map(key_column, shown), Column("figure", "figure"), Column("before", "A"), Column("after", "B")]
    columns += [Column("n", "n"), Column("change", "change", "%", 100), Column("verdict", "verdict")]
    said = {verdict: sum(row["verdict"].startswith(verdict) for row in rows) for verdict in VERDICTS}
    notes = [
        f"B against A: {', '.join(f'{count} {verdict}' for verdict, count in said.items() if count)}",
        f"worse: by more than {100 * threshold:g} %, and the 95 % interval of the difference of the means (Welch) does "
        "not hold 0; unclear: by more, but the spread may explain it; single run: no spread, so the threshold decides",
        *_differences(found),
        *processors([group for pair in found for group in pair]),
        *_unpaired(before, after, found),
        *left_out(before.runs),
        *left_out(after.runs),
    ]
    return Table("compare", f"A: {_names(before)}   B: {_names(after)}", columns, rows, notes, spare=("n",)), worse


def _names(loaded: Loaded) -> str:
    return ", ".join(map(str, loaded.roots))


def _differences(found: Sequence[tuple[Group, Group]]) -> list[str]:
    """Names the columns in which the two groups of a compared pair differ."""
    names = sorted({name for pair in found for name in _different(*pair)})
    notes = [f"careful: A and B differ in {', '.join(names)}"] if names else []
    unknown = sorted({name for a, b in found for name in alike.unrecorded(a, b, alike.CHOSEN)})
    told = ", ".join(key_column(name).label for name in unknown)
    return notes + ([f"careful: {told} recorded on one side only, and taken for equal"] if unknown else [])


def _unpaired(before: Loaded, after: Loaded, found: Sequence[tuple[Group, Group]]) -> list[str]:
    sides = {"A": before, "B": after}
    paired = {side: len({id(pair[place]) for pair in found}) for place, side in enumerate(sides)}
    more = {side: len(groups.by(groups.usable(each.runs))) - paired[side] for side, each in sides.items()}
    return [f"{count} groups are in {side} only" for side, count in more.items() if count]
