"""Columns, cells and notes that several tables share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from hvdtrain.results import columns, groups, scores
from hvdtrain.results.columns import GROUP
from hvdtrain.results.groups import Group, short
from hvdtrain.results.tables.model import Column
from hvdtrain.system.exits import printable

SPREAD_NOTE = (
    "mean ± half of its 95 % interval (Student's t, for three or more runs; two runs: both values); --format csv or "
    "json has median, min, max and n"
)
N = Column("n", "n")
FIGURES: dict[str, Column] = {
    "train_s": Column("train_s", "train", "s"),
    "validation_s": Column("validation_s", "validation", "s", spread=False),
    "test_s": Column("test_s", "test", "s", spread=False),
    "checkpoint_s": Column("checkpoint_s", "checkpoint", "s", spread=False),
    "end_to_end_s": Column("end_to_end_s", "end to end", "s"),
    "samples_per_s": Column("samples_per_s", "throughput", "samples/s", spread=False),
    "data_s": Column("data_s", "data", "ms", 1e3, spread=False),
    "compute_s": Column("compute_s", "compute", "ms", 1e3, spread=False),
    "communication_s": Column("communication_s", "exchange", "ms", 1e3),
    "communication_share": Column("communication_share", "waiting for exchange", "%", 100, spread=False),
    "network_bytes_per_step": Column("network_bytes_per_step", "network per step", "MB", 1e-6, spread=False),
    "limit_bytes_per_step": Column("limit_bytes_per_step", "network limit", "MB", 1e-6),
    "energy_j": Column("energy_j", "energy", "J"),
    "peak_rss_bytes": Column("peak_rss_bytes", "memory per rank", "MB", 1e-6),
}
"""How measurements are printed"""
PARTS = {"train": "train", "validation": "validation", "test": "test", "best_validation": "best validation"}


def key_column(name: str) -> Column:
    """The column of a setting."""
    return Column(name, columns.label(name), columns.RUNS[name].unit if name in columns.RUNS else "")


def key_cells(group: Group, names: Sequence[str]) -> dict[str, Any]:
    return {name: short(name, group.value(name)) for name in names}


def cells(group: Group, names: Sequence[str], figures: Sequence[Column]) -> dict[str, Any]:
    """The settings `names`, the number of runs, and the statistics of the measurements."""
    return key_cells(group, names) | {"n": group.n} | {one.key: group.statistic(one.key) for one in figures}


def score_columns(runs: pd.DataFrame, part: str = "test", names: Sequence[str] = ()) -> list[Column]:
    """Columns of the primary metrics of the runs, or of the scores `names`. Shares are printed in percent."""
    known, chosen = scores.of(runs), names or scores.primary(runs)
    made = []
    for name in chosen:
        score, label = known[name], PARTS[part]
        if len(chosen) > 1 or "validation" not in part:
            label = f"{label} {score.label}"
        unit, factor = ("%", 100.0) if score.share else (score.unit, 1.0)
        made.append(Column(f"{part}_{name}", printable(label), printable(unit), factor))
    return made


# --- which settings to show -------------------------------------------------------------------------------------------


def varying(found: Sequence[Group], first: Sequence[str] = ("strategy", "device", "hosts", "rate_mbit")) -> list[str]:
    """The settings that differ between the groups, and always hosts; without those that follow from others."""
    different = groups.varying(found)
    always = [name for name in first if name in different or name == "hosts"]
    others = [name for name in different if name not in always]
    if "global_batch" not in others and "rank_batch" in others:
        others.remove("rank_batch")  # follows from the number of ranks
    if "backend" in others:
        single = all(group.key["hosts"] == 1 for group in found if group.key["backend"] == "none")
        pairs = {(group.key["strategy"], group.key["backend"]) for group in found if group.key["backend"] != "none"}
        if single and len(pairs) == len({strategy for strategy, _ in pairs}):
            others.remove("backend")  # a single process needs none, and each strategy has its own
    for name in ("launcher", "fill"):  # shown only if nothing else distinguishes the groups
        rest = [other for other in (*always, *others) if other != name]
        keys = {json.dumps([group.value(other) for other in rest]) for group in found}
        if name in others and len(keys) == len(found):
            others.remove(name)
    return [*always, *others]


def ordered(found: Sequence[Group]) -> list[Group]:
    """Sorts groups by workload, framework, strategy and device, single hosts first, then by rate and hosts."""

    def place(group: Group) -> tuple[Any, ...]:
        rate, hosts = group.key.get("rate_mbit"), group.key.get("hosts") or 0
        names = tuple(str(group.key.get(name)) for name in ("workload", "framework", "strategy", "device"))
        return (*names, hosts > 1, rate is None, rate or 0, hosts)

    return sorted(found, key=place)


def grouped(runs: pd.DataFrame, group_by: Sequence[str] | None) -> tuple[list[Group], list[str]]:
    """The groups of the runs that count, in order, and the settings to show."""
    found = ordered(groups.by(groups.usable(runs), group_by or GROUP))
    return found, list(group_by) if group_by else varying(found)


# --- notes ------------------------------------------------------------------------------------------------------------


def group_notes(
    runs: pd.DataFrame, found: Sequence[Group], shown: Sequence[str], by: Sequence[str] | None
) -> list[str]:
    """Notes on the settings of all groups, on groups that mix experiments, and on the runs that do not count."""
    return [*common(found, shown), *_mixed(found, by), *left_out(runs)]


def common(found: Sequence[Group], shown: Sequence[str]) -> list[str]:
    """Notes on the settings that are equal in all groups, and on processors that are not."""
    if not found:
        return []
    skipped = {*shown, "settings", "data_fingerprint", "ranks_per_host" if "hosts" in shown else ""}
    facts = [
        f"{columns.label(name)} {short(name, value):{',' if name in ('parameters', 'train_samples') else ''}}"
        for name, value in found[0].key.items()
        if name not in skipped and value is not None and all(group.key[name] == value for group in found)
    ]
    return ([f"equal in all groups: {', '.join(facts)}"] if facts else []) + processors(found)


def processors(found: Sequence[Group]) -> list[str]:
    """A warning if the runs used different processors."""
    names = sorted({name for group in found for name in group.values("processor")})
    return [f"warning: the runs used different processors: {'; '.join(names)}"] if len(names) > 1 else []


def _mixed(found: Sequence[Group], group_by: Sequence[str] | None) -> list[str]:
    """A warning if the user's grouping averages over different experiments."""
    inside = {
        name
        for group in found
        for name in set(GROUP) - set(group_by or GROUP)
        if len({None if groups.is_missing(value) else value for value in group.column(name)}) > 1
    }
    return [f"warning: these groups average over different {', '.join(sorted(inside))}"] if inside else []


def left_out(runs: pd.DataFrame, *, timing: bool = True) -> list[str]:
    """Notes on the runs that do not count, and why."""
    notes = []
    for state, why in (("unfinished", "did not finish"), ("refused", "have records that cannot be trusted")):
        if count := int((runs["state"] == state).sum()):
            notes.append(f"left out: {count} runs that {why}; `hvdtrain results list` shows them")
    marked = runs[(runs["state"] == "complete") & runs["marked"].notna()]
    notes += [f"left out: {name}, marked: {why}" for name, why in zip(marked["run"], marked["marked"], strict=True)][:5]
    if len(marked) > 5:
        notes.append(f"left out: {len(marked) - 5} more marked runs")
    sampled = int(((runs["state"] == "complete") & (runs["kind"] != "timing")).sum())
    if timing and sampled:
        notes.append(f"left out of times: {sampled} energy runs, because sampling may slow them down")
    return notes
