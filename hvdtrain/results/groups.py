"""Repeats of one experiment put together: runs that agree in the group's columns, and what is taken from them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from hvdtrain.results.columns import GROUP, RUNS, TIMING
from hvdtrain.results.scores import all_columns
from hvdtrain.results.statistics import Statistic, summary
from hvdtrain.system.exits import printable


class Group:
    """Some rows of the data frame of runs that have the same `key`: column -> value, None for a missing one."""

    def __init__(self, key: dict[str, Any], columns: dict[str, np.ndarray], rows: np.ndarray) -> None:
        self.key = key
        self._columns, self._rows = columns, rows
        self._timing = rows[columns["kind"][rows] == "timing"]

    @property
    def n(self) -> int:
        """The number of runs."""
        return len(self._rows)

    def values(self, column: str) -> list[Any]:
        """The column's values that are there; runs of kind energy give none of their times."""
        if column not in self._columns:  # a score that none of these runs has
            return []
        return [value for value in self.column(column, timing=column in TIMING) if not is_missing(value)]

    def column(self, name: str, *, timing: bool = False) -> list[Any]:
        """The column in the group's runs, or in those of kind timing; missing values as they are."""
        return self._columns[name][self._timing if timing else self._rows].tolist()

    def statistic(self, column: str) -> Statistic | None:
        """None if no run of the group has the figure."""
        return summary(self.values(column))

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The rest of the runs' config; empty if the group is not by settings."""
        return settings(self.key.get("settings"))

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """What an expression may ask of a group: its key, its settings, and ranks."""
        hosts, per_host = self.key.get("hosts"), self.key.get("ranks_per_host")
        ranks = None if hosts is None or per_host is None else round(hosts * per_host)
        return self.settings | self.key | {"ranks": ranks}


@functools.lru_cache(maxsize=1024)
def settings(text: str | None) -> dict[str, Any]:
    """The column `settings`, read."""
    found = json.loads(text, parse_constant=str) if text else {}
    return {printable(key): printable(each) if isinstance(each, str) else each for key, each in found.items()}


def usable(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that may enter figures: complete, and not marked."""
    return frame[(frame["state"] == "complete") & frame["marked"].isna()]


def by(frame: pd.DataFrame, columns: Sequence[str] = GROUP) -> list[Group]:
    """Groups of the frame's rows, in the order of their keys (missing values last)."""
    arrays = {name: frame[name].to_numpy() for name in frame.columns}
    keys = [[None if is_missing(value) else value for value in resolve(frame, name)] for name in columns]
    members: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(zip(*keys, strict=True)):
        members.setdefault(key, []).append(row)
    ordered = sorted(members.items(), key=lambda item: [(value is None, str(type(value)), value) for value in item[0]])
    return [Group(dict(zip(columns, key, strict=True)), arrays, np.array(rows)) for key, rows in ordered]


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def setting_names(frame: pd.DataFrame) -> list[str]:
    """Keys of the runs' configs that are no columns of their own, e.g. lr."""
    found = {name for text in set(frame["settings"].dropna()) for name in settings(text)}
    return sorted(found - set(RUNS))


def resolve(frame: pd.DataFrame, name: str) -> list[Any]:
    """A column's values, or those of a setting such as lr; None where the run has none."""
    if name in frame.columns:
        return frame[name].tolist()
    found = [settings(text).get(name) for text in frame["settings"]]
    return [json.dumps(value) if isinstance(value, list | dict) else value for value in found]


def kinds(frame: pd.DataFrame) -> dict[str, str]:
    """Every name an expression may use for a run: columns and settings -> number, text, flag or any."""
    known = {
        name: column.kind
        for name, column in all_columns(frame).items()
        if column.kind != "object" and name != "settings"
    }
    return dict.fromkeys(setting_names(frame), "any") | known


def fact_kinds(names: Sequence[str] = ()) -> dict[str, str]:
    """Every name an expression may use for a group; `names` are those of settings."""
    known = {name: RUNS[name].kind for name in (*GROUP, "ranks") if name != "settings"}
    return dict.fromkeys(names, "any") | known


def varying(groups: Sequence[Group]) -> list[str]:
    """What tells the groups apart: columns of their keys, and settings, that have more than one value."""
    if not groups:
        return []
    names = [name for name in groups[0].key if name != "settings" and len({group.key[name] for group in groups}) > 1]
    inner = sorted({name for group in groups for name in group.settings})
    return names + [name for name in inner if len({json.dumps(group.settings.get(name)) for group in groups}) > 1]


def value(group: Group, name: str) -> Any:
    """The value of a column of the group's key, or of a setting."""
    return group.key[name] if name in group.key else group.settings.get(name)
