"""What the machines did meanwhile: power of each device, and use of processor, memory, GPU and network of each host.

A column is one run, because samples of repeats do not fall on the same instants: the runs named, or else the first run
with samples of each number of hosts, at the slowest rate. Time counts from the first sample of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results import groups, load, sensors
from hvdtrain.results.figures import style
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.results.scaling import many, rate_words
from hvdtrain.results.table import number
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure, printable

COLUMNS = 3
POINTS = 300
"""Most points of a curve; a long run's samples are put together so that its figure stays small"""
# Row of the figure -> unit, words for its mean, and (column of `use`, factor to the unit), the second one dotted.
ROWS: dict[str, tuple[str, str, tuple[tuple[str, float], ...]]] = {
    "CPU": ("%", "{} of all cores", (("cpu_percent", 1.0),)),
    "RAM": ("GB", "{}", (("ram_used_bytes", 1e-9),)),
    "GPU": ("%", "{}", (("gpu_percent", 1.0),)),
    "NIC": ("Mbit/s", "{} sent", (("sent_mbit", 1.0), ("received_mbit", 1.0))),
}


def power(loaded: Loaded, options: Options) -> Figure:
    """Power of each device of each host against time. Raises Failure (2, 65) when there are no samples."""
    chosen = choose(loaded, options.runs, load.samples, no_power(loaded.runs))
    figure = Figure((style.WIDTH_IN, 3.2), layout="constrained")
    axes = figure.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    devices = sorted({device for _, samples in chosen for device in samples["device"]})
    hosts = sorted({host for _, samples in chosen for host in samples["host"]})
    for axis, (name, samples) in zip(axes, chosen, strict=True):
        began = (samples["unix_s"] - samples["seconds"]).min()
        for (host, device), every in samples.groupby(["host", "device"], sort=True):
            part, place = thinned(every), hosts.index(host)
            dash = style.LINES[devices.index(device) % len(style.LINES)]
            look = style.marker(place) | {"color": style.colour(place), "linestyle": dash}
            watts = part["energy_j"] / part["seconds"]
            line(axis, part["unix_s"] - began, watts, look, printable(f"{host}: {device}"))
        style.title(axis, name)
        axis.set_xlabel("time (s)")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("power (W)")
    style.legend(figure, axes, "host: device; each point is a mean over its interval")
    return figure


def resources(loaded: Loaded, options: Options) -> Figure:
    """CPU, RAM, GPU and network use of each host against time, with the mean over the run and the hosts.

    Raises Failure (2, 65) when there are no samples.
    """
    chosen = choose(loaded, options.runs, use, "no resource samples: run with --monitor resources")
    shown = [row for row, (*_, columns) in ROWS.items() if any(s[columns[0][0]].notna().any() for _, s in chosen)]
    hosts = sorted({host for _, samples in chosen for host in samples["host"]})
    figure = Figure((style.WIDTH_IN, 1.35 * len(shown) + 0.9), layout="constrained")
    axes = figure.subplots(len(shown), len(chosen), squeeze=False, sharey="row", sharex="col")
    for index, (name, samples) in enumerate(chosen):
        began = (samples["unix_s"] - samples["seconds"]).min()
        style.title(axes[0][index], name)
        axes[-1][index].set_xlabel("time (s)")
        for row, axis in zip(shown, axes[:, index], strict=True):
            for host, every in samples.groupby("host", sort=True):
                part = thinned(every)
                for column, factor in ROWS[row][2]:
                    place, second = hosts.index(host), column != ROWS[row][2][0][0]
                    look = style.marker(place) | {"color": style.colour(place), "linestyle": ":" if second else "-"}
                    label = None if second else printable(str(host))
                    line(axis, part["unix_s"] - began, factor * part[column], look, label)
            axis.text(0.99, 0.97, mean(samples, row), transform=axis.transAxes, ha="right", va="top", fontsize=7)
    for row, axis in zip(shown, axes[:, 0], strict=True):
        axis.set_ylabel(f"{row} ({ROWS[row][0]})")
        axis.set_ylim(0, max(axis.get_ylim()[1] * 1.25, 1e-3))  # room for the mean above the curves
    axes[0][-1].plot([], [], color=style.SOFT, linestyle=":", label="received by the NIC")
    style.legend(figure, list(axes.flat), "host")
    return figure


def no_power(runs: pd.DataFrame) -> str:
    """Why a figure of power has nothing to show."""
    for run_dir in runs["run_dir"]:
        for sensor in sensors.of(run_dir):
            if sensor.source is None and sensor.used:
                return f"no power samples: {sensor.device} of {sensor.host} has no sensor: {printable(sensor.reason)}"
    return "no power samples: run with --monitor power"


def choose(
    loaded: Loaded, names: Sequence[str], read: Callable[[str], pd.DataFrame], lacking: str
) -> list[tuple[str, pd.DataFrame]]:
    """(title, samples) of the runs to show, at most COLUMNS: those named, or given by their own folder, whatever their
    state; else complete ones.

    Raises Failure (2) for a name that no run has, Failure (65) with `lacking` when none has samples.
    """
    runs = loaded.runs
    asked = runs["run"].isin([begun(name, runs) for name in names]) | (
        runs["run_dir"].isin(list(map(str, loaded.roots))) & (not names)
    )
    if (many := int(asked.sum())) > COLUMNS:
        raise Failure(f"{many} runs are named: a figure holds {COLUMNS}", exits.USAGE)
    shown = runs[asked] if many else groups.usable(runs)
    chosen: dict[Any, tuple[str, pd.DataFrame]] = {}
    for run in shown.sort_values(["hosts", "rate_mbit", "started_utc", "run"], kind="stable").itertuples():
        key = run.run_dir if many else run.hosts
        if key not in chosen and len(chosen) < COLUMNS and len(samples := read(run.run_dir)):
            chosen[key] = (title(run), samples)
    if not chosen:
        raise Failure(lacking, exits.BAD_DATA)
    return list(chosen.values())


def begun(name: str, runs: pd.DataFrame) -> str:
    """The name of the one run that is called so, or begins so. Raises Failure (2)."""
    known = sorted(set(runs["run"]))
    fitting = [name] if name in known else [run for run in known if run.startswith(name)]
    if len(fitting) != 1:
        what = f"{len(fitting)} runs begin so" if fitting else f"no such run there{near(name, known)}"
        raise Failure(f"--runs {name}: {what}; see hvdtrain results list", exits.USAGE)
    return fitting[0]


def title(run: Any) -> str:
    link = f", {rate_words(run.rate_mbit)}" if run.hosts > 1 else ""
    state = "" if run.state == "complete" else f", {run.state}"
    return f"{run.framework} {run.strategy}\n{many(run.hosts, 'hosts')}{link}{state}"


def thinned(samples: pd.DataFrame) -> pd.DataFrame:
    """One host's (and device's) samples in at most POINTS rows: successive ones together, their seconds and joules
    added, other figures averaged with the seconds as weights (over the samples that have them)."""
    together = -(-len(samples) // POINTS)
    if together == 1:
        return samples
    bins = np.arange(len(samples)) // together
    found: dict[str, Any] = {"unix_s": samples["unix_s"].groupby(bins).last()}
    for name in samples.columns.difference(["host", "device", "unix_s"], sort=False):
        weights = samples["seconds"].where(samples[name].notna())
        if name in ("seconds", "energy_j"):
            found[name] = samples[name].groupby(bins).sum()
        else:
            found[name] = (samples[name] * weights).groupby(bins).sum(min_count=1) / weights.groupby(bins).sum()
    return pd.DataFrame(found)


def use(run_dir: str) -> pd.DataFrame:
    """`load.resources` of the run with rates in the place of the NIC's bytes; empty without any measurement."""
    found = load.resources(run_dir)
    for way in ("sent", "received"):
        found[f"{way}_mbit"] = found[f"nic_{way}_bytes"] * 8e-6 / found["seconds"]
    return found.dropna(subset=[column for *_, columns in ROWS.values() for column, _ in columns], how="all")


def mean(samples: pd.DataFrame, row: str) -> str:
    """`mean 54.1 % of all cores`: over hosts and time, weighted by the length of each interval."""
    unit, words, ((column, factor), *_) = ROWS[row]
    known = samples.dropna(subset=[column])
    if known.empty:
        return "not measured"
    value = factor * (known[column] * known["seconds"]).sum() / known["seconds"].sum()
    return "mean " + words.format(f"{number(value)} {unit}")


def line(axis: Any, seconds: Any, values: Any, look: dict[str, Any], label: str | None) -> None:
    """A curve with a marker here and there, so that it is told from others in grey."""
    every = max(1, len(seconds) // 5)
    axis.plot(seconds, values, **(look | {"linewidth": 1.0, "markersize": 4}), markevery=every, label=label)
