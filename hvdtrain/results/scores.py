"""Which scores runs have and how they are shown, from what their manifests say of the metric.

A run's primary metric is in the columns `test_score` and `best_validation_score`, and each of its scores in columns of
its own name: `test_accuracy`, `best_validation_mae` ...
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hvdtrain.records import metrics
from hvdtrain.records.metrics import Score
from hvdtrain.results import columns
from hvdtrain.results.table import Column
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import BAD_DATA, USAGE, Failure, printable

PARTS = {"train": "train", "validation": "validation", "test": "test", "best_validation": "validation, best"}
"""Of what a score may be -> how that is headed"""
ACCURACY = metrics.Accuracy()


@functools.lru_cache(maxsize=256)
def of_run(text: str) -> dict[str, Score]:
    """What a run's column `scores` says, which `row` has made."""
    return metrics.read(json.loads(text))[1]


def row(metric: Mapping[str, Any], where: str) -> tuple[dict[str, str], dict[str, Score]]:
    """The columns `primary_metric` and `scores` of a run with this metric, and its scores. Both are empty for a script
    that recorded no scores. Raises Failure (65)."""
    if not metric:
        return {}, {}
    try:
        primary, scores = metrics.read(metric)
    except ValueError as error:
        raise Failure(f"{where}:1: its metric is damaged: {printable(str(error))}", BAD_DATA) from error
    return {"primary_metric": primary, "scores": json.dumps(metric, sort_keys=True)}, scores


def check(found: Mapping[str, float], scores: Mapping[str, Score], where: str) -> None:
    """Raises Failure (65) for a score of a record that the manifest does not name, or that is out of its bounds."""
    for name, value in found.items():
        score = scores.get(name)
        usable = type(value) in (int, float) and abs(value) <= 1e18
        if score is None or not usable or not score.possible(value):
            what = f"not {score.bounds}" if score else "which the manifest does not name"
            raise Failure(f"{where}: score {printable(name)} is {value!r:.40}, {what}", BAD_DATA)


def of(runs: pd.DataFrame) -> dict[str, Score]:
    """All scores of the runs, accuracy if there are none; a unit that differs from run to run is told as such."""
    found: dict[str, Score] = {}
    for text in runs["scores"].dropna().unique():
        for name, score in of_run(text).items():
            differs = name in found and found[name].unit != score.unit
            found[name] = dataclasses.replace(score, unit="various units") if differs else score
    return found or dict(ACCURACY.scores)


def primary_metrics(runs: pd.DataFrame) -> list[str]:
    """The names of the runs' primary metrics, accuracy if there are none."""
    return [str(name) for name in runs["primary_metric"].dropna().unique()] or [ACCURACY.primary]


def judged_by(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """The runs that have this score, as if it were their primary metric. Raises Failure (2) if none has."""
    known = of(runs)
    if name not in known:
        raise Failure(f"--target: no score {name!r}{near(name, known)}; these runs have {', '.join(known)}", USAGE)
    having = [isinstance(text, str) and name in of_run(text) for text in runs["scores"]]
    parts = {f"{part}_score": runs[f"{part}_{name}"] for part in ("test", "best_validation")}
    return runs.assign(primary_metric=name, **parts)[having].reset_index(drop=True)


def check_target(runs: pd.DataFrame, value: float) -> None:
    """Raises Failure (2) for a value that no primary metric of the runs can have."""
    known = [of(runs)[name] for name in primary_metrics(runs)]
    if not any(score.possible(value) for score in known):
        able = " or ".join(f"{printable(score.label)} {printable(score.bounds)}" for score in known)
        raise Failure(f"--target {value:g}: give a value of {able}", USAGE)


def figures(runs: pd.DataFrame, part: str = "test", names: Sequence[str] = ()) -> list[Column]:
    """How the primary metrics of the runs, or these, are printed: shares in percent."""
    known, chosen = of(runs), names or primary_metrics(runs)
    made = []
    for name in chosen:
        score, label = known[name], PARTS[part]
        if len(chosen) > 1 or "validation" not in part:
            label = f"{label} {score.label}"
        unit, factor = ("%", 100.0) if score.share else (score.unit, 1.0)
        made.append(Column(f"{part}_{name}", printable(label), printable(unit), factor))
    return made


def shown(runs: pd.DataFrame) -> list[str]:
    """The scores that tables show, the primary metrics first."""
    first = primary_metrics(runs)
    return first + [name for name, score in of(runs).items() if score.shown and name not in first]


def all_columns(runs: pd.DataFrame) -> dict[str, columns.Column]:
    """Every column of the data frame of runs: those of `columns.RUNS`, and two for each score."""
    found = dict(columns.RUNS)
    for name, score in of(runs).items():
        label, unit = printable(score.label), printable(score.unit)
        found[f"test_{name}"] = columns.Column("number", unit, f"{label} of the test split")
        found[f"best_validation_{name}"] = columns.Column("number", unit, f"{label} of the best epoch's validation")
    return found


def goal(runs: pd.DataFrame, value: float) -> str:
    """The same with the score's name: 95 % validation accuracy."""
    score, *others = (of(runs)[name] for name in primary_metrics(runs))
    shown = target(runs, value)
    return f"{shown} validation {printable(score.label)}" if score.share and not others else f"validation {shown}"


def best(runs: pd.DataFrame) -> str | None:
    """The best primary metric of validation of any run, for people, of each primary metric; None if there is none."""
    known = of(runs)
    found = {
        name: runs.get(f"best_validation_{name}", pd.Series(dtype=float)).dropna() for name in primary_metrics(runs)
    }
    told = []
    for name, values in found.items():
        if not values.empty:
            value = max(values, key=known[name].merit)
            told.append(words(known[name], float(f"{value:.3g}")))
    return " and ".join(told) or None


def target(runs: pd.DataFrame, value: float) -> str:
    """A value of the runs' primary metric for people: 95 %, MAE 61.5 W/m2; primary metric 0.95, where it is another
    from run to run."""
    score, *others = (of(runs)[name] for name in primary_metrics(runs))
    return f"primary metric {value:g}" if others else words(score, value)


def words(score: Score, value: float) -> str:
    """A value of a score for people."""
    return f"{100 * value:g} %" if score.share else printable(f"{score.label} {value:g} {score.unit}").rstrip()
