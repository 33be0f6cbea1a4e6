"""The advice at the end of a run: never what is used already, and never what cannot run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import runs

from hvdtrain import records, strategies
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Spent, step_shares
from hvdtrain.strategies.advice import advice, network_s
from hvdtrain.training.summary import advised

HIERARCHICAL, POWERSGD = "--strategy hierarchical", "--strategy powersgd:rank=4"
LOCAL = "--strategy local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4"
SLOW = {"exchange": 0.9, "exchange_least": 0.9, "compute": 0.1, "data": 0.0}


@pytest.mark.parametrize(
    ("settings", "network_ratio", "flags"),
    [
        ({}, 0.5, HIERARCHICAL),
        ({}, 5, POWERSGD),
        ({}, 40, LOCAL),
        ({}, None, POWERSGD),
        ({}, 0.01, HIERARCHICAL),
        ({"strategy": "hierarchical"}, 0.01, None),
        ({"strategy": "native"}, 0.5, POWERSGD),
        ({"strategy": "native:hook=powersgd"}, 5, POWERSGD),
        ({"strategy": "bf16"}, 0.5, POWERSGD),
        ({"strategy": "powersgd"}, 5, LOCAL),
        ({"strategy": "topk"}, 5, LOCAL),
        ({"strategy": "hierarchical", "shares": "measured"}, 5, POWERSGD),
        ({"strategy": "local-sgd"}, 40, None),
        ({"precision": "fp16"}, 40, None),
        ({"stages": 2, "strategy": "hierarchical"}, 40, None),
        ({"micro_batches": 2, "strategy": "hierarchical"}, 5, POWERSGD),
    ],
)
def test_advice_follows_the_link_and_is_at_least_the_next_level(
    settings: dict[str, Any], network_ratio: float | None, flags: str | None
) -> None:
    config = TrainConfig(**settings)
    text = advice(config, SLOW, network_ratio)
    if flags is None:
        assert text is None
        return
    assert text is not None
    assert text.startswith(f"try {flags} (")
    strategies.resolve(TrainConfig(strategy=flags.removeprefix("--strategy ")))


def test_ranks_that_wait_for_slower_ones_are_advised_to_use_unequal_shares() -> None:
    assert advice(TrainConfig(), {"exchange": 0.2, "exchange_least": 0.2}, 40) is None
    assert advice(TrainConfig(), {}, 40) is None
    uneven = {"exchange": 0.3, "exchange_least": 0.05}
    assert (advice(TrainConfig(), uneven, 0.5) or "").startswith("try --strategy hierarchical --shares measured (")
    inner = advice(TrainConfig(strategy="int8"), uneven, 0.5) or ""
    assert inner.startswith("try --shares measured (")
    assert advice(TrainConfig(shares="measured"), uneven, 0.5) is None
    assert advice(TrainConfig(strategy="int8", micro_batches=2), uneven, 0.5) is None


def test_the_network_time_is_that_of_the_slowest_link() -> None:
    links = [{"goodput_mbit": rate} for rate in (9.36, 93.6, None)]
    assert network_s(1_334_970, 2, links) == pytest.approx(4.564, rel=1e-3), "as in docs/benchmarks/horovod-and-ddp.md"
    assert network_s(1_334_970, 2, [{"goodput_mbit": None}]) is None


def test_the_network_time_is_compared_with_the_computation_of_a_step() -> None:
    made = runs.Made(hosts=2, parameters=1_000_000, train_s=100.0, steps_per_epoch=50)  # two epochs: 1 s per step
    shares = {"data": 0.0, "compute": 0.5, "exchange": 0.5, "exchange_least": 0.5}
    summary = msgspec.structs.replace(runs.summary(made, Path("run"), 0.0), step_shares=shares)
    for changes in ({"train_s": 300.0}, {"samples_per_s": None}):  # a long warm-up; a script that logs no samples
        text = advised(TrainConfig(), msgspec.structs.replace(summary, **changes), [{"goodput_mbit": 6.4}])
        assert text and "take 10 times as long" in text, "5 s for 4 MB"


def test_shares_of_a_step_are_means_over_ranks_without_warmup() -> None:
    def spent(*seconds: float | None) -> Spent:
        found = Spent()
        for warmup in (True, False, False):
            data_s, compute_s, exchange_s = (s if s is None else s * (9 if warmup else 1) for s in seconds)
            step = {"data_s": data_s, "compute_s": compute_s, "communication_s": exchange_s, "warmup": warmup}
            found.add(records.Step(step=0, epoch=0, loss=0, samples=1, lr=1, bytes_sent=0, **step))
        return found

    shares = step_shares([spent(1, 3, 4), spent(0, 1, 3)])
    assert shares == {"data": 0.0625, "compute": 0.3125, "exchange": 0.625, "exchange_least": 0.5}
    assert step_shares([spent(1, 3, 4), spent(0, 1, None)]) == {}
    assert step_shares([Spent()]) == {}
