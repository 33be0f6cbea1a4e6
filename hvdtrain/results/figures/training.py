"""How well a model learns: the primary metric against epochs and against time, one panel per framework and strategy.

A curve is the mean over the repeats of one group, its band their spread.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hvdtrain.results import load, scores
from hvdtrain.results.figures import panels, style
from hvdtrain.results.figures.panels import Looks
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.results.scaling import rate_words
from hvdtrain.results.statistics import summary
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


def figure(loaded: Loaded, _: Options, *, x: str, label: str) -> Figure:
    """The primary metric of validation against x. Raises Failure (65) when no run has validated."""
    lacking = "no validation score: needs complete timing runs with a validation split"
    runs = panels.usable(loaded.runs, needs="best_validation_score", lacking=lacking)
    parts = list(panels.split(runs))
    drawn = [(name, curves(part)) for name, part in parts]
    if not any(found for _, found in drawn):
        raise Failure(lacking, exits.BAD_DATA)
    shown, looks = [scores.figures(part)[0] for _, part in parts], Looks(loaded)
    alike = len({column.key for column in shown}) == 1
    made, axes = style.grid(len(drawn), sharey=alike)
    last: list[float] = []
    counts: list[int] = []
    for axis, column, (name, found) in zip(axes, shown, drawn, strict=True):
        for (number, mbit), points in found.items():
            look = looks.line(mbit, number)
            every = max(1, len(points) // 6)
            axis.plot(points[x], column.scale * points["mean"], markevery=every, **look, **looks.marker(number))
            band = [column.scale * points[end] for end in ("low", "high")]
            axis.fill_between(points[x], *band, color=look["color"], alpha=0.15, lw=0)
            counts += [int(n) for n in points["n"]]
            last.append(points[x].iloc[-1])
        style.title(axis, name)
        axis.set_xlabel(label)
        if column.unit == "%":
            axis.set_ylim(max(0, axis.get_ylim()[0]), 100)
    for axis in axes:
        if x == "epoch":
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        elif max(last) > style.WIDE * min(last):
            style.log_scale(axis, "x")
    for axis, column in zip(axes, shown, strict=True):
        if not alike or axis in style.first_column(axes):
            axis.set_ylabel(column.heading.replace("test", "validation", 1))
    all_hosts = {number for _, found in drawn for number, _ in found}
    looks.legend(axes[0], all_hosts)
    for mbit in looks.rates if max(all_hosts) > 1 else ():
        axes[0].plot([], [], **looks.line(mbit), label=rate_words(mbit))
    style.legend(made, axes, style.repeats(counts, "bands"))
    return made


by_epoch = functools.partial(figure, x="epoch", label="epoch")
by_time = functools.partial(figure, x="time_s", label="time since step 0 (s)")


def curves(runs: pd.DataFrame) -> dict[tuple[int, float], pd.DataFrame]:
    """(hosts, rate) -> curve of each group of the panel that has validated."""
    order = runs["rate_mbit"].fillna(math.inf)
    grouped = [(number, part) for (number, _), part in runs.groupby(["hosts", order], sort=True)]
    found = {(int(number), float(part["rate_mbit"].iloc[0])): curve(part) for number, part in grouped}
    return {key: points for key, points in found.items() if len(points)}


def curve(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean of the primary metric of validation after each epoch that all the runs reached: epoch (from 1), time_s
    (mean), mean, low, high, n."""
    name = f"validation_{scores.primary_metrics(runs)[0]}"
    frames = [frame for folder in runs["run_dir"] if name in (frame := load.epochs(folder))]
    frames = [frame for each in frames if len(frame := each.dropna(subset=[name]))]
    rows: list[dict[str, Any]] = []
    for epoch, members in pd.concat(frames).groupby("epoch") if frames else ():
        score, seconds = summary(members[name]), summary(members["elapsed_s"])
        if len(members) < len(frames) or score is None or seconds is None:
            continue
        about = {"epoch": float(epoch) + 1, "time_s": seconds.mean}
        low, high = score.span or (None, None)
        rows.append({**about, "mean": score.mean, "low": low, "high": high, "n": score.n})
    return pd.DataFrame(rows, columns=["epoch", "time_s", "mean", "low", "high", "n"]).astype(float)
