"""Predicts how long a run takes: from earlier runs of equal settings, else from a similar run with its time on the wire
corrected, else from a rough model."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
from pathlib import Path
from typing import Any

from hvdtrain.sweep.file import ClusterSpec
from hvdtrain.sweep.folder import document, summary
from hvdtrain.sweep.plan import Point, Run
from hvdtrain.sweep.preview import Preview
from hvdtrain.system.rates import goodput_both_ways, parse_rate
from hvdtrain.system.redaction import without_secret_values

START_S = {"torch": (2.0, 2.5), "tensorflow": (4.0, 7.0)}
"""Seconds from launch to first step: a fixed part, and a part to divide by the rank's cores if it has less than one"""
LINKS_S = 2.0
"""To measure the links before step 0"""
VERIFY_S = 6.0
"""To set a rate and measure one link"""
CLUSTER_S = 3.0
"""To bring a virtual cluster up, and down"""
SAMPLE_S, SAMPLE_PER_PARAMETER_S = 0.65e-3, 0.145e-9
"""Forward and backward pass of one sample of 1,024 pixels on one core: constant, and per parameter. Fitted to ResNet-34
at widths 0.25 and 1 on a virtual machine with two cores"""
STEP_S, STEP_PER_PARAMETER_S, DENSE_PER_PARAMETER_S = 2e-3, 3.5e-9, 0.2e-9
"""A step's constant; what the optimizer does with each parameter; and, of data that are not images, whose samples meet
each parameter once, forward and backward pass of a sample on one core"""
FORMULA = (
    "a guess is start + steps x (compute + wire): 2 s + 2.5 s of a core to start (TensorFlow 4 + 7), 2 s for links;"
    " 2 ms + 3.5 ms per million parameters and step, and 0.65 ms + 0.145 ms per million parameters and sample of 1,024"
    " pixels, or 0.2 ms per million parameters and sample of other data, on one core;"
    " bytes that the strategy sends per host and step x 8 / (0.936 x rate)"
)
NEAR_MAY_DIFFER = ("seed", "rate", "hosts", "strategy", "label", "launcher", "cluster", "on")


@dataclasses.dataclass(frozen=True)
class Estimate:
    seconds: float | None
    """None: unknown"""
    basis: str
    """measured (equal settings), near (other rate, hosts or strategy), guess (the model) or unknown"""


@dataclasses.dataclass(frozen=True)
class _Known:
    settings: dict[str, Any]
    seconds: float
    steps: int
    wire_s: float
    """Per step"""
    rank_batch: float
    """0: unknown"""

    @functools.cached_property
    def cell(self) -> str:
        return _without(self.settings, ("seed",))

    @functools.cached_property
    def kin(self) -> str:
        return _without(self.settings, NEAR_MAY_DIFFER)


class Estimator:
    """Predicts from the finished runs under a root and those that finish during the sweep."""

    def __init__(self, previews: dict[str, Preview], cluster: ClusterSpec | None) -> None:
        self._previews, self._cluster = previews, cluster
        self._known: list[_Known] = []

    def read(self, root: Path) -> None:
        """Reads every finished run of any sweep under the root."""
        for path in sorted(root.glob("*/*/point.json")):
            point, end = document(path), summary(path.parent)
            if point is None or end is None or not (path.parent / "COMPLETE").exists():
                continue
            phases = ["train_s", "validation_s", "test_s", "checkpoint_s", "first_step_s"]
            figures = [end.get(phase) or 0.0 for phase in phases]  # a script does not tell all of them
            settings = point.get("settings")
            if isinstance(settings, dict) and all(isinstance(figure, int | float) for figure in figures):
                steps = int(end.get("steps") or 0)
                wire_s = _wire_s(settings, (end.get("bytes_sent") or 0) / max(1, steps))
                planned = (document(path.parent / "manifest.json") or {}).get("plan") or {}
                batch = planned.get("rank_batch") or 0
                self._known.append(_Known(settings, sum(figures) + 1.0, steps, wire_s, batch))

    def learn(self, run: Run, seconds: float) -> None:
        preview = self._previews.get(run.point.name)
        steps = preview.plan["steps"] if preview else 0
        batch = preview.plan["rank_batch"] if preview else 0
        self._known.append(_Known(run.point.settings, seconds, steps, self.wire_s(run.point), batch))

    def of(self, run: Run) -> Estimate:
        """Seconds from launch to end, without setting the throttle and without cool-down."""
        point = run.point
        preview = self._previews.get(point.name)
        cell, kin = _without(point.settings, ("seed",)), _without(point.settings, NEAR_MAY_DIFFER)
        same = [one.seconds for one in self._known if one.cell == cell]
        if same:
            return Estimate(statistics.median(same), "measured")
        if preview is None:
            return Estimate(None, "unknown")
        steps, wire_s = preview.plan["steps"], self.wire_s(point)
        start_s = self._start_s(point.settings, preview)
        near = [one for one in self._known if one.steps and one.kin == kin]
        if near:
            one = min(near, key=lambda other: _distance(other.settings, point.settings))
            compute_s = one.seconds - self._start_s(one.settings, preview) - one.steps * one.wire_s
            share = _cores(one.settings, self._cluster) / _cores(point.settings, self._cluster)
            share *= preview.plan["rank_batch"] / one.rank_batch if one.rank_batch else 1
            return Estimate(start_s + max(0.0, compute_s) * steps / one.steps * share + steps * wire_s, "near")
        guessed_s = self._compute_s(point, preview)
        if guessed_s is None:
            return Estimate(None, "unknown")
        return Estimate(start_s + steps * (guessed_s + wire_s), "guess")

    def wire_s(self, point: Point) -> float:
        """The least seconds per step that the strategy's bytes need on the wire."""
        preview = self._previews.get(point.name)
        return _wire_s(point.settings, preview.sent_bytes) if preview else 0.0

    def _start_s(self, settings: dict[str, Any], preview: Preview) -> float:
        fixed_s, core_s = START_S.get(str(preview.config.get("framework")), START_S["torch"])
        cores = min(1.0, _cores(settings, self._cluster) / int(settings["ranks_per_host"]))
        return fixed_s + core_s / cores + (LINKS_S if settings["hosts"] > 1 else 0.0)

    def _compute_s(self, point: Point, preview: Preview) -> float | None:
        """Seconds of computation per step; None for a GPU."""
        if point.flags.get("device") == "gpu":
            return None
        fixed_s, sample_s = (
            STEP_S + STEP_PER_PARAMETER_S * preview.parameters,
            DENSE_PER_PARAMETER_S * preview.parameters,
        )
        if preview.pixels:
            fixed_s, sample_s = 0.0, (SAMPLE_S + SAMPLE_PER_PARAMETER_S * preview.parameters) * preview.pixels / 1024
        ranks = point.settings["ranks_per_host"]
        return float(ranks * (fixed_s + preview.plan["rank_batch"] * sample_s) / _cores(point.settings, self._cluster))


def _wire_s(settings: dict[str, Any], sent_bytes: float) -> float:
    """Seconds that a host's link needs for so many bytes out and in; 0 if it has no rate."""
    if settings["hosts"] < 2 or settings.get("rate") in (None, "unlimited"):
        return 0.0
    return sent_bytes * 8 / goodput_both_ways(parse_rate(str(settings["rate"])))


def _without(settings: dict[str, Any], keys: tuple[str, ...]) -> str:
    kept = {key: value for key, value in settings.items() if key not in keys}
    return json.dumps(without_secret_values(kept), sort_keys=True)  # as in records


def _distance(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
    apart = sum(one.get(key) != other.get(key) for key in NEAR_MAY_DIFFER if key != "seed")
    return int(one.get("on") != other.get("on")) * 10 + apart, abs(int(one["hosts"]) - int(other["hosts"]))


def _cores(settings: dict[str, Any], cluster: ClusterSpec | None) -> float:
    """Cores of each host; virtual hosts share the machine's cores, up to their CPU share."""
    mine = float(len(os.sched_getaffinity(0)))
    if settings["on"] == "machine" or not (cluster and (cluster.virtual or cluster.existing)):
        return mine
    shared = mine / int(settings["hosts"])
    return min(shared, cluster.cpu_share) if cluster.cpu_share else shared
