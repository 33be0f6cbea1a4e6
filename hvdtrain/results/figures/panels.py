"""Panels and curves: which groups share axes, and one look of rates and hosts for all figures.

In all figures of the same runs, a rate has one colour and line style and a number of hosts one marker.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.results import groups, scaling
from hvdtrain.results.comparability import Count, many
from hvdtrain.results.figures import style
from hvdtrain.results.groups import Group
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import Row
from hvdtrain.results.tables.columns import ordered
from hvdtrain.results.tables.scaling import curve_settings, settings_of
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

MOST_PANELS = 12


class Looks:
    """The look of each rate and of each number of hosts."""

    def __init__(self, loaded: Loaded) -> None:
        experiments = groups.by(groups.usable(loaded.runs), ("hosts", "rate_mbit"))
        self.rates = rates(experiments)
        self.hosts = sorted({int(group.key["hosts"]) for group in experiments if group.key["hosts"]})

    def line(self, mbit: float | None, hosts: float = 2) -> dict[str, Any]:
        """Colour and line style. A single host uses no link and is drawn in black."""
        return {"color": style.INK, "linestyle": "-"} if hosts <= 1 else style.line(self.rates.index(mbit))

    def marker(self, hosts: float) -> dict[str, Any]:
        return style.marker(self.hosts.index(int(hosts)))

    def legend(self, axis: Any, numbers: Iterable[float]) -> None:
        """Adds entries for the markers of these numbers of hosts."""
        for number in sorted(set(numbers)):
            axis.plot([], [], color=style.SOFT, linestyle="none", **self.marker(number), label=many(number, "hosts"))


def rates(experiments: Sequence[Group]) -> list[float | None]:
    """The rates of the groups on several hosts, slowest first, unlimited (None) last. Only None if there are none."""
    several = {group.key["rate_mbit"] for group in experiments if group.key["hosts"] and group.key["hosts"] > 1}
    return sorted(several, key=lambda mbit: math.inf if mbit is None else mbit) or [None]


def check(number: int) -> None:
    """Raises Failure (2) if a figure would have too many panels."""
    if number > MOST_PANELS:
        message = f"{number} settings exceed the {MOST_PANELS} of one figure"
        raise Failure(f"{message}; hint: select runs with --where", exits.USAGE)


def split(loaded: Loaded, column: str, missing: str) -> dict[str, list[Group]]:
    """Title -> groups with timing runs that have a value in the column. Titles name the differences between panels.

    Raises Failure (65) with the message `missing` if there is none, Failure (2) for too many panels.
    """
    experiments = ordered(groups.by(groups.usable(loaded.runs)))
    experiments = [group for group in experiments if group.key["hosts"] and group.timing[column].notna().any()]
    if not experiments:
        raise Failure(missing, exits.BAD_DATA)
    weak = len({group.key["rank_batch"] for group in experiments}) == 1
    panels: dict[str, list[Group]] = {}
    for group, words in zip(experiments, settings_of(experiments, ["global_batch"] if weak else []), strict=True):
        panels.setdefault(_title(group, words), []).append(group)
    check(len(panels))
    return panels


def _title(group: Group, words: Sequence[str]) -> str:
    return ", ".join([f"{group.key['framework']} {group.key['strategy']}", *words])


# --- scaling curves ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """The curves of one setting."""

    title: str
    curves: list[tuple[float | None, list[Row]]]
    """Rate (None: unlimited, or a single host) and points of each curve, baseline first, slowest rate first"""


def curves(loaded: Loaded, count: Count, missing: str) -> list[Panel]:
    """The curves of `scaling.rows` by setting, with the points that have a time.

    Raises Failure (65) with the message `missing` if there is none, Failure (2) for too many panels.
    """
    rows = scaling.rows(groups.by(groups.usable(loaded.runs)), count)
    known = [row for row in rows if row.train_s is not None and row.group.key["hosts"] is not None]
    drawable = [list(points) for _, points in itertools.groupby(known, key=lambda row: row.curve)]
    if not drawable:
        raise Failure(missing, exits.BAD_DATA)
    panels: dict[str, list[tuple[float | None, list[Row]]]] = {}
    for points, words in zip(drawable, curve_settings(drawable, count), strict=True):
        last = points[-1].group
        panels.setdefault(_title(last, words), []).append((last.key["rate_mbit"], points))
    check(len(panels))
    return [Panel(title, drawn) for title, drawn in panels.items()]
