"""The scores of runs, as their manifests declare them.

A run's primary metric is in the columns `test_score` and `best_validation_score`. Each score also has its own
columns: `test_accuracy`, `best_validation_mae` ...
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from hvdtrain.records import metrics
from hvdtrain.records.metrics import Score
from hvdtrain.results import columns
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import BAD_DATA, USAGE, Failure, printable

ACCURACY = metrics.Accuracy()


@functools.lru_cache(maxsize=256)
def of_run(text: str) -> dict[str, Score]:
    """The scores in a run's column `scores`, which `row` made."""
    return metrics.read(json.loads(text))[1]


def row(declared: Mapping[str, Any], where: str) -> tuple[dict[str, str], dict[str, Score]]:
    """The columns `primary_metric` and `scores` for a manifest's declaration, and the scores; both are empty for a
    script without scores. Raises Failure (65)."""
    if not declared:
        return {}, {}
    try:
        primary, scores = metrics.read(declared)
    except ValueError as error:
        raise Failure(f"{where}:1: its declaration of scores is damaged: {printable(str(error))}", BAD_DATA) from error
    return {"primary_metric": primary, "scores": json.dumps(declared, sort_keys=True)}, scores


def check(values: Mapping[str, float], declared: Mapping[str, Score], where: str) -> None:
    """Raises Failure (65) if the manifest does not declare a score, or its value is out of bounds."""
    for name, value in values.items():
        score = declared.get(name)
        if score is None or not score.possible(value):
            what = f"but must be {score.bounds}" if score else "but the manifest does not declare it"
            raise Failure(f"{where}: score {printable(name)} is {value!r:.40}, {what}", BAD_DATA)


def of(runs: pd.DataFrame) -> dict[str, Score]:
    """All scores of the runs, or accuracy if there are none. A unit that differs between runs is named as such."""
    declared: dict[str, Score] = {}
    for text in runs["scores"].dropna().unique():
        for name, score in of_run(text).items():
            differs = name in declared and declared[name].unit != score.unit
            declared[name] = dataclasses.replace(score, unit="various units") if differs else score
    return declared or dict(ACCURACY.scores)


def primary(runs: pd.DataFrame) -> list[str]:
    """The names of the runs' primary metrics, or accuracy if there are none."""
    return [str(name) for name in runs["primary_metric"].dropna().unique()] or [*ACCURACY.scores][:1]


def shown(runs: pd.DataFrame) -> list[str]:
    """The scores that tables show, primary ones first."""
    first = primary(runs)
    return first + [name for name, score in of(runs).items() if score.shown and name not in first]


def judge_by(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """The runs that have this score, with it as their primary metric. Raises Failure (2) if none has it."""
    known = of(runs)
    if name not in known:
        raise Failure(f"--target: no score {name!r}{near(name, known)}; these runs have {', '.join(known)}", USAGE)
    having = [isinstance(text, str) and name in of_run(text) for text in runs["scores"]]
    parts = {f"{part}_score": runs[f"{part}_{name}"] for part in ("test", "best_validation")}
    return runs.assign(primary_metric=name, **parts)[having].reset_index(drop=True)


def check_target(runs: pd.DataFrame, value: float) -> None:
    """Raises Failure (2) for a value that no primary metric of the runs can have."""
    known = [of(runs)[name] for name in primary(runs)]
    if not any(score.possible(value) for score in known):
        bounds = " or ".join(f"{printable(score.label)} {printable(score.bounds)}" for score in known)
        raise Failure(f"--target {value:g} is out of range; hint: give {bounds}", USAGE)


def all_columns(runs: pd.DataFrame) -> dict[str, columns.Column]:
    """Every column of the data frame of runs: `columns.RUNS`, and two for each score."""
    known = dict(columns.RUNS)
    for name, score in of(runs).items():
        label, unit = printable(score.label), printable(score.unit)
        for part, what in (("test", "the test split"), ("best_validation", "the best epoch's validation")):
            meaning = f"{label} of {what}"
            known[f"{part}_{name}"] = columns.Column(f"{part}_{name}", kind="number", base=unit, meaning=meaning)
    return known


def target(runs: pd.DataFrame, value: float) -> str:
    """A value of the runs' primary metric as text: `95 %`, `MAE 61.5 W/m2`; `primary metric 0.95` if it differs between
    runs."""
    score, *others = (of(runs)[name] for name in primary(runs))
    return f"primary metric {value:g}" if others else words(score, value)


def goal(runs: pd.DataFrame, value: float) -> str:
    """The same with the score's name: `95 % validation accuracy`."""
    score, *others = (of(runs)[name] for name in primary(runs))
    shown = target(runs, value)
    return f"{shown} validation {printable(score.label)}" if score.share and not others else f"validation {shown}"


def words(score: Score, value: float) -> str:
    """A value of a score as text."""
    return f"{100 * value:g} %" if score.share else printable(f"{score.label} {value:g} {score.unit}").rstrip()
