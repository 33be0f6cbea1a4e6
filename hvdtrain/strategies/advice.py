"""What to try when ranks wait long for their exchange: the table of docs/guides/choose-a-strategy.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.batch_plan import micro_batches
from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies.registry import ADVICE, UNEQUAL_ADVICE
from hvdtrain.strategies.spec import parse
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import all_reduce_s

WAITING_THRESHOLD = 0.2
"""Share of a step spent waiting above which advice is given"""
FAST_LINK, MEDIUM_LINK, SLOW_LINK = 0.1, 1.0, 30.0
"""Limits between the rows of the table: network time of all gradients / computation time of a step"""


def network_s(parameters: int, hosts: int, links: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds that the slowest link needs to sum all gradients over hosts; None if no link was measured.

    `links`: see `records.Manifest`.
    """
    rates = [link["goodput_mbit"] for link in links if link["goodput_mbit"]]
    return all_reduce_s(4 * parameters, hosts, 1e6 * min(rates)) if rates else None


def advice(config: TrainConfig, step_shares: Mapping[str, float], network_ratio: float | None) -> str | None:
    """Return what to try, with the flag and the reason; None if nothing better is known.

    `step_shares`: see `records.Summary.step_shares`. `network_ratio`: `network_s` / the seconds that a step computes;
    None if unknown.
    """
    # The ranks of a pipeline also wait for their neighbours, so their waiting times say little about the exchange.
    if step_shares.get("exchange", 0.0) <= WAITING_THRESHOLD or config.stages > 1:
        return None
    current = parse(config.strategy)
    if step_shares["exchange_least"] <= WAITING_THRESHOLD:  # the slowest rank hardly waits: the network is fast enough
        tcp = current.capabilities.backend == "tcp"
        if config.shares is not None or current.capabilities.local_updates or micro_batches(config) > 1:
            return None
        flags = "--shares measured" if tcp else f"--strategy {ADVICE[0][0]} --shares measured"
        return f"try {flags} (ranks wait for slower ones; {UNEQUAL_ADVICE}; docs/guides/choose-a-strategy.md)"
    level, reason = current.capabilities.advice_level, ""
    if network_ratio is None:
        target = max(level + 1, 1)
    elif network_ratio < FAST_LINK:
        target, reason = 0, "the link is fast enough"
    else:
        target = max(level + 1, sum(network_ratio > limit for limit in (MEDIUM_LINK, SLOW_LINK)))
        reason = f"all gradients take {network_ratio:.2g} times as long on the slowest link as a step computes"
    if not level < target < len(ADVICE):
        return None
    strategy, measurement = ADVICE[target]
    try:
        parse(strategy).check(config)
    except Failure:
        return None
    reasons = "; ".join(filter(None, (reason, measurement)))
    return f"try --strategy {strategy} ({reasons}; docs/guides/choose-a-strategy.md)"
