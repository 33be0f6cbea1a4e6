"""`hvdtrain results accuracy`: the scores, and the time to a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hvdtrain.results import scores
from hvdtrain.results.read import frame, run, steps
from hvdtrain.results.read.folders import Problem
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.statistics import summary
from hvdtrain.results.tables.columns import (
    SPREAD_NOTE,
    N,
    cells,
    group_notes,
    grouped,
    key_column,
    score_columns,
)
from hvdtrain.results.tables.model import Column, Table
from hvdtrain.system.exits import Failure

CAPTIONS_NOTE = (
    "bleu: corpus BLEU of the test captions from the weights of the best epoch, by greedy or beam search; accuracy of "
    "captions: share of correct words, given the correct previous words"
)


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


def reached(run_dir: str, score: str, target: float, problems: list[Problem]) -> Reached | None:
    """When the run's score reached the target; None if it did not, or the run cannot be read (see `problems`)."""
    try:
        known = scores.row(frame.manifest(run_dir).metric, run_dir)[1]
        epochs = steps.epochs(run.metrics_file(run_dir)) if score in known else []  # a script may have no scores
    except Failure as failure:
        problems.append(Problem(run_dir, None, str(failure)))
        return None
    before: tuple[float, float] | None = None
    for timed in epochs:
        value, train_s = timed.epoch.validation_scores.get(score), timed.trained_s
        if value is not None and not known[score].better(target, value):
            interpolated_s = train_s
            if before is not None:
                aim = math.copysign(target, before[1]) if known[score].higher_is_better is None else target
                interpolated_s = before[0] + (train_s - before[0]) * (aim - before[1]) / (value - before[1])
            return Reached(timed.epoch.epoch + 1, timed.epoch.step, train_s, interpolated_s, timed.elapsed_s)
        before = before if value is None else (train_s, value)
    return None


def table(loaded: Loaded, target: float = 0.95, group_by: Sequence[str] | None = None) -> Table:
    """The scores of each group and its times to the target, a value of the primary metric."""
    found, shown = grouped(loaded.runs, group_by)
    primary, more = scores.primary(loaded.runs), scores.shown(loaded.runs)
    best = score_columns(loaded.runs, "best_validation")
    others = score_columns(loaded.runs, "test", more[len(primary) :]) if len(more) > len(primary) else []
    figures = [*score_columns(loaded.runs), *best, *others]
    rows = []
    for group in found:
        members = zip(group.column("run_dir"), group.column("primary_metric"), strict=True)
        times = [reached(*member, target, loaded.problems) for member in members]
        timed = [time for time, kind in zip(times, group.column("kind"), strict=True) if time and kind == "timing"]
        rows.append(
            cells(group, shown, figures)
            | {
                "reached": f"{sum(time is not None for time in times)} of {group.n}",
                "epochs_to_target": summary(time.epoch for time in times if time),
                "train_to_target_s": summary(time.train_s for time in timed),
                "end_to_end_to_target_s": summary(time.end_to_end_s for time in timed),
            }
        )
    percent = scores.target(loaded.runs, target)
    columns = [key_column(name) for name in shown] + [N, *figures]
    columns += [
        Column("reached", f"reached {percent}"),
        Column("epochs_to_target", "epochs to target", spread=False),
        Column("train_to_target_s", "time to target", "s"),
        Column("end_to_end_to_target_s", "end to end to target", "s"),
    ]
    notes = [
        SPREAD_NOTE,
        f"target: the end of the first epoch whose validation reaches {percent}, without interpolation; time to "
        "target: seconds of training until then; end to end: with validation and checkpoints",
        "times and epochs are means over the runs that reached the target, so they flatter a group with failures",
        *([CAPTIONS_NOTE] if "bleu4" in more else []),
        *group_notes(loaded.runs, found, shown, group_by),
    ]
    spare = (*(one.key for one in (*others, *best)), "epochs_to_target", "n", "end_to_end_to_target_s")
    return Table("accuracy", "Accuracy and time to accuracy", columns, rows, notes, spare=spare)
