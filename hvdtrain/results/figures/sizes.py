"""Width against depth: what a step takes of networks of several sizes, one curve per number of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hvdtrain.results.figures import panels, style
from hvdtrain.results.load import Loaded, manifest
from hvdtrain.results.plots import Options
from hvdtrain.results.statistics import summary

APART = ("framework", "strategy", "launcher", "precision")
"""Runs that differ in these are no repeats of each other: each has a curve of its own"""


def layers(loaded: Loaded, options: Options) -> Figure:
    """Seconds per step against parameters of the runs on one process, a panel per device and global batch.

    Raises Failure (65) when no such run has timed steps, Failure (2) for too many panels.
    """
    lacking = "no times per step: needs complete timing runs, on one process, of more than the 3 warm-up steps"
    runs = panels.usable(loaded.runs[loaded.runs["ranks"] == 1], needs="step_s", lacking=lacking)
    told = [name for name in APART if runs[name].nunique(dropna=False) > 1]
    runs = runs.assign(network=[network(run, told) for run in runs.to_dict("records")])
    parts = list(runs.groupby(["device", "global_batch"], sort=True, dropna=False))
    panels.check(len(parts), panels.MOST_PANELS, "devices and batches")
    networks = sorted(set(runs["network"]))
    figure, axes = style.grid(len(parts), columns=options.columns, sharex=True, sharey=True)
    behind = []
    for axis, ((device, batch), part) in zip(axes, parts, strict=True):
        for number, name in enumerate(networks):
            found = part[part["network"] == name].groupby("parameters", sort=True)["step_s"]
            behind += found.size().tolist()
            steps = {float(size): one for size, times in found if (one := summary(times))}
            if steps:
                means, look = [one.mean for one in steps.values()], style.line(number) | style.marker(number)
                axis.errorbar(list(steps), means, style.bars(list(steps.values())), label=name, **look)
        style.title(axis, f"{device}, {panels.batch('strong', batch)}")
        style.log_scale(axis, "x")
        style.log_scale(axis, "y")
        axis.set_xlabel("parameters")
    for axis in style.first_column(axes):
        axis.set_ylabel("s per step")
    style.legend(figure, axes, style.repeats(behind))
    return figure


def network(run: Mapping[Any, Any], told: Sequence[str]) -> str:
    """`3 hidden layers` of a perceptron, else the model's name; behind it what the run has in the columns `told`."""
    model = manifest(Path(run["run_dir"])).model
    hidden, name = model.get("spec", {}).get("hidden"), str(model.get("name"))
    if isinstance(hidden, list):
        name = f"{len(hidden)} hidden layer{'s' if len(hidden) > 1 else ''}"
    return ", ".join([name, *(panels.HOW.get(each, "{}").format(run[each]) for each in told if run[each])])
