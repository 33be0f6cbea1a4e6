"""`hvdtrain results accuracy`: the scores, and the time to a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import Column
from hvdtrain.results.groups import Group
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import Statistic, summary
from hvdtrain.results.tables.columns import SPREAD_NOTE, N, cells, group_notes, grouped, score_columns
from hvdtrain.results.tables.model import Table


@dataclasses.dataclass(frozen=True)
class Reached:
    """The first epoch of a run whose validation reached the target."""

    epoch: int
    """From 1"""
    steps: int
    """Since the start of the run"""
    train_s: float
    """Seconds of training until the end of that epoch"""
    interpolated_s: float
    """Seconds of training until a straight line from the epoch before, if there is one, crosses the target"""
    end_to_end_s: float
    """With validation, including that epoch's, and earlier checkpoints"""


def reached(loaded: Loaded, run: Mapping[Any, Any], target: float) -> Reached | None:
    """When the primary metric of a run, a row of the frame, reached the target; None if it did not."""
    name = run["primary_metric"]
    if groups.is_missing(name):  # a script may have no scores
        return None
    score = scores.of_run(run["scores"])[name]
    before: tuple[float, float] | None = None
    for timed in loaded.epochs[run["run_dir"]]:
        value, train_s = timed.epoch.validation_scores.get(name), timed.trained_s
        if value is not None and not score.better(target, value):
            interpolated_s = train_s
            if before is not None:
                aim = math.copysign(target, before[1]) if score.higher_is_better is None else target
                interpolated_s = before[0] + (train_s - before[0]) * (aim - before[1]) / (value - before[1])
            return Reached(timed.epoch.epoch + 1, timed.epoch.step, train_s, interpolated_s, timed.elapsed_s)
        before = before if value is None else (train_s, value)
    return None


def to_target(loaded: Loaded, group: Group, target: float) -> dict[str, Any]:
    """Cells about the runs of a group that reached the target. Energy runs have no times, one host has no network."""
    found = [(run, there) for run in group.runs.to_dict("records") if (there := reached(loaded, run, target))]
    timed = [there for run, there in found if run["kind"] == "timing"]
    sent = ((run["network_bytes_per_step"], there.steps) for run, there in found if (group.key.get("hosts") or 1) > 1)
    return {
        "reached": f"{len(found)} of {group.n}",
        "epochs_to_target": summary(there.epoch for _, there in found),
        "steps_to_target": summary(there.steps for _, there in found),
        "bytes_to_target": summary(count * each for each, count in sent if not groups.is_missing(each)),
        "train_to_target_s": summary(there.train_s for there in timed),
        "interpolated_s": summary(there.interpolated_s for there in timed),
        "end_to_end_to_target_s": summary(there.end_to_end_s for there in timed),
    }


def table(loaded: Loaded, target: float = 0.95, group_by: Sequence[str] | None = None) -> Table:
    """The scores of each group and its times to the target, a value of the primary metric."""
    experiments, settings = grouped(loaded.runs, group_by)
    primary, more = scores.primary(loaded.runs), scores.shown(loaded.runs)
    best = score_columns(loaded.runs, "best_validation", role="detail")
    others = score_columns(loaded.runs, "test", more[len(primary) :], "detail") if len(more) > len(primary) else []
    figures = [*score_columns(loaded.runs), *best, *others]
    keys = [one.key for one in settings]
    rows = [cells(group, keys, figures) | to_target(loaded, group, target) for group in experiments]
    percent = scores.target(loaded.runs, target)
    columns = [
        N,
        *score_columns(loaded.runs),
        Column("reached", f"reached {percent}"),
        Column("train_to_target_s", "time to target", "s", of=Statistic),
        *best,
        Column("epochs_to_target", "epochs to target", spread=False, role="detail", of=Statistic),
        Column("end_to_end_to_target_s", "end to end to target", "s", role="detail", of=Statistic),
        *others,
        *settings,
    ]
    notes = [
        SPREAD_NOTE,
        f"target: the end of the first epoch whose validation reaches {percent}, without interpolation; time to "
        "target: seconds of training until then; end to end: with validation and checkpoints",
        "times and epochs are means over the runs that reached the target, so they flatter a group with failures",
        *group_notes(loaded.runs, experiments),
    ]
    return Table("accuracy", "Accuracy and time to accuracy", columns, rows, notes)
