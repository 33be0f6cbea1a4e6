"""The figures: training time over hosts, and the primary metric over time, a panel for each setting.

In all figures of the same runs, a rate has one colour and line style and a number of hosts one marker. A single host
uses no link, so it is the first point of every curve over hosts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from hvdtrain.results import groups, scaling, scores
from hvdtrain.results.comparability import Count, many
from hvdtrain.results.figures import style
from hvdtrain.results.groups import Group
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import Row
from hvdtrain.results.statistics import summary
from hvdtrain.results.tables.columns import ordered, score_columns
from hvdtrain.results.tables.scaling import curve_settings, rate_words, settings_of
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

MOST_PANELS = 12


class Looks:
    """The look of each rate and of each number of hosts."""

    def __init__(self, loaded: Loaded) -> None:
        keys = [group.key for group in groups.by(groups.usable(loaded.runs), ("hosts", "rate_mbit"))]
        several = {key["rate_mbit"] for key in keys if (key["hosts"] or 0) > 1}
        self.rates: list[float | None] = sorted(several, key=lambda mbit: math.inf if mbit is None else mbit) or [None]
        self.hosts = sorted({int(key["hosts"]) for key in keys if key["hosts"]})

    def line(self, mbit: float | None, hosts: float = 2) -> dict[str, Any]:
        """Colour and line style. A single host uses no link and is drawn in black."""
        return {"color": style.INK, "linestyle": "-"} if hosts <= 1 else style.line(self.rates.index(mbit))

    def marker(self, hosts: float) -> dict[str, Any]:
        return style.marker(self.hosts.index(int(hosts)))

    def legend(self, axis: Any, numbers: Iterable[float]) -> None:
        """Adds entries for the markers of these numbers of hosts."""
        for number in sorted(set(numbers)):
            axis.plot([], [], color=style.SOFT, linestyle="none", **self.marker(number), label=many(number, "hosts"))


def _by_title(items: Iterable[Any], lasts: Iterable[Group], words: Iterable[Sequence[str]]) -> dict[str, list[Any]]:
    """Title of a panel -> its items. The group and the words of an item make its title.

    Raises Failure (2) for too many panels.
    """
    panels: dict[str, list[Any]] = {}
    for item, group, more in zip(items, lasts, words, strict=True):
        panels.setdefault(", ".join([f"{group.key['framework']} {group.key['strategy']}", *more]), []).append(item)
    if len(panels) > MOST_PANELS:
        message = f"{len(panels)} settings exceed the {MOST_PANELS} of one figure"
        raise Failure(f"{message}; hint: select runs with --where", exits.USAGE)
    return panels


# --- time over hosts --------------------------------------------------------------------------------------------------


def curves(loaded: Loaded, count: Count, missing: str) -> dict[str, list[list[Row]]]:
    """Title -> the curves of `scaling.rows` with that setting, baseline first, slowest rate first; timed points only.

    Raises Failure (65) with the message `missing` if there is none, Failure (2) for too many panels.
    """
    rows = scaling.rows(groups.by(groups.usable(loaded.runs)), count)
    known = [row for row in rows if row.train_s is not None and row.group.key["hosts"] is not None]
    drawable = [list(points) for _, points in itertools.groupby(known, key=lambda row: row.curve)]
    if not drawable:
        raise Failure(missing, exits.BAD_DATA)
    return _by_title(drawable, (points[-1].group for points in drawable), curve_settings(drawable, count))


def time(loaded: Loaded) -> Figure:
    """Seconds of the training phase over hosts, or ranks, a curve for each rate. Raises Failure (65) without times."""
    count = scaling.what_varies(groups.by(groups.usable(loaded.runs)))
    drawn = curves(loaded, count, "no times: needs complete timing runs that are not marked")
    points = [row for panel in drawn.values() for rows in panel for row in rows]
    counts, means = sorted({int(row.count) for row in points}), [row.train_s.mean for row in points if row.train_s]
    looks = Looks(loaded)
    figure, axes = style.grid(len(drawn), sharey=True)
    for axis, (title, panel) in zip(axes, drawn.items(), strict=True):
        for rows in panel:
            values = [row.train_s for row in rows if row.train_s]
            most, mbit = max(row.group.key["hosts"] for row in rows), rows[-1].group.key["rate_mbit"]
            label, look = "one host" if most == 1 else rate_words(mbit), looks.line(mbit, most)
            place = [row.count for row in rows]
            axis.errorbar(place, [one.mean for one in values], style.bars(values), label=label, **look)
            for row, one in zip(rows, values, strict=True):
                axis.plot(row.count, one.mean, color=look["color"], **looks.marker(row.group.key["hosts"]))
        axis.set(xlabel=count, xticks=counts, xlim=(counts[0] - 0.25, counts[-1] + 0.25))
        style.title(axis, title)
    for axis in axes:
        if max(means) > style.WIDE * min(means) > 0:
            style.log_scale(axis, "y")
        else:
            axis.set_ylim(bottom=0)
        if style.is_first(axis):
            axis.set_ylabel("training time (s)")
    style.legend(figure, axes, style.repeats([row.train_s.n for row in points if row.train_s]))
    return figure


# --- accuracy over time -----------------------------------------------------------------------------------------------


def split(loaded: Loaded, column: str, missing: str) -> dict[str, list[Group]]:
    """Title -> groups with timing runs that have a value in the column. Titles name the differences between panels.

    Raises Failure (65) with the message `missing` if there is none, Failure (2) for too many panels.
    """
    experiments = ordered(groups.by(groups.usable(loaded.runs)))
    experiments = [group for group in experiments if group.key["hosts"] and group.timing[column].notna().any()]
    if not experiments:
        raise Failure(missing, exits.BAD_DATA)
    weak = len({group.key["rank_batch"] for group in experiments}) == 1
    return _by_title(experiments, experiments, settings_of(experiments, ["global_batch"] if weak else []))


def accuracy(loaded: Loaded) -> Figure:
    """The primary metric of validation over time; curves are means over the repeats, bands their spread.

    Raises Failure (65) if no run has validated.
    """
    missing = "no validation score: needs complete timing runs with a validation split"
    panels = split(loaded, "best_validation_score", missing)
    shown = [score_columns(members[0].runs)[0] for members in panels.values()]
    alike = len({column.key for column in shown}) == 1
    made, axes = style.grid(len(panels), sharey=alike)
    looks, drawn = Looks(loaded), []
    for axis, column, (title, members) in zip(axes, shown, panels.items(), strict=True):
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
        if not alike or style.is_first(axis):
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
    """The primary metric of validation after each epoch that all timing runs reached: time_s (mean), mean, low, high,
    n."""
    name = f"validation_{scores.primary(group.runs)[0]}"
    every = (frame.epochs(loaded, folder) for folder in group.column("run_dir", timing=True))
    frames = [known for epochs in every if name in epochs and len(known := epochs.dropna(subset=[name]))]
    rows = []
    for _, members in pd.concat(frames).groupby("epoch") if frames else ():
        score, seconds = summary(members[name]), summary(members["elapsed_s"])
        if len(members) == len(frames) and score is not None and seconds is not None:
            rows.append((seconds.mean, score.mean, *(score.span or (None, None)), score.n))
    return pd.DataFrame(rows, columns=["time_s", "mean", "low", "high", "n"], dtype=float)
