"""How well a model learns: accuracy against epochs and against time, one panel per framework and strategy.

A curve is the mean over the repeats of one group, its band the 95 % interval of that mean. Colour and marker tell the
number of hosts, the line style the rate of the links.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results import load
from hvdtrain.results.figures import panels, style
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.results.statistics import summary


def by_epoch(loaded: Loaded, _: Options) -> Figure:
    """Validation accuracy against epochs. Raises Failure (65) when no run has validated."""
    return figure(loaded.runs, "epoch", "epoch")


def by_time(loaded: Loaded, _: Options) -> Figure:
    """Validation accuracy against the seconds of training, validation and checkpoints so far. Raises Failure (65)."""
    return figure(loaded.runs, "time_s", "time since step 0 (s)")


def figure(runs: pd.DataFrame, x: str, label: str) -> Figure:
    lacking = "no validation accuracy: needs complete timing runs with a validation split"
    runs = panels.usable(runs, needs="best_validation_accuracy", lacking=lacking)
    drawn = [(name, curves(part)) for name, part in panels.split(runs)]
    all_hosts = sorted({number for _, found in drawn for number, _ in found})
    rates = panels.rates(runs)
    made, axes = style.grid(len(drawn), sharey=True)
    counts: list[int] = []
    last: list[float] = []
    for axis, (name, found) in zip(axes, drawn, strict=True):
        for (number, mbit), points in found.items():
            line = panels.place(rates, mbit) if number > 1 else 0
            host = all_hosts.index(number)
            look = {"color": style.colour(host), "linestyle": style.LINES[line % len(style.LINES)]}
            every = max(1, len(points) // 6)
            axis.plot(points[x], 100 * points["mean"], marker=style.MARKERS[host % 7], markevery=every, **look)
            axis.fill_between(
                points[x], 100 * points["low"], 100 * points["high"], color=look["color"], alpha=0.15, lw=0
            )
            counts += [int(n) for n in points["n"]]
            last.append(points[x].iloc[-1])
        axis.set_title(name)
        axis.set_xlabel(label)
        axis.set_ylim(max(0, axis.get_ylim()[0]), 100)
    for axis in axes:
        if x == "epoch":
            style.whole_numbers(axis)
        elif max(last) > style.WIDE * min(last):
            style.log_scale(axis, "x")
    for axis in style.first_column(axes):
        axis.set_ylabel("validation accuracy (%)")
    keys(made, axes[0], all_hosts, rates, style.repeats(counts, "bands"))
    return made


def curves(runs: pd.DataFrame) -> dict[tuple[int, float], pd.DataFrame]:
    """(hosts, rate) -> curve of each group of the panel that has validated."""
    order = runs["rate_mbit"].fillna(math.inf)
    grouped = [(number, part) for (number, _), part in runs.groupby(["hosts", order], sort=True)]
    found = {(int(number), float(part["rate_mbit"].iloc[0])): curve(part) for number, part in grouped}
    return {key: points for key, points in found.items() if len(points)}


def curve(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean validation accuracy after each epoch that all the runs reached: epoch (from 1), time_s (mean), mean, low,
    high, n."""
    frames = [load.epochs(folder).dropna(subset=["validation_accuracy"]) for folder in runs["run_dir"]]
    frames = [frame for frame in frames if len(frame)]
    rows: list[dict[str, Any]] = []
    for index in range(min(map(len, frames), default=0)):
        accuracy = summary(frame["validation_accuracy"].iloc[index] for frame in frames)
        seconds = summary(frame["elapsed_s"].iloc[index] for frame in frames)
        assert accuracy and seconds
        about = {"epoch": frames[0]["epoch"].iloc[index] + 1, "time_s": seconds.mean}
        rows.append({**about, "mean": accuracy.mean, "low": accuracy.low, "high": accuracy.high, "n": accuracy.n})
    return pd.DataFrame(rows, columns=["epoch", "time_s", "mean", "low", "high", "n"]).astype(float)


def keys(made: Figure, axis: Any, all_hosts: list[int], rates: list[float], title: str) -> None:
    """The legend: what colours and markers mean, and what line styles mean."""
    for index, number in enumerate(all_hosts):
        axis.plot([], [], color=style.colour(index), marker=style.MARKERS[index % 7], label=panels.hosts(number))
    if max(all_hosts) > 1:
        for index, mbit in enumerate(rates):
            axis.plot(
                [], [], color=style.SOFT, linestyle=style.LINES[index % len(style.LINES)], label=panels.rate(mbit)
            )
    style.legend(made, [axis], title, columns=6)
