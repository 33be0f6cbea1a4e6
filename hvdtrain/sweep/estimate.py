"""Estimates the duration of a run from finished runs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.sweep.folder import read
from hvdtrain.sweep.grid import Run
from hvdtrain.system.redaction import without_secret_values

OTHER_PHASES = ("validation_s", "test_s", "checkpoint_s", "first_step_s")
SIMILAR_MAY_DIFFER = ("seed", "rate", "hosts", "strategy", "label", "launcher", "cluster", "on")


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float | None
    """None if unknown"""
    basis: str
    """measured (runs of the same experiment, perhaps with another seed), similar (the mean of runs that differ only in
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
            request, end = read(path, records.Experiment), records.summary(path.parent)
            if request and end and (path.parent / "COMPLETE").exists():
                # a script does not record all phases
                others_s = sum(getattr(end, phase) or 0.0 for phase in OTHER_PHASES)
                self._add(request.settings, end.train_s + others_s)

    def learn(self, run: Run, seconds: float) -> None:
        """Adds a run of the current sweep."""
        self._add(run.experiment.settings, seconds)

    def of(self, run: Run) -> Estimate:
        """Duration of the run itself, without throttling and cool-down."""
        settings = run.experiment.settings
        if same := self._same.get(_key(settings, ("seed",))):
            return Estimate(statistics.median(same), "measured")
        similar = self._similar.get(_key(settings, SIMILAR_MAY_DIFFER))
        return Estimate(statistics.fmean(similar), "similar") if similar else UNKNOWN

    def _add(self, settings: dict[str, Any], seconds: float) -> None:
        self._same[_key(settings, ("seed",))].append(seconds)
        self._similar[_key(settings, SIMILAR_MAY_DIFFER)].append(seconds)


def _key(settings: dict[str, Any], ignored: tuple[str, ...]) -> str:
    kept = {key: value for key, value in settings.items() if key not in ignored}
    return json.dumps(without_secret_values(kept), sort_keys=True)  # records contain no secrets
