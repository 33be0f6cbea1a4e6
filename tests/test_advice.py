"""The advice at the end of a run: never what is used already, and never what cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import runs

from hvdtrain import records, strategies
from hvdtrain.config.options import TrainConfig
from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.observe.timing import Spent, step_shares
from hvdtrain.plan import coding, learning, prediction, profile, recorded
from hvdtrain.plan.advice import after_run
from hvdtrain.strategies import presets
from hvdtrain.strategies.spec import parse

SHAPES = [list(shape) for shape in parameters(ResNetSpec(channels=1, classes=10, width=0.125)).values()]


def waited(folder: Path, **changes: Any) -> Path:
    """Write a run on four slow hosts that waited for most of each step."""
    settings = {"hosts": 4, "rate_mbit": 10.0, "strategy": "hierarchical", "shapes": SHAPES, "data_s": 0.0}
    return runs.make(folder, **settings | {"compute_s": 0.1, "communication_s": 1.7} | changes)


def advised(folder: Path, **settings: Any) -> str:
    recorded = records.read_document(folder / "manifest.json", records.Manifest)
    return after_run(TrainConfig(**{"strategy": recorded.config["strategy"]} | settings), folder) or ""


@pytest.mark.parametrize("strategy", ["hierarchical", "int8", "allreduce", "native:hook=fp16"])
def test_the_advice_is_the_preset_with_the_shortest_time_to_an_accuracy(tmp_path: Path, strategy: str) -> None:
    folder = waited(tmp_path / "run", strategy=strategy)
    names = prediction.reducers([parse(each) for each in learning.SHOWN])
    made = recorded.as_profile(recorded.read(folder), [])
    made = profile.with_coding(made, coding.recorded(names, SHAPES))
    (folder / profile.NAME).write_text(json.dumps(profile.as_json(msgspec.structs.replace(made, factors={}))))
    run = recorded.read(folder)
    able = [parse(name, "sgd") for name in presets.NAMES]
    made = recorded.as_profile(run, able)
    predicted = [prediction.predict(made, each, run.hosts(), run.global_batch) for each in able]
    first = min(predicted, key=lambda each: each.step_s * sum(each.steps_factor or ()))
    text = advised(folder)
    assert f"try --strategy {presets.named(first.strategy, 'sgd')}, {1.8 / first.step_s:.2g} times as fast" in text
    assert f"{1.8 / first.interval_s[1]:.2g} to {1.8 / first.interval_s[0]:.2g}" in text
    strategies.resolve(TrainConfig(strategy=first.strategy))


def test_nothing_is_advised_if_nothing_is_clearly_better(tmp_path: Path) -> None:
    best = "local-sgd:every=4,staleness=2+powersgd:rank=12,bits=4"
    assert not advised(waited(tmp_path / "one", hosts=1))
    assert not advised(waited(tmp_path / "short", communication_s=0.02))
    assert not advised(waited(tmp_path / "fast", rate_mbit=10_000.0, communication_s=0.05)), "no link explains the wait"
    assert not advised(waited(tmp_path / "best", strategy=best, communication_s=0.03))
    assert not advised(waited(tmp_path / "stages", strategy=best), stages=2)
    assert "--strategy bf16" in advised(waited(tmp_path / "fp16"), precision="fp16"), "the others keep a residual"
    with runs.edited(waited(tmp_path / "unknown") / "manifest.json") as manifest:
        manifest["links"] = [{**link, "goodput_mbit": None} for link in manifest["links"]]
    assert not advised(tmp_path / "unknown")


def test_ranks_that_wait_for_slower_ones_are_advised_to_use_unequal_shares(tmp_path: Path) -> None:
    for strategy, words in (("allreduce", "try --strategy hierarchical --shares measured ("), ("int8", "try --shares")):
        folder = waited(tmp_path / strategy, strategy=strategy)
        with runs.edited(folder / "metrics" / "rank0000.jsonl") as lines:
            lines[-1]["step_shares"]["exchange_least"] = 0.05
        assert words in advised(folder)
        assert not advised(folder, shares="measured") and not advised(folder, micro_batches=2)


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
