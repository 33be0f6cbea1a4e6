"""The laws of the strategies for slow networks, on real ranks: equal strategies, equality with a simulation in NumPy,
resumed equals uninterrupted, bytes on the network, and a killed rank.

One machine acts as several hosts (programs/strategy_hosts.py). Tests on virtual hosts with real links are at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import runpy
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, Cluster, command, document, failing, here, launch, trainings, until
from runs import cut_off, read_run
from test_faults import Job, is_rank
from test_resnet_train import assert_same_arrays, newest_arrays
from thread_ranks import ThreadRendezvous, at_once, meetings, reach

from hvdtrain import strategies
from hvdtrain.comm.backends.base import RankGroup
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.observe.timing import Clock
from hvdtrain.records.metrics import Accuracy
from hvdtrain.strategies import REDUCERS
from hvdtrain.strategies.algorithms.local_sgd import LocalSGD
from hvdtrain.strategies.cost import elements
from hvdtrain.training.framework import make_replica

LAUNCHED = {"torch": (3, 2, "mpirun"), "tensorflow": (2, 1, "horovodrun --gloo")}
"""Ranks, ranks per host, and the launcher. With PyTorch one host has two ranks and the other has one."""
# With a small learning rate and blocks that start as the identity, equal programs stay equal (see
# test_resnet_train.py). There are two epochs of eight steps.
CALM = ["--image-size", "8", "--width", "0.125", "--global-batch-size", "192", "--lr", "0.005", "--epochs", "2"]
SHAPES = list(parameters(ResNetSpec(channels=1, classes=10, width=0.125)).values())
PAYLOAD = 4 * elements(SHAPES)
TAIL = Accuracy().size + 1
"""Numbers after the gradients: totals and the request to stop"""
STOPPED = 4
"""A signal arrives just before this step"""
STALE = "local-sgd:staleness=1"
RESUMED: dict[str, tuple[str, int | None]] = {
    "hierarchical": ("--strategy hierarchical", 5),
    "local-sgd": ("--strategy local-sgd:every=3,outer_lr=0.7,outer_momentum=0.6", 6),
    "powersgd": ("--strategy powersgd", None),
    "central": ("--strategy central", 5),
    STALE: ("--strategy local-sgd:every=3,staleness=1,parts=3,outer_momentum=0.6", 6),
    "local-sgd:staleness=2+powersgd": (
        "--strategy local-sgd:every=1,staleness=2,outer_momentum=0.6+powersgd --check-replicas 0",
        7,
    ),
}
"""Flags, and the steps after which the run stops; None: it is killed and continued from a later checkpoint.

With `--checkpoint-steps 4` checkpoints are due at other steps than the exchanges of local-sgd every 3 steps."""
TENSORFLOW = ("hierarchical", "powersgd", STALE)
"""Building its graphs takes seconds per run, so the other strategies run only the small problem below"""
CUTS = [*(("torch", name) for name in RESUMED if name != STALE), ("tensorflow", STALE), ("tensorflow", "powersgd")]


# --- one start, many trainings ----------------------------------------------------------------------------------------


def report(framework: str, todo: list[dict[str, Any]]) -> list[Any]:
    """Run strategy_runs.py on several hosts and return its exit codes and reports."""
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
        """Return the epochs' records without times; of epochs trained twice, the last ones."""
        found = {e.epoch: (e.step, e.train_loss, *e.train_scores.values(), e.samples) for e in self.read(name, "epoch")}
        return list(found.values())

    def summary(self, name: str) -> Any:
        return self.read(name, "summary")[-1]

    def steps_saved(self, name: str) -> list[int]:
        folders = (self.folder / name / "checkpoints").glob("step-*")
        return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """Run all trainings of a framework once."""
    return functools.cache(lambda framework: train(framework, tmp_path_factory.mktemp("runs")))


@pytest.fixture(params=["torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, trained: Callable[[str], Runs]) -> Runs:
    return trained(request.param)


def train(framework: str, folder: Path) -> Runs:
    common = [*CALM, "--framework", framework, "--check-replicas", "1", "--checkpoint-steps", "4"]
    common += ["--keep-checkpoints", "9"]
    todo: dict[str, dict[str, Any]] = {}

    def add(name: str, flags: str, where: str = "", **how: Any) -> None:
        todo[name] = {"flags": [*common, *flags.split(), "--run-dir", str(folder / (where or name))], **how}

    add("allreduce", "--strategy allreduce")
    for name, (flags, stops) in RESUMED.items():
        if name in TENSORFLOW if framework == "tensorflow" else name != STALE:
            add(name, flags)
        if (framework, name) in CUTS and stops is not None:
            add(f"{name}, stopped", flags, stop_before=STOPPED)
            add(f"{name}, resumed", f"{flags} --resume", where=f"{name}, stopped")
        elif (framework, name) in CUTS:
            add(f"{name}, killed", f"{flags} --resume", folder=str(folder / name), from_step=15)
    small = [{"linear": {"strategy": each}, "steps": LINEAR_STEPS} for each in LINEAR.values()]
    results = report(framework, [*small, *todo.values()])
    codes, reports = dict(zip(todo, results[len(small) :], strict=True)), dict(zip(LINEAR, results, strict=False))
    return Runs(framework, folder, codes, reports)


def test_all_runs_end_as_expected(runs: Runs) -> None:
    """--check-replicas 1 also proves that replicas are equal after every exchange."""
    assert runs.codes == {name: 75 if name.endswith(", stopped") else 0 for name in runs.codes}


def test_hierarchical_trains_like_allreduce(runs: Runs) -> None:
    """Only the first epoch is compared: Horovod adds up in another order, and rounding differences grow."""
    np.testing.assert_allclose(runs.losses("hierarchical")[:8], runs.losses("allreduce")[:8], rtol=1e-6)
    (hierarchical, _), (horovod, _) = (runs.read(name, "epoch") for name in ("hierarchical", "allreduce"))
    assert hierarchical.train_loss == pytest.approx(horovod.train_loss, rel=1e-6)
    assert hierarchical.validation_loss == pytest.approx(horovod.validation_loss, rel=1e-5)
    assert hierarchical.validation_scores == horovod.validation_scores


def test_hierarchical_sends_the_sum_of_its_host_once(runs: Runs) -> None:
    """Two hosts send 2(h-1)/h = 1 of the payload. Rank 0 also sends the sum to the other rank of its host."""
    _, per_host, _ = LAUNCHED[runs.framework]
    sent = [(step.bytes_sent, step.local_bytes_sent) for step in runs.read("hierarchical", "step")]
    vector = PAYLOAD + 4 * TAIL
    assert sent == [(vector, (per_host - 1) * vector)] * 16


@pytest.mark.parametrize(
    ("runs", "name"),
    [pytest.param(*cut, marks=[pytest.mark.slow] * (cut[0] == "tensorflow")) for cut in CUTS],
    indirect=["runs"],
)
def test_a_resumed_run_equals_one_that_was_never_interrupted(runs: Runs, name: str) -> None:
    stopped_at = RESUMED[name][1]
    cut = f"{name}, {'killed' if stopped_at is None else 'stopped'}"
    tolerance = 0.0 if runs.framework == "torch" else 1e-6
    (resumed,) = runs.read(cut, "resumed")
    if stopped_at is not None:
        assert resumed.step == stopped_at
        np.testing.assert_allclose(runs.losses(cut), runs.losses(name), rtol=tolerance)
    else:
        assert 8 < resumed.step < 16, "within the second epoch"
    assert_same_arrays(runs.folder / name, runs.folder / cut, rtol=tolerance, atol=tolerance)
    for resumed_epoch, epoch in zip(runs.epochs(cut), runs.epochs(name), strict=True):
        assert resumed_epoch == pytest.approx(epoch, rel=tolerance, abs=tolerance)
    assert runs.summary(cut).bytes_sent == runs.summary(name).bytes_sent


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_one_rank_resumes_a_run_of_three_ranks_on_two_hosts(runs: Runs, tmp_path: Path) -> None:
    """Each sample is seen once, and the residuals of three ranks are added to the gradients of one."""
    before, folder = tmp_path / "before", tmp_path / "run"
    for copy in (before, folder):
        cut_off(runs.folder / "powersgd", copy, 12)
    summary = here("resnet", "--resume", str(folder))
    assert (summary["global_batch"], summary["ranks"], summary["steps"]) == (192, 1, 16)
    first, second = {each.epoch: each for each in read_run(folder)["epoch"]}.values()
    assert first.samples == second.samples == runs.read("powersgd", "epoch")[1].samples
    assert second.train_loss == pytest.approx(runs.read("powersgd", "epoch")[1].train_loss, rel=0.05), "other BatchNorm"
    error = "/strategy.error"
    residuals, after = (
        [array.any() for name, array in newest_arrays(each).items() if name.endswith(error)]
        for each in (before, folder)
    )
    assert residuals == [True, False, True], "only leaders have one"
    assert not any(after)


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
@pytest.mark.slow
def test_two_hosts_resume_a_run_of_three_ranks_or_reject_it(runs: Runs, tmp_path: Path) -> None:
    """The residuals are resharded, and local-sgd, whose ranks have different weights, refuses."""
    whole, local = tmp_path / "powersgd", tmp_path / "local-sgd"
    for each in (whole, local):
        cut_off(runs.folder / each.name, each, 12)
    manifest = (local / "manifest.json").read_bytes()
    todo: list[dict[str, Any]] = [{"flags": ["--resume", str(each)]} for each in (whole, local)]
    todo[-1] |= {"refused": 78}
    codes, output = trainings(2, todo)
    assert codes == [0, 78], output
    assert "made by 3 ranks, not 2, and" in output and "each rank has its own weights" in output
    assert "start 3 ranks (-np 3), or choose another --run-dir" in output
    assert (local / "manifest.json").read_bytes() == manifest
    summary = read_run(whole)["summary"][-1]
    assert (summary.ranks, summary.hosts, summary.steps) == (2, 2, 16)
    after, before = (read_run(folder)["epoch"][-1] for folder in (whole, runs.folder / "powersgd"))
    assert after.samples == before.samples
    assert after.train_loss == pytest.approx(before.train_loss, rel=0.05), "other BatchNorm"


@pytest.mark.parametrize("runs", ["torch"], indirect=True)
def test_local_sgd_sends_and_saves_at_exchanges_only(runs: Runs) -> None:
    """Exchanges follow steps 3, 6, 8 (the epoch's last), 11, 14 and 16; checkpoints are due at 4, 8, 12 and 16."""
    sent = [step.bytes_sent > 0 for step in runs.read("local-sgd", "step")]
    assert [number + 1 for number, some in enumerate(sent) if some] == [3, 6, 8, 11, 14, 16]
    assert runs.steps_saved("local-sgd") == [6, 8, 14, 16]
    assert runs.steps_saved("powersgd") == [4, 8, 12, 16]


# --- a problem small enough for NumPy ---------------------------------------------------------------------------------

LINEAR_STEPS = 7
LINEAR: dict[str, str] = {
    "hierarchical": "hierarchical",
    "every step": "local-sgd:every=1",
    "drifting": "local-sgd:every=3",
    "outer": "local-sgd:every=2,outer_lr=0.8,outer_momentum=0.5",
    "stale by a step": "local-sgd:every=3,outer_momentum=0.3,staleness=1",
    "stale by a round": "local-sgd:every=2,outer_momentum=0.3,staleness=2",
    "stale by more than a round": "local-sgd:every=2,staleness=3",
    "central": "central",
}


@pytest.fixture
def linear(runs: Runs) -> dict[str, Any]:
    return {"ranks": LAUNCHED[runs.framework][0], **runs.linear}


class Simulated:
    """The problem of exchange.py in float64 on this number of ranks."""

    def __init__(self, ranks: int) -> None:
        program = runpy.run_path(str(PROGRAMS / "exchange.py"), run_name="read")
        self._inputs, labels, self.weight = (np.asarray(array, np.float64) for array in program["problem"]())
        self._one_hot = np.eye(len(self.weight))[labels.astype(int)]
        self.borders, self.lr, self.steps = program["borders"](ranks), program["LR"], program["STEPS"]
        self.shares = np.diff(self.borders) / self.borders[-1]

    def losses_and_gradient(self, weight: np.ndarray, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's loss and the gradient of the mean, for all samples or for one rank's."""
        own = slice(None) if rank is None else slice(*self.borders[rank : rank + 2])
        logits = self._inputs[own] @ weight.T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses = -np.log((p * self._one_hot[own]).sum(1))
        return losses, (p - self._one_hot[own]).T @ self._inputs[own] / len(losses)

    def updated(self, weight: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        momentum = 0.9 * momentum + gradient + 0.01 * weight
        return weight - self.lr * momentum, momentum

    def rank_means(self, losses: np.ndarray) -> list[float]:
        return [float(part.mean()) for part in np.split(losses, self.borders[1:-1])]


def simulated_sync(problem: Simulated, steps: int = LINEAR_STEPS) -> tuple[np.ndarray, list[list[float]], float]:
    """Return the weights, each rank's losses by step, and their sum over steps and samples."""
    weight, momentum = problem.weight, np.zeros_like(problem.weight)
    losses, total = [], 0.0
    for _ in range(steps):
        each, gradient = problem.losses_and_gradient(weight)
        losses.append(problem.rank_means(each))
        total += each.sum()
        weight, momentum = problem.updated(weight, momentum, gradient)
    return weight, np.transpose(losses).tolist(), total


def simulated_local(problem: Simulated, settings: LocalSGD.Settings) -> tuple[np.ndarray, list[list[float]], float]:
    """Simulate local-sgd; a rank's weights are the common ones plus its own changes that are being exchanged."""
    anchor, velocity = problem.weight, np.zeros_like(problem.weight)
    momenta = [np.zeros_like(anchor) for _ in problem.shares]
    losses: list[list[float]] = [[] for _ in problem.shares]
    total, done = 0.0, 0
    weights, began = ([anchor for _ in problem.shares] for _ in range(2))
    in_flight: list[tuple[int, list[np.ndarray]]] = []
    drifted, staleness = 0, settings.staleness
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
            in_flight.append((done, changes))
            began, drifted = list(weights), 0
        while in_flight and (last or done - in_flight[0][0] >= staleness):
            _, changes = in_flight.pop(0)
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
def test_training_equals_the_simulation(linear: dict[str, Any], name: str) -> None:
    problem, settings, real = Simulated(linear["ranks"]), strategies.parse(LINEAR[name]).settings, linear[name]
    if isinstance(settings, LocalSGD.Settings):
        weight, losses, total = simulated_local(problem, settings)
    else:
        weight, losses, total = simulated_sync(problem)
        losses = [(problem.shares @ losses).tolist()] * len(losses)  # all ranks report the mean over ranks
    for other in real["weights"]:
        assert other == real["weights"][0], "the same bits on all ranks"
    np.testing.assert_allclose(real["weights"][0], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(real["losses"], losses, rtol=1e-4)
    loss, _, samples = real["totals"]
    assert loss == pytest.approx(total, rel=1e-5)
    assert samples == problem.borders[-1] * LINEAR_STEPS, "every step is reported once"
    assert real["stopping"] is True, "rank 0 was asked to stop in each step"


def test_averaging_after_each_step_is_exact_with_momentum_too(linear: dict[str, Any]) -> None:
    """Sample counts are the same in each step, so the mean of the ranks' momenta is the momentum of the mean."""
    np.testing.assert_allclose(linear["every step"]["weights"], linear["hierarchical"]["weights"], rtol=1e-5)


def test_the_central_server_sends_the_weights_to_every_rank_of_other_hosts(runs: Runs, linear: dict[str, Any]) -> None:
    each, (ranks, per_host, _) = LINEAR_STEPS * 4 * (18 + TAIL), LAUNCHED[runs.framework]
    elsewhere = [rank >= per_host for rank in range(ranks)]
    assert linear["central"]["sent_bytes"] == [sum(elsewhere) * each, *(each * other for other in elsewhere[1:])]


# --- gradients sent during backward -----------------------------------------------------------------------------------


@contextlib.contextmanager
def host(
    meeting: ThreadRendezvous, text: str, model: Any, shapes: list[tuple[int, int]]
) -> Iterator[tuple[Any, Callable[[float], None]]]:
    """Run a host with one rank as a thread. Yields its PyTorch replica, with the same initial weights on all hosts, and
    a function that makes a step with a learning rate, on rows of 128 numbers that differ between ranks."""
    world = connect("torch", backend="tcp", group=RankGroup(meeting, None, reach(meeting.rank)))
    config = TrainConfig(framework="torch", device="cpu", strategy=text)
    strategy = strategies.resolve(config).make(config, world, shapes)
    replica = make_replica(model, config, world, strategy, "cpu", Accuracy())
    replica.set_weights(np.random.default_rng(0).normal(0, 0.1, elements(shapes)).astype(np.float32))
    rows = np.random.default_rng(meeting.rank).normal(size=(4, 128)).astype(np.float32)

    def step(lr: float) -> None:
        replica.backward(Batch(arrays=(rows,), weight=4, total_weight=8), lr, stop=False)
        strategy.step(replica, lr, Clock())

    try:
        yield replica, step
    finally:
        world.shutdown()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoints", "reentrant checkpoints"])
def test_a_shared_weight_is_sent_when_its_gradient_is_complete(reentrant: bool | None) -> None:
    """Reentrant checkpoints add to a gradient several times, so its bucket may be sent too early: an error."""
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

    def trained(meeting: ThreadRendezvous) -> bytes:
        with host(meeting, "hierarchical", Shared(), [(128, 128)] * 3) as (replica, step):
            step(0.1)
            return bytes(replica.weights().tobytes())

    ranks = [functools.partial(trained, meeting) for meeting in meetings(2)]
    with failing(1, "layers.1.weight: its gradient arrived twice") if reentrant else contextlib.nullcontext():
        one, other = at_once(ranks)
        assert one == other


# --- as users start it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bf16", "async-ps:servers=2"])
@pytest.mark.slow
def test_a_killed_rank_ends_the_job(strategy: str, tmp_path: Path) -> None:
    """It dies during an exchange: it is stopped first, so that the other rank waits for it. It may be a server."""
    words = ["-m", "hvdtrain.resnet", *CALM, "--epochs", "10000", "--checkpoint-steps", "4", "--strategy", strategy]
    with contextlib.closing(Job(command(2, [*words, "--run-dir", str(tmp_path / "job")]), tmp_path / "job")) as job:
        until(lambda: job.process.poll() is not None or [*job.folder.glob("checkpoints/step-*")])
        assert job.process.poll() is None, job.output()
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_rank(path, job.folder)]
        rank = {number(pid): pid for pid in pids}[1]
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(rank, signal.SIGKILL)
        assert job.end() == 137
        (line,) = (line for line in job.output().splitlines() if "hvdtrain: " in line)
        assert "rank 1" in line and "died unexpectedly" in line and line.endswith(f" --resume {job.folder}")
        assert not (job.folder / "COMPLETE").exists()


def number(pid: int) -> int:
    """Return the rank of a process that mpirun started."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return int(next(word for word in variables if word.startswith("OMPI_COMM_WORLD_RANK=")).partition("=")[2])


# --- virtual hosts ----------------------------------------------------------------------------------------------------

NETWORK_FACTOR = 1.08
"""Network bytes per payload byte: headers of 66 bytes per 1448, and acknowledgements"""
CONTROL = 60_000
"""Bytes of two epochs' evaluations, heartbeats and the end of the run"""


@pytest.mark.root
@pytest.mark.slow
def test_the_network_carries_each_hosts_data_once(cluster: Cluster, tmp_path: Path) -> None:
    """With two ranks per host, a ring over ranks would send 1.5 times as much. Each reducer's own tests compare its
    bytes with `cost`."""
    words = ["launch/mpirun.sh", "-H", "a:2,b:2", "python", "-m", "hvdtrain.resnet", *CALM]
    words += ["--strategy", "hierarchical", "--framework", "torch", "--checkpoint-steps", "0", "--json", "--run-dir"]
    summary = document(cluster.on("a", *words, str(tmp_path / "run")))
    assert (summary["hosts"], summary["ranks"], summary["steps"]) == (2, 4, 16)
    totals = 4 * TAIL
    payload = 16 * (REDUCERS["hierarchical"].cost(SHAPES, 2).sent_bytes + totals)
    assert summary["bytes_sent"] == pytest.approx(payload, rel=1e-3)
    assert (summary["bytes_sent_source"], summary["local_bytes_sent"]) == ("counted", 16 * (PAYLOAD + totals))
    assert len(summary["nic_bytes"]) == 2
    for host in summary["nic_bytes"]:
        for way in ("sent_bytes", "received_bytes"):
            assert payload <= host[way] <= 1.05 * payload * NETWORK_FACTOR + CONTROL, (payload, host)
