"""The tables that `hvdtrain results` prints and the report shows: list, table, phases.

Those with an arithmetic of their own are in scaling_table.py, energy.py and accuracy.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import GROUP
from hvdtrain.results.groups import Group
from hvdtrain.results.load import Loaded
from hvdtrain.results.table import Column, Table

SPREAD_NOTE = (
    "mean ± half of its 95 % interval (Student's t, from n = 3 runs on; of two runs both values); median, min, max and "
    "n of every figure: --detail, or --format csv or json"
)

KEYS: dict[str, Column] = {
    "cores": Column("cores", "cores per host"),
    "threads": Column("threads", "threads per rank"),
    "rate_mbit": Column("rate_mbit", "rate", "Mbit/s"),
    "rank_batch": Column("rank_batch", "batch per rank"),
    "data_fingerprint": Column("data_fingerprint", "data set"),
    "train_samples": Column("train_samples", "training samples"),
}
"""How columns that tell groups apart are headed; others by their own name"""

FIGURES: dict[str, Column] = {
    "train_s": Column("train_s", "train", "s"),
    "validation_s": Column("validation_s", "validation", "s", spread=False),
    "test_s": Column("test_s", "test", "s", spread=False),
    "checkpoint_s": Column("checkpoint_s", "checkpoint", "s", spread=False),
    "end_to_end_s": Column("end_to_end_s", "end to end", "s"),
    "samples_per_s": Column("samples_per_s", "samples", "1/s", spread=False),
    "data_s": Column("data_s", "data", "ms", 1e3, spread=False),
    "compute_s": Column("compute_s", "compute", "ms", 1e3, spread=False),
    "communication_s": Column("communication_s", "network", "ms", 1e3),
    "communication_share": Column("communication_share", "network", "%", 100, spread=False),
    "limit_bytes_per_step": Column("limit_bytes_per_step", "limit", "MB", 1e-6),
    "energy_j": Column("energy_j", "energy", "J"),
    "peak_rss_bytes": Column("peak_rss_bytes", "memory per rank", "MB", 1e-6),
}
"""How figures are printed"""


def key_column(name: str) -> Column:
    return KEYS.get(name, Column(name, name.replace("_", " ")))


def key_cells(group: Group, names: Sequence[str]) -> dict[str, Any]:
    """The cells that tell a group from the others."""
    return {name: short(name, groups.value(group, name)) for name in names}


def short(name: str, value: Any) -> Any:
    if name == "data_fingerprint" and isinstance(value, str):
        return value[:8]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def common(found: Sequence[Group], shown: Sequence[str]) -> list[str]:
    """Notes on what is the same in all groups, if anything is, and on the processors, if these are not."""
    if not found:
        return []
    skipped = {*shown, "settings", "data_fingerprint", "ranks_per_host" if "hosts" in shown else ""}
    facts = [
        f"{key_column(name).label} {short(name, value):{',' if name in ('parameters', 'train_samples') else ''}}"
        for name, value in found[0].key.items()
        if name not in skipped and value is not None and all(group.key[name] == value for group in found)
    ]
    return ([f"the same in all: {', '.join(facts)}"] if facts else []) + processors(found)


def processors(found: Sequence[Group]) -> list[str]:
    """A warning if the groups' runs were not all made on one processor."""
    names = sorted({name for group in found for name in group.values("processor")})
    return [f"careful: not all on one processor: {'; '.join(names)}"] if len(names) > 1 else []


def left_out(runs: pd.DataFrame, *, timing: bool = True) -> list[str]:
    """Notes on the runs that do not enter the figures, and why."""
    notes = []
    for state, why in (("unfinished", "did not finish"), ("refused", "left records that cannot be trusted")):
        if count := int((runs["state"] == state).sum()):
            notes.append(
                f"left out: {count} {'run' if count == 1 else 'runs'} that {why} (hvdtrain results list names them)"
            )
    marked = runs[(runs["state"] == "complete") & runs["marked"].notna()]
    notes += [f"left out: {name}, marked: {why}" for name, why in zip(marked["run"], marked["marked"], strict=True)][:5]
    if len(marked) > 5:
        notes.append(f"left out: {len(marked) - 5} more marked runs")
    sampled = int(((runs["state"] == "complete") & (runs["kind"] != "timing")).sum())
    if timing and sampled:
        notes.append(f"{sampled} energy runs are left out of times, since sampling may disturb them")
    return notes


def listing(loaded: Loaded) -> Table:
    """All runs, also those that enter no figure, and why not."""
    names = ["run", "state", "started_utc", "hosts", "ranks", "rate_mbit"]
    names += [name for name in ("workload", "framework", "strategy", "kind") if loaded.runs[name].nunique() > 1]
    shown = [FIGURES["train_s"], *scores.figures(loaded.runs)]
    columns = [key_column(name) for name in names] + shown
    frame = loaded.runs.sort_values(["started_utc", "run_dir"], na_position="last")
    rows = []
    for values in frame[[*names, *(one.key for one in shown), "marked", "run_dir"]].to_dict("records"):
        row = {name: None if groups.is_missing(value) else short(str(name), value) for name, value in values.items()}
        row["state"] = f"{row['state']}, marked" if row["marked"] and row["state"] == "complete" else row["state"]
        rows.append(row)
    notes = [f"{row['run']} is marked: {row['marked']}" for row in rows if row["marked"]]
    spare = ("started_utc", "ranks", "kind", "workload", *(one.key for one in shown[1:]))
    return Table("list", f"{len(rows)} runs", columns, rows, notes, spare=spare)


def overview(loaded: Loaded, group_by: Sequence[str] | None = None) -> Table:
    """Each group of repeats with its main figures."""
    runs = groups.usable(loaded.runs)
    found = in_order(groups.by(runs, group_by or GROUP))
    shown = list(group_by) if group_by else apart(found)
    end_to_end = dataclasses.replace(FIGURES["end_to_end_s"], spread=False)  # so that the table fits a terminal
    figures = [FIGURES["train_s"], end_to_end, FIGURES["samples_per_s"], FIGURES["communication_share"]]
    figures += scores.figures(runs)
    if runs["energy_j"].notna().any():
        figures.append(FIGURES["energy_j"])
    rows = [
        key_cells(group, shown) | {"n": group.n} | {each.key: group.statistic(each.key) for each in figures}
        for group in found
    ]
    columns = [key_column(name) for name in shown] + [Column("n", "n")] + figures
    notes = [SPREAD_NOTE, *common(found, shown), *mixed(found, group_by), *left_out(loaded.runs)]
    notes.append("train: training phase; end to end: with validation, test and checkpoints; network: share of a step")
    spare = ("end_to_end_s", "communication_share", "n", "samples_per_s")
    return Table("table", f"{len(found)} groups of runs", columns, rows, notes, spare=spare)


def apart(found: Sequence[Group], first: Sequence[str] = ("strategy", "device", "hosts", "rate_mbit")) -> list[str]:
    """The columns that tell the groups apart, hosts among them in any case; none that follows from others."""
    different = groups.varying(found)
    always = [name for name in first if name in different or name == "hosts"]
    varying = [name for name in different if name not in always]
    if "global_batch" not in varying and "rank_batch" in varying:
        varying.remove("rank_batch")  # it follows from the number of ranks
    if "collectives" in varying:
        alone = all(group.key["hosts"] == 1 for group in found if group.key["collectives"] == "none")
        carried = [(group.key["strategy"], group.key["collectives"]) for group in found]
        pairs = {pair for pair in carried if pair[1] != "none"}
        if alone and len(pairs) == len({strategy for strategy, _ in pairs}):
            varying.remove("collectives")  # one process alone needs none, and each strategy has its own
    for name in ("launcher", "fill"):  # told only where nothing else tells the groups apart
        others = [other for other in (*always, *varying) if other != name]
        rest = {json.dumps([groups.value(group, other) for other in others]) for group in found}
        if name in varying and len(rest) == len(found):
            varying.remove(name)
    return [*always, *varying]


def in_order(found: Sequence[Group]) -> list[Group]:
    """Sorts groups by framework, strategy and device, then one host first, then by rate and hosts."""

    def place(group: Group) -> tuple[Any, ...]:
        rate, hosts = group.key.get("rate_mbit"), group.key.get("hosts") or 0
        names = tuple(str(group.key.get(name)) for name in ("workload", "framework", "strategy", "device"))
        return (*names, hosts > 1, rate is None, rate or 0, hosts)

    return sorted(found, key=place)


def mixed(found: Sequence[Group], group_by: Sequence[str] | None) -> list[str]:
    """A warning if a chosen grouping averages over different experiments."""
    inside = {
        name
        for group in found
        for name in set(GROUP) - set(group_by or GROUP)
        if len({None if groups.is_missing(value) else value for value in group.column(name)}) > 1
    }
    return [f"careful: these groups average over different {', '.join(sorted(inside))}"] if inside else []


def phases(loaded: Loaded, group_by: Sequence[str] | None = None) -> Table:
    """The table of phases of a run and of parts of a step."""
    found = in_order(groups.by(groups.usable(loaded.runs), group_by or GROUP))
    shown = list(group_by) if group_by else apart(found)
    names = ["train_s", "validation_s", "test_s", "checkpoint_s", "data_s", "compute_s", "communication_s"]
    rows = [
        key_cells(group, shown) | {"n": len(group.values("train_s"))} | {name: group.statistic(name) for name in names}
        for group in found
    ]
    columns = [key_column(name) for name in shown] + [Column("n", "n")] + [FIGURES[name] for name in names]
    notes = [
        SPREAD_NOTE,
        "train, validation, test, checkpoint: seconds of a run; loading and initialisation are outside (MLPerf's rule)",
        "data, compute, network: milliseconds of a step of rank 0, warm-up left out. Network is the waiting after "
        "backward: what backward hides counts as compute; - where the framework cannot tell them apart",
        *common(found, shown),
        *mixed(found, group_by),
        *left_out(loaded.runs),
    ]
    spare = ("n", "checkpoint_s", "test_s", "validation_s", "data_s")
    return Table("phases", "Where the time goes", columns, rows, notes, spare=spare)
