"""Running statistics: which arrays are, and how they are taken anew for an evaluation (--precise-bn). Inference."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import here
from runs import read_run

from hvdtrain import data, strategies
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.config.parser import parse
from hvdtrain.data.loader import Loader
from hvdtrain.models import resnet
from hvdtrain.pipeline.schedule import Pipe
from hvdtrain.records import metrics
from hvdtrain.resnet import ResNetConfig
from hvdtrain.strategies import Capabilities
from hvdtrain.system.exits import Failure
from hvdtrain.training import evaluation, snapshot
from hvdtrain.training.checkpoint import Loaded
from hvdtrain.training.evaluation import average_statistics, renew_statistics
from hvdtrain.training.framework import make_replica

SPEC = resnet.ResNetSpec(channels=1, classes=10, width=0.125)


def made(framework: str, pipe: Pipe | None = None) -> Any:
    config = parse(ResNetConfig, ["--framework", framework], prog="", purpose="")
    ranks = connect(framework, backend="tcp")
    strategy = strategies.resolve(config).make(config, ranks, list(resnet.parameters(SPEC).values()))
    model: Any
    if framework == "torch":
        from hvdtrain.models.resnet_torch import ResNetTorch

        model = ResNetTorch(SPEC)
    else:
        from hvdtrain.models.resnet_tf import ResNetTF

        model = ResNetTF(SPEC)
    replica = make_replica(model, config, ranks, strategy, "cpu", metrics.Accuracy(), pipe)
    state = resnet.initial_state(SPEC, 1)
    replica.load({f"parameter.{name}": state[name] for name in resnet.parameters(SPEC)})
    return replica


@pytest.fixture(scope="module", params=["torch", "tensorflow"])
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def replica(framework: str) -> Any:
    return made(framework)


@pytest.fixture(scope="module")
def batches() -> list[data.Batch]:
    train = data.load("digits", (16, 16)).train
    return list(Loader(train, global_batch=256, rank=0, size=1, seed=1).epoch(0))[:3]


def renewed(replica: Any, batches: list[data.Batch]) -> dict[str, np.ndarray]:
    renew_statistics(replica, batches)
    return {name: array.copy() for name, array in replica.local_state().items()}


def test_renewed_statistics_are_the_mean_over_batches(replica: Any, batches: list[data.Batch]) -> None:
    weights = {name: array.copy() for name, array in replica.state().items()}
    one, two, three = [renewed(replica, [batch]) for batch in batches]
    together = renewed(replica, batches)
    assert renewed(replica, batches).keys() == resnet.buffers(SPEC).keys()
    for name, array in together.items():
        mean = (one[name] + two[name] + three[name]) / 3
        np.testing.assert_allclose(array, mean, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, array in renewed(replica, batches).items():
        np.testing.assert_array_equal(array, together[name], err_msg="earlier statistics do not matter")
    for name, array in replica.state().items():
        np.testing.assert_array_equal(array, weights[name], err_msg="weights do not change")


def test_micro_batches_share_the_weight_of_their_batch(framework: str, replica: Any, batches: list[data.Batch]) -> None:
    one, *others = batches
    cut = data.Batch(arrays=(), weight=one.weight, total_weight=one.total_weight, parts=(one, *others[:1]))
    parted = renewed(made(framework, Pipe()), [cut, *others[1:]])
    first, second, third = [renewed(replica, [batch]) for batch in batches]
    for name, array in parted.items():
        mean = ((0.9 * first[name] + second[name]) / 1.9 + third[name]) / 2
        np.testing.assert_allclose(array, mean, rtol=1e-4, atol=1e-5, err_msg=name)


def test_with_the_statistics_of_a_batch_its_evaluation_equals_training(replica: Any, batches: list[data.Batch]) -> None:
    """Except for the factor n / (n - 1) of the variance, with n >= 256."""
    replica.backward(batches[0], 0.0, stop=False)
    trained = replica.tail()
    renew_statistics(replica, batches[:1])
    loss, *_ = replica.evaluate(batches[0])
    assert loss == pytest.approx(trained[0], rel=0.02)


@pytest.mark.parametrize(("shares", "mean"), [(None, 3), ((3.0, 1.0), 2)])
def test_statistics_are_averaged_by_shares(shares: Any, mean: float, replica: Any) -> None:
    """This rank has 1 everywhere, the other 5."""
    replica.load_local({name: np.ones_like(array) for name, array in replica.local_state().items()})
    remote = np.float32(5 if shares is None else 5 / 4)
    world: Any = SimpleNamespace(rank=0, size=2, sum=lambda values, _: values + remote)
    average_statistics(replica, world, shares)
    assert all((replica.local_state()[name] == mean).all() for name in replica.statistics)


def test_new_ranks_get_the_mean_of_the_saved_statistics() -> None:
    others = [{"buffer.mean": np.full(2, value, np.float32)} for value in (1, 2, 6)]
    loaded = Loaded(step=1, shared={}, local={}, progress={}, others=others, recut=False)
    strategy: Any = SimpleNamespace(capabilities=Capabilities(), reshard_state=lambda _: {})
    assert snapshot.resharded(loaded, strategy)["buffer.mean"].tolist() == [3, 3]


def test_the_best_weights_need_no_state_of_the_ranks_that_saved_them(framework: str) -> None:
    """As after a loss in a captioning run with local-sgd, whose ranks have state of their own."""
    replica = made(framework)
    shared = {name: array + 1 for name, array in replica.state().items() if name.startswith("parameter.")}
    others = [
        {f"buffer.{name}": np.full_like(array, value) for name, array in replica.local_state().items()}
        | {"drift.weights": np.zeros(1), "own.momentum": np.zeros(1)}
        for value in (1, 2, 6)
    ]
    snapshot.restore_model(Loaded(step=1, shared=shared, local={}, progress={}, others=others), replica)
    assert all((replica.state()[name] == array).all() for name, array in shared.items())
    assert all((array == 3).all() for array in replica.local_state().values())


def test_residuals_cannot_move_to_other_stages() -> None:
    others = [{"buffer.mean": np.ones(2, np.float32), "strategy.error": np.ones(5, np.float32)}]
    loaded = Loaded(step=1, shared={}, local={}, progress={}, others=others, recut=True)
    strategy: Any = SimpleNamespace(capabilities=Capabilities(), reshard_state=lambda states: states[0])
    with pytest.raises(Failure, match="belongs to other stages; hint: use the same --stages"):
        snapshot.resharded(loaded, strategy)


def test_a_diverged_run_has_no_loss_and_valid_records(tmp_path: Path) -> None:
    flags = ["--epochs", "1", "--epoch-samples", "64", "--global-batch-size", "64", "--lr", "1e4"]
    end = here("resnet", *flags, "--width", "0.0625", "--image-size", "16", "--run-dir", str(tmp_path / "run"))
    assert end["test_loss"] is None
    (epoch,) = read_run(tmp_path / "run")["epoch"]
    assert epoch.validation_loss is None and epoch.train_loss is not None


def test_inference_is_timed_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.chain([0, 5, 0, 5], itertools.cycle([0, 0.2])))  # two slow passes
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    replica: Any = SimpleNamespace(evaluate=lambda _: None)
    (timed,) = evaluation.timed_inference(replica, data.load("digits", (8, 8)).test, [4])
    assert (timed["samples"], timed["passes"], timed["most_s"]) == (4, 5, pytest.approx(0.2))


def test_a_torch_model_declares_which_arrays_are_statistics() -> None:
    """Each has its own momentum, and other arrays do not change."""
    import torch

    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quick, self.slow = torch.nn.BatchNorm1d(2, momentum=0.5), torch.nn.BatchNorm1d(2, momentum=0.1)
            self.register_buffer("scale", torch.full((2,), 3.0))

        def loss(self, x: Any) -> Any:
            return self.slow(x * self.scale).sum() + self.quick(x).sum(), {"correct": torch.zeros(())}

    config = parse(TrainConfig, ["--framework", "torch"], prog="", purpose="")
    ranks = connect("torch", backend="tcp")
    model: Any = Normed()
    make = functools.partial(
        make_replica, model, config, ranks, strategies.resolve(config).make(config, ranks, [(2,)] * 4)
    )
    with pytest.raises(Failure, match=r"Normed does not declare .*quick.running_mean.*`statistics`"):
        make("cpu", metrics.Accuracy())
    model.statistics = {"quick.running_mean": 0.5, "quick.num_batches_tracked": 0.1}
    with pytest.raises(Failure, match=r"Normed.statistics names quick.num_batches_tracked, but no untrained"):
        make("cpu", metrics.Accuracy())
    model.statistics = {"quick.running_mean": 0.5, "slow.running_mean": 0.1}
    replica = make("cpu", metrics.Accuracy())
    inputs = [np.full((4, 2), value, np.float32) for value in (1, 2)]
    renew_statistics(replica, [data.Batch(arrays=(x,), weight=4, total_weight=4) for x in inputs])
    state = replica.local_state()
    assert state["quick.running_mean"] == pytest.approx(1.5)
    assert state["slow.running_mean"] == pytest.approx(3 * 1.5)
    assert state["scale"].tolist() == [3, 3]
    assert state["quick.running_var"] == pytest.approx(0.25), "not declared, so training updates it"


def test_a_tensorflow_model_declares_which_arrays_are_statistics() -> None:
    import tensorflow as tf

    class Shifted(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = {"shift": tf.Variable([0.0])}
            self.mean = tf.Variable([0.0], trainable=False, name="mean")

    config = parse(TrainConfig, ["--framework", "tensorflow"], prog="", purpose="")
    ranks = connect("tensorflow", backend="tcp")
    with pytest.raises(Failure, match=r"Shifted does not declare .*\(mean:0\)"):
        make_replica(
            Shifted(), config, ranks, strategies.resolve(config).make(config, ranks, [(1,)]), "cpu", metrics.Accuracy()
        )
