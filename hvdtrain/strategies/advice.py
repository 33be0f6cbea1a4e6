"""What to try when ranks wait long for their exchange: the table of docs/STRATEGIES.md, with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.batch_plan import micro_batches
from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies.registry import RUNGS, UNEQUAL
from hvdtrain.strategies.spec import Exchange, parse
from hvdtrain.system.exits import Failure

WORTH = 0.2
"""Share of a step's time, spent waiting, from which on advice is given"""
NOTHING, SOME, MUCH = 0.1, 1.0, 30.0
"""Limits of that table: time of the wire for all gradients, as a multiple of a step's computation"""


def wire_s(parameters: int, hosts: int, links: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds that the slowest of the links (see `records.Manifest`) needs to sum all gradients over hosts; None if no
    link was measured."""
    rates = [link["goodput_mbit"] for link in links if link["goodput_mbit"]]
    return 2 * (hosts - 1) / hosts * 4 * parameters * 8e-6 / min(rates) if rates else None


def advice(config: TrainConfig, shares: Mapping[str, float], wire: float | None) -> str | None:
    """What to try, with the flag to type and the reason; None if nothing better is known.

    `shares`: see `records.Summary.step_shares`; `wire`: `wire_s` over the seconds that a step computes, None: unknown.
    """
    if shares.get("exchange", 0.0) <= WORTH or config.stages > 1:  # stages wait for their neighbours too
        return None
    here = parse(config.strategy)
    if shares["exchange_least"] <= WORTH:  # the slowest rank waits for nobody: the network is fast enough
        if here.strategy.divides or here.strategy.local or micro_batches(config) > 1:
            return None
        name, seen = UNEQUAL
        other = Exchange(parse(name).schedule, here.reducer or parse(name).reducer)
        return _words(config, other, f"ranks wait for slower ones; {seen}")
    why = ""
    if wire is not None and wire < NOTHING:
        rung, why = 0, "the link is fast enough"
    else:
        rung = max(here.rung + 1, 1 if wire is None else sum(wire > limit for limit in (SOME, MUCH)))
        if wire is not None:
            why = f"all gradients need {wire:.2g} times as long on the slowest link as a step computes"
    if rung <= here.rung or rung >= len(RUNGS):
        return None
    spec, seen = RUNGS[rung]
    other = parse(spec)
    if here.strategy.divides:  # goes on dividing, and sends by what is advised
        if other.schedule:
            return None
        other = Exchange(here.schedule, other.reducer)
    return _words(config, other, "; ".join(filter(None, (why, seen))))


def _words(config: TrainConfig, other: Exchange, why: str) -> str | None:
    """None if the run's other settings do not go with it."""
    try:
        other.check(config)
    except Failure:
        return None
    return f"try --strategy {other} ({why}; docs/STRATEGIES.md)"
