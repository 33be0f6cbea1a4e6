"""Predicts the duration of a run from finished runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.plan import prediction, recorded
from hvdtrain.plan.choice import FAST_LINK
from hvdtrain.plan.network import Link
from hvdtrain.plan.prediction import Host
from hvdtrain.strategies.spec import parse
from hvdtrain.sweep.dry_run import DryRun
from hvdtrain.sweep.folder import read
from hvdtrain.sweep.grid import Run
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secret_values

OTHER_PHASES = ("validation_s", "test_s", "checkpoint_s", "first_step_s")
SIMILAR_MAY_DIFFER = ("seed", "rate", "hosts", "strategy", "label", "launcher", "cluster", "on")


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float | None
    """None if unknown"""
    basis: str
    """measured (runs of the same experiment, perhaps with another seed), predicted, similar or unknown.

    Predictions start from a run that differs only in SIMILAR_MAY_DIFFER; similar is the mean of such runs if
    `hvdtrain.plan` cannot use them."""


UNKNOWN = Estimate(None, "unknown")


class Estimator:
    """Collects the durations of finished runs, on disk and in the current sweep."""

    def __init__(self, dry_runs: Mapping[str, DryRun] | None = None) -> None:
        """`dry_runs`: of the runs to estimate, by name of the experiment."""
        self._dry_runs = dry_runs or {}
        self._same: dict[str, list[float]] = defaultdict(list)
        self._similar: dict[str, list[tuple[dict[str, Any], Path | None, float]]] = defaultdict(list)
        """Settings, folder and seconds of finished runs"""
        self._recorded: dict[Path, recorded.Recorded | None] = {}
        self._predicted: dict[tuple[Path, str], float | None] = {}

    def read(self, root: Path) -> None:
        """Adds the finished runs of all sweeps under `root`."""
        for path in sorted(root.glob("*/*/experiment.json")):
            request, end = read(path, records.Experiment), records.summary(path.parent)
            if request and end and (path.parent / "COMPLETE").exists():
                self._add(request.settings, path.parent, end.train_s + _other_s(end))

    def learn(self, run: Run, seconds: float, folder: Path | None = None) -> None:
        """Adds a run of the current sweep."""
        self._add(run.experiment.settings, folder, seconds)

    def of(self, run: Run) -> Estimate:
        """Duration of the run itself, without throttling and cool-down."""
        settings = run.experiment.settings
        if same := self._same.get(_key(settings, ("seed",))):
            return Estimate(statistics.median(same), "measured")
        similar = self._similar.get(_key(settings, SIMILAR_MAY_DIFFER), [])
        for _, folder, _ in sorted(similar, key=lambda each: _differences(each[0], settings)):
            if folder and (seconds := self._predict(folder, run)) is not None:
                return Estimate(seconds, "predicted")
        return Estimate(statistics.fmean(each[2] for each in similar), "similar") if similar else UNKNOWN

    def _predict(self, folder: Path, run: Run) -> float | None:
        if folder not in self._recorded:
            self._recorded[folder] = None
            with contextlib.suppress(Failure):
                self._recorded[folder] = recorded.read(folder)
        done, dry_run = self._recorded[folder], self._dry_runs.get(run.experiment.name)
        key = folder, run.experiment.without_seed
        if done and dry_run and key not in self._predicted:
            self._predicted[key] = None
            with contextlib.suppress(Failure):
                self._predicted[key] = predicted_s(done, run, dry_run)
        return self._predicted.get(key)

    def _add(self, settings: dict[str, Any], folder: Path | None, seconds: float) -> None:
        self._same[_key(settings, ("seed",))].append(seconds)
        self._similar[_key(settings, SIMILAR_MAY_DIFFER)].append((settings, folder, seconds))


def predicted_s(done: recorded.Recorded, run: Run, dry_run: DryRun) -> float | None:
    """Predict the steps of a run from a finished run, and add that run's other phases. Raises Failure (78).

    None if the strategy cannot be predicted, or its links are not known. A run to a target accuracy is expected to need
    the same share of its steps.
    """
    exchange, rate, count = parse(str(dry_run.config["strategy"])), run.experiment.rate_bit_s, run.experiment.hosts
    throttled = any((link.get("throttle") or {}).get("up_mbit") for link in done.manifest.links)
    links = [Link.of_rate(rate)] if rate else [] if throttled else list(done.links.values())
    made = recorded.as_profile(done, [exchange])
    if prediction.unpredictable(made, exchange) or (count > 1 and not links):
        return None
    link = min(links, key=lambda each: min(each.up, each.down), default=FAST_LINK)
    ranks, cores = int(run.experiment.settings["ranks_per_host"]), done.hosts()[0].cores
    hosts = [Host(name=str(number), link=link, ranks=ranks, cores=cores) for number in range(count)]
    step_s = prediction.predict(made, exchange, hosts, dry_run.plan["global_batch"]).step_s
    share = done.summary.steps / (done.facts.plan.steps or done.summary.steps)
    return step_s * dry_run.plan["steps"] * share + _other_s(done.summary)


def _other_s(end: records.Summary) -> float:
    return sum(getattr(end, phase) or 0.0 for phase in OTHER_PHASES)  # a script does not record all of them


def _differences(one: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(one.get(name) != other.get(name) for name in SIMILAR_MAY_DIFFER)


def _key(settings: dict[str, Any], ignored: tuple[str, ...]) -> str:
    kept = {key: value for key, value in settings.items() if key not in ignored}
    return json.dumps(without_secret_values(kept), sort_keys=True)  # records contain no secrets
