"""`hvdtrain results scaling`: does each added host make training faster or slower, by how much, and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hvdtrain.results import alike, groups, missing
from hvdtrain.results.alike import Chosen
from hvdtrain.results.groups import Group
from hvdtrain.results.load import Loaded
from hvdtrain.results.reference import Reference
from hvdtrain.results.scaling import MOST_EFFICIENCY, MUST, Count, Row, many, rate_words, rows, what_varies
from hvdtrain.results.statistics import ratio
from hvdtrain.results.table import Column, Table, number
from hvdtrain.results.tables import FIGURES, SPREAD_NOTE, apart, common, key_column, left_out, short

SPARE = ("limit_bytes_per_step", "wire_bytes_per_step", "speedup_end_to_end", "communication_share", "n")
EFFICIENCY = {
    "strong": "efficiency (strong scaling, equal global batch): T_base n_base / (T_n n)",
    "weak": "efficiency (weak scaling, equal batch per rank): (samples/s / n) / (samples/s of the baseline / n_base)",
    "other": "no efficiency where neither the global batch nor the batch per rank is known to equal the baseline's",
}
BATCHES = {
    "strong": "strong scaling: equal global batch",
    "weak": "weak scaling: equal batch per rank",
    "other": "batches differ, or are not known",
}
VARIES_INSIDE = {"strong": "rank_batch", "weak": "global_batch"}
"""The batch that differs from point to point of a curve, and so does not name it"""
NOTES = (
    "train: seconds of the training phase; speed-up: T_base / T_n of the training phase with its 95 % interval (Welch, "
    "on logarithms); end to end: the same with validation, test and checkpoints",
    "network: share of a step that rank 0 waits for the exchange after backward",
    "wire: bytes per step of the busiest host's NIC, the larger of sent and received, headers and all; limit: "
    "2 (h - 1) / h x 4 bytes x parameters, the least that an fp32 allreduce over h hosts has to send per host",
)


def scaling(
    loaded: Loaded, count: Count | None = None, baseline: Chosen | None = None, reference: Reference | None = None
) -> list[Table]:
    """A section for each curve, from its baseline upwards, with its reading in words; a second table beside a study's
    figures if one is given. Raises Failure (2)."""
    found = groups.by(groups.usable(loaded.runs))
    count = count or what_varies(found)
    made = rows(found, count, baseline)
    curves = [[row for row in made if row.curve == number] for number in sorted({row.curve for row in made})]
    titles = _titles(curves, count)
    columns = [
        Column("count", count),
        Column("n", "n"),
        FIGURES["train_s"],
        Column("speedup", "speed-up"),
        Column("speedup_end_to_end", "end to end", spread=False),
        Column("efficiency", "efficiency", "%", 100, spread=False),
        Column("communication_share", "network", "%", 100, spread=False),
        Column("wire_bytes_per_step", "wire", "MB", 1e-6, spread=False),
        FIGURES["limit_bytes_per_step"],
        *([Column("suspect", "suspect")] if any(row.suspect for row in made) else []),
    ]
    table = Table("scaling", f"Scaling over {count}", columns, [], section="curve", spare=SPARE)
    for title, curve in zip(titles, curves, strict=True):
        table.rows += [_cells(row, count, title) for row in curve]
        alone = len(curve) == 1 and curve[0].count and curve[0].group.values("train_s")
        lacking = missing.text(curve[0].group, found, count, baseline) if alone else ""
        table.readings[title] = lacking or reading(curve, count)
    kinds = {curve[-1].kind for curve in curves if len(curve) > 1}
    table.notes = [SPREAD_NOTE, *NOTES, *(said for kind, said in EFFICIENCY.items() if kind in kinds)]
    if any(row.speedup is None and row.group.statistic("train_s") and row.group is not row.baseline for row in made):
        table.notes.append("no speed-up of runs that --target ended after different numbers of epochs: see strategies")
    table.notes += [*_unrecorded(made, count), *common(found, ["hosts"]), *left_out(loaded.runs)]
    lonely = count == "hosts" and any(len(curve) == 1 for curve in curves)
    if lonely and len({group.key["ranks_per_host"] for group in found}) > 1:
        table.notes.append("runs that differ in their ranks and not in their hosts are compared by --count ranks")
    if reference is None:
        return [table]
    pairs = [(row.group, cells) for row, cells in zip(made, table.rows, strict=True) if _same_base(row, reference)]
    return [table, reference.beside("scaling", PUBLISHED, pairs)]


def _same_base(row: Row, reference: Reference) -> bool:
    """Whether the row is compared with what the study compares with."""
    return bool(reference.row(row.baseline).get("environment") == reference.baseline)


def _cells(row: Row, count: Count, title: str) -> dict[str, object]:
    group = row.group
    return {
        "curve": title,
        "count": int(row.count),
        "n": len(group.values("train_s")),
        "speedup": row.speedup,
        "speedup_end_to_end": row.speedup_end_to_end,
        "efficiency": row.efficiency,
        "limit_bytes_per_step": next(iter(group.values("limit_bytes_per_step")), None),
        **{name: group.statistic(name) for name in ("train_s", "communication_share", "wire_bytes_per_step")},
        **{name: short(name, group.key[name]) for name in ("framework", "strategy", "rate_mbit")},
        "suspect": row.suspect,
    }


def _unrecorded(made: Sequence[Row], count: Count) -> list[str]:
    names = sorted({name for row in made for name in alike.unrecorded(row.group, row.baseline, MUST[count])})
    told = ", ".join(key_column(name).label for name in names)
    words = f"careful: {told} not recorded in some of these runs, and taken for equal to the baseline's"
    return [words] if names else []


PUBLISHED = (
    ("speedup", "speedup", Column("", "speed-up", spread=False)),
    ("speedup_end_to_end", "speedup_end_to_end", Column("", "end to end", spread=False)),
    ("efficiency", "efficiency", Column("", "efficiency", "%", 100, spread=False)),
)


# --- in words ---------------------------------------------------------------------------------------------------------


def _titles(curves: Sequence[Sequence[Row]], count: Count) -> list[str]:
    """What is special about each curve; no two alike."""
    last = [curve[-1].group for curve in curves]
    shown = ("hosts", "ranks_per_host", "rate_mbit", "strategy", "framework")
    varying = [name for name in apart(last) if name not in shown]
    titles = []
    for number_, curve in enumerate(curves, start=1):
        group, base = curve[-1].group, curve[0].group
        words = [str(group.key["strategy"]), str(group.key["framework"])]
        told = [name for name in varying if name != VARIES_INSIDE.get(curve[-1].kind)]
        values = [(key_column(name).label, short(name, groups.value(group, name))) for name in told]
        words += [f"{label} {value}" for label, value in values if value is not None]
        if len(curve) == 1:
            title = f"{', '.join(words)}, {many(curve[0].count, count)} alone"
        else:
            words.insert(0, rate_words(group.key["rate_mbit"]))
            title = f"{', '.join(words)} ({BATCHES[curve[-1].kind]}; baseline {_named(base, curve, count)})"
        titles.append(title if title not in titles else f"{title} #{number_}")
    return titles


def _named(base: Group, curve: Sequence[Row], count: Count) -> str:
    """The baseline, and in what besides its size it differs from the curve."""
    beside = f" beside {base.key['fill']:g} busy ones" if base.key["fill"] else ""
    words = [many(curve[0].count, count) + beside]
    for name in ("framework", "strategy", "device", "collectives", "launcher"):
        if base.key[name] not in (None, curve[-1].group.key[name]) and (name != "collectives" or curve[0].count > 1):
            words.append(str(base.key[name]))
    names = [name for name in groups.varying([base, curve[-1].group]) if name in base.settings]
    words += [f"{name} {groups.value(base, name)}" for name in names]
    return ", ".join(words)


def reading(curve: Sequence[Row], count: Count) -> str:
    """What the curve says, for someone who has not measured before."""
    one = count[:-1]
    timed = [row for row in curve if row.group.statistic("train_s") is not None]
    if len(timed) < 2 or timed[0] is not curve[0]:
        return f"Only one number of {count} was timed: no scaling to be seen."
    steps = [_change(before.group, after.group) for before, after in itertools.pairwise(timed)]
    last = timed[-1]
    grown = [row for row in timed[1:] if row.count > timed[0].count]
    if not grown:
        return "No more of them than in the baseline: the speed-up tells the settings apart."
    against = {_change(timed[0].group, row.group) for row in grown}
    if set(steps) == {"slower"}:
        said = f"Each added {one} makes training slower"
    elif set(steps) == {"faster"}:
        said = f"Each added {one} makes training faster"
    elif set(steps) == {"unclear"}:
        said = f"No added {one} makes a difference that the spread of the runs does not explain"
    elif against == {"slower"}:
        said = f"Any number of {count} above {timed[0].count:g} makes training slower"
    else:
        best = min(timed, key=lambda row: row.group.statistic("train_s").mean)  # type: ignore[union-attr]
        said = f"Training is fastest with {many(best.count, count)}"
        turn = next((row for row, step in zip(timed[1:], steps, strict=True) if step == "slower"), None)
        if turn and turn.count > best.count:
            said += f"; from {many(turn.count, count)} on an added {one} makes it slower"
    facts = [_times(row, timed[0], count) for row in grown]
    if (share := last.group.statistic("communication_share")) is not None:
        facts.append(f"with {many(last.count, count)} {100 * share.mean:.0f} % of a step is waiting for the network")
    single = any(len(row.group.values("train_s")) < 2 for row in timed)
    doubt = " Single runs: how far they spread is not known." if single else ""
    if doubted := [row for row in grown if row.suspect]:
        return f"{suspicion(doubted, count)} Measured: {'; '.join(facts)}.{doubt}"
    return f"{said}: {'; '.join(facts)}.{doubt}"


def suspicion(doubted: Sequence[Row], count: Count) -> str:
    """What may have made an efficiency larger than sharing the work can, what the records show of it first."""
    base, worst = doubted[0].baseline, max(doubted, key=lambda row: row.efficiency.mean)  # type: ignore[union-attr]
    times = base.values("train_s")
    cores, threads = base.key["cores"], (base.key["threads"] or 0) * (base.key["ranks_per_host"] or 0)
    spinning = "more threads than cores, which spin while they wait"
    busy = "a machine that was busy during the baseline"
    causes = {
        spinning: f"{threads:g} threads on {cores:g} cores" if cores and threads > cores else "",
        busy: f"its runs took {min(times):.3g} to {max(times):.3g} s" if max(times) > 1.2 * min(times) else "",
        "hosts that are not equal": "",
    }
    if worst.kind == "strong":
        causes["a smaller batch per rank, which fits the cache"] = ""
    told = [f"{cause} (here: {seen})" for cause, seen in causes.items() if seen]
    told += [cause for cause, seen in causes.items() if not seen]
    percent = 100 * worst.efficiency.mean  # type: ignore[union-attr]
    return (
        f"Suspect: an efficiency of {percent:.0f} % with {many(worst.count, count)} is more than sharing the work can "
        f"give (above {100 * MOST_EFFICIENCY:.0f} % is marked). Likely causes: {'; '.join(told)}. Repeat the baseline "
        "on a quiet machine before believing it."
    )


def _change(before: Group, after: Group) -> str:
    """slower, faster, or unclear: the 95 % interval of the two times' ratio holds 1; single runs are taken at face."""
    found = ratio(after.statistic("train_s"), before.statistic("train_s"))
    if found is None:
        return "unclear"
    low, high = (found.mean if bound is None else bound for bound in (found.low, found.high))
    return "slower" if low > 1 else "faster" if high < 1 else "unclear"


def _times(row: Row, base: Row, count: Count) -> str:
    here, there = row.group.statistic("train_s"), base.group.statistic("train_s")
    if row.speedup is None or here is None or there is None:
        return f"{many(row.count, count)}: not measured"
    per_added = f"{(here.mean - there.mean) / (row.count - base.count):+.3g} s per added {count[:-1]}"
    factor = row.speedup.mean
    if _change(base.group, row.group) == "unclear":
        return f"{many(row.count, count)} take about as long ({per_added}, within the spread)"
    if factor >= 1:
        return f"{many(row.count, count)} are {number(factor)} x as fast ({per_added})"
    return f"{many(row.count, count)} take {number(1 / factor)} x as long ({per_added})"
