"""Where the time of a step goes: data, compute and waiting for the exchange.

Bars are means over the repeats of a group. Each rate has separate axes, because a step at 10 Mbit/s can take a
hundred times as long as at 1 Gbit/s. A single host appears in all of them.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from hvdtrain.results.comparability import many
from hvdtrain.results.figures import Options, panels, style
from hvdtrain.results.groups import Group
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
    bars: dict[str, dict[float | None, Group]] = {}  # label -> rate -> group
    for title, members in panels.split(loaded, "step_s", missing).items():
        for group in members:
            label = style.wrapped(f"{title}, {many(group.key['hosts'], 'hosts')}", LETTERS)
            while group.key["rate_mbit"] in bars.get(label, ()):
                label += " #"
            bars.setdefault(label, {})[group.key["rate_mbit"]] = group
    experiments = [group for by_rate in bars.values() for group in by_rate.values()]
    rates = panels.rates(experiments)
    panels.check(len(bars), panels.MOST_BARS, "bars")
    bar_in = 0.07 + 0.12 * max(label.count("\n") + 1 for label in bars)
    figure, axes = style.grid(len(rates), columns=COLUMNS, height_in=bar_in * len(bars) + 0.4, sharey=True)
    axes[0].set_yticks(range(len(bars)), list(bars))
    axes[0].set_ylim(len(bars) - 0.5, -0.5)
    for mbit, axis in zip(rates, axes, strict=True):
        shown = [_at_rate(by_rate, mbit) for by_rate in bars.values()]
        ends = [0.0] * len(shown)
        for column, (label, colour, hatch) in STEP.items():
            lengths = [_mean_s(group, column) for group in shown]
            if any(lengths):
                look = {"color": colour, "hatch": hatch, "edgecolor": style.PAPER, "label": label}
                axis.barh(range(len(shown)), lengths, left=ends, height=0.72, **look)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        for index, end in enumerate(ends):
            if end:
                axis.annotate(number(end), (end, index), (3, 0), textcoords="offset points", va="center", fontsize=7)
        axis.set_xlim(0, 1.22 * max(ends) or 1.0)
        axis.grid(visible=False, axis="y")
        style.title(axis, rate_words(mbit) if any(group.key["hosts"] > 1 for group in experiments) else "")
        axis.set_xlabel("s per step")
    counts = [len(group.values("step_s")) for group in experiments]
    style.legend(figure, axes, f"mean of {style.count(counts)}; the number is the whole bar")
    return figure


def _at_rate(by_rate: dict[float | None, Group], mbit: float | None) -> Group | None:
    """The group at this rate; a single host has the same bar at every rate."""
    single = [group for group in by_rate.values() if group.key["hosts"] == 1]
    return single[0] if single else by_rate.get(mbit)


def _mean_s(group: Group | None, column: str) -> float:
    """Mean seconds of a phase. If the framework cannot separate the exchange from computing, both are in `both_s`."""
    if group is None:
        return 0.0
    runs = group.timing
    if column in ("both_s", "compute_s"):
        runs = runs[runs["communication_s"].isna() == (column == "both_s")]
    mean = summary(runs["compute_s" if column == "both_s" else column])
    return mean.mean if mean else 0.0
