"""Training time over hosts, one curve per rate: the numbers of `hvdtrain results scaling`.

A single host uses no link, so it is the first point of every curve.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from hvdtrain.results.figures import Options, style
from hvdtrain.results.figures.panels import Looks, Panel, curves
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import Row
from hvdtrain.results.tables.scaling import rate_words


def time(loaded: Loaded, options: Options) -> Figure:
    """Seconds of the training phase over hosts. Raises Failure (65) without timing runs."""
    drawn = curves(loaded, options.count, "no times: needs complete timing runs that are not marked")
    values = [row.train_s.mean for row in points(drawn) if row.train_s]
    figure, axes = draw(drawn, options, Looks(loaded))
    for axis in axes:
        if max(values) > style.WIDE * min(values) > 0:
            style.log_scale(axis, "y")
        else:
            axis.set_ylim(bottom=0)
    for axis in style.first_column(axes):
        axis.set_ylabel("training time (s)")
    style.legend(figure, axes, style.repeats(sizes(drawn)))
    return figure


def draw(drawn: list[Panel], options: Options, looks: Looks) -> tuple[Figure, list[Any]]:
    """A panel per setting, in which each rate is a curve with error bars."""
    counts = sorted({int(row.count) for row in points(drawn)})
    figure, axes = style.grid(len(drawn), sharey=True)
    for axis, panel in zip(axes, drawn, strict=True):
        for mbit, rows in panel.curves:
            values = [row.train_s for row in rows]
            most = max(row.group.key["hosts"] for row in rows)
            label, look = "one host" if most == 1 else rate_words(mbit), looks.line(mbit, most)
            means = [one.mean for one in values if one]
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
    """The number of timing runs behind each point."""
    return [row.train_s.n for row in points(drawn) if row.train_s]
