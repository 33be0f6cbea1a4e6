"""`--strategy hybrid`: ranks with unequal shares train as one process on all samples, and shares follow the speed."""

from __future__ import annotations

import itertools
import json
import runpy
import threading
from pathlib import Path
from typing import Any

import fake_hosts
import numpy as np
import pytest
from conftest import PROGRAMS, SMALL, alone, document, failing, first_of, launch, refused, trainings
from hypothesis import given
from hypothesis import strategies as st
from runs import read_run
from test_resnet_train import assert_same_arrays

from hvdtrain import strategies
from hvdtrain.data import ImageSplit
from hvdtrain.data.loader import Loader
from hvdtrain.strategies.algorithms import hybrid
from hvdtrain.strategies.algorithms.hybrid import DIGITS, LEAST_TRIES, TOLERANCE, measured_shares, shares_of

FRAMEWORKS = ("torch", "tensorflow")


def numpy_training() -> tuple[np.ndarray, list[float]]:
    """The weights and losses of programs/hybrid.py's problem in float64, on whole global batches."""
    program = runpy.run_path(str(PROGRAMS / "hybrid.py"), run_name="read")
    split, start = program["problem"]()
    loader = Loader(split, global_batch=program["GLOBAL_BATCH"], rank=0, size=1, seed=program["SEED"])
    weight, momentum, losses = start.astype(np.float64), 0.0, []
    for batch in (batch for epoch in range(program["EPOCHS"]) for batch in loader.epoch(epoch)):
        inputs, labels = batch.arrays[0].reshape(batch.weight, -1).astype(np.float64), batch.arrays[1]
        p = np.exp(inputs @ weight.T)
        p /= p.sum(1, keepdims=True)
        p_of_label = p[np.arange(len(labels)), labels]
        losses.append(float(-np.log(p_of_label).mean()))
        p[np.arange(len(labels)), labels] -= 1
        momentum = 0.9 * momentum + p.T @ inputs / len(inputs) + 0.01 * weight
        weight = weight - program["LR"] * momentum
    return weight, losses


@pytest.mark.parametrize(("framework", "ranks"), [("torch", 0), ("torch", 3), ("tensorflow", 3)])
def test_unequal_ranks_train_as_one_process_on_the_union(
    framework: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shares that are given, and with those measured."""
    monkeypatch.syspath_prepend(PROGRAMS)
    given = {0: [[12, 6]], 3: [[6, 2], [4, 2], [2, 2]]}[ranks]  # of a whole global batch, and of the short last
    asked = [f"hybrid:shares={'3:2:1' if ranks else 1}", *["hybrid"] * bool(ranks)]
    reports = document(launch(ranks, [str(PROGRAMS / "hybrid.py"), framework, *asked]))["trained"]
    assert len(reports) == len(asked)
    weight, losses = numpy_training()
    for report in reports:
        np.testing.assert_allclose(report["weights"][0], weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(report["losses"], losses, rtol=1e-5)
        assert all(other == report["weights"][0] for other in report["weights"]), "the same bits on all ranks"
        assert report["untouched"], "by measuring"
        assert report["traces"] == 1, "one graph for batches of all sizes"
    assert reports[0]["samples"] == [[whole] * 4 + [last] + [whole] * 4 + [last] for whole, last in given]


class Clock(threading.local):
    """Each rank's own, so that other work on this machine takes none of its time."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hybrid, "time", made)
    return made


class Timed:
    """A replica whose pass takes a + b n seconds of the clock, and leaves its traces in a statistic."""

    def __init__(self, clock: Clock, a_s: float, b_s: float) -> None:
        self.clock, self.a_s, self.b_s = clock, a_s, b_s
        self.statistic = np.zeros(1)

    def backward(self, batch: Any, lr: float, stop: bool) -> None:
        self.clock.now_s += self.a_s + self.b_s * batch.weight
        self.statistic += 1

    def synchronize(self) -> None: ...

    def local_state(self) -> dict[str, np.ndarray]:
        return {"statistic": self.statistic}  # its own memory, as PyTorch gives it

    def load_local(self, state: dict[str, np.ndarray]) -> None:
        self.statistic[:] = state["statistic"]


class Ranks:
    """As much of a world as measuring needs, on the threads of fake_hosts."""

    def __init__(self, hosts: Any) -> None:
        self.rank, self.size, self._hosts = hosts.index, hosts.count, hosts

    def gather(self, value: float) -> list[float]:
        return [float(each[0]) for each in self._hosts.all_gather(np.array([value]))]


@pytest.mark.parametrize(
    "speeds",
    [[(0.0, 4e-4), (0.0, 4e-4)], [(0.0, 3e-4), (0.0, 9e-4)], [(0.01, 2e-4), (0.01, 8e-4), (0.005, 1.2e-3)]],
)
def test_measured_shares_let_all_ranks_end_at_the_same_time(speeds: list[tuple[float, float]], clock: Clock) -> None:
    size, global_batch = len(speeds), 48 * len(speeds)
    split = ImageSplit(samples=np.zeros((600, 1, 1, 1), np.float32), labels=np.zeros(600, np.int64))

    def rank(hosts: Any) -> tuple[tuple[float, ...], float]:
        replica = Timed(clock, *speeds[hosts.index])
        loader = Loader(split, global_batch=48 * size, rank=hosts.index, size=size, seed=0)
        shares = measured_shares(Ranks(hosts), replica, loader.first_of).shares  # type: ignore[arg-type]
        assert replica.statistic == 0
        return shares, sum(loader.divided(shares).rank_samples)

    found = fake_hosts.run(size, rank)
    shares = found[0][0]
    assert all(each == (shares, global_batch) for each in found)
    assert sum(shares) == pytest.approx(1, abs=size * 10.0**-DIGITS)
    times = [a + b * share * global_batch for (a, b), share in zip(speeds, shares, strict=True)]
    assert max(times) < (1 + 2 * TOLERANCE) * min(times)


@pytest.mark.parametrize(
    ("tries", "shares"),
    [
        ([(100, 100)] * 4, (0.5, 0.5)),
        ([(100, 101), (101, 100), (103, 100), (100, 102)], (0.5, 0.5)),
        ([(100, 100), (70, 100), (100, 100), (98, 100), (100, 100)], (0.5, 0.5)),
        ([(71, 100), (104, 100), (97, 100), (88, 100)], (0.5, 0.5)),
        ([(300, 100), (297, 101), (303, 99), (300, 100)], (0.75, 0.25)),
        ([(401, 398, 100, 99), (397, 402, 100, 101)] * 3, (0.4, 0.4, 0.1, 0.1)),
    ],
)
def test_other_work_on_a_host_makes_no_unequal_shares(
    tries: list[tuple[float, ...]], shares: tuple[float, ...]
) -> None:
    found = shares_of(tries)
    assert found.shares == pytest.approx(shares, abs=0.003)
    assert len(set(found.shares)) == len(set(shares))
    assert ("equal shares are taken" in str(found)) == (len(set(shares)) == 1)
    assert ("off the other" in str(found)) != found.agreed


@pytest.mark.parametrize("scatter", [0.02, 0.05, 0.2])
def test_equal_ranks_whose_tries_scatter_are_seldom_told_apart(scatter: float) -> None:
    random = np.random.default_rng(1)
    drawn = np.exp(random.normal(0, scatter, (500, LEAST_TRIES, 2)))
    assert sum(len(set(shares_of(tries).shares)) > 1 for tries in drawn) < 40
    assert sum(len(set(shares_of(tries * [1, 3]).shares)) > 1 for tries in drawn) > 475


@given(
    st.integers(2, 5).flatmap(
        lambda ranks: st.lists(st.lists(st.floats(1, 1e4), min_size=ranks, max_size=ranks), min_size=2)
    )
)
def test_a_rank_faster_in_every_try_never_gets_less_and_equal_ones_the_same(tries: list[list[float]]) -> None:
    shares = shares_of(tries).shares
    assert sum(shares) == pytest.approx(1, abs=len(shares) * 10.0**-DIGITS)
    ranks = list(zip(shares, zip(*tries, strict=True), strict=True))
    for (share, speeds), (other, others) in itertools.permutations(ranks, 2):
        if all(a >= b for a, b in zip(speeds, others, strict=True)):
            assert share >= other
        if speeds == others:
            assert share == other


def test_a_rank_that_computes_next_to_nothing_still_has_a_share(clock: Clock) -> None:
    speeds = [(0.0, 2e-5), (0.0, 0.5)]

    def rank(hosts: Any) -> tuple[float, ...]:
        replica = Timed(clock, *speeds[hosts.index])
        batch = type("Batch", (), {"weight": 2})
        return measured_shares(Ranks(hosts), replica, lambda shares: batch).shares  # type: ignore[arg-type]

    assert all(share > 0 for share in fake_hosts.run(2, rank)[0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Runs of two ranks in one start, and what they said: `cut` measured, was stopped and went on, and `given` changed
    its shares after two epochs."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--framework", "torch", *SMALL, "--epochs", "2", "--run-dir"]
    cut = [*flags, str(folder / "cut"), "--strategy", "hybrid"]
    given = [*flags, str(folder / "given"), "--schedule", "constant"]
    more = (["--epochs", "1", "--strategy", "hybrid:shares=3:1"], ["--resume"])
    more += (["--epochs", "3", "--resume", "--strategy", "hybrid:shares=1:1"],)
    todo = [{"flags": cut, "stop_before": 17}, {"flags": [*cut, "--resume"]}]
    codes, said = trainings(2, [*todo, *({"flags": [*given, *each]} for each in more)])
    assert codes == [75, 0, 0, 0, 0], said
    return folder, said


def test_measuring_leaves_no_trace_and_resumed_equals_uninterrupted(runs: tuple[Path, str], tmp_path: Path) -> None:
    """A measured run, stopped and resumed, against a run of the shares that it printed."""
    cut, whole = runs[0] / "cut", tmp_path / "whole"
    plan = json.loads((cut / "manifest.json").read_text())["plan"]
    shown = [line.split(maxsplit=1)[1] for line in runs[1].splitlines() if line.startswith("shares ")]
    printed = shown[0].partition(": ")[0]
    assert [float(share) for share in printed.split(":")] == plan["shares"], "those of the first run still"
    less, more = sorted(plan["shares"])
    assert less == more or less < (1 - TOLERANCE) * more, "equal within the noise is equal"
    straight = ["--framework", "torch", *SMALL, "--epochs", "2", "--strategy", f"hybrid:shares={printed}"]
    assert trainings(2, [{"flags": [*straight, "--run-dir", str(whole)]}])[0] == [0]
    found = [[step.samples for step in read_run(folder, 1)["step"]] for folder in (cut, whole)]
    assert found[0] == found[1], "the same cuts"
    assert_same_arrays(whole, cut)
    ends = [read_run(folder)["epoch"][-1] for folder in (cut, whole)]
    assert ends[0].validation_scores == ends[1].validation_scores


def test_given_shares_are_those_of_every_step_and_a_run_goes_on_with_its_own_or_others(runs: tuple[Path, str]) -> None:
    folder = runs[0] / "given"
    found = [read_run(folder, rank)["step"] for rank in range(2)]
    manifest = json.loads((folder / "manifest.json").read_text())
    per_epoch = len(found[0]) // 3
    for epoch, pair in enumerate([(72, 24), (72, 24), (48, 48)]):
        steps = [each[epoch * per_epoch : (epoch + 1) * per_epoch] for each in found]
        assert {(a.samples, b.samples) for a, b in zip(*(each[:-1] for each in steps), strict=True)} == {pair}
        assert [a.loss for a in steps[0]] == [b.loss for b in steps[1]]
        assert sum(step.samples for each in steps for step in each) == manifest["data"]["train"]
    assert manifest["plan"]["shares"] == [1, 1]


@pytest.mark.parametrize("shares", ["", "3:", "3:x", "3:0", "3:-1", "inf:1", "nan:1", "3;1"])
def test_shares_that_are_no_positive_numbers_are_refused(shares: str) -> None:
    with failing(78, "give a number > 0 for each rank, as 3:1"):
        strategies.parse(f"hybrid:shares={shares}")


def test_shares_are_one_for_each_rank() -> None:
    given = strategies.parse("hybrid:shares=3:1")
    assert given.shares(2) == (3.0, 1.0)
    with failing(78, "2 shares for 3 ranks; give one for each, in order of ranks"):
        given.shares(3)
    assert strategies.parse("hybrid").shares(3) is strategies.parse("allreduce").shares(3) is None


def test_a_dry_run_tells_the_shares_and_a_wrong_number_of_them_is_refused() -> None:
    shown = alone("resnet", "--dry-run", "--strategy", "hybrid", *SMALL)
    assert "shares         measured before step 0" in shown.stdout
    shown = alone("resnet", "--dry-run", "--strategy", "hybrid:shares=1:2", *SMALL, extra=first_of(2))
    assert "shares         1:2: 32 + 64 samples of a step" in shown.stdout
    refused("resnet", "--strategy", "hybrid:shares=1:2:3", code=78, said="3 shares for 2 ranks", extra=first_of(2))


def test_the_first_ranks_of_a_host_take_its_gpus_and_the_others_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hvdtrain.frameworks.pytorch import prepare

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [prepare("auto", rank, 1, one_each=True) for rank in range(4)] == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert [prepare("auto", rank, 1) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert prepare("gpu", 2, 1, one_each=True) == "cuda:0", "as asked"
    assert prepare("cpu", 0, 1, one_each=True) == "cpu"


def test_and_so_in_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.frameworks import tensorflow

    seen: list[Any] = []
    config = tensorflow.tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: ["first", "second"])
    monkeypatch.setattr(config, "set_visible_devices", lambda devices, kind: seen.append(devices))
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda device, on: None)
    monkeypatch.setattr(config.threading, "set_intra_op_parallelism_threads", lambda threads: None)
    monkeypatch.setattr(config.threading, "set_inter_op_parallelism_threads", lambda threads: None)
    found = [tensorflow.prepare("auto", rank, 1, one_each=True) for rank in range(3)]
    assert found == ["gpu:0", "gpu:1", "cpu"]
    assert seen == [["first"], ["second"], []]
    assert [tensorflow.prepare("auto", rank, 1) for rank in range(3)] == ["gpu:0", "gpu:1", "gpu:0"]
    assert tensorflow.prepare("gpu", 2, 1, one_each=True) == "gpu:0", "as asked"
