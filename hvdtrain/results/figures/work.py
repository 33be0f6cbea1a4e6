"""Where a step's time and bytes go: stacked phases, and bytes on the wire against the least that an allreduce can send.

Bars are means over the repeats of a group. The runs of each rate have axes of their own, because a step takes a hundred
times longer at 10 Mbit/s than at 1 Gbit/s; a run on one host stands in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results.figures import panels, style
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.results.scaling import many, rate_words
from hvdtrain.results.statistics import summary
from hvdtrain.results.table import number

STEP = {
    "data_s": ("waiting for data", style.GREEN, "||||"),
    "compute_s": ("compute", style.BLUE, ""),
    "both_s": ("compute and exchange, not separable", style.SKY, "xxxx"),
    "communication_s": ("waiting for the exchange", style.VERMILION, "////"),
}
RUN = {
    "train_s": ("training", style.PURPLE, ""),
    "validation_s": ("validation", style.ORANGE, "\\\\\\\\"),
    "test_s": ("test", style.INK, "----"),
    "checkpoint_s": ("checkpoints", style.SOFT, "++++"),
}
COLUMNS = 3
LABEL = 38
"""Letters in a line of a bar's label"""


def phases(loaded: Loaded, _: Options) -> Figure:
    """Seconds per step (above) and per run (below) of each group, stacked by phase; one column per rate.

    Raises Failure (65) when no run has timed steps.
    """
    lacking = "no times per step: needs complete timing runs of more than the 3 warm-up steps"
    runs = panels.usable(loaded.runs, needs="step_s", lacking=lacking)
    rates = panels.rates(runs)
    across = -(-len(rates) // -(-len(rates) // COLUMNS))  # as many in each row of axes as can be
    blocks = [rates[start : start + across] for start in range(0, len(rates), across)]
    labels, groups = bars(runs)
    panels.check(len(labels), panels.MOST_BARS, "bars")
    height_in = 2 * len(blocks) * (bar_in(labels) * len(labels) + 0.75) + 0.9
    figure = Figure((style.WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots(2 * len(blocks), across, squeeze=False, sharey=True)
    axes[0][0].set_yticks(range(len(labels)), labels)
    axes[0][0].set_ylim(len(labels) - 0.5, -0.5)
    for block, shown in enumerate(blocks):
        for spare in axes[2 * block : 2 * block + 2, len(shown) :].flat:
            spare.set_visible(False)
        for mbit, above, below in zip(shown, axes[2 * block], axes[2 * block + 1], strict=False):
            here = [panels.at_rate(part, mbit) for part in groups]
            stack(above, [separable(part) for part in here], STEP)
            stack(below, here, RUN)
            style.title(above, rate_words(mbit) if runs["hosts"].max() > 1 else "")
            above.set_xlabel("s per step")
            below.set_xlabel("s per run")
    counts = [len(panels.at_rate(part, mbit)) for part in groups for mbit in rates]
    style.legend(figure, list(axes.flat), f"mean of {style.count(counts)}; the number is the whole bar")
    return figure


def bars(runs: pd.DataFrame) -> tuple[list[str], list[pd.DataFrame]]:
    """From above: the label of each bar, and its runs at all rates."""
    labels, groups = [], []
    for name, part in panels.split(runs):
        for hosts, same in part.groupby("hosts", sort=True):
            labels.append(style.wrapped(f"{name}, {many(hosts, 'hosts')}", LABEL))
            groups.append(same)
    return labels, groups


def bar_in(labels: Sequence[str]) -> float:
    """The distance of two bars in inches, so that labels of several lines do not touch."""
    return 0.07 + 0.12 * max(label.count("\n") + 1 for label in labels)


def separable(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with `both_s` in the place of `compute_s` where the framework cannot tell exchange from compute."""
    mixed = runs["communication_s"].isna()
    return runs.assign(both_s=runs["compute_s"].where(mixed), compute_s=runs["compute_s"].mask(mixed))


def stack(axis: Any, groups: Sequence[pd.DataFrame], parts: dict[str, tuple[str, str, str]]) -> None:
    """A horizontal bar per group out of the mean of each part that was measured, and its length in letters."""
    ends = [0.0] * len(groups)
    for column, (label, colour, hatch) in parts.items():
        means = [summary(group[column]) for group in groups]
        lengths = [0.0 if mean is None else mean.mean for mean in means]
        if any(lengths):
            axis.barh(
                range(len(groups)), lengths, left=ends, height=0.72, color=colour, hatch=hatch, edgecolor=style.PAPER,
                label=label,
            )  # fmt: skip
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for index, end in enumerate(ends):
        if end:
            axis.annotate(number(end), (end, index), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_xlim(0, 1.22 * max(ends, default=1.0) or 1.0)
    axis.grid(visible=False, axis="y")


def wire(loaded: Loaded, _: Options) -> Figure:
    """Bytes per step on the busiest NIC beside the limit and the payload, and the part of a step that the wire needs.

    Raises Failure (65) when no run on several hosts knows its NIC's bytes.
    """
    lacking = "no bytes on a wire: needs complete timing runs on two or more hosts"
    runs = panels.usable(loaded.runs, needs="wire_bytes_per_step", lacking=lacking)
    labels, groups = [], []
    for name, part in panels.split(runs):
        for (hosts, _), same in part.groupby(["hosts", part["rate_mbit"].fillna(math.inf)], sort=True):
            mbit = float(same["rate_mbit"].iloc[0])
            labels.append(style.wrapped(f"{name}, {many(hosts, 'hosts')}, {rate_words(mbit)}", LABEL))
            groups.append(same)
    panels.check(len(labels), panels.MOST_BARS, "bars")
    figure = Figure((style.WIDTH_IN, bar_in(labels) * len(labels) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(groups))
    measured = [summary(group["wire_bytes_per_step"] / 1e6) for group in groups]
    style.barh(left, measured, color=style.SKY, label="sent or received by the busiest NIC")
    for column, label, look in (
        ("bytes_per_step", "payload given to the exchange", {"marker": "o", "color": style.INK, "markersize": 3.5}),
        ("limit_bytes_per_step", "least of any allreduce", {"marker": "|", "color": style.VERMILION, "markersize": 11}),
    ):
        values = [summary(group[column] / 1e6) for group in groups]
        left.plot(
            [math.nan if one is None else one.mean for one in values], rows, linestyle="none", label=label, **look
        )
    left.set_title("Bytes per step")
    left.set_xlabel("MB per host")
    left.set_xlim(left=0)
    share = [summary(100 * group["limit_s_per_step"] / group["step_s"]) for group in groups]
    style.barh(right, share, color=style.GREEN, hatch="////", label="least bytes at 0.936 of the rate")
    right.set_title("Least time on the wire")
    right.set_xlabel("% of a step")
    right.set_xlim(0, max([100.0, *(one.mean for one in share if one is not None)]))
    for axis in (left, right):
        axis.grid(visible=False, axis="y")
    left.set_yticks(rows, labels)
    left.set_ylim(len(labels) - 0.5, -0.5)
    style.legend(figure, [left, right], style.repeats([len(group) for group in groups]))
    return figure
