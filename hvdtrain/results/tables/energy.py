"""`hvdtrain results energy`: joules, energy-delay product and samples per joule.

    EDP = t sum_d(e_d)

t is the end-to-end time and e_d the energy of device d. One column adds up the devices that ranks compute on, another
all measured devices. Both are relative to a baseline (as in Cruz Varona, 2021, whose baseline is one GPU).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hvdtrain.results import groups
from hvdtrain.results.columns import RUNS, Column, label
from hvdtrain.results.comparability import DEVICES, describe, obstacles
from hvdtrain.results.groups import Group
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import Interval, Statistic, product, ratio, summary
from hvdtrain.results.tables.columns import (
    SPREAD_NOTE,
    N,
    group_notes,
    key_cells,
    key_columns,
    ordered,
    varying,
)
from hvdtrain.results.tables.model import Table


def cells(group: Group) -> dict[str, Any]:
    """Cells of the table, and the EDP: `edp_js` of all devices, `edp_used_js` of those that ranks compute on.

    Times come from timing runs, or from the energy runs if there are no others.
    """
    timed = group.values("end_to_end_s")
    joules = group.column("energy_j")
    measured = [not groups.is_missing(each) for each in joules]
    kinds = [kind for kind, known in zip(group.column("kind"), measured, strict=True) if known]
    separate = bool(timed) and "timing" not in kinds
    own_s = [time for time, known in zip(group.column("end_to_end_s"), measured, strict=True) if known]
    time_s = summary(timed if separate else own_s)
    trained = zip(group.column("epochs_done"), group.column("train_samples"), joules, strict=True)

    def edp(name: str) -> Statistic | Interval | None:
        if separate:
            return product(time_s, group.statistic(name))
        return summary(t * e for t, e in zip(group.column("end_to_end_s"), group.column(name), strict=True))

    return {
        "n": sum(measured),
        "end_to_end_s": time_s,
        "energy_j": group.statistic("energy_j"),
        "energy_used_j": group.statistic("energy_used_j"),
        "edp_js": edp("energy_j"),
        "edp_used_js": edp("energy_used_j"),
        "samples_per_j": summary(done * samples / energy_j for done, samples, energy_j in trained if energy_j > 0),
    }


def energies(loaded: Loaded) -> list[Group]:
    """The groups with at least one run whose energy was measured."""
    return [group for group in ordered(groups.by(groups.usable(loaded.runs))) if group.values("energy_j")]


def _size(group: Group) -> tuple[bool, float, bool]:
    """The least is the baseline: the fewest ranks, preferably on a GPU."""
    key = group.key
    return key["device"] != "gpu", (key["hosts"] or 0) * (key["ranks_per_host"] or 0), key["backend"] != "none"


def table(loaded: Loaded) -> Table:
    """A row for each group whose energy was measured."""
    experiments = energies(loaded)
    notes = [*_absent(loaded), *group_notes(loaded.runs, experiments, timing=False)]
    if not experiments:
        note = "no complete run has its energy measured; hint: train with --monitor power on a machine with sensors"
        return Table("energy", "Energy", [], [], [note, *notes])
    base = min(experiments, key=_size)
    measured = {id(group): cells(group) for group in experiments}
    shown = varying(experiments)
    settings = key_columns(experiments, shown)
    keys = [one.key for one in settings]
    unit, scale = _unit([each["energy_j"].mean for each in measured.values()])
    rows = []
    refused = []
    for group in experiments:
        names, own = obstacles(group, base, DEVICES), measured[id(group)]
        pairs = {name: (own[f"{name}_js"], measured[id(base)][f"{name}_js"]) for name in ("edp_used", "edp")}
        edp = {name: None if names else _relative(*pair) for name, pair in pairs.items()}
        rows.append(key_cells(group, keys) | own | edp)
        if names:
            refused.append(
                f"no EDP of {_words(group, shown)}: it differs from the baseline in "
                f"{describe(group, base, names)}; hint: select runs with --where"
            )
    columns = [
        N,
        dataclasses.replace(RUNS["end_to_end_s"], role="result"),
        dataclasses.replace(RUNS["energy_used_j"], unit=unit, scale=scale),
        Column("edp_used", "EDP of used devices", spread=False, of=Interval),
        dataclasses.replace(RUNS["energy_j"], unit=unit, scale=scale),
        Column("edp", "EDP", spread=False, role="detail", of=Interval),
        Column("samples_per_j", "samples", "1/J", spread=False, role="detail", of=Statistic),
        *settings,
    ]
    notes = [
        SPREAD_NOTE,
        "EDP: end-to-end time x energy, relative to the baseline; used devices: those that a rank computes on",
        f"baseline: {_words(base, shown)}",
        *refused,
        "end to end: of timing runs, or else of energy runs; samples: training samples per joule of all devices",
        *_resumed(experiments),
        *notes,
    ]
    return Table("energy", "Energy and energy-delay product", columns, rows, notes)


def _relative(value: Statistic | Interval | None, one: Statistic | Interval | None) -> Interval | None:
    """The value relative to the baseline's, with an interval if both are statistics."""
    if value is None or one is None or value.mean <= 0 or one.mean <= 0:
        return None
    if value is one:
        return Interval(1.0)
    if isinstance(value, Statistic) and isinstance(one, Statistic):
        return ratio(value, one)
    return Interval(value.mean / one.mean)


def _unit(joules: Sequence[float]) -> tuple[str, float]:
    largest = max(joules)
    return ("MJ", 1e-6) if largest >= 1e6 else ("kJ", 1e-3) if largest >= 1e4 else ("J", 1.0)


def _words(group: Group, shown: Sequence[str]) -> str:
    cells = key_cells(group, shown)
    return ", ".join(f"{label(name)} {value}" for name, value in cells.items() if value is not None)


def _absent(loaded: Loaded) -> list[str]:
    """Notes on devices without energy, each reason once."""
    notes = [f"not measured: {reason}" for reason in dict.fromkeys(loaded.complete["energy_absent"].dropna())]
    more = [f"not measured: {len(notes) - 5} more devices; see `hvdtrain results show RUN`"] if len(notes) > 5 else []
    return notes[:5] + more


def _resumed(experiments: Sequence[Group]) -> list[str]:
    count = sum(sum(map(bool, group.column("resumed"))) for group in experiments)
    return [f"{count} runs were resumed: their energy includes repeated steps, their times do not"] if count else []
