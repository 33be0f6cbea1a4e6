"""Training curves: the primary metric over time, one panel per framework and strategy.

A curve is the mean over the repeats of a group, its band their spread.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results import scores
from hvdtrain.results.figures import Options, panels, style
from hvdtrain.results.figures.panels import Looks
from hvdtrain.results.groups import Group
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import summary
from hvdtrain.results.tables.columns import score_columns
from hvdtrain.results.tables.scaling import rate_words
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


def accuracy(loaded: Loaded, _: Options) -> Figure:
    """The primary metric of validation over time. Raises Failure (65) if no run has validated."""
    missing = "no validation score: needs complete timing runs with a validation split"
    split = panels.split(loaded, "best_validation_score", missing)
    shown = [score_columns(members[0].runs)[0] for members in split.values()]
    alike = len({column.key for column in shown}) == 1
    made, axes = style.grid(len(split), sharey=alike)
    looks, drawn = Looks(loaded), []
    for axis, column, (title, members) in zip(axes, shown, split.items(), strict=True):
        for group in members:
            points = _curve(loaded, group)
            if points.empty:
                continue
            look = looks.line(group.key["rate_mbit"], group.key["hosts"])
            look |= looks.marker(group.key["hosts"]) | {"markevery": max(1, len(points) // 6)}
            axis.plot(points["time_s"], column.scale * points["mean"], **look)
            band = [column.scale * points[end] for end in ("low", "high")]
            axis.fill_between(points["time_s"], *band, color=look["color"], alpha=0.15, lw=0)
            drawn.append(points.assign(hosts=group.key["hosts"]))
        style.title(axis, title)
        axis.set_xlabel("time since step 0 (s)")
        if column.unit == "%":
            axis.set_ylim(max(0, axis.get_ylim()[0]), 100)
        if not alike or axis in style.first_column(axes):
            axis.set_ylabel(column.heading.replace("test", "validation", 1))
    if not drawn:
        raise Failure(missing, exits.BAD_DATA)
    ends = [points["time_s"].iloc[-1] for points in drawn]
    if max(ends) > style.WIDE * min(ends):
        for axis in axes:
            style.log_scale(axis, "x")
    every = pd.concat(drawn)
    looks.legend(axes[0], every["hosts"])
    for mbit in looks.rates if every["hosts"].max() > 1 else ():
        axes[0].plot([], [], **looks.line(mbit), label=rate_words(mbit))
    style.legend(made, axes, style.repeats([int(n) for n in every["n"]], "bands"))
    return made


def _curve(loaded: Loaded, group: Group) -> pd.DataFrame:
    """The primary metric of validation after each epoch that all timing runs reached: epoch (from 1), time_s (mean),
    mean, low, high, n."""
    name = f"validation_{scores.primary(group.runs)[0]}"
    every = (frame.epochs(loaded, folder) for folder in group.column("run_dir", timing=True))
    frames = [known for epochs in every if name in epochs and len(known := epochs.dropna(subset=[name]))]
    rows = []
    for epoch, members in pd.concat(frames).groupby("epoch") if frames else ():
        score, seconds = summary(members[name]), summary(members["elapsed_s"])
        if len(members) < len(frames) or score is None or seconds is None:
            continue
        low, high = score.span or (None, None)
        rows.append((float(epoch) + 1, seconds.mean, score.mean, low, high, score.n))
    return pd.DataFrame(rows, columns=["epoch", "time_s", "mean", "low", "high", "n"], dtype=float)
