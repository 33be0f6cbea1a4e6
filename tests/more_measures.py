"""A measure of a test's own: what a confusion matrix tells of a classifier."""

from __future__ import annotations

import numpy as np

from hvdtrain.measures import Measure, Score, Sums


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
