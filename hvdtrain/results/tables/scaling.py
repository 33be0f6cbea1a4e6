"""`hvdtrain results scaling`: does each added host make training faster or slower, by how much, and why."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Sequence

from hvdtrain.results import groups, scaling, scores
from hvdtrain.results.columns import RUNS, Column, label
from hvdtrain.results.comparability import (
    MUST,
    NOTHING,
    WORK,
    Count,
    classes,
    count_of,
    many,
    unrecorded,
    why_alone,
)
from hvdtrain.results.groups import Group
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import MOST_EFFICIENCY, Row
from hvdtrain.results.statistics import Interval, ratio, summary
from hvdtrain.results.tables.columns import SPREAD_NOTE, N, group_notes, key_cells, key_column, varying
from hvdtrain.results.tables.model import Table, number

NOT_COMPARED = "not compared"
SINGLE = "Single runs have no spread, so this may be chance; repeat them with another --seed."
STEPS = (
    "Steps are compared by their time per sample, with its spread within each run and 20 % between runs. Accuracy is "
    "not compared: that takes more runs, with another --seed."
)
BETWEEN_RUNS = 1.2
"""Ratio of step times that runs of equal settings may have in addition to the spread of their steps"""
LESS = 0.02
"""Relative difference of scores from which runs of the same epochs are not equally good"""
BATCHES = {
    "strong": "strong scaling: equal global batch",
    "weak": "weak scaling: equal batch per rank",
    "other": "batches differ or are unknown",
}
VARIES_INSIDE = {"strong": "rank_batch", "weak": "global_batch"}
"""The batch that differs between the points of a curve, so that it cannot name the curve"""
NOTES = (
    "speed-up: T_base / T_n of the training phase with its 95 % interval (Welch, on logarithms); end-to-end speed-up: "
    "with validation, test and checkpoints",
    "efficiency: speed-up x n_base / n; in weak scaling, of samples/s; none if batches differ or are unknown",
    "network limit: 2 (h - 1) / h x 4 bytes x parameters, the least per host of an fp32 all-reduce over h hosts",
)


def table(loaded: Loaded) -> Table:
    """A section for each curve in ascending order from its baseline, with its conclusion."""
    experiments = groups.by(groups.usable(loaded.runs))
    count = scaling.what_varies(experiments)
    rows = scaling.rows(experiments, count)
    curves = [list(curve) for _, curve in itertools.groupby(rows, key=lambda row: row.curve)]
    alone = [curve[0] for curve in curves if len(curve) == 1]
    curves = [curve for curve in curves if len(curve) > 1]
    columns = [
        Column("count", count),
        N,
        RUNS["train_s"],
        Column("speedup", "speed-up", of=Interval),
        Column("efficiency", "efficiency", "%", 100, spread=False, role="detail", of=Interval),
        *(RUNS[name] for name in ("communication_share", "network_bytes_per_step", "limit_bytes_per_step")),
        Column("speedup_end_to_end", "end-to-end speed-up", spread=False, role="detail", of=Interval),
        Column("group", "group", prose=True, role="detail"),
        Column("suspect", "suspect", role="data"),
        *(key_column(name, "data") for name in ("workload", "framework", "strategy", "rate_mbit")),
    ]
    made = Table("scaling", f"Scaling over {count}", columns, [], section="curve")
    settings = curve_settings([*curves, *([row] for row in alone)], count)
    for title, curve in zip(_titles(curves, settings, count), curves, strict=False):
        made.rows += [_cells(row, title) for row in curve]
        made.readings[title] = reading(curve, count)
    if alone:
        for row, words in zip(alone, settings[len(curves) :], strict=True):
            made.rows.append(_cells(row, NOT_COMPARED) | {"group": _words(row.group, words)})
        made.readings[NOT_COMPARED] = _missing([row.group for row in alone], experiments, count)
    made.notes = [SPREAD_NOTE, *NOTES]
    if any(row.speedup is None and row.train_s and row.group is not row.baseline for row in rows):
        made.notes.append("no speed-up for runs that --target ended after different numbers of epochs: see strategies")
    if names := sorted({name for row in rows for name in unrecorded(row.group, row.baseline, MUST[count])}):
        which = ", ".join(map(label, names))
        made.notes.append(f"warning: some runs did not record {which}, which is assumed equal to the baseline's")
    made.notes += group_notes(loaded.runs, experiments)
    return made


def _cells(row: Row, title: str) -> dict[str, object]:
    group = row.group
    return {
        "curve": title,
        "count": int(row.count),
        "n": len(group.values("train_s")),
        "speedup": row.speedup,
        "speedup_end_to_end": row.speedup_end_to_end,
        "efficiency": row.efficiency,
        "limit_bytes_per_step": next(iter(group.values("limit_bytes_per_step")), None),
        **{name: group.statistic(name) for name in ("train_s", "communication_share", "network_bytes_per_step")},
        **key_cells(group, ("workload", "framework", "strategy", "rate_mbit")),
        "suspect": row.suspect,
    }


# --- titles -----------------------------------------------------------------------------------------------------------


def rate_words(mbit: float | None) -> str:
    """`10 Mbit/s`, or `no throttle` for None and NaN."""
    return "no throttle" if mbit is None or math.isnan(mbit) else f"{mbit:g} Mbit/s"


def settings_of(experiments: Sequence[Group], skip: Sequence[str] = ()) -> list[list[str]]:
    """For each group, the settings that differ between the groups, as `threads per rank 2`; without hosts and rate,
    strategy and framework, and `skip`. Groups of other work differ in it, and need no other settings."""
    skipped = ("hosts", "rate_mbit", "strategy", "framework", *skip)
    work = [name for name in groups.varying(experiments) if name in WORK]
    words = []
    for group in experiments:
        alike = [other for other in experiments if all(other.key[name] == group.key[name] for name in work)]
        names = [*work, *(name for name in varying(alike) if name not in (*skipped, *work))]
        cells = key_cells(group, names)
        words.append([f"{label(name)} {value}" for name, value in cells.items() if value is not None])
    return words


def curve_settings(curves: Sequence[Sequence[Row]], count: Count) -> list[list[str]]:
    """For each curve, the settings that differ between the curves, without those that differ inside it."""
    last = [curve[-1].group for curve in curves]
    inside = ["ranks_per_host"] if count == "ranks" else []
    by_kind = {kind: settings_of(last, [name, *inside]) for kind, name in {**VARIES_INSIDE, "other": ""}.items()}
    return [by_kind[curve[-1].kind][place] for place, curve in enumerate(curves)]


def _titles(curves: Sequence[Sequence[Row]], settings: Sequence[Sequence[str]], count: Count) -> list[str]:
    """A different title for each curve, from its settings and its baseline."""
    titles: list[str] = []
    for place, (curve, words) in enumerate(zip(curves, settings, strict=False), start=1):
        base = _baseline(curve[0].group, curve, count)
        title = f"{_words(curve[-1].group, words)} ({BATCHES[curve[-1].kind]}; baseline {base})"
        titles.append(title if title not in titles else f"{title} #{place}")
    return titles


def _words(group: Group, settings: Sequence[str]) -> str:
    rate = [rate_words(group.key["rate_mbit"])] if group.key["hosts"] != 1 else []
    return ", ".join([*rate, str(group.key["strategy"]), str(group.key["framework"]), *settings])


def _baseline(base: Group, curve: Sequence[Row], count: Count) -> str:
    """The size of the baseline, and its other differences from the curve."""
    busy = f" with {base.key['fill']:g} busy neighbours" if base.key["fill"] else ""
    words = [many(curve[0].count, count) + busy]
    for name in ("framework", "strategy", "device", "backend", "launcher"):
        if base.key[name] not in (None, curve[-1].group.key[name]) and (name != "backend" or curve[0].count > 1):
            words.append(str(base.key[name]))
    names = [name for name in groups.varying([base, curve[-1].group]) if name in base.settings]
    return ", ".join([*words, *(f"{name} {base.value(name)}" for name in names)])


# --- conclusions ------------------------------------------------------------------------------------------------------


def _missing(alone: Sequence[Group], experiments: Sequence[Group], count: Count) -> str:
    """Why the largest set of similar groups is compared with none, and the command whose run it lacks."""
    timed = [group for group in alone if count_of(group, count) and group.values("train_s")]
    if not timed:
        return f"{NOTHING}: these runs have no times."
    group = max(classes(timed, MUST[count]), key=len)[0]
    sentence = why_alone(group, experiments, count)
    if more := len(alone) - 1:
        sentence += f" {more} more group{'s are' if more > 1 else ' is'} not compared; see `hvdtrain results table`."
    folder, per_host = group.column("run_dir")[0], group.key["ranks_per_host"] or 1
    hosts = [*frame.manifest(folder).hosts, "OTHER"][: 2 if count_of(group, count) == 1 and count == "hosts" else 1]
    slots = per_host if count == "hosts" else 2 if count_of(group, count) == 1 else 1
    places = ",".join(f"{host}:{slots:g}" for host in hosts)
    command = shlex.join(["hvdtrain", "launch", "mpirun", "-H", places, *frame.program(folder)])
    return f"{sentence} Such a run: `{command}`"


def reading(curve: Sequence[Row], count: Count) -> str:
    """The conclusion from a curve in plain words."""
    one = count[:-1]
    timed = [row for row in curve if row.train_s is not None]
    if len(timed) < 2 or timed[0] is not curve[0]:
        return f"Only one number of {count} was timed, so scaling is unknown."
    steps = [_change(before, after) for before, after in itertools.pairwise(timed)]
    grown, last = timed[1:], timed[-1]
    against = {_change(timed[0], row) for row in grown}
    worse = [row for row in grown if _learns_less(row, timed[0])]
    pairs = [*itertools.pairwise(timed), *((timed[0], row) for row in grown)]
    by_steps = any(_by_steps(*pair) for pair in pairs)
    what = "steps" if by_steps else "the same epochs" if worse else "training"
    single = any(row.train_s.n < 2 for row in timed if row.train_s)
    if set(steps) == {"slower"}:
        conclusion = f"Each added {one} makes {what} slower"
    elif set(steps) == {"faster"}:
        conclusion = f"Each added {one} makes {what} faster"
    elif against == {"slower"}:
        conclusion = f"Any number of {count} above {timed[0].count:g} makes {what} slower"
    elif "faster" in against:
        best = min(timed, key=lambda row: row.train_s.mean if row.train_s else math.inf)
        verb = "is fastest" if what == "training" else "take least time"
        conclusion = f"{what.capitalize()} {verb} with {many(best.count, count)}"
        turn = next((row for row, step in zip(timed[1:], steps, strict=True) if step == "slower"), None)
        if close := [f"{row.count:g}" for row in timed if row is not best and _change(best, row) != "slower"]:
            conclusion += f", but {' and '.join(close)} are not clearly slower"
        elif turn and turn.count > best.count:
            conclusion += f"; from {many(turn.count, count)}, each added {one} makes it slower"
    elif single:
        conclusion = f"It is unclear whether an added {one} makes training faster"
    else:
        conclusion = f"No added {one} makes training faster beyond the spread of the runs"
    facts = [_times(row, timed[0], count) for row in grown]
    if (share := last.group.statistic("communication_share")) is not None:
        facts.append(f"with {many(last.count, count)}, waiting for the exchange is {100 * share.mean:.0f} % of a step")
    doubt = f" {STEPS}" if by_steps else f" {SINGLE}" if single else ""
    if worse:
        scored = [f"{_score(row)} with {many(row.count, count)}" for row in (timed[0], *worse)]
        doubt += (
            f" But they learn less: {', '.join(scored)}; `hvdtrain results accuracy --target` compares times to one."
        )
    if doubted := [row for row in grown if row.suspect]:
        return f"{suspicion(doubted, count)} Measured: {'; '.join(facts)}.{doubt}"
    return f"{conclusion}: {'; '.join(facts)}.{doubt}"


def _learns_less(row: Row, base: Row) -> bool:
    """Whether the mean score is worse than that of the baseline, beyond the spread of the runs."""
    here, there = row.group.statistic("test_score"), base.group.statistic("test_score")
    names = {*row.group.values("primary_metric"), *base.group.values("primary_metric")}
    if here is None or there is None or min(here.n, there.n) < 2 or len(names) != 1:
        return False
    declared = scores.of_run(row.group.values("scores")[0])[names.pop()]
    less = declared.better(there.mean, here.mean) and abs(here.mean - there.mean) > LESS * abs(there.mean)
    return less and faster_or_slower(ratio(here, there)) != "unclear"


def _score(row: Row) -> str:
    (name, *_), (declared, *_) = (row.group.values(column) for column in ("primary_metric", "scores"))
    score, mean = scores.of_run(declared)[name], row.group.statistic("test_score")
    return f"test {score.label} {scores.words(score, float(f'{mean.mean if mean else math.nan:.3g}'))}"


def suspicion(doubted: Sequence[Row], count: Count) -> str:
    """A warning about efficiencies above 100 %, with the likely causes."""
    efficiency, n = max((row.efficiency.mean, row.count) for row in doubted if row.efficiency)
    times = doubted[0].baseline.values("train_s")
    return (
        f"Suspect: an efficiency of {100 * efficiency:.0f} % with {many(n, count)} is more than sharing the work can "
        f"explain (the limit is {100 * MOST_EFFICIENCY:.0f} %). Likely causes: a busy machine during the baseline (its "
        f"runs took {min(times):.3g} to {max(times):.3g} s); more threads than cores, which spin while they wait; "
        "hosts of unequal speed; a smaller batch per rank that fits the cache."
    )


def _change(before: Row, after: Row) -> str:
    return faster_or_slower(_by_steps(before, after) or ratio(before.train_s, after.train_s))


def _by_steps(before: Row, after: Row) -> Interval | None:
    """The speed-up in samples per second, of any run of one side over any run of the other, from the spread of steps.

    None if it is not needed, because the runs' times are clear, or not clear itself, or the runs' means disagree.
    """
    runs = ratio(before.train_s, after.train_s)
    if runs is None or faster_or_slower(runs) != "unclear":
        return None
    seconds = [
        [summary(each / (row.group.key["global_batch"] or math.nan) for each in blocks) for blocks in found]
        for row in (before, after)
        if (found := row.group.values("step_blocks"))
    ]
    ratios = list(itertools.starmap(ratio, itertools.product(*seconds))) if len(seconds) == 2 else []
    spans = [each.span for each in ratios if each and each.span]
    if not spans or len(spans) < len(ratios):
        return None
    low, high = min(low for low, _ in spans) / BETWEEN_RUNS, max(high for _, high in spans) * BETWEEN_RUNS
    return Interval(runs.mean, low, high) if min(runs.mean, low) > 1 or max(runs.mean, high) < 1 else None


def faster_or_slower(speedup: Interval | None) -> str:
    """faster, slower, or unclear if the 95 % interval of the speed-up contains 1, or a single run has no interval."""
    if speedup is None or speedup.span is None:
        return "unclear"
    low, high = speedup.span
    return "faster" if low > 1 else "slower" if high < 1 else "unclear"


def _times(row: Row, base: Row, count: Count) -> str:
    here, there = row.train_s, base.train_s
    if row.speedup is None or here is None or there is None:
        return f"{many(row.count, count)}: not measured"
    per_added = f"{(here.mean - there.mean) / (row.count - base.count):+.3g} s per added {count[:-1]}"
    factor = row.speedup.mean
    took = f"{number(1 / factor)} x as long"
    words = f"are {number(factor)} x as fast" if factor >= 1 else f"take {took}"
    if (steps := _by_steps(base, row)) and steps.span:
        least, most = (number(1 / bound) for bound in reversed(steps.span))
        words = f"took {took}, and for each sample {least} to {most} x as long"
    elif _change(base, row) == "unclear":
        why = "in single runs" if min(here.n, there.n) < 2 else "which is within the spread of the runs"
        words = f"took {took}, {why}"
    return f"{many(row.count, count)} {words} ({per_added})"
