"""Scores of a model, and the sums over samples that they are computed from.

A model's `loss` returns the sum of its losses over a batch, and the sums that its metric declares:

    return loss, {"correct": (logits.argmax(1) == labels).sum()}

Sums add up over batches and ranks, so the score of a split is exactly equal to a single process, however the split
was divided. A mean of scores would not be: the mean F1 of two halves is not the F1 of the whole. A regression declares
the sums of absolute and squared errors, and computes MAE and RMSE. A classifier with rare classes declares the
confusion matrix, and computes F1 (`Confusion`). The primary metric selects the best epoch and appears in tables and
figures; any score can be a run's `--target`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure, printable

NAME = re.compile(r"(?!(loss|scores?|sums)$)[a-z][a-z0-9_]+")
"""The name of a score, which becomes a column, test_NAME"""
T = TypeVar("T")
Sums = Mapping[str, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The meaning and the bounds of one number about a model."""

    label: str
    """As printed: accuracy, MAE ..."""
    unit: str = ""
    """W/m2, s ...; empty for a share or a count"""
    least: float | None = None
    most: float | None = None
    """Bounds of valid values; None: unbounded"""
    higher_is_better: bool | None = True
    """None: a value closer to 0 is better, from either side"""
    shown: bool = True
    """Whether progress lines and tables show it; records always contain it"""

    @property
    def share(self) -> bool:
        """Whether it is a share of 1, printed in percent."""
        return (self.least, self.most, self.unit) == (0, 1, "")

    @property
    def bounds(self) -> str:
        """`from 0 to 1`, `of 0 W/m2 or more` ..."""
        unit = f" {self.unit}" if self.unit else ""
        if self.least is not None and self.most is not None:
            return f"from {self.least:g} to {self.most:g}{unit}"
        if self.least is not None:
            return f"of {self.least:g}{unit} or more"
        return "that is a number" if self.most is None else f"of {self.most:g}{unit} or less"

    def possible(self, value: float) -> bool:
        """Whether it is a finite number within the bounds."""
        least, most = (-math.inf if self.least is None else self.least), (math.inf if self.most is None else self.most)
        return math.isfinite(value) and least <= value <= most

    def better(self, value: float, than: float) -> bool:
        return self.merit(value) > self.merit(than)

    def merit(self, value: float) -> float:
        """A number that is larger for a better value."""
        if self.higher_is_better is None:
            return -abs(value)
        return value if self.higher_is_better else -value


class Metric(abc.ABC):
    """The sums to add up over samples, and the scores that follow from them."""

    sums: Mapping[str, tuple[int, ...]]
    """Name and shape of each sum; () is a number"""
    scores: Mapping[str, Score]
    """Every score that a run may record, by name, in display order"""
    primary: str
    """The score that selects the best epoch and appears in tables and figures"""

    @abc.abstractmethod
    def score(self, sums: Sums, samples: float) -> Mapping[str, float]:
        """The scores of `samples` samples (at least one) with these sums. Scores that are not finite are left out."""

    @property
    def size(self) -> int:
        """Length of the totals of a step: the sum of losses, every sum, and samples, in this order."""
        return 2 + sum(math.prod(shape) for shape in self.sums.values())

    def in_order(self, given: Mapping[str, T]) -> list[T]:
        """A model's sums in the order of the totals. Raises Failure (78) if they are not the declared ones."""
        if set(given) != set(self.sums):
            raise Failure(
                f"the model's loss returns the sums {', '.join(given) or 'none'}, but its metric declares "
                f"{', '.join(self.sums) or 'none'}; hint: use the same names",
                exits.BAD_CONFIG,
            )
        return [given[name] for name in self.sums]

    def means(self, totals: NDArray[np.float64]) -> tuple[float, dict[str, float]]:
        """Mean loss and scores of totals (size,) with at least one sample."""
        loss, *_, samples = totals.tolist()
        found = self.score(self.by_name(totals), samples)
        return loss / samples, {name: float(value) for name, value in found.items() if math.isfinite(value)}

    def by_name(self, totals: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """The sums in totals (size,)."""
        cuts = np.cumsum([math.prod(shape) for shape in self.sums.values()])
        parts = np.split(totals[1:-1], cuts[:-1]) if self.sums else []
        return {name: part.reshape(shape) for (name, shape), part in zip(self.sums.items(), parts, strict=True)}

    def report(self, sums: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
        """Tables with titles, printed at the end of a run instead of the scores that are not `shown`. Empty: these
        scores are listed."""
        return []

    def target(self, asked: str) -> tuple[str, float]:
        """The score and the value of `SCORE=VALUE`. Raises Failure (78) if either is invalid."""
        name, _, text = asked.partition("=")
        score = self.scores.get(name)
        if score is None:
            known, example = ", ".join(self.scores), 0.95 if self.scores[self.primary].share else 10
            raise Failure(
                f"--target {asked}: no score {name!r}{near(name, self.scores)}; this workload has {known}; hint: "
                f"use SCORE=VALUE, e.g. {self.primary}={example}",
                exits.BAD_CONFIG,
            )
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not score.possible(value):
            raise Failure(
                f"--target {asked} is out of range; hint: give {name} a value {score.bounds}", exits.BAD_CONFIG
            )
        return name, value

    def words(self, found: Mapping[str, float]) -> str:
        """The shown scores as text: `accuracy 0.9444, bleu4 0.91`; `none` for a missing value."""
        shown = [name for name, score in self.scores.items() if score.shown]
        known = [name for name in shown if name in found] or shown[:1]
        return ", ".join(f"{self.scores[name].label} {self.number(name, found.get(name))}" for name in known)

    def number(self, name: str, value: float | None) -> str:
        """A score's value with its unit, as text."""
        return "none" if value is None else f"{value:.4f} {self.scores[name].unit}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """The declaration for the manifest; see `read`."""
        return {
            "primary": self.primary,
            "scores": {name: dataclasses.asdict(score) for name, score in self.scores.items()},
        }


class _Declaration(msgspec.Struct):
    primary: str
    scores: dict[Annotated[str, msgspec.Meta(pattern=rf"\A{NAME.pattern}\Z")], Score]


def read(value: Mapping[str, Any]) -> tuple[str, dict[str, Score]]:
    """The primary metric and the scores of a declaration by `Metric.as_json`. Raises ValueError if it is invalid."""
    try:
        declared = msgspec.convert(value, _Declaration)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if declared.primary not in declared.scores:
        raise ValueError("the primary metric is not among the scores")
    for name, given in value["scores"].items():
        if missing := [field.name for field in dataclasses.fields(Score) if field.name not in given]:
            raise ValueError(f"score {name}: missing {missing[0]}")
    return declared.primary, declared.scores


class Accuracy(Metric):
    """The share of samples whose most likely class is correct."""

    sums: Mapping[str, tuple[int, ...]] = {"correct": ()}
    scores: Mapping[str, Score] = {"accuracy": Score(label="accuracy", least=0, most=1)}
    primary = "accuracy"

    def score(self, sums: Sums, samples: float) -> dict[str, float]:
        return {"accuracy": float(sums["correct"]) / samples}


class Confusion(Metric):
    """Accuracy, and precision, recall and F1 of each class, with their plain mean over classes (macro) and their mean
    weighted by the classes' samples. As in scikit-learn, precision is 0 for a class that was never predicted, and a
    class without samples and predictions is left out. One sum: the confusion matrix, with the number of samples of
    class i that were predicted as class j at [i, j]."""

    primary = "accuracy"

    def __init__(self, classes: Sequence[str]) -> None:
        """`classes`: their names, as printed."""
        self._classes = [printable(name) for name in classes]
        self.sums: Mapping[str, tuple[int, ...]] = {"confusion": (len(classes), len(classes))}
        kinds = {"f1": "F1", "precision": "precision", "recall": "recall"}
        labels = {"accuracy": "accuracy", **kinds}
        labels |= {f"{kind}_weighted": f"weighted {label}" for kind, label in kinds.items()}
        for number, name in enumerate(self._classes):
            labels |= {f"{kind}_class{number}": f"{label} of {name}" for kind, label in kinds.items()}
        self.scores: Mapping[str, Score] = {
            name: Score(label=label, least=0, most=1, shown=name in ("accuracy", "f1"))
            for name, label in labels.items()
        }

    @staticmethod
    def _by_class(matrix: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        right, truth, answers = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
        return {
            "precision": right / np.maximum(answers, 1),
            "recall": right / np.maximum(truth, 1),
            "f1": 2 * right / np.maximum(truth + answers, 1),
        }

    @staticmethod
    def _seen(matrix: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which classes have samples or predictions."""
        return matrix.sum(axis=0) + matrix.sum(axis=1) > 0

    def _means(self, matrix: NDArray[np.float64]) -> dict[str, tuple[str, NDArray[Any]]]:
        """Suffix of a score's name -> its label, and the weights of the classes."""
        return {"": ("mean (macro)", self._seen(matrix)), "_weighted": ("weighted", matrix.sum(axis=1))}

    def score(self, sums: Sums, samples: float) -> dict[str, float]:
        matrix = sums["confusion"]
        found = {"accuracy": float(np.trace(matrix)) / samples}
        for kind, values in self._by_class(matrix).items():
            for ending, (_, weights) in self._means(matrix).items():
                found[f"{kind}{ending}"] = float(np.average(values, weights=weights))
            found |= {f"{kind}_class{number}": float(values[number]) for number in np.flatnonzero(self._seen(matrix))}
        return found

    def report(self, sums: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
        matrix = np.array(sums["confusion"])
        counts, by_class, seen = matrix.sum(axis=1), self._by_class(matrix), self._seen(matrix)
        names = [name if len(name) <= 16 else f"{name[:14]}.." for name in self._classes]
        scores = [["class", *by_class, "samples"]]
        for number, name in enumerate(names):
            values = [f"{each[number]:.4f}" if seen[number] else "-" for each in by_class.values()]
            scores.append([name, *values, f"{counts[number]:.0f}"])
        for name, weights in self._means(matrix).values():
            means = [np.average(each, weights=weights) for each in by_class.values()]
            scores.append([name, *(f"{mean:.4f}" for mean in means), f"{counts.sum():.0f}"])
        answers = [["", *names]]
        answers += [[name, *(f"{each:.0f}" for each in row)] for name, row in zip(names, matrix, strict=True)]
        return [
            ("Scores of each class", scores),
            ("Confusion matrix (rows: true class, columns: prediction)", answers),
        ]


class Regression(Metric):
    """MAE, RMSE and bias in the targets' unit, and R2, over all numbers of a target."""

    sums: Mapping[str, tuple[int, ...]] = dict.fromkeys(("absolute", "squared", "signed", "truth", "truth_squared"), ())
    primary = "mae"

    def __init__(self, unit: str = "") -> None:
        self.scores: Mapping[str, Score] = {
            "mae": Score(label="MAE", unit=unit, least=0, higher_is_better=False),
            "rmse": Score(label="RMSE", unit=unit, least=0, higher_is_better=False),
            "bias": Score(label="bias", unit=unit, higher_is_better=None, shown=False),
            "r2": Score(label="R2", most=1),
        }

    def score(self, sums: Sums, samples: float) -> dict[str, float]:
        spread = sums["truth_squared"] - sums["truth"] ** 2 / samples
        return {
            "mae": float(sums["absolute"]) / samples,
            "rmse": float(np.sqrt(sums["squared"] / samples)),
            "bias": float(sums["signed"]) / samples,
            "r2": float(1 - sums["squared"] / spread) if spread > 1e-12 * sums["truth_squared"] else float("nan"),
        }
