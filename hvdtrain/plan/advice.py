"""What to try after a run whose hosts waited long for each other, predicted from its records."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.config.batch_plan import micro_batches
from hvdtrain.config.options import TrainConfig
from hvdtrain.plan import choice, learning, prediction, recorded
from hvdtrain.plan.prediction import EXACT_REDUCER
from hvdtrain.strategies import presets
from hvdtrain.strategies.automatic import Rule
from hvdtrain.system.exits import Failure

WAITING_THRESHOLD = 0.2
"""Share of a step spent waiting above which advice is given"""


def after_run(config: TrainConfig, folder: Path) -> str | None:
    """Return what would make the steps of a finished run clearly shorter, in one line; None if nothing would.

    A strategy is clearly better if it is even at the slow end of its 90 % interval. Nothing is measured, which would
    let the ranks wait: coding costs what it did on another machine.
    """
    try:
        run = recorded.read(folder)
    except Failure:
        return None
    shares = run.summary.step_shares
    if run.summary.hosts == 1 or shares.get("exchange", 0.0) <= WAITING_THRESHOLD:
        return None
    waited = f"{shares['exchange']:.0%} of a step was waiting for other hosts: try "
    if shares["exchange_least"] <= WAITING_THRESHOLD:  # the slowest rank hardly waits: the network is fast enough
        current = run.exchange.capabilities
        if config.shares is not None or current.local_updates or micro_batches(config) > 1:
            return None
        flags = "" if current.backend == "tcp" else f"--strategy {EXACT_REDUCER} "
        return f"{waited}{flags}--shares measured (some ranks compute more slowly; docs/guides/choose-a-strategy.md)"
    exchanges, hosts = choice.candidates(Rule(), config), run.hosts()
    made = recorded.as_profile(run, exchanges)
    predictions = [prediction.predict(made, each, hosts, run.global_batch) for each in exchanges]
    known = learning.of(run.exchange, config.optimizer)
    own_s = run.step_s * (sum(known.steps) / 2 if known else 1.0)
    better = [each for each in predictions if run.links and _is_clearly_shorter(each, own_s)]
    by_preset = [each for each in better if presets.named(each.strategy, config.optimizer) in presets.NAMES]
    if not better:
        return None
    best = prediction.best(by_preset or better)
    assert best.interval_s
    name = presets.named(best.strategy, config.optimizer)
    least, speedup, most = (run.step_s / each for each in (best.interval_s[1], best.step_s, best.interval_s[0]))
    return (
        f"{waited}--strategy {name}, {speedup:.2g} times as fast by prediction (90 % interval {least:.2g} to "
        f"{most:.2g}{best.learns}; docs/guides/choose-a-strategy.md)"
    )


def _is_clearly_shorter(each: prediction.Prediction, own_s: float) -> bool:
    """Whether training with it takes less time than `own_s` a step, even at the slow end of the interval."""
    return bool(each.interval_s and each.steps_factor and own_s > each.ranking_s * each.interval_s[1] / each.step_s)
