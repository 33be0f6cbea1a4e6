"""`hvdtrain results energy`: joules, energy-delay product and samples per joule, beside a published study's if asked.

    EDP = t sum_d(e_d)

with t the end-to-end time and e_d the energy of device d, once over the devices that ranks compute on and once over all
that were measured, normalised to a baseline (Cruz Varona, 2021, normalises to one GPU).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hvdtrain.results import alike, groups
from hvdtrain.results.alike import Chosen
from hvdtrain.results.groups import Group
from hvdtrain.results.load import Loaded
from hvdtrain.results.reference import Reference
from hvdtrain.results.statistics import Interval, Statistic, product, ratio, summary
from hvdtrain.results.table import Column, Table
from hvdtrain.results.tables import SPREAD_NOTE, apart, common, in_order, key_cells, key_column, left_out
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class Energy:
    """What a group's runs took."""

    group: Group
    figures: dict[str, Any]
    """Cells of the table, and EDP: `edp_js` of all measured devices, `edp_used_js` of those that ranks compute on"""


def of(group: Group) -> Energy:
    """Times are those of the group's timing runs, or of the very runs whose energy was taken if there are no others."""
    timed = group.values("end_to_end_s")
    joules = group.column("energy_j")
    other_runs = bool(timed) and "timing" not in _where(group, "kind", joules)
    time_s = summary(timed if other_runs else _where(group, "end_to_end_s", joules))
    trained = zip(group.column("epochs_done"), group.column("train_samples"), joules, strict=True)

    def edp(name: str) -> Statistic | Interval | None:
        if other_runs:
            return product(time_s, group.statistic(name))
        return summary(t * e for t, e in zip(group.column("end_to_end_s"), group.column(name), strict=True))

    figures = {
        "n": len(group.values("energy_j")),
        "end_to_end_s": time_s,
        "energy_j": group.statistic("energy_j"),
        "energy_used_j": group.statistic("energy_used_j"),
        "edp_js": edp("energy_j"),
        "edp_used_js": edp("energy_used_j"),
        "samples_per_j": summary(done * samples / energy_j for done, samples, energy_j in trained if energy_j > 0),
    }
    return Energy(group, figures)


def _where(group: Group, name: str, present: Sequence[float]) -> list[Any]:
    """The values of a column in the runs that have a value in `present`."""
    return [value for value, other in zip(group.column(name), present, strict=True) if not groups.is_missing(other)]


def energies(loaded: Loaded) -> list[Energy]:
    """The energies of the groups that have a run whose energy was measured."""
    return [of(group) for group in in_order(groups.by(groups.usable(loaded.runs))) if group.values("energy_j")]


def choose_baseline(found: Sequence[Energy], chosen: Chosen | None) -> Energy:
    """The one group chosen; by default that with the fewest ranks, on a GPU if there is one. Raises Failure (2)."""
    if chosen is None:
        return min(found, key=_size)
    fitting = [each for each in found if chosen.test(each.group)]
    if len(fitting) != 1:
        names = ", ".join(groups.varying([each.group for each in fitting]))
        what = f"{len(fitting)} groups, which differ in {names}" if fitting else "none of the groups with energy"
        raise Failure(f"--baseline chooses {what}; it must choose one", exits.USAGE)
    return fitting[0]


def _size(each: Energy) -> tuple[bool, float, bool]:
    key = each.group.key
    return key["device"] != "gpu", (key["hosts"] or 0) * (key["ranks_per_host"] or 0), key["collectives"] != "none"


def energy(loaded: Loaded, chosen: Chosen | None = None, reference: Reference | None = None) -> list[Table]:
    """A row for each group, a second table by device, a third beside a study's figures if one is given.

    Raises Failure (2) for a baseline that is no group, or several.
    """
    found = energies(loaded)
    if not found:
        note = "no complete run has its energy measured: train with --monitor power where the machine has a sensor"
        nothing = Table("energy", "Energy", [], [], [note, *_absent(loaded), *left_out(loaded.runs, timing=False)])
        return [nothing, reference.beside("energy", PUBLISHED, [])] if reference else [nothing]
    base = choose_baseline(found, chosen)
    shown = apart([each.group for each in found])
    unit, scale = _unit([each.figures["energy_j"].mean for each in found])
    freed = chosen.names if chosen else frozenset()
    unlike = {
        id(each): [name for name in alike.apart(each.group, base.group, alike.DEVICES) if name not in freed]
        for each in found
    }
    rows = [key_cells(each.group, shown) | _cells(each, base, not unlike[id(each)]) for each in found]
    columns = [
        *map(key_column, shown),
        Column("n", "n"),
        Column("end_to_end_s", "end to end", "s"),
        Column("energy_used_j", "used devices", unit, scale),
        Column("energy_j", "with idle", unit, scale),
        Column("edp_used", "EDP", spread=False),
        Column("edp", "EDP with idle", spread=False),
        Column("samples_per_j", "samples", "1/J", spread=False),
    ]
    notes = [
        SPREAD_NOTE,
        "EDP: end-to-end time x energy, over the baseline's; with idle: devices that no rank computes on count too",
        f"baseline: {_words(base.group, shown)}",
        *(
            f"no EDP of {_words(each.group, shown)}: it differs from the baseline in "
            f"{alike.words(each.group, base.group, unlike[id(each)])}; --baseline chooses another"
            for each in found
            if unlike[id(each)]
        ),
        "end to end: of the timing runs; where there are none, of the runs whose energy was taken. samples: training "
        "samples per joule of all measured devices",
        *_absent(loaded),
        *_resumed(found),
        *common([each.group for each in found], shown),
        *left_out(loaded.runs, timing=False),
    ]
    table = Table("energy", "Energy and energy-delay product", columns, rows, notes, spare=SPARE)
    beside = [_beside(found, base, rows, reference)] if reference else []
    return [table, _by_device(found, shown), *beside]


def _beside(found: Sequence[Energy], base: Energy, rows: Sequence[dict[str, Any]], reference: Reference) -> Table:
    """The table beside the study; EDP is left out unless our baseline is the study's."""
    same = reference.row(base.group).get("environment") == reference.baseline
    hidden = {} if same else {"edp_used": None, "edp": None}
    pairs = [(each.group, row | hidden) for each, row in zip(found, rows, strict=True)]
    table = reference.beside("energy", PUBLISHED, pairs)
    if table.rows and not same:
        table.notes.append(f"our baseline is not {reference.baseline}: choose it with --baseline to compare EDP")
    return table


SPARE = ("samples_per_j", "edp", "energy_j", "n")
PUBLISHED = (
    ("energy_used_j", "energy_j", Column("", "energy", "MJ", 1e-6, spread=False)),
    ("edp_used", "edp", Column("", "EDP", spread=False)),
    ("edp", "edp_with_idle", Column("", "EDP with idle", spread=False)),
)


def _cells(each: Energy, base: Energy, comparable: bool) -> dict[str, Any]:
    """The group's cells; EDP only if the group equals the baseline in all but what is compared."""
    edp = {
        name: _relative(each.figures[f"{name}_js"], base.figures[f"{name}_js"], each is base) if comparable else None
        for name in ("edp_used", "edp")
    }
    return each.figures | edp


def _relative(value: Statistic | Interval | None, base: Statistic | Interval | None, same: bool) -> Any:
    """The value over the baseline's, with an interval where both are statistics."""
    if value is None or base is None or value.mean <= 0 or base.mean <= 0:
        return None
    if same:
        return Interval(1.0, None, None)
    if isinstance(value, Statistic) and isinstance(base, Statistic):
        return ratio(value, base)
    return Interval(value.mean / base.mean, None, None)


def _unit(joules: Sequence[float]) -> tuple[str, float]:
    largest = max(joules)
    return ("MJ", 1e-6) if largest >= 1e6 else ("kJ", 1e-3) if largest >= 1e4 else ("J", 1.0)


def _words(group: Group, shown: Sequence[str]) -> str:
    cells = key_cells(group, shown)
    return ", ".join(f"{key_column(name).label} {value}" for name, value in cells.items() if value is not None)


def _absent(loaded: Loaded) -> list[str]:
    """What could not be measured and why, each reason once."""
    notes = [f"not measured: {reason}" for reason in dict.fromkeys(loaded.complete["energy_absent"].dropna())]
    more = [f"and {len(notes) - 5} more such reasons: hvdtrain results show RUN"] if len(notes) > 5 else []
    return notes[:5] + more


def _resumed(found: Sequence[Energy]) -> list[str]:
    count = sum(sum(map(bool, each.group.column("resumed"))) for each in found)
    text = f"{count} runs were stopped and continued: their energy holds what was done twice, their times do not"
    return [text] if count else []


def _by_device(found: Sequence[Energy], shown: Sequence[str]) -> Table:
    rows = []
    for each in found:
        measured = [devices for devices in each.group.column("energy_by_device") if devices]
        idle = {name for text in each.group.values("idle_devices") for name in text.split(",")}
        for device in dict.fromkeys(name for devices in measured for name in devices):
            joules = summary(devices[device] for devices in measured if device in devices)
            about = {"host_device": device, "use": "idle" if device in idle else "used", "energy_j": joules}
            rows.append(key_cells(each.group, shown) | about | {"n": joules.n if joules else 0})
    unit, scale = _unit([row["energy_j"].mean for row in rows])
    columns = [*map(key_column, shown), Column("host_device", "host:device"), Column("use", "use"), Column("n", "n")]
    columns.append(Column("energy_j", "energy", unit, scale))
    return Table("energy_by_device", "Energy by device", columns, rows, spare=("n", "use"))
