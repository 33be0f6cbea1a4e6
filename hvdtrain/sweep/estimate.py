"""Predicts the duration of a run from the durations of finished runs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from hvdtrain.sweep.folder import document, summary
from hvdtrain.sweep.grid import Run
from hvdtrain.system.redaction import without_secret_values

PHASES = ("train_s", "validation_s", "test_s", "checkpoint_s", "first_step_s")
SIMILAR_MAY_DIFFER = ("seed", "rate", "hosts", "strategy", "label", "launcher", "cluster", "on")


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float | None
    """None if unknown"""
    basis: str
    """measured (runs of the same experiment, perhaps with another seed), similar (runs that differ only in
    SIMILAR_MAY_DIFFER) or unknown"""


UNKNOWN = Estimate(None, "unknown")


class Estimator:
    """Collects the durations of finished runs, on disk and in the current sweep."""

    def __init__(self) -> None:
        self._same: dict[str, list[float]] = defaultdict(list)
        self._similar: dict[str, list[float]] = defaultdict(list)

    def read(self, root: Path) -> None:
        """Adds the finished runs of all sweeps under `root`."""
        for path in sorted(root.glob("*/*/experiment.json")):
            request, end = document(path), summary(path.parent)
            if request is None or end is None or not (path.parent / "COMPLETE").exists():
                continue
            settings = request.get("settings")
            seconds = [end.get(phase) or 0.0 for phase in PHASES]  # a script does not record all of them
            if isinstance(settings, dict) and all(isinstance(value, int | float) for value in seconds):
                self._add(settings, sum(seconds))

    def learn(self, run: Run, seconds: float) -> None:
        """Adds a run of the current sweep."""
        self._add(run.experiment.settings, seconds)

    def of(self, run: Run) -> Estimate:
        """Duration of the run itself, without throttling and cool-down."""
        settings = run.experiment.settings
        if same := self._same.get(_key(settings, ("seed",))):
            return Estimate(statistics.median(same), "measured")
        if similar := self._similar.get(_key(settings, SIMILAR_MAY_DIFFER)):
            return Estimate(statistics.fmean(similar), "similar")
        return UNKNOWN

    def _add(self, settings: dict[str, Any], seconds: float) -> None:
        self._same[_key(settings, ("seed",))].append(seconds)
        self._similar[_key(settings, SIMILAR_MAY_DIFFER)].append(seconds)


def _key(settings: dict[str, Any], ignored: tuple[str, ...]) -> str:
    kept = {key: value for key, value in settings.items() if key not in ignored}
    return json.dumps(without_secret_values(kept), sort_keys=True)  # records contain no secrets
