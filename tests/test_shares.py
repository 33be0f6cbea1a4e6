"""`--shares`: ranks with unequal shares train like one process on all samples, and measured shares follow the speed."""

from __future__ import annotations

import itertools
import json
import runpy
import threading
from collections.abc import Sequence
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

from hvdtrain.config.options import TrainConfig
from hvdtrain.data import ImageSplit
from hvdtrain.data.loader import Loader
from hvdtrain.strategies import shares as unequal_shares
from hvdtrain.strategies.shares import DIGITS, GAIN, MIN_TRIALS, TOLERANCE, measure, renewed, shares_of


def numpy_training() -> tuple[np.ndarray, list[float]]:
    """Return weights and losses of the problem of programs/shares.py in float64, on whole global batches."""
    program = runpy.run_path(str(PROGRAMS / "shares.py"), run_name="read")
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
def test_unequal_ranks_train_like_one_process_on_the_union(
    framework: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With given and with measured shares."""
    monkeypatch.syspath_prepend(PROGRAMS)
    # Samples of a whole global batch, and of the short last one.
    samples = {0: [[12, 6]], 3: [[6, 2], [4, 2], [2, 2]]}[ranks]
    given = ["3:2:1" if ranks else "1", *["measured"] * bool(ranks)]
    launcher = "forks" if ranks and framework == "torch" else "mpirun"
    program = [str(PROGRAMS / "shares.py"), framework, "hierarchical", *given]
    reports = document(launch(ranks, program, launcher))["trained"]
    assert len(reports) == len(given)
    weight, losses = numpy_training()
    for report in reports:
        np.testing.assert_allclose(report["weights"][0], weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(report["losses"], losses, rtol=1e-5)
        assert all(other == report["weights"][0] for other in report["weights"]), "the same bits on all ranks"
        assert report["untouched"], "measuring changes nothing"
        assert report["traces"] == 1, "one graph for batches of all sizes"
    assert reports[0]["samples"] == [[whole] * 4 + [last] + [whole] * 4 + [last] for whole, last in samples]


class Clock(threading.local):
    """A clock for each rank, so that other work on this machine takes none of its time."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(unequal_shares, "time", clock)
    return clock


class Timed:
    """A replica whose backward takes a + b n seconds of the clock and changes a running statistic."""

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
    """The part of a world that measuring needs, on the threads of fake_hosts."""

    def __init__(self, hosts: Any) -> None:
        self.rank, self.size, self._hosts = hosts.index, hosts.count, hosts

    def gather(self, value: float) -> list[float]:
        return [float(each[0]) for each in self._hosts.all_gather(np.array([value]))]


@pytest.mark.parametrize(
    "speeds", [[(0.0, 4e-4), (0.0, 4e-4)], [(0.0, 3e-4), (0.0, 9e-4)], [(0.01, 2e-4), (0.01, 8e-4), (0.005, 1.2e-3)]]
)
def test_with_measured_shares_all_ranks_end_at_the_same_time(speeds: list[tuple[float, float]], clock: Clock) -> None:
    size, global_batch = len(speeds), 48 * len(speeds)
    split = ImageSplit(samples=np.zeros((600, 1, 1, 1), np.float32), labels=np.zeros(600, np.int64))

    def rank(hosts: Any) -> tuple[tuple[float, ...], float]:
        replica = Timed(clock, *speeds[hosts.index])
        loader = Loader(split, global_batch=48 * size, rank=hosts.index, size=size, seed=0)
        shares = measure(Ranks(hosts), replica, loader.first_of).shares  # type: ignore[arg-type]
        assert replica.statistic == 0
        return shares, sum(loader.divided(shares).rank_samples)

    results = fake_hosts.run(size, rank)
    shares = results[0][0]
    assert all(each == (shares, global_batch) for each in results)
    assert sum(shares) == pytest.approx(1, abs=size * 10.0**-DIGITS)
    times = [a + b * share * global_batch for (a, b), share in zip(speeds, shares, strict=True)]
    assert max(times) < (1 + 2 * TOLERANCE) * min(times)


@pytest.mark.parametrize(
    ("trials", "shares"),
    [
        ([(100, 100)] * 4, (0.5, 0.5)),
        ([(100, 101), (101, 100), (103, 100), (100, 102)], (0.5, 0.5)),
        ([(100, 100), (70, 100), (100, 100), (98, 100), (100, 100)], (0.5, 0.5)),
        ([(71, 100), (104, 100), (97, 100), (88, 100)], (0.5, 0.5)),
        ([(300, 100), (297, 101), (303, 99), (300, 100)], (0.75, 0.25)),
        ([(401, 398, 100, 99), (397, 402, 100, 101)] * 3, (0.4, 0.4, 0.1, 0.1)),
    ],
)
def test_other_work_on_a_host_does_not_make_shares_unequal(
    trials: list[tuple[float, ...]], shares: tuple[float, ...]
) -> None:
    measured = shares_of(trials)
    assert measured.shares == pytest.approx(shares, abs=0.003)
    assert len(set(measured.shares)) == len(set(shares))
    assert ("no rank is clearly faster" in str(measured)) == (len(set(shares)) == 1)
    assert ("give --shares" in str(measured)) != measured.agreed


@pytest.mark.parametrize("scatter", [0.02, 0.05, 0.2])
def test_equal_ranks_with_noisy_trials_rarely_get_unequal_shares(scatter: float) -> None:
    random = np.random.default_rng(1)
    drawn = np.exp(random.normal(0, scatter, (500, MIN_TRIALS, 2)))
    assert sum(len(set(shares_of(trials).shares)) > 1 for trials in drawn) < 40
    assert sum(len(set(shares_of(trials * [1, 3]).shares)) > 1 for trials in drawn) > 475


@given(
    st.integers(2, 5).flatmap(
        lambda ranks: st.lists(st.lists(st.floats(1, 1e6), min_size=ranks, max_size=ranks), min_size=2)
    )
)
def test_a_rank_that_is_never_slower_never_gets_less_and_equal_ranks_get_the_same(trials: list[list[float]]) -> None:
    shares = shares_of(trials).shares
    assert min(shares) > 0 and sum(shares) == pytest.approx(1, abs=len(shares) * 10.0**-DIGITS)
    ranks = list(zip(shares, zip(*trials, strict=True), strict=True))
    for (share, speeds), (other, others) in itertools.permutations(ranks, 2):
        if all(a >= b for a, b in zip(speeds, others, strict=True)):
            assert share >= other
        if speeds == others:
            assert share == other


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(1e-3, 1)), min_size=2, max_size=5), st.floats(0.1, 10))
def test_batches_are_divided_again_only_if_the_slowest_rank_gains_enough(
    ranks: list[tuple[float, float]], slower: float
) -> None:
    kept = [share / sum(share for share, _ in ranks) for share, _ in ranks]
    pace = [seconds for _, seconds in ranks]

    def slowest_s(shares: Sequence[float]) -> float:
        return max(share * seconds for share, seconds in zip(shares, pace, strict=True)) / sum(shares)

    shares = renewed(kept, kept, pace)
    best_s = 1 / sum(1 / seconds for seconds in pace)
    if shares != tuple(kept):
        assert best_s <= (1 - GAIN) * slowest_s(kept) * (1 + 1e-9)
        assert shares == pytest.approx([best_s / seconds for seconds in pace], abs=10.0**-DIGITS)
    else:
        assert best_s >= (1 - GAIN) * slowest_s(kept) * (1 - 1e-9)
    assert renewed(kept, [None] * len(kept), [None] * len(kept)) == tuple(kept)
    # A rank that was measured to be as fast as the first one, and has come back since the others became slower.
    even = renewed([0.25] * 4, [0.25, 0.5, 0.25, None], [slower, slower / 2, slower, None])
    assert even[0] == even[2] and even[3] == pytest.approx(sum(even[:3]) / 3, abs=1e-3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return two runs of two ranks and their output: `cut` measures, stops and resumes; `given` changes its shares."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--framework", "torch", *SMALL, "--epochs", "2", "--strategy", "hierarchical", "--run-dir"]
    cut = [*flags, str(folder / "cut"), "--shares", "measured"]
    given = [*flags, str(folder / "given"), "--schedule", "constant"]
    more = (["--epochs", "1", "--shares", "3:1"], ["--resume"], ["--epochs", "3", "--resume", "--shares", "1:1"])
    todo = [{"flags": cut, "stop_before": 17}, {"flags": [*cut, "--resume"]}]
    codes, output = trainings(2, [*todo, *({"flags": [*given, *each]} for each in more)])
    assert codes == [75, 0, 0, 0, 0], output
    return folder, output


@pytest.mark.slow
def test_measuring_changes_nothing_and_resumed_equals_uninterrupted(runs: tuple[Path, str], tmp_path: Path) -> None:
    """Compare a measured run, stopped and resumed, with a run of the shares that it printed."""
    cut, whole = runs[0] / "cut", tmp_path / "whole"
    plan = json.loads((cut / "manifest.json").read_text())["plan"]
    shown = [line.split(maxsplit=1)[1] for line in runs[1].splitlines() if line.startswith("shares ")]
    printed = shown[0].partition(": ")[0]
    assert [float(share) for share in printed.split(":")] == plan["shares"], "a resumed run keeps them"
    less, more = sorted(plan["shares"])
    assert less == more or less < (1 - TOLERANCE) * more
    straight = ["--framework", "torch", *SMALL, "--epochs", "2", "--strategy", "hierarchical", "--shares", printed]
    assert trainings(2, [{"flags": [*straight, "--run-dir", str(whole)]}])[0] == [0]
    found = [[step.samples for step in read_run(folder, 1)["step"]] for folder in (cut, whole)]
    assert found[0] == found[1]
    assert_same_arrays(whole, cut)
    ends = [read_run(folder)["epoch"][-1] for folder in (cut, whole)]
    assert ends[0].validation_scores == ends[1].validation_scores


def test_given_shares_hold_in_every_step_and_a_resumed_run_may_change_them(runs: tuple[Path, str]) -> None:
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


@pytest.mark.parametrize("shares", ["", "3:", "3:x", "3:0", "inf:1", "nan:1", "3:1:1"])
def test_shares_are_one_positive_number_per_rank(shares: str) -> None:
    assert unequal_shares.given(TrainConfig(shares="3:1"), 2) == (3.0, 1.0)
    assert unequal_shares.given(TrainConfig(shares="measured"), 2) is unequal_shares.given(TrainConfig(), 2) is None
    with failing(78, "--shares"):
        unequal_shares.given(TrainConfig(shares=shares), 2)


def test_a_dry_run_shows_the_shares_and_wrong_combinations_are_rejected() -> None:
    tcp = ("--strategy", "hierarchical", *SMALL)
    shown = alone("resnet", "--dry-run", "--shares", "measured", *tcp)
    assert "shares         measured before step 0" in shown.stdout
    shown = alone("resnet", "--dry-run", "--shares", "1:2", *tcp, extra=first_of(2))
    assert "shares         1:2: 32 + 64 samples of a step" in shown.stdout
    refused("resnet", "--shares", "1:2:3", *tcp, code=78, said="3 shares for 2 ranks", extra=first_of(2))
    refused("resnet", "--shares", "1:2", code=78, said="hint: --strategy hierarchical", extra=first_of(2))


def test_surplus_ranks_of_a_host_use_the_cpu_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from hvdtrain.frameworks.pytorch import prepare

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [prepare("auto", rank, 1, exclusive_gpu=True) for rank in range(4)] == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert [prepare("auto", rank, 1) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert prepare("gpu", 2, 1, exclusive_gpu=True) == "cuda:0"
    assert prepare("cpu", 0, 1, exclusive_gpu=True) == "cpu"


def test_surplus_ranks_of_a_host_use_the_cpu_in_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdtrain.frameworks import tensorflow

    seen: list[Any] = []
    config = tensorflow.tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: ["first", "second"])
    monkeypatch.setattr(config, "set_visible_devices", lambda devices, kind: seen.append(devices))
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda device, on: None)
    monkeypatch.setattr(config.threading, "set_intra_op_parallelism_threads", lambda threads: None)
    monkeypatch.setattr(config.threading, "set_inter_op_parallelism_threads", lambda threads: None)
    found = [tensorflow.prepare("auto", rank, 1, exclusive_gpu=True) for rank in range(3)]
    assert found == ["gpu:0", "gpu:1", "cpu"]
    assert seen == [["first"], ["second"], []]
    assert [tensorflow.prepare("auto", rank, 1) for rank in range(3)] == ["gpu:0", "gpu:1", "gpu:0"]
    assert tensorflow.prepare("gpu", 2, 1, exclusive_gpu=True) == "gpu:0"
