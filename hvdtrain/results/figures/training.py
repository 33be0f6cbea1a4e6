"""How well a model learns: accuracy against epochs and against time, one panel per framework and strategy.

A curve is the mean over the repeats of one group, its band their spread.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results import load
from hvdtrain.results.figures import panels, style
from hvdtrain.results.figures.panels import Looks
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.results.statistics import summary


def by_epoch(loaded: Loaded, _: Options) -> Figure:
    """Validation accuracy against epochs. Raises Failure (65) when no run has validated."""
    return figure(loaded, "epoch", "epoch")


def by_time(loaded: Loaded, _: Options) -> Figure:
    """Validation accuracy against the seconds of training, validation and checkpoints so far. Raises Failure (65)."""
    return figure(loaded, "time_s", "time since step 0 (s)")


def figure(loaded: Loaded, x: str, label: str) -> Figure:
    lacking = "no validation accuracy: needs complete timing runs with a validation split"
    runs = panels.usable(loaded.runs, needs="best_validation_accuracy", lacking=lacking)
    drawn = [(name, curves(part)) for name, part in panels.split(runs)]
    looks = Looks(loaded)
    made, axes = style.grid(len(drawn), sharey=True)
    last: list[float] = []
    counts: list[int] = []
    for axis, (name, found) in zip(axes, drawn, strict=True):
        for (number, mbit), points in found.items():
            look = looks.line(mbit, number)
            every = max(1, len(points) // 6)
            axis.plot(points[x], 100 * points["mean"], markevery=every, **look, **looks.marker(number))
            axis.fill_between(
                points[x], 100 * points["low"], 100 * points["high"], color=look["color"], alpha=0.15, lw=0
            )
            counts += [int(n) for n in points["n"]]
            last.append(points[x].iloc[-1])
        style.title(axis, name)
        axis.set_xlabel(label)
        axis.set_ylim(max(0, axis.get_ylim()[0]), 100)
    for axis in axes:
        if x == "epoch":
            style.whole_numbers(axis)
        elif max(last) > style.WIDE * min(last):
            style.log_scale(axis, "x")
    for axis in style.first_column(axes):
        axis.set_ylabel("validation accuracy (%)")
    all_hosts = {number for _, found in drawn for number, _ in found}
    looks.legend(axes[0], all_hosts)
    for mbit in looks.rates if max(all_hosts) > 1 else ():
        axes[0].plot([], [], **looks.line(mbit), label=panels.rate(mbit))
    style.legend(made, axes, style.repeats(counts, "bands"))
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
        low, high = accuracy.span or (None, None)
        rows.append({**about, "mean": accuracy.mean, "low": low, "high": high, "n": accuracy.n})
    return pd.DataFrame(rows, columns=["epoch", "time_s", "mean", "low", "high", "n"]).astype(float)
