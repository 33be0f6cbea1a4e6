"""The laws of the strategies for slow networks, on real ranks: which of them equal which, and continue as if never
stopped; what a simulation in NumPy gives; bytes on the wire; a killed rank; what is refused.

One machine plays several hosts (programs/strategy_hosts.py); virtual hosts with real links are at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    LIMIT_S,
    PROGRAMS,
    Cluster,
    alone,
    command,
    document,
    environment,
    failing,
    here,
    launch,
    resnet,
    trainings,
    until,
)
from runs import cut_off, read_run
from test_faults import Job, is_rank
from test_resnet_train import assert_same_arrays, newest_arrays, started, wait_for_steps
from thread_ranks import ThreadMeeting, at_once, meetings, reach

from hvdtrain import strategies
from hvdtrain.comm.world import Met, World
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.observe.timing import Clock
from hvdtrain.records.metrics import Accuracy
from hvdtrain.strategies import REDUCERS, SCHEDULES
from hvdtrain.strategies.algorithms.local_sgd import LocalSGD
from hvdtrain.strategies.cost import elements
from hvdtrain.training import job as workload

FRAMEWORKS = ("torch", "tensorflow")
LAUNCHED = {"torch": (3, 2, "mpirun"), "tensorflow": (2, 1, "horovodrun --gloo")}
"""Ranks, ranks per host, and what starts them. So PyTorch has a host of two ranks and one of one."""
# A small rate and blocks that start as the identity: equal programs stay equal (see test_resnet_train.py). Two
# epochs of eight steps.
CALM = ["--image-size", "8", "--width", "0.125", "--global-batch-size", "192", "--lr", "0.005", "--epochs", "2"]
SHAPES = list(parameters(ResNetSpec(channels=1, classes=10, width=0.125)).values())
PAYLOAD = 4 * elements(SHAPES)
TAIL = Accuracy().size + 1
"""Numbers behind the gradients: totals and the request to stop"""
STOPPED = 4
"""A signal arrives just before this step ..."""
# ... and takes effect after as many steps as are given here; None: killed, and continued from a later checkpoint. It is
# the schedule that says when a run stops, so each schedule is stopped; the killed ones show what reducers remember.
# Under `--checkpoint-steps 4` the exchanges of local-sgd, every 3 steps, come at other steps than the checkpoints are
# due. Checking replicas makes `delayed` wait for all sums.
BESIDE = "local-sgd beside"
LATE = "delayed of powersgd"
RESUMED: dict[str, tuple[str, int | None]] = {
    "hierarchical": ("--strategy hierarchical", 5),
    "local-sgd": ("--strategy local-sgd:every=3,start=2,outer_lr=0.7,outer_momentum=0.6", 5),
    "delayed": ("--strategy delayed:staleness=2 --check-replicas 0", 7),
    "powersgd": ("--strategy powersgd", None),
    "local-sgd of powersgd": ("--strategy local-sgd:every=3,outer_momentum=0.6+powersgd", None),
    LATE: ("--strategy delayed+powersgd:rank=1 --check-replicas 0", None),
    "local-sgd of topk": ("--strategy local-sgd:every=3+topk", None),
    "delayed of onebit": ("--strategy delayed+onebit", None),
    "int4": ("--strategy int4", None),
    "factors": ("--strategy factors", None),
    "central": ("--strategy central", 5),
    BESIDE: ("--strategy local-sgd:every=3,staleness=1", 7),
    "local-sgd far beside": (
        "--strategy local-sgd:every=1,staleness=2,outer_momentum=0.6+powersgd --check-replicas 0",
        7,
    ),
}
TENSORFLOW = ("allreduce", "hierarchical", LATE, BESIDE)
"""Its graphs take seconds to build for each run; what it leaves out is shown for both on a small problem below"""
CUTS = [*(("torch", name) for name in RESUMED), ("tensorflow", BESIDE), ("tensorflow", LATE)]
EQUAL: dict[str, str] = {
    "allreduce": "--strategy allreduce",
    "delayed by 0": "--strategy delayed:staleness=0",
    "plain": "--strategy hierarchical --momentum 0",
    "plain local-sgd": "--strategy local-sgd:every=1 --momentum 0",
}


# --- one start, many trainings ----------------------------------------------------------------------------------------


def report(framework: str, todo: list[dict[str, Any]]) -> list[Any]:
    """What strategy_runs.py on several hosts told of each."""
    ranks, per_host, launcher = LAUNCHED[framework]
    arguments = [str(PROGRAMS / "strategy_runs.py"), framework, str(per_host), json.dumps(todo)]
    return document(launch(ranks, arguments, launcher, limit_s=600))["codes"]


@dataclasses.dataclass
class Runs:
    """Trainings of one framework, by name."""

    framework: str
    folder: Path
    codes: dict[str, int]
    linear: dict[str, Any]
    """Reports of strategy_linear.py"""

    def read(self, name: str, kind: str) -> list[Any]:
        """Rank 0's records of one kind."""
        return read_run(self.folder / name)[kind]

    def losses(self, name: str) -> list[float]:
        return [step.loss for step in self.read(name, "step")]

    def epochs(self, name: str) -> list[Any]:
        """What the epochs' records say that is not seconds; the last word of those that were trained twice."""
        found = {e.epoch: (e.step, e.train_loss, *e.train_scores.values(), e.samples) for e in self.read(name, "epoch")}
        return list(found.values())

    def summary(self, name: str) -> Any:
        return self.read(name, "summary")[-1]

    def steps_saved(self, name: str) -> list[int]:
        folders = (self.folder / name / "checkpoints").glob("step-*")
        return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """All trainings of a framework, once."""
    return functools.cache(lambda framework: train(framework, tmp_path_factory.mktemp("runs")))


@pytest.fixture(params=FRAMEWORKS)
def runs(request: pytest.FixtureRequest, trained: Callable[[str], Runs]) -> Runs:
    return trained(request.param)


def train(framework: str, folder: Path) -> Runs:
    common = [*CALM, "--framework", framework, "--check-replicas", "1", "--checkpoint-steps", "4"]
    common += ["--keep-checkpoints", "9"]
    todo: dict[str, dict[str, Any]] = {}

    def add(name: str, flags: str, where: str = "", **how: Any) -> None:
        todo[name] = {"flags": [*common, *flags.split(), "--run-dir", str(folder / (where or name))], **how}

    for name, flags in (EQUAL | {name: flags for name, (flags, _) in RESUMED.items()}).items():
        if framework == "torch" or name in TENSORFLOW:
            add(name, flags)
        if (framework, name) in CUTS and RESUMED[name][1] is not None:
            add(f"{name}, stopped", flags, stop_before=STOPPED)
            add(f"{name}, resumed", f"{flags} --resume", where=f"{name}, stopped")
        elif (framework, name) in CUTS:
            add(f"{name}, killed", f"{flags} --resume", folder=str(folder / name), from_step=15)
    small = [{"linear": {"strategy": each}, "steps": LINEAR_STEPS} for each in LINEAR.values()]
    told = report(framework, [*small, *todo.values()])
    codes, reports = dict(zip(todo, told[len(small) :], strict=True)), dict(zip(LINEAR, told, strict=False))
    return Runs(framework, folder, codes, reports)


def test_all_runs_end_and_stop_as_they_should(runs: Runs) -> None:
    """Also their replicas are equal after every step, or every exchange: --check-replicas 1 would have stopped them."""
    assert runs.codes == {name: 75 if name.endswith(", stopped") else 0 for name in runs.codes}


def test_hierarchical_trains_as_allreduce_does(runs: Runs) -> None:
    """In the first epoch: Horovod adds up in an order of its own, and after ten steps the last digit has grown."""
    np.testing.assert_allclose(runs.losses("hierarchical")[:8], runs.losses("allreduce")[:8], rtol=1e-6)
    (ours, _), (horovods, _) = (runs.read(name, "epoch") for name in ("hierarchical", "allreduce"))
    assert ours.train_loss == pytest.approx(horovods.train_loss, rel=1e-6)
    assert ours.validation_loss == pytest.approx(horovods.validation_loss, rel=1e-5)
    assert ours.validation_scores == horovods.validation_scores


def test_hierarchical_sends_the_sum_of_its_host_once(runs: Runs) -> None:
    """Two hosts send 2(h-1)/h = 1 of the payload; rank 0 also gives the sum to the other rank of its host."""
    _, per_host, _ = LAUNCHED[runs.framework]
    sent = [(step.bytes_sent, step.local_bytes_sent) for step in runs.read("hierarchical", "step")]
    vector = PAYLOAD + 4 * TAIL
    assert sent == [(vector, (per_host - 1) * vector)] * 16


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_local_sgd_after_each_step_is_the_sum_of_gradients(runs: Runs) -> None:
    mean, summed = (newest_arrays(runs.folder / name) for name in ("plain local-sgd", "plain"))
    weights = [name for name in summed if "/parameter." in name]
    assert weights
    for name in weights:
        np.testing.assert_allclose(mean[name], summed[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for local, whole in zip(runs.epochs("plain local-sgd"), runs.epochs("plain"), strict=True):
        assert local == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_delayed_by_no_step_is_its_reducer_bit_for_bit(runs: Runs) -> None:
    delayed, reducer = (newest_arrays(runs.folder / name) for name in ("delayed by 0", "hierarchical"))
    both = [name for name in reducer if "/strategy." not in name]
    for name in both:
        np.testing.assert_array_equal(delayed[name], reducer[name], err_msg=name)
    assert runs.losses("delayed by 0") == runs.losses("hierarchical")
    assert runs.epochs("delayed by 0") == runs.epochs("hierarchical")
    assert runs.summary("delayed by 0").bytes_sent == runs.summary("hierarchical").bytes_sent


@pytest.mark.parametrize(("runs", "name"), CUTS, indirect=["runs"])
def test_a_resumed_run_equals_one_that_was_never_interrupted(runs: Runs, name: str) -> None:
    stopped_at = RESUMED[name][1]
    cut = f"{name}, {'killed' if stopped_at is None else 'stopped'}"
    tolerance = 0.0 if runs.framework == "torch" else 1e-6
    (resumed,) = runs.read(cut, "resumed")
    if stopped_at is not None:
        assert resumed.step == stopped_at
        np.testing.assert_allclose(runs.losses(cut), runs.losses(name), rtol=tolerance)
    else:
        assert 8 < resumed.step < 16, "in the midst of the second epoch"
    assert_same_arrays(runs.folder / name, runs.folder / cut, rtol=tolerance, atol=tolerance)
    for ours, whole in zip(runs.epochs(cut), runs.epochs(name), strict=True):
        assert ours == pytest.approx(whole, rel=tolerance, abs=tolerance)
    assert runs.summary(cut).bytes_sent == runs.summary(name).bytes_sent


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
@pytest.mark.parametrize("name", [LATE, "hierarchical"])
def test_one_rank_goes_on_with_what_three_on_two_hosts_did(runs: Runs, name: str, tmp_path: Path) -> None:
    """Each sample is seen once, and what they left out is added to what the one learns."""
    before, folder = tmp_path / "before", tmp_path / "run"
    for copy in (before, folder):
        cut_off(runs.folder / name, copy, 12)
    summary = here("resnet", "--resume", str(folder))
    assert (summary["global_batch"], summary["ranks"], summary["steps"]) == (192, 1, 16)
    first, second = {each.epoch: each for each in read_run(folder)["epoch"]}.values()
    assert first.samples == second.samples == runs.read(name, "epoch")[1].samples
    assert second.train_loss == pytest.approx(runs.read(name, "epoch")[1].train_loss, rel=0.05), "other BatchNorm"
    error = "/strategy.inner.error"
    left_out, after = (
        [array.any() for name, array in newest_arrays(each).items() if name.endswith(error)]
        for each in (before, folder)
    )
    assert left_out == ([True, False, True] if "powersgd" in name else [])
    assert not any(after)


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_two_hosts_go_on_with_what_three_ranks_did_or_say_why_they_cannot(runs: Runs, tmp_path: Path) -> None:
    """Each quarter of the model's layers has a reducer of its own, which takes over its part of what was left out."""
    whole, local = tmp_path / "powersgd", tmp_path / "local-sgd"
    for each in (whole, local):
        cut_off(runs.folder / each.name, each, 12)
    manifest = (local / "manifest.json").read_bytes()
    todo: list[dict[str, Any]] = [{"flags": ["--resume", str(each)]} for each in (whole, local)]
    todo[-1] |= {"refused": 78}
    codes, said = trainings(2, todo)
    assert codes == [0, 78], said
    asked = RESUMED["local-sgd"][0]
    assert f"made by 3 ranks, here are 2, and with {asked} each rank has weights and a" in said
    assert "start with -np 3, or choose another --run-dir" in said
    assert (local / "manifest.json").read_bytes() == manifest
    summary = read_run(whole)["summary"][-1]
    assert (summary.ranks, summary.hosts, summary.steps) == (2, 2, 16)
    ours, before = (read_run(folder)["epoch"][-1] for folder in (whole, runs.folder / "powersgd"))
    assert ours.samples == before.samples
    assert ours.train_loss == pytest.approx(before.train_loss, rel=0.05), "other BatchNorm"


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_ranks_that_drifted_apart_save_after_their_next_exchange(runs: Runs) -> None:
    """Exchanges are after steps 1, 2, 5, 8 (the epoch's last), 11, 14, 16, and 4, 8, 12, 16 are the steps to save."""
    assert runs.steps_saved("local-sgd") == [5, 8, 14, 16]
    assert runs.steps_saved(LATE) == [4, 8, 12, 16]


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_only_exchanges_send(runs: Runs) -> None:
    sent = [step.bytes_sent > 0 for step in runs.read("local-sgd", "step")]
    assert [number + 1 for number, some in enumerate(sent) if some] == [1, 2, 5, 8, 11, 14, 16]


# --- a problem small enough for NumPy ---------------------------------------------------------------------------------

LINEAR_STEPS = 7
LINEAR: dict[str, str] = {
    "hierarchical": "hierarchical",
    "every step": "local-sgd:every=1",
    "drifting": "local-sgd:every=3",
    "outer": "local-sgd:every=2,start=1,outer_lr=0.8,outer_momentum=0.5",
    "a step beside": "local-sgd:every=3,outer_momentum=0.3,staleness=1",
    "a round beside": "local-sgd:every=2,outer_momentum=0.3,staleness=2",
    "more than a round beside": "local-sgd:every=2,staleness=3",
    "delayed by 0": "delayed:staleness=0",
    "delayed by 1": "delayed",
    "delayed by 3": "delayed:staleness=3",
    "factors": "factors",
    "central": "central",
}


@pytest.fixture
def linear(runs: Runs) -> dict[str, Any]:
    return {"ranks": LAUNCHED[runs.framework][0], **runs.linear}


class Simulated:
    """The problem of exchange.py in float64 on so many ranks."""

    def __init__(self, ranks: int) -> None:
        about = runpy.run_path(str(PROGRAMS / "exchange.py"), run_name="read")
        self._inputs, labels, self.weight = (np.asarray(array, np.float64) for array in about["problem"]())
        self._one_hot = np.eye(len(self.weight))[labels.astype(int)]
        self.borders, self.lr, self.steps = about["borders"](ranks), about["LR"], about["STEPS"]
        self.shares = np.diff(self.borders) / self.borders[-1]

    def losses_and_gradient(self, weight: np.ndarray, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's loss, and the gradient of the mean; of all samples, or of one rank's."""
        mine = slice(None) if rank is None else slice(*self.borders[rank : rank + 2])
        logits = self._inputs[mine] @ weight.T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses = -np.log((p * self._one_hot[mine]).sum(1))
        return losses, (p - self._one_hot[mine]).T @ self._inputs[mine] / len(losses)

    def updated(self, weight: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        momentum = 0.9 * momentum + gradient + 0.01 * weight
        return weight - self.lr * momentum, momentum

    def rank_means(self, losses: np.ndarray) -> list[float]:
        return [float(part.mean()) for part in np.split(losses, self.borders[1:-1])]


def simulated_delayed(
    problem: Simulated, staleness: int, steps: int = LINEAR_STEPS
) -> tuple[np.ndarray, list[list[float]], float]:
    """Weights, each rank's losses by step, and their sum over steps and samples."""
    weight, momentum = problem.weight, np.zeros_like(problem.weight)
    on_their_way: list[np.ndarray] = []
    losses, total = [], 0.0
    for _ in range(steps):
        each, gradient = problem.losses_and_gradient(weight)
        on_their_way.append(gradient)
        losses.append(problem.rank_means(each))
        total += each.sum()
        if len(on_their_way) > staleness:
            weight, momentum = problem.updated(weight, momentum, on_their_way.pop(0))
    return weight, np.transpose(losses).tolist(), total


def simulated_local(problem: Simulated, settings: LocalSGD.Settings) -> tuple[np.ndarray, list[list[float]], float]:
    """The same for local-sgd; each rank's weights are the common ones and its own changes that are on their way."""
    anchor, velocity = problem.weight, np.zeros_like(problem.weight)
    momenta = [np.zeros_like(anchor) for _ in problem.shares]
    losses: list[list[float]] = [[] for _ in problem.shares]
    start, total, done = settings.start, 0.0, 0
    for _ in range(start):
        each, gradient = problem.losses_and_gradient(anchor)
        total += each.sum()
        results = [problem.updated(anchor, momentum, gradient) for momentum in momenta]
        anchor, momenta = results[0][0], [momentum for _, momentum in results]
        for mine in losses:
            mine.append(float(each.mean()))
        done += 1
    weights, began = ([anchor for _ in problem.shares] for _ in range(2))
    on_their_way: list[tuple[int, list[np.ndarray]]] = []
    drifted, late = 0, settings.staleness
    while done < LINEAR_STEPS:
        done, drifted = done + 1, drifted + 1
        for rank in range(len(weights)):
            each, gradient = problem.losses_and_gradient(weights[rank], rank)
            losses[rank].append(float(each.mean()))
            total += each.sum()
            weights[rank], momenta[rank] = problem.updated(weights[rank], momenta[rank], gradient)
        last = done == LINEAR_STEPS
        if drifted == settings.every or last:
            changes = [weight - before for weight, before in zip(weights, began, strict=True)]
            on_their_way.append((done, changes))
            began, drifted = list(weights), 0
        while on_their_way and (last or done - on_their_way[0][0] >= late):
            _, changes = on_their_way.pop(0)
            mean = np.tensordot(problem.shares, changes, 1)
            outer = settings.outer_momentum
            velocity = outer * velocity + mean
            step = settings.outer_lr * (mean + outer * velocity)
            anchor = anchor + step
            weights, began = (
                [w + step - own for w, own in zip(all_, changes, strict=True)] for all_ in (weights, began)
            )
    return anchor, losses, total


@pytest.mark.parametrize("name", LINEAR)
def test_training_is_what_a_simulation_says(linear: dict[str, Any], name: str) -> None:
    problem, settings, got = Simulated(linear["ranks"]), strategies.parse(LINEAR[name]).settings, linear[name]
    if isinstance(settings, LocalSGD.Settings):
        weight, losses, total = simulated_local(problem, settings)
    else:
        weight, losses, total = simulated_delayed(problem, late := getattr(settings, "staleness", 0))
        if not late:  # then all know the mean over all ranks
            losses = [(problem.shares @ losses).tolist()] * len(losses)
    for other in got["weights"]:
        assert other == got["weights"][0], "the same bits on all ranks"
    np.testing.assert_allclose(got["weights"][0], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["losses"], losses, rtol=1e-4)
    loss, _, samples = got["totals"]
    assert loss == pytest.approx(total, rel=1e-5)
    assert samples == problem.borders[-1] * LINEAR_STEPS, "every step is told once"
    assert got["stopping"] is True, "rank 0 was asked to stop in each step"


def test_plain_averaging_after_each_step_is_exact_with_momentum_too(linear: dict[str, Any]) -> None:
    """Shares are the same in each step here, so the mean of the ranks' momenta is the momentum of the mean."""
    np.testing.assert_allclose(linear["every step"]["weights"], linear["hierarchical"]["weights"], rtol=1e-5)


def test_factors_cross_the_network_once_for_each_host(linear: dict[str, Any]) -> None:
    """A sample's 6 inputs and 3 slopes in place of 18 weights; with them their number, and whose they are. The last
    rank is alone on its host."""
    samples = np.diff(Simulated(linear["ranks"]).borders)[-1]
    per_step = 4 * samples * (6 + 3) + 8 + 16 + 4 * TAIL
    assert linear["factors"]["sent_bytes"][-1] == LINEAR_STEPS * per_step


def test_the_centre_sends_the_weights_to_every_rank_of_other_hosts(runs: Runs, linear: dict[str, Any]) -> None:
    each, (ranks, per_host, _) = LINEAR_STEPS * 4 * (18 + TAIL), LAUNCHED[runs.framework]
    elsewhere = [rank >= per_host for rank in range(ranks)]
    assert linear["central"]["sent_bytes"] == [sum(elsewhere) * each, *(each * other for other in elsewhere[1:])]


def test_what_is_not_late_is_the_same_bits(linear: dict[str, Any]) -> None:
    assert linear["delayed by 0"] == linear["hierarchical"]


# --- gradients sent during backward -----------------------------------------------------------------------------------


@contextlib.contextmanager
def host(
    meeting: ThreadMeeting, text: str, model: Any, shapes: list[tuple[int, int]]
) -> Iterator[tuple[Any, Callable[[float], None]]]:
    """A host of one rank, as a thread: its replica of a PyTorch model, which begins with the same weights on all, and a
    function that makes a step of this learning rate, on rows of 128 numbers that differ between ranks."""
    world = World("torch", carrier="streams", met=Met(meeting, None, reach(meeting.rank)))
    config = TrainConfig(framework="torch", device="cpu", strategy=text)
    strategy = strategies.chosen(config).make(config, world, shapes)
    replica = workload.replica_of(model, config, world, strategy, "cpu", Accuracy())
    replica.set_weights(np.random.default_rng(0).normal(0, 0.1, elements(shapes)).astype(np.float32))
    rows = np.random.default_rng(meeting.rank).normal(size=(4, 128)).astype(np.float32)

    def step(lr: float) -> None:
        replica.backward(Batch(arrays=(rows,), weight=4, total_weight=8), lr, stop=False)
        strategy.step(replica, lr, Clock())

    try:
        yield replica, step
    finally:
        world.leave()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["no checkpoints", "checkpoints", "reentrant ones"])
def test_a_shared_weight_is_sent_when_its_gradient_is_complete(reentrant: bool | None) -> None:
    """Reentrant checkpoints add to the gradient once for each use, so it may have been sent incomplete: an error."""
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128, bias=False) for _ in range(3))

        def loss(self, x: Any) -> Any:
            first, shared, last = self.layers
            x = first(x.requires_grad_())
            for _ in range(2):
                x = shared(x) if reentrant is None else checkpoint(shared, x, use_reentrant=reentrant)
            loss = last(x).square().mean()
            return loss, {"correct": 0 * loss}

    def trained(meeting: ThreadMeeting) -> bytes:
        with host(meeting, "hierarchical", Shared(), [(128, 128)] * 3) as (replica, step):
            step(0.1)
            return bytes(replica.weights().tobytes())

    ranks = [functools.partial(trained, meeting) for meeting in meetings(2)]
    with failing(1, "layers.1.weight: its gradient arrived twice") if reentrant else contextlib.nullcontext():
        one, other = at_once(ranks)
        assert one == other


@pytest.mark.parametrize("reducer", [name for name, reducer in REDUCERS.items() if reducer.remembers])
def test_what_was_left_out_of_gradients_changes_no_weights_later(reducer: str) -> None:
    """So the first local step, at a learning rate of 0, leaves them as they are."""
    torch = pytest.importorskip("torch")

    class Linear(torch.nn.Linear):
        def loss(self, x: Any) -> Any:
            loss = self(x).square().mean()
            return loss, {"correct": 0 * loss}

    def changed(meeting: ThreadMeeting) -> tuple[float, float]:
        text, model = f"local-sgd:every=1,start=1+{reducer}", Linear(128, 128, bias=False)
        with host(meeting, text, model, [(128, 128)]) as (replica, step):
            weights = [replica.weights().copy()]
            for lr in (0.1, 0.0):
                step(lr)
                weights.append(replica.weights().copy())
        first, second = np.abs(np.diff(weights, axis=0)).max(axis=1)
        return float(first), float(second)

    for first, second in at_once([functools.partial(changed, meeting) for meeting in meetings(2)]):
        assert first > 0
        assert second == 0


# --- as users start it ------------------------------------------------------------------------------------------------


def test_a_signal_to_mpirun_stops_a_delayed_run_and_it_resumes(tmp_path: Path) -> None:
    flags = [*CALM, "--strategy", "delayed", "--epochs"]
    with started(2, tmp_path, *flags, "10000") as process:
        wait_for_steps(process, tmp_path, 3)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, errors
    assert f"stopped; continue with mpirun -np 2 python -m hvdtrain.resnet --resume {tmp_path}\n" in errors
    assert not (tmp_path / "COMPLETE").exists()
    steps = read_run(tmp_path)["step"][-1].step + 1
    epochs = steps // 8 + 1
    summary = document(resnet(2, "--run-dir", str(tmp_path), *flags, str(epochs), "--resume", "--json"))
    found = read_run(tmp_path)
    assert [resumed.step for resumed in found["resumed"]] == [steps]
    assert [step.step for step in found["step"]] == list(range(8 * epochs))
    assert summary["steps"] == 8 * epochs


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    """In the middle of an exchange: the rank is held first, so that the other waits for its part."""
    words = ["-m", "hvdtrain.resnet", *CALM, "--epochs", "10000", "--checkpoint-epochs", "0", "--strategy", "delayed"]
    with contextlib.closing(Job(command(2, [*words, "--run-dir", str(tmp_path / "job")]), tmp_path / "job")) as job:
        records = job.folder / "metrics" / "rank0001.jsonl"
        until(lambda: job.process.poll() is not None or (records.exists() and len(records.read_bytes())))
        assert job.process.poll() is None, job.output()
        mine = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_rank(path, job.folder)]
        rank = {number(pid): pid for pid in mine}[1]
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(rank, signal.SIGKILL)
        assert job.end() == 137
        (said,) = (line for line in job.output().splitlines() if "hvdtrain: " in line)
        assert "rank 1" in said
        assert "died without a word" in said


def number(pid: int) -> int:
    """The rank of a process that mpirun started."""
    told = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return int(next(word for word in told if word.startswith("OMPI_COMM_WORLD_RANK=")).partition("=")[2])


def test_help_lists_every_strategy_with_what_it_sends() -> None:
    done = alone("resnet", "--strategy", "help", "--width", "0.125")
    assert (done.returncode, done.stderr) == (0, "")
    found = re.findall(r"^  (\S+) +(\d+\.\d+)  ", done.stdout, re.MULTILINE)
    said = {name: float(sent) for name, sent in found}
    assert list(said) == [*REDUCERS, *SCHEDULES]
    assert said["hierarchical"] == pytest.approx(2 * 3 / 4 * PAYLOAD / 1e6, abs=1e-3)
    assert said["fp16"] == pytest.approx(said["hierarchical"] / 2, abs=1e-3)
    assert said["local-sgd"] == pytest.approx(said["hierarchical"] / LocalSGD.Settings().every, abs=1e-3)


def test_a_reader_who_leaves_early_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.resnet", "--strategy", "help"],
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


# --- virtual hosts ----------------------------------------------------------------------------------------------------

WIRE = 1.08
"""Bytes on the wire for each of payload: headers of 66 bytes for 1448, and acknowledgements of the other direction"""
CONTROL = 60_000
"""Bytes of two epochs' evaluations, heartbeats and the end of the run"""


@pytest.mark.root
def test_the_wire_carries_each_hosts_data_once(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks of a host are one: with two on each, a ring of ranks would send half as much again. That reducers send
    what `cost` says is shown where each is tested."""
    words = ["launch/mpirun.sh", "-H", "a:2,b:2", "python", "-m", "hvdtrain.resnet", *CALM]
    words += ["--strategy", "hierarchical", "--framework", "torch", "--checkpoint-epochs", "0", "--json", "--run-dir"]
    summary = document(cluster.on("a", *words, str(tmp_path / "run")))
    assert (summary["hosts"], summary["ranks"], summary["steps"]) == (2, 4, 16)
    totals = 4 * TAIL
    payload = 16 * (REDUCERS["hierarchical"].cost(SHAPES, 2).sent_bytes + totals)
    assert summary["bytes_sent"] == pytest.approx(payload, rel=1e-3)
    assert (summary["bytes_sent_source"], summary["local_bytes_sent"]) == ("counted", 16 * (PAYLOAD + totals))
    assert len(summary["nic_bytes"]) == 2
    for host in summary["nic_bytes"]:
        for way in ("sent_bytes", "received_bytes"):
            assert payload <= host[way] <= 1.05 * payload * WIRE + CONTROL, (payload, host)
