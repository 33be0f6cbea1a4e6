"""Training curves: the primary score over epochs and over time, one panel per framework and strategy.

A curve is the mean over the repeats of a group, its band their spread.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvdtrain.results import scores
from hvdtrain.results.figures import Options, panels, style
from hvdtrain.results.figures.panels import Looks
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import summary
from hvdtrain.results.tables.columns import score_columns
from hvdtrain.results.tables.scaling import rate_words
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


def figure(loaded: Loaded, _: Options, *, x: str, label: str) -> Figure:
    """The primary score of validation over x. Raises Failure (65) if no run has validated."""
    missing = "no validation score: needs complete timing runs with a validation split"
    runs = panels.usable(loaded.runs, "best_validation_score", missing)
    parts = list(panels.split(runs))
    drawn = [(name, _curves(part)) for name, part in parts]
    if not any(found for _, found in drawn):
        raise Failure(missing, exits.BAD_DATA)
    shown, looks = [score_columns(part)[0] for _, part in parts], Looks(loaded)
    alike = len({column.key for column in shown}) == 1
    made, axes = style.grid(len(drawn), sharey=alike)
    last: list[float] = []
    counts: list[int] = []
    for axis, column, (name, found) in zip(axes, shown, drawn, strict=True):
        for (hosts, mbit), points in found.items():
            look = looks.line(mbit, hosts)
            every = max(1, len(points) // 6)
            axis.plot(points[x], column.scale * points["mean"], markevery=every, **look, **looks.marker(hosts))
            band = [column.scale * points[end] for end in ("low", "high")]
            axis.fill_between(points[x], *band, color=look["color"], alpha=0.15, lw=0)
            counts += [int(n) for n in points["n"]]
            last.append(points[x].iloc[-1])
        style.title(axis, name)
        axis.set_xlabel(label)
        if column.unit == "%":
            axis.set_ylim(max(0, axis.get_ylim()[0]), 100)
        if not alike or axis in style.first_column(axes):
            axis.set_ylabel(column.heading.replace("test", "validation", 1))
    for axis in axes:
        if x == "epoch":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        elif max(last) > style.WIDE * min(last):
            style.log_scale(axis, "x")
    all_hosts = {hosts for _, found in drawn for hosts, _ in found}
    looks.legend(axes[0], all_hosts)
    for mbit in looks.rates if max(all_hosts) > 1 else ():
        axes[0].plot([], [], **looks.line(mbit), label=rate_words(mbit))
    style.legend(made, axes, style.repeats(counts, "bands"))
    return made


by_epoch = functools.partial(figure, x="epoch", label="epoch")
by_time = functools.partial(figure, x="time_s", label="time since step 0 (s)")


def _curves(runs: pd.DataFrame) -> dict[tuple[int, float], pd.DataFrame]:
    """(hosts, rate) -> the curve of each group of a panel that has validated."""
    found = {}
    for (hosts, _), part in runs.groupby(["hosts", runs["rate_mbit"].fillna(math.inf)], sort=True):
        if len(points := _curve(part)):
            found[int(hosts), float(part["rate_mbit"].iloc[0])] = points
    return found


def _curve(runs: pd.DataFrame) -> pd.DataFrame:
    """The primary score of validation after each epoch that all runs reached: epoch (from 1), time_s (mean), mean,
    low, high, n."""
    name = f"validation_{scores.primary(runs)[0]}"
    frames = [found for folder in runs["run_dir"] if name in (found := frame.epochs(folder))]
    frames = [found for each in frames if len(found := each.dropna(subset=[name]))]
    rows: list[dict[str, Any]] = []
    for epoch, members in pd.concat(frames).groupby("epoch") if frames else ():
        score, seconds = summary(members[name]), summary(members["elapsed_s"])
        if len(members) < len(frames) or score is None or seconds is None:
            continue
        low, high = score.span or (None, None)
        about = {"epoch": float(epoch) + 1, "time_s": seconds.mean}
        rows.append({**about, "mean": score.mean, "low": low, "high": high, "n": score.n})
    return pd.DataFrame(rows, columns=["epoch", "time_s", "mean", "low", "high", "n"]).astype(float)
