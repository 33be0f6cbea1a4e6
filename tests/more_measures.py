"""Two measures beside accuracy: errors of a regression, and what a confusion matrix tells of a classifier."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdtrain.measures import Measure, Score, Sums


class Errors(Measure):
    """MAE, RMSE and bias in the targets' unit, and R2."""

    sums: Mapping[str, tuple[int, ...]] = dict.fromkeys(("absolute", "squared", "signed", "truth", "truth_squared"), ())
    scores: Mapping[str, Score] = {
        "mae": Score(label="MAE", unit="W/m2", least=0, higher_is_better=False),
        "rmse": Score(label="RMSE", unit="W/m2", least=0, higher_is_better=False),
        "bias": Score(label="bias", unit="W/m2", higher_is_better=False, shown=False),
        "r2": Score(label="R2", most=1),
    }
    headline = "mae"

    def score(self, sums: Sums, samples: float) -> dict[str, float]:
        spread = sums["truth_squared"] - sums["truth"] ** 2 / samples
        return {
            "mae": float(sums["absolute"]) / samples,
            "rmse": float(np.sqrt(sums["squared"] / samples)),
            "bias": float(sums["signed"]) / samples,
            "r2": float(1 - sums["squared"] / spread) if spread else float("nan"),
        }


class Confusion(Measure):
    """Macro F1, precision and recall, and F1 of each class; 0 where a class was never found, as scikit-learn has it."""

    headline = "f1"

    def __init__(self, classes: int) -> None:
        self.sums = {"confusion": (classes, classes)}
        names = ["f1", "precision", "recall", *(f"f1_class{each}" for each in range(classes))]
        self.scores = {name: Score(label=name, least=0, most=1, shown="class" not in name) for name in names}

    def score(self, sums: Sums, samples: float) -> dict[str, float]:
        """The matrix counts samples by (truth, answer)."""
        matrix = sums["confusion"]
        right, truth, answers = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
        precision, recall = (right / np.maximum(whole, 1) for whole in (answers, truth))
        f1 = 2 * right / np.maximum(truth + answers, 1)
        found = {"f1": f1.mean(), "precision": precision.mean(), "recall": recall.mean()}
        return {name: float(each) for name, each in found.items()} | {
            f"f1_class{k}": float(x) for k, x in enumerate(f1)
        }
