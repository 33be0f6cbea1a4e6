"""What more hosts give at each rate: training time, speed-up with its ideal, and efficiency as a map.

All three draw the rows of `results.scaling.rows`, the numbers that `hvdtrain results scaling` prints. A run on one
host uses no link, so it opens every curve.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hvdtrain.results.figures import panels, style
from hvdtrain.results.figures.panels import Looks, Panel, compare
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.results.scaling import Row, rate_words

LACKING = (
    "needs complete timing runs on one host and on more that are alike; `hvdtrain results scaling` says in what these "
    "differ, and which run is missing"
)


def time(loaded: Loaded, options: Options) -> Figure:
    """Seconds of the training phase against hosts. Raises Failure (65) without timing runs."""
    drawn = compare(loaded.runs, options.count, "train_s", "no times: needs complete timing runs that no sweep marked")
    values = [row.train_s.mean for row in points(drawn) if row.train_s]
    figure, axes = draw(drawn, "train_s", options, Looks(loaded))
    for axis in axes:
        if max(values) > style.WIDE * min(values) > 0:
            style.log_scale(axis, "y")
        else:
            axis.set_ylim(bottom=0)
    for axis in style.first_column(axes):
        axis.set_ylabel("training time (s)")
    style.legend(figure, axes, style.repeats(sizes(drawn)))
    return figure


def speedup(loaded: Loaded, options: Options) -> Figure:
    """Speed-up of the training phase over the baseline. Raises Failure (65) without a baseline and a run on more."""
    drawn = compare(loaded.runs, options.count, "speedup", f"no speed-up: {LACKING}")
    figure, axes = draw(drawn, "speedup", options, Looks(loaded))
    for panel, axis in zip(drawn, axes, strict=True):
        counts = [row.count for row in points([panel])]
        least, most = min(counts), max(counts)
        axis.plot([least, most], [1, most / least], color=style.SOFT, linewidth=1, linestyle=style.LONG, label="ideal")
        axis.axhline(1, color=style.SOFT, linewidth=0.8, linestyle=":", label="baseline")
        for row in points([panel]):
            if row.suspect and row.speedup:
                axis.annotate("suspect", (row.count, row.speedup.mean), ha="right", va="bottom", fontsize=7)
        axis.set_ylim(bottom=0)
    for axis in style.first_column(axes):
        axis.set_ylabel("speed-up of training")
    style.legend(figure, axes, style.repeats(sizes(drawn)))
    return figure


def efficiency(loaded: Loaded, options: Options) -> Figure:
    """A cell per number of hosts and rate, with its 95 % interval: strong efficiency at an equal global batch, weak at
    an equal batch per rank. Raises Failure (65) without a baseline and a run on more hosts."""
    drawn = compare(loaded.runs, options.count, "efficiency", f"no efficiency: {LACKING}")
    values = {
        (index, mbit, int(row.count)): row
        for index, panel in enumerate(drawn)
        for mbit, rows in panel.curves
        for row in rows
        if row.group is not row.baseline
    }
    rates = panels.ordered([mbit for _, mbit, _ in values])
    counts = sorted({count for *_, count in values})
    figure, axes = style.grid(len(drawn), height_in=0.42 * len(rates) + 0.6, sharey=True)
    for axis, panel in zip(axes, drawn, strict=True):
        axis.set_xticks(np.arange(len(counts)) + 0.5, counts)
        axis.set_yticks(np.arange(len(rates)) + 0.5, [rate_words(mbit) for mbit in rates])
        axis.set(xlabel=options.count, ylim=(len(rates), 0))
        style.title(axis, panel.title)
        axis.tick_params(length=0)
        axis.grid(visible=False)
    shown = [np.full((len(rates), len(counts)), math.nan) for _ in drawn]
    for (index, mbit, count), point in values.items():
        value: Any = point.efficiency
        row, column = panels.place(rates, mbit), counts.index(count)
        shown[index][row, column] = value.mean
        ink = style.LIGHT if value.mean < 0.55 else style.DARK
        words = cell(value) + ("\nsuspect" if point.suspect else "")
        axes[index].text(column + 0.5, row + 0.5, words, ha="center", va="center", fontsize=7.5, color=ink)
    for axis, cells in zip(axes, shown, strict=True):
        axis.pcolormesh(np.ma.masked_invalid(cells), cmap="cividis", vmin=0, vmax=1, edgecolor=style.PAPER)
    words = f"efficiency per {options.count.removesuffix('s')}; 1 is ideal"
    words += f"; {style.repeats(sizes(drawn), 'below it')}"
    figure.supxlabel(style.across_figure(figure, words), fontsize=8, color=style.INK)
    return figure


def cell(value: Any) -> str:
    """`0.91`, and below it the 95 % interval if there is one."""
    return f"{value.mean:.2f}" + ("" if value.low is None else f"\n{value.low:.2f}-{value.high:.2f}")


def draw(drawn: list[Panel], column: str, options: Options, looks: Looks) -> tuple[Figure, list[Any]]:
    """A panel per setting, in it a curve per rate with the spread of each point."""
    counts = sorted({int(row.count) for row in points(drawn)})
    figure, axes = style.grid(len(drawn), columns=options.columns, sharey=True)
    for axis, panel in zip(axes, drawn, strict=True):
        for mbit, rows in panel.curves:
            values = [getattr(row, column) for row in rows]
            most = max(row.group.key["hosts"] for row in rows)
            label, look = "one host" if most == 1 else rate_words(mbit), looks.line(mbit, most)
            means = [one.mean for one in values]
            axis.errorbar([row.count for row in rows], means, style.bars(values), label=label, **look)
            for row, mean in zip(rows, means, strict=True):
                axis.plot(row.count, mean, color=look["color"], **looks.marker(row.group.key["hosts"]))
        axis.set(xlabel=options.count, xticks=counts, xlim=(counts[0] - 0.25, counts[-1] + 0.25))
        style.title(axis, panel.title)
    if options.count == "ranks":
        looks.legend(axes[0], (row.group.key["hosts"] for row in points(drawn)))
    return figure, axes


def points(drawn: list[Panel]) -> list[Row]:
    return [row for panel in drawn for _, rows in panel.curves for row in rows]


def sizes(drawn: list[Panel]) -> list[int]:
    """How many timing runs are behind each point."""
    return [row.train_s.n for row in points(drawn) if row.train_s]
