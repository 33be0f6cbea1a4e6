"""`hvdtrain.train` with a script's model and data (programs/own_train.py), in one process and on several ranks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, launch
from programs import own_train
from runs import cut_off
from test_stages import stepped

import hvdtrain
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch, own
from hvdtrain.data.loader import Loader
from hvdtrain.records.metrics import Accuracy, Metric, Score
from hvdtrain.system.exits import Failure

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def separate_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Imitate a separate process: a script name, no flags, and an error hook that is restored."""
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def ranks(framework: str, folder: Path, launcher: str, **settings: Any) -> Any:
    """Train on two ranks."""
    return launch(2, [str(PROGRAMS / "own_train.py"), framework, str(folder), json.dumps(settings)], launcher)


@pytest.mark.parametrize(("framework", "launcher"), [("torch", "torchrun"), ("tensorflow", "mpirun")])
def test_two_ranks_train_as_one_process(framework: str, launcher: str, tmp_path: Path) -> None:
    """One process can resume the run of two ranks."""
    pytest.importorskip(framework)
    run = tmp_path / "run"
    done = ranks(framework, tmp_path, launcher, run_dir=str(run))
    assert done.returncode == 0, done.stderr[-3000:]
    model, summary = own_train.trained(framework, 0)
    expected = own_train.weights(model)
    for rank in (0, 1):
        actual = [*np.load(tmp_path / f"rank{rank}.npz").values()]
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
    scores, other = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert scores == other, "the summaries differ"
    inputs, labels = own_train.PARTS["test"]
    assert scores[0] == summary.test_scores == {"accuracy": np.mean(own_train.answers(model, inputs) == labels)}
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["workload"], len(manifest["ranks"])) == ("own_train", 2)

    cut_off(run, tmp_path / "cut", 3)
    sys.argv = ["own_train.py"]
    with pytest.raises(Failure, match="constants"):  # untrained parameters differ
        own_train.trained(framework, 7, resume=str(tmp_path / "cut"))
    sys.argv.append("--api-token=hunter2")
    model, again = own_train.trained(framework, 0, resume=str(tmp_path / "cut"))
    assert again.steps == summary.steps
    assert json.loads((tmp_path / "cut" / "manifest.json").read_text())["argv"][-1] == "--api-token=***"
    for one, other in zip(expected, own_train.weights(model), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_resumed_equals_uninterrupted(framework: str, tmp_path: Path) -> None:
    """Bit for bit, with random layers."""
    pytest.importorskip(framework)
    whole, summary = own_train.trained(framework, 0, dropout=0.3, run_dir="whole", strategy="hierarchical")
    cut_off(tmp_path / "whole", tmp_path / "cut", 6)
    resumed, again = own_train.trained(framework, 0, dropout=0.3, resume="cut", strategy="hierarchical")
    assert again.test_scores == summary.test_scores
    for one, other in zip(own_train.weights(whole), own_train.weights(resumed), strict=True):
        np.testing.assert_array_equal(other, one)
    other, _ = own_train.trained(framework, 0, dropout=0.3, seed=1)
    assert any((a != b).any() for a, b in zip(own_train.weights(whole), own_train.weights(other), strict=True))


def test_a_sequential_is_split_into_stages(tmp_path: Path) -> None:
    """Two stages train bit for bit as one process with the same micro-batches."""
    settings = {"dropout": 0.3, "micro_batches": 3, "seed": 1}
    done = ranks("torch", tmp_path, "mpirun", stages=2, run_dir=str(tmp_path / "run"), **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "stage 1 " in done.stderr
    model, _ = own_train.trained("torch", 0, **settings)
    for rank in (0, 1):
        actual = [*np.load(tmp_path / f"rank{rank}.npz").values()]
        assert all(map(np.array_equal, own_train.weights(model), actual))


def test_the_stages_of_a_keras_sequential_equal_the_whole() -> None:
    """With a convolution, moving statistics and dropout."""
    keras = pytest.importorskip("keras")
    from hvdtrain.models import own_tf

    model = keras.Sequential([keras.Input((64,)), keras.layers.Reshape((8, 8, 1)), keras.layers.Conv2D(4, 3)])
    for layer in (keras.layers.BatchNormalization(), keras.layers.Flatten(), keras.layers.Dropout(0.3)):
        model.add(layer)
    model.add(keras.layers.Dense(10))
    x, y = (array[:32] for array in own_train.PARTS["train"])
    batch = Batch(arrays=(x.astype(np.float32), y.astype(np.int64), np.array([3, 4])), weight=32, total_weight=32)
    loss, metric = keras.losses.SparseCategoricalCrossentropy(from_logits=True), Accuracy()
    config = TrainConfig(framework="tensorflow", stages=2)
    whole = own_tf.Own(model, loss, own_tf.correct, metric.sums, config)
    whole.probe(batch.arrays)
    assert [layer.output for layer in whole.layers] == [(6, 6, 4), (144,), (10,)]
    expected, *others = [
        stepped("tensorflow", lambda part: whole.part(part) if part else whole, whole.layers, at, batch, metric)
        for at in range(3)
    ]
    for actual in others:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    doubles = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, dtype="float64")])
    with pytest.raises(Failure, match="float64"):
        own_tf.Own(doubles, loss, own_tf.correct, metric.sums, config)
    arrays = {name: 2 * array for name, array in whole.arrays().items()}
    whole.take(arrays)
    assert all(np.array_equal(array, arrays[name]) for name, array in whole.arrays().items())


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 90

    def __getitem__(self, at: int) -> Any:
        x, y = own_train.PARTS["train"]
        return torch.from_numpy(x[at]), int(y[at])


def batches(train: Any) -> list[np.ndarray]:
    split = own.opened(train, None, None).train
    loader = Loader(split, global_batch=32, rank=1, size=2, seed=3)
    return [array for batch in loader.epoch(1) for array in batch.arrays]


def test_a_dataset_of_either_framework_gives_the_batches_of_its_arrays() -> None:
    x, y = (array[:90] for array in own_train.PARTS["train"])
    sources: dict[str, Any] = {"Dataset": Pairs(), "lists": (x.tolist(), y.tolist())}
    if tf := pytest.importorskip("tensorflow"):
        sources["tf.data"] = tf.data.Dataset.from_tensor_slices((x, y))
        sources["tf.data in batches"] = sources["tf.data"].batch(40).prefetch(1)
        from hvdtrain.models import own_tf

        with pytest.raises(Failure, match="train="):
            own.opened(sources["tf.data"].take(0), None, None)
        for outputs, targets in [((3, 1), (3,)), ((3, 1), (3, 1)), ((3, 2), (3, 2)), ((3,), (3,))]:
            with pytest.raises(Failure, match="accuracy"):
                own_tf.correct(tf.zeros(outputs), tf.zeros(targets))
    expected = batches((x, y))
    assert [array.dtype.name for array in expected[:3]] == ["float32", "int64", "int64"]
    for kind, train in sources.items():
        for one, other in zip(expected, batches(train), strict=True):
            np.testing.assert_array_equal(other, one, err_msg=kind)
    twice = batches(((x, x), y))
    np.testing.assert_array_equal(twice[0], twice[1])
    assert own.opened((x, y), None, None).fingerprint != own.opened((x, y[::-1]), None, None).fingerprint


def test_sparse_gradients_and_unused_parameters() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.EmbeddingBag(17, 10, sparse=True)
            self.unused = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.scores((16 * x).long())

    model, entropy = Odd(), torch.nn.functional.cross_entropy
    start = model.scores.weight.detach().clone()
    hvdtrain.train(model, loss=entropy, epochs=1, global_batch_size=100, **own_train.PARTS)
    assert not torch.equal(model.scores.weight, start)


class Half(Metric):
    """Share of outputs with an error of less than 0.5."""

    sums = {"near": ()}  # noqa: RUF012
    scores = {"near": Score(label="near", least=0, most=1)}  # noqa: RUF012
    primary = "near"

    def score(self, sums: Any, samples: float) -> dict[str, float]:
        return {"near": float(sums["near"]) / samples}


def test_a_regression_and_a_custom_metric() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(300, 2, 3)).astype(np.float32)
    y = x.sum((1, 2)) + 0.1 * draw.normal(size=300)

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(6, 1)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, first: Any, second: Any) -> Any:
            return self.scale * self.line(torch.cat([first, second], 1))

    def loss(outputs: Any, targets: Any) -> Any:
        return (outputs[:, 0] - targets) ** 2

    def train(**more: Any) -> Any:
        model = Sum()
        parts = (x[:, 0], x[:, 1], y)
        return model, hvdtrain.train(model, loss=loss, train=parts, test=parts, epochs=3, **more)

    model, summary = train(batch_size=16)
    with torch.no_grad():
        error = model(torch.from_numpy(x[:, 0]), torch.from_numpy(x[:, 1]))[:, 0].numpy() - y
    assert summary.test_scores["mae"] == pytest.approx(abs(error).mean(), rel=1e-5)
    assert summary.test_scores["r2"] == pytest.approx(1 - (error**2).mean() / y.var(), rel=1e-5)
    assert summary.test_loss == pytest.approx((error**2).mean(), rel=1e-5)
    _, summary = train(
        metric=Half(), sums=lambda outputs, targets: {"near": abs(outputs[:, 0] - targets) < 0.5}, argv=["--epochs=1"]
    )
    assert (summary.epochs, [*summary.test_scores]) == (1, ["near"])


def test_running_statistics_are_kept_and_other_buffers_must_not_change() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
    entropy, start = torch.nn.functional.cross_entropy, model[1].running_mean.clone()
    hvdtrain.train(model, loss=entropy, epochs=1, **own_train.PARTS)
    assert not torch.equal(model[1].running_mean, start)

    class Counting(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            self.calls += 1.0
            return super().forward(x)

    counting = Counting(64, 10)
    counting.register_buffer("calls", torch.zeros(()))
    with pytest.raises(Failure, match="calls"):
        hvdtrain.train(counting, loss=entropy, epochs=1, **own_train.PARTS)


X, Y = own_train.PARTS["train"]


def tied() -> Any:
    layer = torch.nn.Linear(64, 64)
    return torch.nn.Sequential(layer, torch.nn.Linear(64, 64), layer, torch.nn.Linear(64, 10))


BAD_DATA = [
    ("train", (X, Y[:-1])),
    ("train", X),
    ("train", (X[:0], Y[:0])),
    ("train", (X, Y.astype(str))),
    ("train", (X.astype(object), Y)),
    ("validation", (X[:, :32], Y)),
]


@pytest.mark.parametrize(
    ("changes", "name", "code"),
    [
        *(({part: data}, f"{part}=", 65) for part, data in BAD_DATA),
        ({"train": {"x": X, "kind": Y}}, "dict", 65),
        ({"model": "resnet"}, "model", 78),
        ({"epoch": 3}, "epochs", 2),
        ({"argv": ["--bach-size", "3"]}, "--batch-size", 2),
        ({"loss": lambda outputs, targets: outputs.logsumexp(1).sum()}, "loss", 78),
        ({"model": tied(), "stages": 2, "dry_run": True}, "0.weight", 78),
        ({"metric": "acuracy"}, "accuracy", 78),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_are_one_line_that_names_the_argument(changes: dict[str, Any], name: str, code: int) -> None:
    arguments = {"model": own_train.new_model("torch", 0), "loss": torch.nn.functional.cross_entropy, **own_train.PARTS}
    arguments |= changes
    with pytest.raises(Failure, match=re.escape(name)) as error:
        hvdtrain.train(arguments.pop("model"), **arguments)
    assert "\n" not in str(error.value)
    assert error.value.code == code


def test_ranks_with_different_data_are_an_error(tmp_path: Path) -> None:
    done = ranks("torch", tmp_path, "mpirun", cut=True, strategy="hierarchical")
    assert done.returncode == 65, done.stderr[-3000:]
    assert re.search(r"own_train\.py:\d+: rank 1 on \S+ .* rank 0 on \S+", done.stderr)
    assert "Traceback" not in done.stderr
