"""What to try when ranks wait long for their exchange: the table of docs/STRATEGIES.md, with its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain import strategies
from hvdtrain.config import TrainConfig
from hvdtrain.exits import Failure
from hvdtrain.strategies.onebit import OneBit
from hvdtrain.strategies.powersgd import PowerSGD
from hvdtrain.strategies.rounded import Int4
from hvdtrain.strategies.topk import TopK

WORTH = 0.2
"""Share of a step's time, spent waiting, from which on advice is given"""
RUNGS: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"strategy": "hierarchical"},
        "four hosts at 1 Gbit/s took 0.27 s a step with it, 0.38 with horovodrun --gloo",
    ),
    (
        {"strategy": "powersgd", "rank": 4},
        "four hosts at 100 Mbit/s took 0.21 s a step with it, 0.94 with exact sums; accuracy 0.979, exact 0.983",
    ),
    (
        {"strategy": "local-sgd", "every": 6, "staleness": 1, "inner": "powersgd", "rank": 12, "bits": 4},
        "four hosts at 10 Mbit/s took 17 s to 0.95 accuracy with it, 21 with powersgd --rank 4, 446 with horovodrun",
    ),
)
"""Settings, from those that change least to those that send least, and what was measured of them"""
NOTHING, SOME, MUCH = 0.1, 1.0, 30.0
"""Limits of that table: time of the wire for all gradients, as a multiple of a step's computation"""
UNEQUAL = "hosts of 0.45 and 0.15 core took 0.72 s a step with it, 1.42 with even batches"


def wire_s(parameters: int, hosts: int, links: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds that the slowest of the links (see `records.Manifest`) needs to sum all gradients over hosts; None if no
    link was measured."""
    rates = [link["goodput_mbit"] for link in links if link["goodput_mbit"]]
    return 2 * (hosts - 1) / hosts * 4 * parameters * 8e-6 / min(rates) if rates else None


def advice(config: TrainConfig, shares: Mapping[str, float], wire: float | None) -> str | None:
    """What to try, with the flags to type and the reason; None if nothing better is known.

    `shares`: see `records.Summary.step_shares`; `wire`: `wire_s` over the seconds that a step computes, None: unknown.
    """
    if shares.get("exchange", 0.0) <= WORTH:
        return None
    if shares["exchange_least"] <= WORTH:  # the slowest rank waits for nobody: the network is fast enough
        if config.strategy in ("hybrid", "async-ps") or strategies.lookup(config)[0].local:
            return None
        inner = {"inner": config.strategy} if config.strategy in strategies.REDUCERS else {}
        return _words(config, {"strategy": "hybrid"} | inner, f"ranks wait for slower ones; {UNEQUAL}")
    tried = _rung(config)
    if wire is not None and wire < NOTHING:
        rung, why = 0, "the link is fast enough"
    else:
        rung = max(tried + 1, 1 if wire is None else sum(wire > limit for limit in (SOME, MUCH)))
        why = (
            ""
            if wire is None
            else f"all gradients need {wire:.2g} times as long on the slowest link as a step computes"
        )
    if rung <= tried or rung >= len(RUNGS):
        return None
    settings, seen = RUNGS[rung]
    if config.strategy == "hybrid":
        settings = {**settings, "strategy": "hybrid", "inner": settings["strategy"]}
    return _words(config, settings, "; ".join(filter(None, (why, seen))))


def _rung(config: TrainConfig) -> int:
    """The one that this run stands on; -1: below all."""
    schedule, reducer = strategies.lookup(config)
    if schedule.local:
        return len(RUNGS) - 1
    if reducer is None:
        return 0 if config.strategy == "native" else -1
    return 1 if reducer in (Int4, PowerSGD, TopK, OneBit) else 0


def _words(config: TrainConfig, settings: dict[str, Any], why: str) -> str | None:
    """None if the run's other settings do not go with these."""
    plain: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(config) if field.name in strategies.SETTINGS
    }
    try:
        strategies.chosen(dataclasses.replace(config, **plain | settings))
    except Failure:
        return None
    flags = " ".join(f"--{name} {value}" for name, value in settings.items())
    return f"try {flags} ({why}; docs/STRATEGIES.md)"
