"""Time to the target: a row per strategy, all rates on one axis. It draws the rows of `hvdtrain results strategies`."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from hvdtrain.results import scores
from hvdtrain.results.comparability import many
from hvdtrain.results.figures import Options, panels, style
from hvdtrain.results.figures.panels import Looks
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.tables import strategies
from hvdtrain.results.tables.model import Table, cell
from hvdtrain.results.tables.strategies import time_to_target
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

WIDTH_IN, ROW_IN, LINE_IN = 4.3, 0.2, 0.14
LETTERS = 54


def to_target(loaded: Loaded, options: Options) -> Figure:
    """Seconds of training until the target, a panel per rate. Raises Failure (65) if no run reached it."""
    table = strategies.table(loaded, options.target)
    times = [row["train_to_target_s"] for row in table.rows if row["train_to_target_s"] is not None]
    goal = scores.goal(loaded.runs, options.target)
    if not times:
        best = scores.best(loaded.complete)
        reached = "no run has validated" if best is None else f"the best reached {best}; hint: set --target"
        raise Failure(f"no run reached {goal}; {reached}", exits.BAD_DATA)
    looks = Looks(loaded)
    drawn = [(part.name, _by_label(table, part.rows)) for part in table.parts()]
    panels.check(sum(len(rows) for _, rows in drawn), panels.MOST_BARS, "rows")
    heights = [sum(ROW_IN + LINE_IN * (label.count("\n") + 1) for label in rows) + 0.1 for _, rows in drawn]
    figure = Figure((WIDTH_IN, sum(heights) + 0.3 * len(drawn) + 0.9), layout="constrained")
    axes = figure.subplots(len(drawn), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    looks.legend(axes[0], (row["hosts"] for row in table.rows if row["hosts"]))
    for axis, (title, rows), height in zip(axes, drawn, heights, strict=True):
        style.title(axis, title)
        _panel(axis, rows, looks, height)
    if max(one.mean for one in times) > style.WIDE * min(one.mean for one in times):
        style.log_scale(axes[0], "x")
    else:
        axes[0].set_xlim(left=0)
    axes[-1].set_xlabel(f"training until {goal} (s)")
    style.legend(figure, list(axes), style.repeats([one.n for one in times]))
    return figure


def _by_label(table: Table, rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Label -> rows of one section, fastest first. The label names the other differences, and failures."""
    others = [column for column in table.columns if column.role == "setting" and column.key != "hosts"]
    others = [column for column in others if len({cell(row.get(column.key), column) for row in table.rows}) > 1]
    by_label: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=time_to_target):
        words = [row["strategy"], *(f"{column.label} {cell(row.get(column.key), column)}" for column in others)]
        by_label.setdefault(", ".join(words), []).append(row)
    return {style.wrapped(label + _failures(members), LETTERS): members for label, members in by_label.items()}


def _failures(rows: list[dict[str, Any]]) -> str:
    """` (2 of 3 reached it on 4 hosts)` if some runs did not reach the target."""
    some = [row for row in rows if row["reached"] != f"{row['n']} of {row['n']}"]
    words = [f"{row['reached']} reached it on {many(row['hosts'], 'hosts')}" for row in some]
    return f" ({', '.join(words)})" if words else ""


def _panel(axis: Any, rows: dict[str, list[dict[str, Any]]], looks: Looks, height_in: float) -> None:
    """The rows of one rate, each label above its marks, and a line at the fastest single host."""
    y = 0.0
    for label, members in rows.items():
        text_in = LINE_IN * (label.count("\n") + 1)
        place = {"transform": axis.get_yaxis_transform(), "va": "bottom", "fontsize": 8, "linespacing": 1.1}
        axis.text(0, y + text_in, label, bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 0.5}, **place)
        y += text_in + ROW_IN
        for row in members:
            time, hosts = row["train_to_target_s"], row["hosts"] or 1
            if time is not None:
                look = {"color": looks.line(row["rate_mbit"], hosts)["color"], "linewidth": 1, **looks.marker(hosts)}
                axis.errorbar(time.mean, y - ROW_IN / 2, xerr=style.bars([time]), **look)
    single = [row["train_to_target_s"] for members in rows.values() for row in members if row["hosts"] == 1]
    if known := [one.mean for one in single if one is not None]:
        axis.axvline(min(known), color=style.INK, linewidth=0.8, linestyle=":", label="one host")
    axis.set_ylim(height_in, 0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
