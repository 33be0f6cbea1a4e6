"""`hvdtrain results accuracy`: what was learnt, and how long it took to reach a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hvdtrain.results import groups, load, metrics, scores
from hvdtrain.results.columns import GROUP
from hvdtrain.results.folders import Problem
from hvdtrain.results.load import Loaded
from hvdtrain.results.statistics import summary
from hvdtrain.results.table import Column, Table
from hvdtrain.results.tables import SPREAD_NOTE, apart, common, in_order, key_cells, key_column, left_out, mixed
from hvdtrain.system.exits import Failure

CAPTIONS_NOTE = (
    "bleu: corpus BLEU of the test pictures' captions by the weights of the best epoch, written greedily, or by beam "
    "search; accuracy of captions is the share of words that are right when all words before are given"
)


@dataclasses.dataclass(frozen=True)
class Reached:
    """The first epoch of a run whose validation was as good as the target."""

    epoch: int
    """From 1"""
    steps: int
    """Since the start of the run"""
    train_s: float
    """Seconds of training until that epoch's end"""
    crossed_s: float
    """The same until a straight line from the epoch before, if there is one, crosses the target"""
    end_to_end_s: float
    """With validation, that epoch's included, and the checkpoints before"""


def reached(run_dir: str, score: str, target: float, problems: list[Problem]) -> Reached | None:
    """When the run's score reached the target; None if it never did, or the run cannot be read any more (why is then
    in `problems`)."""
    try:
        known = scores.row(load.manifest(run_dir).metric, run_dir)[1]
        epochs = metrics.epochs(load.metrics_file(run_dir)) if score in known else []  # a script told none
    except Failure as failure:
        problems.append(Problem(run_dir, None, str(failure)))
        return None
    before: tuple[float, float] | None = None
    for timed in epochs:
        value, train_s = timed.epoch.validation_scores.get(score), timed.trained_s
        if value is not None and not known[score].better(target, value):
            crossed_s = train_s
            if before is not None:
                aim = math.copysign(target, before[1]) if known[score].higher_is_better is None else target
                crossed_s = before[0] + (train_s - before[0]) * (aim - before[1]) / (value - before[1])
            return Reached(timed.epoch.epoch + 1, timed.epoch.step, train_s, crossed_s, timed.elapsed_s)
        before = before if value is None else (train_s, value)
    return None


def accuracy(loaded: Loaded, target: float = 0.95, group_by: Sequence[str] | None = None) -> Table:
    """Each group's scores and its times to the target, a value of the primary metric."""
    found = in_order(groups.by(groups.usable(loaded.runs), group_by or GROUP))
    shown = list(group_by) if group_by else apart(found)
    heads, more = scores.primary_metrics(loaded.runs), scores.shown(loaded.runs)
    figures = [*scores.figures(loaded.runs), *scores.figures(loaded.runs, "best_validation")]
    others = scores.figures(loaded.runs, "test", more[len(heads) :]) if len(more) > len(heads) else []
    figures += others
    rows = []
    for group in found:
        members = zip(group.column("run_dir"), group.column("primary_metric"), strict=True)
        times = [reached(*member, target, loaded.problems) for member in members]
        timed = [time for time, kind in zip(times, group.column("kind"), strict=True) if time and kind == "timing"]
        rows.append(
            key_cells(group, shown)
            | {one.key: group.statistic(one.key) for one in figures}
            | {
                "n": group.n,
                "reached": f"{sum(time is not None for time in times)} of {group.n}",
                "epochs_to_target": summary(time.epoch for time in times if time),
                "train_to_target_s": summary(time.train_s for time in timed),
                "end_to_end_to_target_s": summary(time.end_to_end_s for time in timed),
            }
        )
    percent = scores.target(loaded.runs, target)
    columns = [key_column(name) for name in shown] + [Column("n", "n")] + figures
    columns += [
        Column("reached", f"reached {percent}"),
        Column("epochs_to_target", "epochs", spread=False),
        Column("train_to_target_s", "training", "s"),
        Column("end_to_end_to_target_s", "end to end", "s"),
    ]
    notes = [
        SPREAD_NOTE,
        f"reached {percent}: at the end of the first epoch whose validation is as good as that, nothing interpolated; "
        "training: seconds of training until then; end to end: with validation and checkpoints",
        "times and epochs are means over the runs that got there: where some did not, they flatter the group",
        *([CAPTIONS_NOTE] if "bleu4" in more else []),
        *common(found, shown),
        *mixed(found, group_by),
        *left_out(loaded.runs),
    ]
    spare = (*(one.key for one in others), *(one.key for one in scores.figures(loaded.runs, "best_validation")))
    spare += ("epochs_to_target", "n", "end_to_end_to_target_s")
    return Table("accuracy", "Accuracy and time to accuracy", columns, rows, notes, spare=spare)
