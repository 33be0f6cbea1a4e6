"""`hvdtrain results scaling`: does each added host make training faster or slower, by how much, and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hvdtrain.results import groups, scaling
from hvdtrain.results.columns import label
from hvdtrain.results.comparability import MUST, Baseline, Count, many, unrecorded, why_alone
from hvdtrain.results.groups import Group, short
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import MOST_EFFICIENCY, Row
from hvdtrain.results.statistics import ratio
from hvdtrain.results.tables.columns import FIGURES, SPREAD_NOTE, N, common, key_cells, left_out, varying
from hvdtrain.results.tables.model import Column, Table, number

SPARE = ("limit_bytes_per_step", "network_bytes_per_step", "speedup_end_to_end", "communication_share", "n")
EFFICIENCY = {
    "strong": "efficiency (strong scaling, equal global batch): T_base n_base / (T_n n)",
    "weak": "efficiency (weak scaling, equal batch per rank): (samples/s / n) / (samples/s of the baseline / n_base)",
    "other": "no efficiency, because neither the global batch nor the batch per rank is known to equal the baseline's",
}
BATCHES = {
    "strong": "strong scaling: equal global batch",
    "weak": "weak scaling: equal batch per rank",
    "other": "batches differ or are unknown",
}
VARIES_INSIDE = {"strong": "rank_batch", "weak": "global_batch"}
"""The batch that differs between the points of a curve, so that it cannot name the curve"""
NOTES = (
    "train: seconds of the training phase; speed-up: T_base / T_n of the training phase with its 95 % interval (Welch, "
    "on logarithms); end-to-end speed-up: with validation, test and checkpoints",
    "waiting for exchange: share of a step that rank 0 waits after backward",
    "network per step: bytes of the busiest host's NIC (sent or received) including headers; network limit: "
    "2 (h - 1) / h x 4 bytes x parameters, the least that each host sends in an fp32 all-reduce over h hosts",
)


def table(loaded: Loaded, count: Count | None = None, baseline: Baseline | None = None) -> Table:
    """A section for each curve in ascending order from its baseline, with its conclusion. Raises Failure (2)."""
    found = groups.by(groups.usable(loaded.runs))
    count = count or scaling.what_varies(found)
    rows = scaling.rows(found, count, baseline)
    curves = [list(curve) for _, curve in itertools.groupby(rows, key=lambda row: row.curve)]
    columns = [
        Column("count", count),
        N,
        FIGURES["train_s"],
        Column("speedup", "speed-up"),
        Column("speedup_end_to_end", "end-to-end speed-up", spread=False),
        Column("efficiency", "efficiency", "%", 100, spread=False),
        *(FIGURES[name] for name in ("communication_share", "network_bytes_per_step", "limit_bytes_per_step")),
        *([Column("suspect", "suspect")] if any(row.suspect for row in rows) else []),
    ]
    made = Table("scaling", f"Scaling over {count}", columns, [], section="curve", spare=SPARE)
    for title, curve in zip(_titles(curves, count), curves, strict=True):
        made.rows += [_cells(row, title) for row in curve]
        alone = len(curve) == 1 and curve[0].count and curve[0].group.values("train_s")
        made.readings[title] = why_alone(curve[0].group, found, count, baseline) if alone else reading(curve, count)
    kinds = {curve[-1].kind for curve in curves if len(curve) > 1}
    made.notes = [SPREAD_NOTE, *NOTES, *(note for kind, note in EFFICIENCY.items() if kind in kinds)]
    if any(row.speedup is None and row.train_s and row.group is not row.baseline for row in rows):
        made.notes.append("no speed-up for runs that --target ended after different numbers of epochs: see strategies")
    if names := sorted({name for row in rows for name in unrecorded(row.group, row.baseline, MUST[count])}):
        which = ", ".join(map(label, names))
        made.notes.append(f"warning: some runs did not record {which}, which is assumed equal to the baseline's")
    made.notes += [*common(found, ["hosts"]), *left_out(loaded.runs)]
    lonely = count == "hosts" and any(len(curve) == 1 for curve in curves)
    if lonely and len({group.key["ranks_per_host"] for group in found}) > 1:
        made.notes.append("use --count ranks to compare runs with different ranks on the same hosts")
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
        **{name: short(name, group.key[name]) for name in ("framework", "strategy", "rate_mbit")},
        "suspect": row.suspect,
    }


# --- titles -----------------------------------------------------------------------------------------------------------


def rate_words(mbit: float | None) -> str:
    """`10 Mbit/s`, or `no throttle` for None and NaN."""
    return "no throttle" if mbit is None or math.isnan(mbit) else f"{mbit:g} Mbit/s"


def settings_of(found: Sequence[Group], skip: Sequence[str] = ()) -> list[list[str]]:
    """For each group, the settings that differ between the groups, as `threads per rank 2`; without hosts and rate,
    strategy and framework, and `skip`."""
    shown = ("hosts", "ranks_per_host", "rate_mbit", "strategy", "framework", *skip)
    names = [name for name in varying(found) if name not in shown]
    cells = [key_cells(group, names) for group in found]
    return [[f"{label(name)} {value}" for name, value in each.items() if value is not None] for each in cells]


def curve_settings(curves: Sequence[Sequence[Row]]) -> list[list[str]]:
    """For each curve, the settings that differ between the curves, without the batch that differs inside it."""
    last = [curve[-1].group for curve in curves]
    by_kind = {kind: settings_of(last, [name]) for kind, name in {**VARIES_INSIDE, "other": ""}.items()}
    return [by_kind[curve[-1].kind][place] for place, curve in enumerate(curves)]


def _titles(curves: Sequence[Sequence[Row]], count: Count) -> list[str]:
    """A different title for each curve, from its settings and its baseline."""
    titles: list[str] = []
    for place, (curve, settings) in enumerate(zip(curves, curve_settings(curves), strict=True), start=1):
        group, base = curve[-1].group, curve[0].group
        words = [str(group.key["strategy"]), str(group.key["framework"]), *settings]
        if len(curve) == 1:
            title = f"{', '.join(words)}, only {many(curve[0].count, count)}"
        else:
            words.insert(0, rate_words(group.key["rate_mbit"]))
            title = f"{', '.join(words)} ({BATCHES[curve[-1].kind]}; baseline {_baseline(base, curve, count)})"
        titles.append(title if title not in titles else f"{title} #{place}")
    return titles


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


def reading(curve: Sequence[Row], count: Count) -> str:
    """The conclusion from a curve in plain words."""
    one = count[:-1]
    timed = [row for row in curve if row.train_s is not None]
    if len(timed) < 2 or timed[0] is not curve[0]:
        return f"Only one number of {count} was timed, so scaling is unknown."
    steps = [_change(before.group, after.group) for before, after in itertools.pairwise(timed)]
    last = timed[-1]
    grown = [row for row in timed[1:] if row.count > timed[0].count]
    if not grown:
        return f"The number of {count} is equal; the speed-up compares other settings."
    against = {_change(timed[0].group, row.group) for row in grown}
    if set(steps) == {"slower"}:
        conclusion = f"Each added {one} makes training slower"
    elif set(steps) == {"faster"}:
        conclusion = f"Each added {one} makes training faster"
    elif set(steps) == {"unclear"}:
        conclusion = f"No added {one} makes a difference beyond the spread of the runs"
    elif against == {"slower"}:
        conclusion = f"Any number of {count} above {timed[0].count:g} makes training slower"
    else:
        best, fastest_s = timed[0], math.inf
        for row in timed:
            if row.train_s and row.train_s.mean < fastest_s:
                best, fastest_s = row, row.train_s.mean
        conclusion = f"Training is fastest with {many(best.count, count)}"
        turn = next((row for row, step in zip(timed[1:], steps, strict=True) if step == "slower"), None)
        if turn and turn.count > best.count:
            conclusion += f"; from {many(turn.count, count)}, each added {one} makes it slower"
    facts = [_times(row, timed[0], count) for row in grown]
    if (share := last.group.statistic("communication_share")) is not None:
        facts.append(f"with {many(last.count, count)}, waiting for the exchange is {100 * share.mean:.0f} % of a step")
    single = any(len(row.group.values("train_s")) < 2 for row in timed)
    doubt = " Some points are single runs, so their spread is unknown." if single else ""
    if doubted := [row for row in grown if row.suspect]:
        return f"{suspicion(doubted, count)} Measured: {'; '.join(facts)}.{doubt}"
    return f"{conclusion}: {'; '.join(facts)}.{doubt}"


def suspicion(doubted: Sequence[Row], count: Count) -> str:
    """Possible causes of an efficiency above 100 %. Causes that the records support come first."""
    base = doubted[0].baseline
    kind, n, efficiency = max(
        ((row.kind, row.count, row.efficiency.mean) for row in doubted if row.efficiency), key=lambda each: each[2]
    )
    times = base.values("train_s")
    cores, threads = base.key["cores"], (base.key["threads"] or 0) * (base.key["ranks_per_host"] or 0)
    causes = {
        "more threads than cores, which spin while they wait": (
            f"{threads:g} threads on {cores:g} cores" if cores and threads > cores else ""
        ),
        "a machine that was busy during the baseline": (
            f"its runs took {min(times):.3g} to {max(times):.3g} s" if max(times) > 1.2 * min(times) else ""
        ),
        "hosts of unequal speed": "",
    }
    if kind == "strong":
        causes["a smaller batch per rank, which fits the cache"] = ""
    listed = [f"{cause} (here: {seen})" for cause, seen in causes.items() if seen]
    listed += [cause for cause, seen in causes.items() if not seen]
    return (
        f"Suspect: an efficiency of {100 * efficiency:.0f} % with {many(n, count)} is more than sharing the work can "
        f"explain (the limit is {100 * MOST_EFFICIENCY:.0f} %). Likely causes: {'; '.join(listed)}. Repeat the "
        "baseline on a quiet machine."
    )


def _change(before: Group, after: Group) -> str:
    """slower, faster, or unclear if the 95 % interval of the ratio of the times contains 1."""
    found = ratio(after.statistic("train_s"), before.statistic("train_s"))
    if found is None:
        return "unclear"
    low, high = found.span or (found.mean, found.mean)  # single runs have no interval
    return "slower" if low > 1 else "faster" if high < 1 else "unclear"


def _times(row: Row, base: Row, count: Count) -> str:
    here, there = row.train_s, base.train_s
    if row.speedup is None or here is None or there is None:
        return f"{many(row.count, count)}: not measured"
    per_added = f"{(here.mean - there.mean) / (row.count - base.count):+.3g} s per added {count[:-1]}"
    factor = row.speedup.mean
    if _change(base.group, row.group) == "unclear":
        return f"{many(row.count, count)} take about as long ({per_added}, within the spread)"
    if factor >= 1:
        return f"{many(row.count, count)} are {number(factor)} x as fast ({per_added})"
    return f"{many(row.count, count)} take {number(1 / factor)} x as long ({per_added})"
