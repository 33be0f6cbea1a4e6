"""Where the time of a step goes: data, compute and waiting for the exchange.

Bars are means over the repeats of a group. Each rate has axes of its own, because a step at 10 Mbit/s can take a
hundred times as long as at 1 Gbit/s. A single host appears in all of them.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results.comparability import many
from hvdtrain.results.figures import Options, panels, style
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import summary
from hvdtrain.results.tables.model import number
from hvdtrain.results.tables.scaling import rate_words

STEP = {
    "data_s": ("waiting for data", style.GREEN, "||||"),
    "compute_s": ("compute", style.BLUE, ""),
    "both_s": ("compute and exchange, not separable", style.SKY, "xxxx"),
    "communication_s": ("waiting for the exchange", style.VERMILION, "////"),
}
COLUMNS = 3
LETTERS = 38
"""Longest line of a bar's label"""


def phases(loaded: Loaded, _: Options) -> Figure:
    """Seconds per step of each group by phase, in a panel per rate. Raises Failure (65) without timed steps."""
    missing = "no times per step: needs complete timing runs with more steps than the 3 of warm-up"
    runs = panels.usable(loaded.runs, "step_s", missing)
    rates = panels.rates(runs)
    labels, parts = [], []
    for name, part in panels.split(runs):
        for hosts, same in part.groupby("hosts", sort=True):
            labels.append(style.wrapped(f"{name}, {many(hosts, 'hosts')}", LETTERS))
            parts.append(_separable(same))
    panels.check(len(labels), panels.MOST_BARS, "bars")
    bar_in = 0.07 + 0.12 * max(label.count("\n") + 1 for label in labels)
    height_in = bar_in * len(labels) + 0.4
    figure, axes = style.grid(len(rates), columns=COLUMNS, height_in=height_in, sharey=True)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].set_ylim(len(labels) - 0.5, -0.5)
    for mbit, axis in zip(rates, axes, strict=True):
        ends = [0.0] * len(parts)
        for column, (label, colour, hatch) in STEP.items():
            means = [summary(panels.at_rate(part, mbit)[column]) for part in parts]
            lengths = [0.0 if mean is None else mean.mean for mean in means]
            if any(lengths):
                look = {"color": colour, "hatch": hatch, "edgecolor": style.PAPER, "label": label}
                axis.barh(range(len(parts)), lengths, left=ends, height=0.72, **look)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        for index, end in enumerate(ends):
            if end:
                axis.annotate(number(end), (end, index), (3, 0), textcoords="offset points", va="center", fontsize=7)
        axis.set_xlim(0, 1.22 * max(ends) or 1.0)
        axis.grid(visible=False, axis="y")
        style.title(axis, rate_words(mbit) if runs["hosts"].max() > 1 else "")
        axis.set_xlabel("s per step")
    counts = [len(panels.at_rate(part, mbit)) for part in parts for mbit in rates]
    style.legend(figure, axes, f"mean of {style.count(counts)}; the number is the whole bar")
    return figure


def _separable(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with `both_s` instead of `compute_s` if the framework cannot separate the exchange from it."""
    mixed = runs["communication_s"].isna()
    return runs.assign(both_s=runs["compute_s"].where(mixed), compute_s=runs["compute_s"].mask(mixed))
