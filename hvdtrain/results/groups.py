"""Groups of repeats: runs that agree in all settings, and the statistics over them."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from hvdtrain.results.columns import GROUP, RUNS, TIMING, alike
from hvdtrain.results.scores import all_columns
from hvdtrain.results.statistics import Statistic, summary
from hvdtrain.system.exits import printable


class Group:
    """Rows of the data frame of runs with the same `key`: column -> value, None for a missing one."""

    def __init__(self, key: dict[str, Any], runs: pd.DataFrame) -> None:
        self.key = key
        self.runs = runs
        self.timing = runs[runs["kind"] == "timing"]

    @property
    def n(self) -> int:
        """The number of runs."""
        return len(self.runs)

    def column(self, name: str, *, timing: bool = False) -> list[Any]:
        """The column in all runs, or in timing runs only, including missing values."""
        return (self.timing if timing else self.runs)[name].tolist()

    def values(self, name: str) -> list[Any]:
        """The column's values without missing ones; only timing runs have times."""
        if name not in self.runs:  # a score of other runs
            return []
        return [value for value in self.column(name, timing=name in TIMING) if not is_missing(value)]

    def statistic(self, name: str) -> Statistic | None:
        """None if no run of the group has a value."""
        return summary(self.values(name))

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Settings without a column; empty if `settings` is not part of the key."""
        return settings(self.key.get("settings"))

    def value(self, name: str) -> Any:
        """The value of a column of the key, or of a setting."""
        return self.key[name] if name in self.key else self.settings.get(name)


@functools.lru_cache(maxsize=1024)
def settings(text: str | None) -> dict[str, Any]:
    """The parsed column `settings`."""
    parsed = json.loads(text, parse_constant=str) if text else {}
    return {printable(key): printable(value) if isinstance(value, str) else value for key, value in parsed.items()}


def usable(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that count: complete and not marked."""
    return runs[(runs["state"] == "complete") & runs["marked"].isna()]


def by(runs: pd.DataFrame, columns: Sequence[str] = GROUP) -> list[Group]:
    """Groups of runs that agree in these columns or settings, sorted by their values, missing values last."""
    keys = pd.DataFrame({name: resolve(runs, name) for name in columns}, dtype=object)
    if exact := [name for name in columns if name != "goodput_mbit"]:
        numbers = keys.groupby(exact, dropna=False, sort=False).ngroup()
    else:
        numbers = pd.Series(0, keys.index)
    groups = []
    for rows in numbers.groupby(numbers).indices.values():
        for goodput, some in by_goodput(runs.iloc[rows]) if "goodput_mbit" in columns else [(None, runs.iloc[rows])]:
            values = [None if is_missing(value) else value for value in keys.iloc[rows[0]]]
            key = dict(zip(columns, values, strict=True))
            groups.append(Group(key | ({"goodput_mbit": goodput} if "goodput_mbit" in key else {}), some))
    return sorted(groups, key=lambda group: [(v is None, str(type(v)), v) for v in group.key.values()])


def by_goodput(runs: pd.DataFrame) -> list[tuple[float | None, pd.DataFrame]]:
    """The runs by the goodput of their links, each part with its median; None if all are alike or it is unknown."""
    measured = sorted(runs["goodput_mbit"].dropna())
    starts = [after for before, after in itertools.pairwise(measured) if not alike(before, after)]
    if not starts:
        return [(None, runs)]
    numbers = runs["goodput_mbit"].map(lambda goodput: bisect.bisect(starts, goodput), na_action="ignore")
    medians = ((part["goodput_mbit"].median(), part) for _, part in runs.groupby(numbers, dropna=False))
    return [(None if is_missing(median) else float(f"{median:.3g}"), part) for median, part in medians]


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def short(name: str, value: Any) -> Any:
    """A value of a key as printed."""
    if name in ("data_fingerprint", "git_commit") and isinstance(value, str):
        return value[:8]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def setting_names(runs: pd.DataFrame) -> list[str]:
    """Settings without a column, such as lr."""
    names = {name for text in set(runs["settings"].dropna()) for name in settings(text)}
    return sorted(names - set(RUNS))


def resolve(runs: pd.DataFrame, name: str) -> list[Any]:
    """The values of a column, or of a setting such as lr; None if a run does not have it."""
    if name in runs.columns:
        return runs[name].tolist()
    values = [settings(text).get(name) for text in runs["settings"]]
    return [json.dumps(value) if isinstance(value, list | dict) else value for value in values]


def kinds(runs: pd.DataFrame) -> dict[str, str]:
    """Names that an expression may use for a run: column or setting -> number, text, flag or any."""
    columns = {name: column.kind for name, column in all_columns(runs).items()}
    known = {name: kind for name, kind in columns.items() if kind != "object" and name != "settings"}
    return dict.fromkeys(setting_names(runs), "any") | known


def varying(groups: Sequence[Group]) -> list[str]:
    """The columns of the key, and the settings, that differ between the groups."""
    if not groups:
        return []
    names = [name for name in groups[0].key if name != "settings" and len({group.key[name] for group in groups}) > 1]
    inner = sorted({name for group in groups for name in group.settings})
    return names + [name for name in inner if len({json.dumps(group.settings.get(name)) for group in groups}) > 1]
