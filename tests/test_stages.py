"""Pipelines learn the weights that one process learns from the same micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, alone, document, finished, first_of, here, refused, resnet, trainings, unique, until
from hypothesis import given
from hypothesis import strategies as st
from test_resnet_train import newest_arrays
from thread_ranks import at_once, meetings, reach

from hvdtrain import strategies
from hvdtrain.comm.channel import AHEAD, Channel, neighbours
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.config.parser import parse
from hvdtrain.data import Batch
from hvdtrain.models.layers import Layer
from hvdtrain.pipeline import partition
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.pipeline.plan import Stages
from hvdtrain.pipeline.schedule import Pipe, order
from hvdtrain.records import metrics
from hvdtrain.records.metrics import Metric
from hvdtrain.system.exits import Failure
from hvdtrain.training.framework import make_replica

# --- mesh, schedule and partition -------------------------------------------------------------------------------------


def test_every_rank_has_different_coordinates_in_the_mesh() -> None:
    mesh = Mesh(ranks=12, stages=3)
    places = [mesh.at(rank) for rank in range(12)]
    assert sorted(places) == list(itertools.product(range(4), range(3)))
    assert [mesh.rank(*place) for place in places] == list(range(12))
    assert mesh.holders(1) == [4, 5, 6, 7]
    with pytest.raises(Failure, match="--stages 5: the number of ranks, 12, is not a multiple"):
        Mesh(ranks=12, stages=5)


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 9)])
def test_each_micro_batch_runs_forward_once_and_then_backward_in_order(stages: int, count: int) -> None:
    for stage in range(stages):
        actions = list(order(stage, stages, count))
        assert [number for forward, number in actions if forward] == list(range(count))
        assert [number for forward, number in actions if not forward] == list(range(count))
        held = list(itertools.accumulate(1 if forward else -1 for forward, _ in actions))
        assert min(held) == 0 and max(held) == min(count, stages - stage)


def layers(work: list[float], sent: list[int]) -> list[Layer]:
    pairs = enumerate(zip(work, sent, strict=True))
    return [Layer(name=f"l{n}", arrays=(), output=(size,), multiply_adds=each) for n, (each, size) in pairs]


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=4, max_size=8))
def test_no_other_partition_is_faster(stages: int, sizes: list[tuple[int, int]]) -> None:
    count, link, work = len(sizes), 0.5, [float(each) for each, _ in sizes]
    row = layers(work, [sent for _, sent in sizes])

    def slowest(borders: tuple[int, ...]) -> tuple[float, int]:
        sent = [math.prod(row[end - 1].output) for end in borders[1:-1]]
        times = [sum(work[begin:end]) for begin, end in itertools.pairwise(borders)]
        return max(*times, *(link * each for each in sent), 0.0), sum(sent)

    possible = [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]
    best = partition.balanced(row, stages, work, link).borders
    assert best in possible and slowest(best) == min(map(slowest, possible))


def test_the_plan_of_two_stages() -> None:
    row = layers([1.0, 1.0], [10**6, 7])

    def plan(size: int = 2, local_size: int = 1, **options: Any) -> Stages:
        environment = LaunchEnv(launcher="mpirun", size=size, local_size=local_size)
        return Stages.of(TrainConfig(stages=2, **options), environment, row, [10, 20], "model")

    assert [plan().held(stage, 12) for stage in range(2)] == [2, 1]
    facts = plan().facts(partition.named(row, 2, ["l1"]), 4)
    assert "2 micro-batches of 2 samples" in facts["pipeline"], "a micro-batch has at least two samples"
    assert "sends and receives 8.000 MB per micro-batch" in facts["stage 0"]
    assert plan(4, 2).layout().hosts == 1
    assert partition.bubble(2, 4) == 1 / 5 and partition.bubble(1, 4) == 0


def test_a_measured_partition_uses_the_slowest_link_and_the_fastest_time_of_each_layer() -> None:
    row = layers([1.0] * 3, [10**6, 1, 1])
    plan = Stages.of(TrainConfig(stages=2), LaunchEnv(launcher="mpirun", size=2, local_size=1), row, [1] * 3, "model")

    def border(*rates: float | None) -> str:
        ranks: Any = SimpleNamespace(
            gather=lambda own: [own, [9.0, 0.1, 9.0]], links=[{"goodput_mbit": rate} for rate in rates]
        )
        (name,) = plan.measured(ranks, (), lambda: [0.2, 9.0, 0.1]).names
        return name

    assert border() == border(None, 1e4) == "l1", "sending takes no time, or 3 ms"
    assert border(1e4, 1.0) == "l2", "sending would take 32 s"
    assert (border(110.0), border(100.0)) == ("l1", "l2"), "0.29 s and 0.32 s, compared with 0.3 s of computation"
    ranks: Any = SimpleNamespace()
    assert plan.measured(ranks, ("l2",), list).names == ("l2",), "a resumed run keeps its partition"
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, cut_at="l1"))
    assert plan.measured(ranks, ("l2",), list).names == ("l1",), "--cut-at takes precedence"


def test_invalid_partitions_are_rejected() -> None:
    row = layers([1.0] * 4, [1] * 4)
    assert partition.named(row, 3, ["l1", "l3"]).borders == (0, 1, 3, 4)
    with pytest.raises(Failure, match=r"no layer 'l7' can begin a stage.*; hint: these can: l1, l2, l3"):
        partition.named(row, 2, ["l7"])
    for names in (["l1"], ["l3", "l1"], ["l0", "l1"]):
        with pytest.raises(Failure, match="--cut-at"):
            partition.named(row, 3, names)
    with pytest.raises(Failure, match="at most 4 stages"):
        partition.balanced(row, 5, [1.0] * 4, 0.0)
    tied = [dataclasses.replace(layer, arrays=(name,)) for layer, name in zip(row, "aabb", strict=True)]
    assert partition.named(tied, 2, ["l2"]).arrays(1) == ["b", "b"]
    with pytest.raises(Failure, match="a is shared by the layers l0, l1, which must be in one stage"):
        partition.named(tied, 2, ["l1"])


def test_two_stages_compute_the_loss_and_gradients_of_the_model_bit_for_bit() -> None:
    """For every partition of every model, with dropout, and with images of one pixel, whose strides are arbitrary."""
    import torch

    from hvdtrain.models import captioner, mlp, mlp_torch, resnet, solar, solar_torch
    from hvdtrain.models.captioner_torch import CaptionerTorch
    from hvdtrain.models.resnet_torch import ResNetTorch

    small = resnet.ResNetSpec(channels=1, classes=10, width=0.125)
    net = mlp.MLPSpec(inputs=30, hidden=(20, 10, 5), outputs=1)
    cnn = solar.CNNSpec(side=14)
    drawn = np.random.default_rng(1)
    key, tokens = np.array([3, 2**31 + 5]), drawn.integers(3, 11, (9, 6))
    tokens[::2, 4:] = 0
    images, windows, maps = (drawn.random((9, *shape), np.float32) for shape in ((16, 16, 1), (30,), (14, 14)))
    targets = drawn.random((9, 2), np.float32)

    def perceptron(spec: mlp.MLPSpec, part: range | None) -> Any:
        return mlp_torch.MLPTorch(spec, "forecast_error", part)

    models: list[tuple[Any, ...]] = [
        (resnet, small, ResNetTorch, resnet.layers(small, 16, 16), (images, np.arange(9))),
        (mlp, net, perceptron, mlp.layers(net), (windows, targets)),
        (solar, cnn, solar_torch.CNNTorch, solar.layers(cnn), (maps, targets, key)),
    ]
    photos, features = drawn.integers(0, 256, (9, 24, 40, 3), np.uint8), drawn.random((9, 13), np.float32)
    for encoder, seen in (("small", photos), ("vgg16", features), ("none", features)):
        spec = captioner.CaptionerSpec(
            vocabulary=11, encoder=encoder, image_size=(40, 24), features=13, embedding=6, hidden=9
        )
        models.append((captioner, spec, CaptionerTorch, captioner.layers(spec, 5), (seen, tokens, key)))
    for numbers, spec, make, row, arrays in models:
        values, *others = map(torch.from_numpy, arrays)

        def filled(part: range | None, numbers: Any = numbers, spec: Any = spec, make: Any = make) -> Any:
            model, state = make(spec, part), numbers.initial_state(spec, 1, part)
            model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
            return model

        model = filled(None)
        loss, sums = model.loss(values, *others)
        loss.backward()
        known = dict(model.named_parameters())
        for border in range(1, len(row)):
            first, second = filled(range(border)), filled(range(border, len(row)))
            sent = first(values, *others)
            assert tuple(sent.shape[1:]) == row[border - 1].output
            received = torch.from_numpy(np.array(sent.detach().numpy(), order="C")).requires_grad_()
            stage_loss, stage_sums = second.loss(received, *others)
            assert torch.equal(stage_loss, loss)
            assert all(torch.equal(stage_sums[name], each) for name, each in sums.items())
            stage_loss.backward()
            sent.backward(torch.from_numpy(np.array(received.grad.numpy(), order="C")))
            parts = {**dict(first.named_parameters()), **dict(second.named_parameters())}
            assert parts.keys() == known.keys() == {name for layer in row for name in layer.arrays} & known.keys()
            assert not [name for name in known if not torch.equal(known[name].grad, parts[name].grad)], border


# --- channels, and a pipeline of threads ------------------------------------------------------------------------------


def channels(count: int) -> list[list[Channel | None]]:
    """Return the channels of each rank in a row: to the previous rank and to the next one."""
    ends = zip(meetings(count), [None, *range(count - 1)], [*range(1, count), None], strict=True)
    return at_once([functools.partial(neighbours, each, reach(each.rank), a, b) for each, a, b in ends])


def stepped(
    framework: str, make: Callable[[range | None], Any], row: list[Layer], border: int, batch: Batch, metric: Metric
) -> np.ndarray:
    """Return the gradients and totals of a step in two stages; `border` begins the second, 0 for an undivided model."""
    config = parse(TrainConfig, ["--framework", framework, "--strategy", "hierarchical"], prog="", purpose="")
    cut = partition.Partition(row, (0, border, len(row)) if border else (0, len(row)))
    count, ranks = len(cut.borders) - 1, connect(framework, backend="tcp")
    replicas = []
    for stage, (before, after) in enumerate(channels(count) if count > 1 else [(None, None)]):
        shapes = [cut.boundary(stage - 1) if stage else (), cut.boundary(stage)]
        pipe = Pipe(stage, count, before=before, after=after, inputs=shapes[0], outputs=shapes[1])
        model = make(cut.part(stage) if border else None)
        strategy = strategies.resolve(config).make(config, ranks, [(1,)])
        replicas.append(make_replica(model, config, ranks, strategy, "cpu", metric, pipe))
    at_once([functools.partial(each.backward, batch, 0.1, False) for each in replicas])
    vectors = [each.vector() for each in replicas]
    tail = metric.size + 1
    assert all(np.array_equal(vector[-tail:], vectors[0][-tail:]) for vector in vectors), "all stages have the totals"
    return np.concatenate([*(vector[:-tail] for vector in vectors), vectors[0][-tail:]])


class Linear:
    """A `StageModel` in NumPy: y = x W. The last stage's loss is half the squared distance to the labels."""

    def __init__(self, weight: np.ndarray, last: bool) -> None:
        self.weight, self.gradient, self._last = weight, np.zeros_like(weight), last
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._loss = 0.0

    def forward(self, number: int, batch: Batch, inputs: np.ndarray | None) -> np.ndarray | None:
        x = batch.arrays[0] if inputs is None else inputs
        y = x @ self.weight
        self._kept[number] = x, y - batch.arrays[1] if self._last else y
        self._loss += float((self._kept[number][1] ** 2).sum() / 2) if self._last else 0.0
        return None if self._last else y

    def back(self, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        x, error = self._kept.pop(number)
        error = error if gradient is None else gradient
        self.gradient += x.T @ error
        return error @ self.weight.T

    def totals(self) -> np.ndarray:
        loss, self._loss = self._loss, 0.0
        return np.array([loss], np.float32)

    def see(self, batch: Batch, inputs: np.ndarray | None, training: bool) -> np.ndarray:
        y = (batch.arrays[0] if inputs is None else inputs) @ self.weight
        return np.array([((y - batch.arrays[1]) ** 2).sum() / 2, batch.weight]) if self._last else np.asarray(y)


@pytest.mark.parametrize(("stages", "sizes"), [(1, [3]), (2, [4, 4, 1]), (4, [5, 3]), (3, [2] * 9)])
def test_a_pipeline_has_the_gradients_and_totals_of_one_process(stages: int, sizes: list[int]) -> None:
    """With more and with fewer micro-batches than stages, and with a short last one."""
    drawn = np.random.default_rng(stages)
    widths = [6, *drawn.integers(2, 8, stages - 1).tolist(), 2]
    weights = [drawn.standard_normal(shape, np.float32) for shape in itertools.pairwise(widths)]
    x, y = drawn.standard_normal((sum(sizes), 6), np.float32), drawn.standard_normal((sum(sizes), 2), np.float32)
    ends = [0, *itertools.accumulate(sizes)]
    parts = tuple(
        Batch(arrays=(x[a:b], y[a:b]), weight=b - a, total_weight=len(x)) for a, b in itertools.pairwise(ends)
    )
    batch = Batch(arrays=(), weight=len(x), total_weight=len(x), parts=parts)
    ends_of = channels(stages) if stages > 1 else [[None, None]]
    made = [Linear(weight.copy(), stage == stages - 1) for stage, weight in enumerate(weights)]
    pipes = [
        Pipe(stage, stages, before=before, after=after, inputs=(widths[stage],), outputs=(widths[stage + 1],))
        for stage, (before, after) in enumerate(ends_of)
    ]

    def run(stage: int) -> tuple[np.ndarray, np.ndarray | None]:
        tail = pipes[stage].train(made[stage], batch, stop=stage == 1)
        return tail, pipes[stage].see(made[stage], batch, training=False)

    results = at_once([functools.partial(run, stage) for stage in range(stages)])
    at_once([pipe.shut_down for pipe in pipes])

    inputs, values = [], x.astype(float)
    for weight in weights:
        inputs.append(values)
        values = values @ weight
    error = values - y
    loss = (error**2).sum() / 2
    for stage in reversed(range(stages)):
        np.testing.assert_allclose(made[stage].gradient, inputs[stage].T @ error, rtol=2e-4, atol=1e-4)
        error = error @ weights[stage].T
    for stage, (tail, seen) in enumerate(results):
        np.testing.assert_allclose(tail, [loss, len(x), stages > 1], rtol=1e-5, err_msg="all stages have the totals")
        assert (seen is None) == (stage < stages - 1)
    np.testing.assert_allclose(results[-1][1], [loss, len(x)], rtol=1e-5)
    sent = [(stage > 0) + (stage < stages - 1) for stage in range(stages)]
    assert all(
        bool(pipe.take_sent_bytes()[0]) == bool(neighbours_) for pipe, neighbours_ in zip(pipes, sent, strict=True)
    )


def test_bytes_and_waiting_times_of_a_step_exclude_evaluations_and_earlier_steps() -> None:
    x, weight = np.ones((6, 4), np.float32), np.ones((4, 4), np.float32)
    batch = Batch(arrays=(x, x), weight=6, total_weight=6)
    pipes = [Pipe(n, 2, before=a, after=b, inputs=(4,), outputs=(4,)) for n, (a, b) in enumerate(channels(2))]

    def run(stage: int) -> list[tuple[int, float]]:
        part, pipe, steps = Linear(weight.copy(), stage == 1), pipes[stage], []
        for late_s in (0.5, 0.0):
            time.sleep(late_s * (stage == 0))
            pipe.train(part, batch, stop=False)
            steps.append((pipe.take_sent_bytes()[0], pipe.waited_s))
            pipe.see(part, batch, training=False)
        return steps

    results = at_once([functools.partial(run, stage) for stage in range(2)])
    at_once([pipe.shut_down for pipe in pipes])
    assert all(first == second > 0 for (first, _), (second, _) in results)
    (_, late_s), (_, usual_s) = results[1]
    assert usual_s < late_s


def test_a_blocked_send_is_waiting() -> None:
    class Wide:
        """The first stage sends 8 MiB for each sample, more than connections buffer. The last one answers briefly."""

        def forward(self, number: int, batch: Batch, inputs: Any) -> np.ndarray | None:
            return np.ones((1, 1 << 21), np.float32) if inputs is None else None

        def back(self, number: int, gradient: Any) -> np.ndarray | None:
            return np.ones((1, 1), np.float32) if gradient is None else None

        def totals(self) -> np.ndarray:
            return np.zeros(1, np.float32)

    x = np.ones((10, 1), np.float32)
    parts = tuple(Batch(arrays=(x[i : i + 1],), weight=1, total_weight=10) for i in range(len(x)))
    batch = Batch(arrays=(x,), weight=10, total_weight=10, parts=parts)
    ends = enumerate(channels(2))
    pipes = [Pipe(n, 2, before=a, after=b, inputs=(1,), outputs=(1,)) for n, (a, b) in ends]

    def run(stage: int) -> None:
        time.sleep(1.2 * stage)
        pipes[stage].train(Wide(), batch, stop=False)  # type: ignore[arg-type]

    at_once([functools.partial(run, stage) for stage in range(2)])
    at_once([pipe.shut_down for pipe in pipes])
    assert pipes[0].waited_s > 0.5


def test_layers_are_timed_per_sample() -> None:
    class Slow:
        def forward(self, number: int, batch: Batch, inputs: Any) -> np.ndarray:
            time.sleep(0.002 * len(batch.arrays[0]))
            return np.ones((len(batch.arrays[0]), 1), np.float32)

        def back(self, number: int, gradient: Any) -> None:
            time.sleep(0.001 * len(gradient))

    made: Any = lambda number: Slow()  # noqa: E731
    seconds = partition.measured_s(
        made, layers([1.0] * 2, [1] * 2), Batch(arrays=(np.ones((20, 1)),), weight=20, total_weight=20)
    )
    assert len(seconds) == 2 and all(0.003 <= each < 0.02 for each in seconds)


def test_a_sender_waits_for_a_slow_receiver_and_notices_a_lost_one() -> None:
    (_, one), (other, _) = channels(2)
    assert one is not None and other is not None
    sent = []

    def send() -> None:
        for number in range(80):
            one.send(np.full(1 << 20, number, np.uint8))
            sent.append(number)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    until(lambda: len(sent) >= AHEAD)
    assert len(sent) < 70, "messages that nothing receives are not sent"
    assert [int(other.receive()[0]) for _ in range(80)] == list(range(80))
    sending.join()
    other.shutdown()
    with pytest.raises(PeerLost):
        one.receive()


def test_a_stage_may_begin_with_an_in_place_layer() -> None:
    import torch

    class Some(torch.nn.Sequential):
        def loss(self, x: Any) -> Any:
            return (self(x) ** 2).sum(), {"correct": torch.zeros(())}

    def make(part: range | None) -> Any:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(4, 5), torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 3))]
        return Some(*(layers[number] for number in part or range(2)))

    row = [Layer(name=f"l{width}", arrays=(), output=(width,), multiply_adds=1) for width in (5, 3)]
    batch = Batch(arrays=(np.random.default_rng(1).standard_normal((8, 4), np.float32),), weight=8, total_weight=8)
    whole, cut = [stepped("torch", make, row, border, batch, metrics.Accuracy()) for border in (0, 1)]
    assert np.array_equal(whole, cut)


# --- real ranks -------------------------------------------------------------------------------------------------------

USUAL = [*SMALL[:4], "--epochs", "2", "--seed", "3", "--global-batch-size", "360", "--json", "--framework", "torch"]
FLAGS = [*USUAL, "--micro-batches", "3"]


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of model and optimizer in the newest checkpoint, from all its files."""
    return {name.partition("/")[2]: array for name, array in newest_arrays(folder).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains on this number of ranks with these flags, once, and returns the run folder."""

    @functools.cache
    def train(ranks: int, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        words = [*FLAGS, *flags, "--run-dir", str(folder)]
        launcher = "mpirun" if "tensorflow" in flags else "forks"
        summary = document(resnet(ranks, *words, launcher=launcher)) if ranks else here("resnet", *words)
        assert summary["ranks"] == max(1, ranks)
        return folder

    return train


def test_two_stages_equal_one_process_bit_for_bit(trained: Callable[..., Path]) -> None:
    """With a short last batch; running statistics and momentum too."""
    one, two = arrays(trained(0)), arrays(trained(2, "--stages", "2"))
    assert one.keys() == two.keys()
    assert not [name for name, array in one.items() if not np.array_equal(array, two[name])]


@pytest.mark.slow
def test_stages_combined_with_replicas(trained: Callable[..., Path], tmp_path: Path) -> None:
    """BatchNorm sees smaller micro-batches in each replica, so the weights only resemble the weights of one process."""
    flags = [*FLAGS, "--stages", "2"]
    exact = [*flags, "--strategy", "hierarchical", "--check-replicas", "1"]
    exact += ["--run-dir", str(tmp_path / "exact")]
    drifting = [*flags, "--strategy", "local-sgd:every=2", "--run-dir", str(tmp_path / "drifting")]
    other = [*drifting, "--resume", "--cut-at", "fc"]
    todo = [{"flags": exact}, {"flags": drifting, "stop_before": 1}, {"flags": other, "refused": 78}]
    codes, output = trainings(4, todo)
    assert codes == [0, 75, 78], output
    assert "hint: use the same --stages and --cut-at" in output, "momentum belongs to a rank"
    one, four = arrays(trained(0)), arrays(tmp_path / "exact")
    shift = np.concatenate([(four[name] - one[name]).ravel() for name in one if name.startswith("parameter.")])
    assert 0 < np.abs(shift).mean() < 2e-2


@pytest.mark.slow
def test_a_run_resumed_with_other_stages_equals_an_uninterrupted_one(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    """Three stages are stopped by a signal, and one process continues with the default micro-batches of stages."""
    flags = [*USUAL, "--stages", "3", "--strategy", "native", "--run-dir", str(tmp_path / "run")]
    codes, output = trainings(3, [{"flags": flags, "stop_before": 1}])
    assert codes == [75], output
    files = {file.name for file in max((tmp_path / "run" / "checkpoints").glob("step-*")).iterdir()}
    assert {"stage0.safetensors", "stage1.safetensors", "stage2.safetensors"} <= files
    here("resnet", "--resume", str(tmp_path / "run"), "--stages", "1")
    one, resumed = arrays(trained(0, "--micro-batches", "4")), arrays(tmp_path / "run")
    assert all(np.array_equal(array, resumed[name]) for name, array in one.items())


@pytest.mark.slow
def test_stages_in_tensorflow_equal_one_process(trained: Callable[..., Path]) -> None:
    flags = ("--framework", "tensorflow", "--epochs", "1")
    one, two = arrays(trained(0, *flags)), arrays(trained(2, *flags, "--stages", "2", "--cut-at", "layer2.1"))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.root
@pytest.mark.slow
def test_the_bytes_on_the_network_are_those_of_the_formula(tmp_path: Path) -> None:
    """Plus at most 8 % for headers and acknowledgements."""
    flags = ["--rates", "100mbit", "--models", "small", "--rows", "stages2", "--rounds", "1", "--json"]
    words = [sys.executable, "tools/bench.py", "stages", *flags, "--name", unique(), "--out", str(tmp_path)]
    done = finished(words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["formula_bytes"] == 4 * 2048 * (398 + 85 + 86) / 4, "4 steps of training and evaluation"
    assert 1 < row["of_formula"] <= 1.08, row


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--stages", "2", "--strategy", "native"], "--strategy native cannot be combined with --stages 2 on 4 ranks"),
        (["--micro-batches", "2"], "--strategy allreduce cannot be combined with --micro-batches 2 on 4 ranks"),
        (["--cut-at", "fc"], "--cut-at needs more than one stage"),
        (["--stages", "2", "--strategy", "int8", "--shares", "2:1"], "--shares cannot be combined with --stages 2"),
        (["--stages", "2", "--strategy", "int8", "--cut-at", "layer9"], "no layer 'layer9' can begin a stage"),
    ],
)
def test_options_that_cannot_be_combined_with_stages(flags: list[str], problem: str) -> None:
    refused("resnet", "--framework", "torch", "--dry-run", *flags, code=78, said=problem, extra=first_of(4))


def test_a_dry_run_without_a_launcher_assumes_one_rank_per_stage() -> None:
    facts = document(alone("resnet", "--stages", "2", "--dry-run", "--json"))["facts"]
    assert facts["pipeline"].startswith("2 stages x 1 replicas, 4 micro-batches")
    assert facts["stage 0"].startswith("stem to ") and facts["stage 0"].endswith("; rank 0")
    assert " to fc: " in facts["stage 1"] and facts["stage 1"].endswith("; rank 1")
    parted = document(alone("resnet", "--micro-batches", "2", "--strategy", "powersgd", "--dry-run", "--json"))
    assert parted["cost"]["overlaps_with"] == "", "gradients are complete after the last micro-batch only"
