"""`hvdtrain results inference`: what a training step and inference take on each device, by the size of the model.

Runs say it that were started with --inference; nothing is interpolated between models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hvdtrain.results import groups
from hvdtrain.results.columns import GROUP
from hvdtrain.results.groups import Group
from hvdtrain.results.load import Loaded
from hvdtrain.results.statistics import Statistic, summary
from hvdtrain.results.table import Column, Table
from hvdtrain.results.tables import SPREAD_NOTE, apart, common, key_cells, key_column, left_out

STEP = "training step"
NOTE = (
    "inference: from samples in host memory to their loss and scores there, on rank 0 alone; a run's figure is the "
    "median of its passes, warm-up left out. Training step: mean, data and exchange included, warm-up left out"
)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Repeats of one model on one device."""

    group: Group
    seconds: dict[str, Statistic]
    """STEP, or `N samples` -> time"""

    @property
    def alike(self) -> tuple[Any, ...]:
        """What is the same for models and devices that are compared: all but they, and what follows from them."""
        names = ("workload", "framework", "strategy", "precision", "hosts", "rate_mbit", "ranks_per_host", "rank_batch")
        return tuple(self.group.key[name] for name in names)


def timed(loaded: Loaded) -> list[Timed]:
    """Smallest model first, of the runs that timed inference."""
    found = []
    for group in groups.by(groups.usable(loaded.runs)):
        told = group.values("inference")
        sizes = sorted({size for each in told for size in each})
        seconds = {f"{size} samples": summary(each[size] for each in told if size in each) for size in sizes}
        if told and group.key["parameters"]:
            figures = {STEP: group.statistic("step_s")} | seconds
            found.append(Timed(group, {name: each for name, each in figures.items() if each is not None}))
    return sorted(found, key=lambda each: each.group.key["parameters"])


def measures(found: Sequence[Timed]) -> list[str]:
    """Names of all that was timed, in order: the step, then few samples before many."""
    names = {name for each in found for name in each.seconds} - {STEP}
    return [STEP, *sorted(names, key=lambda name: int(name.split()[0]))]


def crossovers(found: Sequence[Timed]) -> list[str]:
    """From which model on the GPU is faster than the CPU, in words; or what is missing to say so."""
    by_device = {name: [each for each in found if each.group.key["device"] == name] for name in ("cpu", "gpu")}
    if found and (missing := [name for name, runs in by_device.items() if not runs]):
        one = found[0].group.key
        told = f"nothing was timed on a {missing[0]}, so no crossover is known: start the same there"
        return [f"{told}, hvdtrain train {one['workload']} --device {missing[0]} --inference 2,64,512,1024 ..."]
    lines = []
    for name in measures(found):
        pairs = [
            (cpu.group.key["parameters"], gpu.seconds[name].mean < cpu.seconds[name].mean)
            for cpu in by_device["cpu"]
            for gpu in by_device["gpu"]
            if cpu.alike == gpu.alike and cpu.group.key["parameters"] == gpu.group.key["parameters"]
            if name in cpu.seconds and name in gpu.seconds
        ]
        sizes, slower = {size for size, _ in pairs}, [size for size, faster in pairs if not faster]
        beyond = [size for size in sizes if size > max(slower, default=0)]
        if pairs:
            what = f"from {min(beyond):,.0f} parameters on" if beyond else "of no model timed"
            lines.append(f"{name}: the GPU is faster {what} ({len(sizes)} models timed on both)")
    return lines or ["no model was timed on both devices with the same settings"]


def inference(loaded: Loaded) -> Table:
    """Each model's times on each device."""
    found = timed(loaded)
    members = [each.group for each in found]
    shown = [name for name in apart(members, GROUP) if name not in ("parameters", "device", "hosts", "settings")]
    shown = ["parameters", "device", *shown]
    names = measures(found)
    columns = [*(key_column(name) for name in shown), Column("n", "n")]
    columns += [Column(f"{name.replace(' ', '_')}_s", name, "ms", 1e3) for name in names]
    rows = [
        key_cells(each.group, shown)
        | {"n": each.group.n}
        | {f"{name.replace(' ', '_')}_s": each.seconds.get(name) for name in names}
        for each in found
    ]
    notes = crossovers(found) if found else ["no run timed inference: train with --inference 2,64,512,1024"]
    notes += [NOTE, SPREAD_NOTE, *common(members, shown), *left_out(loaded.runs)]
    return Table("inference", "Training step and inference by device", columns, rows, notes, spare=("n",))
