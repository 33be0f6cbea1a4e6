"""Power and use of each host over time: power by device, CPU, RAM, GPU and network.

Each column is one run, because the samples of repeats have different times: the runs that the user names, or the first
run with samples for each number of hosts, at the slowest rate. Time starts at the run's first sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results import groups
from hvdtrain.results.comparability import many
from hvdtrain.results.figures import Options, style
from hvdtrain.results.read import energy
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.tables.model import number
from hvdtrain.results.tables.scaling import rate_words
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure, printable

COLUMNS = 3
POINTS = 300
"""Most points of a curve, which bounds the size of the figure of a long run"""
# Row of the figure -> unit, and (start of the columns of `energy.series`, factor to the unit). Later ones are dotted.
ROWS: dict[str, tuple[str, tuple[tuple[str, float], ...]]] = {
    "power": ("W", (("power_w.", 1.0),)),
    "CPU": ("%", (("cpu_percent", 1.0),)),
    "RAM": ("GB", (("ram_used_bytes", 1e-9),)),
    "GPU": ("%", (("gpu_percent", 1.0),)),
    "NIC": ("Mbit/s", (("sent_mbit", 1.0), ("received_mbit", 1.0))),
}
DASHES = ("-", ":", "--", "-.")


def resources(loaded: Loaded, options: Options) -> Figure:
    """The samples of up to three runs, with the mean over hosts and time. Raises Failure (2, 65) without samples."""
    chosen = _choose(loaded, options.runs)
    shown = [row for row in ROWS if any(_columns(samples, row) for _, samples in chosen)]
    hosts = sorted({host for _, samples in chosen for host in samples["host"]})
    figure = Figure((style.WIDTH_IN, 1.35 * len(shown) + 0.9), layout="constrained")
    axes = figure.subplots(len(shown), len(chosen), squeeze=False, sharey="row", sharex="col")
    labels: dict[str, dict[str, Any]] = {}
    for (name, samples), column_axes in zip(chosen, axes.T, strict=True):
        began = (samples["unix_s"] - samples["seconds"]).min()
        style.title(column_axes[0], name)
        column_axes[-1].set_xlabel("time (s)")
        for row, axis in zip(shown, column_axes, strict=True):
            for host, every in samples.groupby("host", sort=True):
                part, place = thinned(every), hosts.index(host)
                for index, (column, factor, what) in enumerate(_columns(samples, row)):
                    look = style.marker(place) | {"color": style.colour(place), "linestyle": DASHES[index % 4]}
                    look |= {"linewidth": 1.0, "markersize": 4, "markevery": max(1, len(part) // 5)}
                    axis.plot(part["unix_s"] - began, factor * part[column], **look)
                    labels[f"{row}: {what}"] = {"color": style.SOFT, "linestyle": look["linestyle"]}
            axis.text(0.99, 0.97, _mean(samples, row), transform=axis.transAxes, ha="right", va="top", fontsize=7)
    for row, axis in zip(shown, axes[:, 0], strict=True):
        axis.set_ylabel(f"{row} ({ROWS[row][0]})")
        axis.set_ylim(0, max(axis.get_ylim()[1] * 1.25, 1e-3))  # room for the mean above the curves
    for place, host in enumerate(hosts):
        axes[0][0].plot([], [], **style.marker(place), color=style.colour(place), label=printable(str(host)))
    for label, look in labels.items():
        if label.partition(": ")[2]:
            axes[0][0].plot([], [], **look, label=printable(label))
    style.legend(figure, list(axes.flat), "host; each point is a mean over its interval")
    return figure


def _columns(samples: pd.DataFrame, row: str) -> list[tuple[str, float, str]]:
    """(column, factor, name) of each curve of a row that has values. A single curve needs no name."""
    found = [
        (name, factor, name.removeprefix("power_w.").removesuffix("_mbit"))
        for start, factor in ROWS[row][1]
        for name in samples.columns
        if name.startswith(start) and samples[name].notna().any()
    ]
    return [(name, factor, what if len(found) > 1 or row == "power" else "") for name, factor, what in found]


def _choose(loaded: Loaded, names: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """(title, samples) of the runs to show, at most COLUMNS. Runs that the user names may have any state.

    Raises Failure (2) for an unknown name, Failure (65) if no run has samples.
    """
    runs = loaded.runs
    named = runs["run"].isin([_full_name(name, runs) for name in names]) | (
        runs["run_dir"].isin(list(map(str, loaded.roots))) & (not names)
    )
    if (count := int(named.sum())) > COLUMNS:
        raise Failure(f"{count} runs are named, but a figure has room for {COLUMNS}", exits.USAGE)
    shown = runs[named] if count else groups.usable(runs)
    chosen: dict[Any, tuple[str, pd.DataFrame]] = {}
    for run in shown.sort_values(["hosts", "rate_mbit", "started_utc", "run"], kind="stable").itertuples():
        key = run.run_dir if count else run.hosts
        if key not in chosen and len(chosen) < COLUMNS and len(samples := energy.series(run.run_dir)):
            chosen[key] = (_title(run), samples)
    if not chosen:
        raise Failure("no samples; hint: train with --monitor power,resources", exits.BAD_DATA)
    return list(chosen.values())


def _full_name(name: str, runs: pd.DataFrame) -> str:
    """The name of the only run that has this name or starts with it. Raises Failure (2)."""
    known = sorted(set(runs["run"]))
    fitting = [name] if name in known else [run for run in known if run.startswith(name)]
    if len(fitting) != 1:
        what = f"{len(fitting)} runs start with it" if fitting else f"no such run{near(name, known)}"
        raise Failure(f"--runs {name}: {what}; hint: see `hvdtrain results list`", exits.USAGE)
    return fitting[0]


def _title(run: Any) -> str:
    link = f", {rate_words(run.rate_mbit)}" if run.hosts > 1 else ""
    state = "" if run.state == "complete" else f", {run.state}"
    return f"{run.framework} {run.strategy}\n{many(run.hosts, 'hosts')}{link}{state}"


def thinned(samples: pd.DataFrame) -> pd.DataFrame:
    """One host's samples in at most POINTS rows: means of successive samples, weighted by their lengths."""
    together = -(-len(samples) // POINTS)
    if together == 1:
        return samples
    bins = np.arange(len(samples)) // together
    found: dict[str, Any] = {
        "unix_s": samples["unix_s"].groupby(bins).last(),
        "seconds": samples["seconds"].groupby(bins).sum(),
    }
    for name in samples.columns.difference(["host", *found], sort=False):
        weights = samples["seconds"].where(samples[name].notna())
        found[name] = (samples[name] * weights).groupby(bins).sum(min_count=1) / weights.groupby(bins).sum()
    return pd.DataFrame(found)


def _mean(samples: pd.DataFrame, row: str) -> str:
    """`mean 54.1 %`: over hosts and time, weighted by the length of each interval. Power is a sum over devices."""
    unit, ((start, factor), *_) = ROWS[row]
    names = [name for name in samples.columns if name.startswith(start)]
    known = samples.dropna(subset=names, how="all")
    if not names or known.empty:
        return "not measured"
    values = factor * known[names].sum(axis=1)
    return f"mean {number((values * known['seconds']).sum() / known['seconds'].sum())} {unit}"
