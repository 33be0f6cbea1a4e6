"""Muon: its orthogonal factors, equal steps in PyTorch, TensorFlow and Keras, and `--optimizer muon`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, failing, here
from runs import cut_off, read_run
from test_resnet_train import assert_same_arrays, newest_arrays
from twins import load, neutral, tf, torch, variables

from hvdtrain.config.options import TrainConfig
from hvdtrain.frameworks import ITERATIONS, NEWTON_SCHULZ
from hvdtrain.frameworks.muon_torch import Muon, Stack
from hvdtrain.frameworks.optimizers_tensorflow import OPTIMIZERS, orthogonal
from hvdtrain.models.layers_tf import Held
from hvdtrain.models.layers_torch import Named

SHAPES = [(6, 6), (5, 40), (40, 5), (16, 9)]
ARRAYS = {"a.weight": (8, 3, 3, 3), "b.weight": (8, 3, 3, 3), "c.weight": (12, 5), "c.bias": (12,)}
ARRAYS["embedding.weight"] = (7, 4)


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def factors(matrices: Any) -> Any:
    """Orthogonal factors of matrices (k, m, n), in their type."""
    stack = Stack(list(matrices))
    stack._matrices.copy_(matrices)
    stack.orthogonalise(len(stack.factors))
    return stack.factors


def iterated(matrix: Any) -> Any:
    """Newton-Schulz iterations as published, in float64."""
    a, b, c = NEWTON_SCHULZ
    x = matrix / matrix.norm()
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", SHAPES)
def test_factors_equal_the_published_iterations(shape: tuple[int, int]) -> None:
    matrices = drawn(3, *shape)
    matrices[2] = 0
    expected = torch.stack([iterated(each) for each in matrices[:2]])
    for found in (factors(matrices.float()), torch.from_numpy(orthogonal(tf.constant(matrices.float())).numpy())):
        torch.testing.assert_close(found[:2].double(), expected, rtol=1e-5, atol=1e-5)
        assert not found[2].any(), "a weight without a gradient does not move"
    half = factors(matrices.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half[:2].double() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("shape", [(16, 16), (16, 144), (64, 576), (300, 20)])
def test_singular_values_become_almost_one_after_three_iterations(shape: tuple[int, int]) -> None:
    rows, columns = shape
    left, _ = torch.linalg.qr(drawn(rows, rows, seed=1))
    right, _ = torch.linalg.qr(drawn(columns, columns, seed=2))
    side = min(shape)
    values = torch.linspace(1, min(5, side**0.5), side, dtype=torch.float64)  # of at least a 50th of their norm
    factor = factors((left[:, :side] * values @ right[:side]).float()[None])[0].double()
    found = torch.linalg.svdvals(factor)
    assert found.min() > 0.68 and found.max() < 1.21, found
    between = left[:, :side].mT @ factor @ right[:side].mT
    torch.testing.assert_close(between, between.diagonal().diag(), rtol=0, atol=1e-4)


def stepped(optimizer: Any, weights: list[Any], steps: int = 6) -> list[Any]:
    for step in range(steps):
        for number, weight in enumerate(weights):
            weight.grad = drawn(*weight.shape, seed=100 * step + number).to(weight.dtype)
        optimizer.step()
    return [weight.detach() for weight in weights]


def parameters(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.nn.Parameter(drawn(*shape, seed=9).float()) for shape in shapes]


def test_matrices_move_as_with_torch_s_muon() -> None:
    """Its momentum is a mean, which only scales the direction, and its iterations are bfloat16."""
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    begun = copy.deepcopy(ours)
    settings: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    torchs = torch.optim.Muon(theirs, nesterov=True, ns_steps=ITERATIONS, ns_coefficients=NEWTON_SCHULZ, **settings)
    for one, other, before in zip(stepped(Muon(ours, **settings), ours), stepped(torchs, theirs), begun, strict=True):
        moved = (other - before).norm()
        assert (one - other).norm() < 0.01 * moved, (one.shape, (one - other).norm() / moved)


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_the_rest_moves_as_with_torch_s_optimizers(rest: Any) -> None:
    """Vectors, embeddings, and a group with a method. A resumed optimizer equals the uninterrupted one."""

    def made(weights: list[Any]) -> Muon:
        named = list(zip(("bias", "embedding.weight", "weight", "head"), weights, strict=True))
        groups = [{"params": named[:3]}, {"params": named[3:], "method": rest, "lr": 0.05}]
        return Muon(groups, 0.1, 0.9, 0.01, rest=rest, rest_scale=0.5)

    shapes = [(5,), (7, 4), (6, 6), (4, 3)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    optimizer = made(ours)
    assert [group["method"] for group in optimizer.param_groups] == ["muon", rest, rest]
    if rest == "sgd":
        torchs: Any = torch.optim.SGD(theirs, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    else:
        torchs = torch.optim.AdamW(theirs, 0.05, weight_decay=0.01)
    pairs = list(zip(stepped(optimizer, ours), stepped(torchs, theirs), strict=True))
    for one, other in (*pairs[:2], pairs[3]):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    again = copy.deepcopy(ours)
    resumed = made(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(stepped(optimizer, ours), stepped(resumed, again), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="'lion' is unknown; hint: muon, sgd, adamw"):
        Muon(parameters((3,)), rest="lion")  # type: ignore[arg-type]


def test_any_layout_and_order_of_memory() -> None:
    """Channels-last weights, and steps in which some weights have no gradient, move like others."""
    plain, other = (parameters((8, 3, 3, 3), (8, 3, 3, 3)) for _ in range(2))
    for each in other:
        each.data = each.data.contiguous(memory_format=torch.channels_last)
    for one, another in zip(stepped(Muon(plain), plain), stepped(Muon(other), other), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-5, atol=1e-6)
    optimizer = Muon(plain)
    stepped(optimizer, plain)
    kept, plain[0].grad = plain[0].detach().clone(), None
    stepped(optimizer, plain[1:])
    assert torch.equal(plain[0], kept)


@pytest.mark.parametrize("name", ["sgd", "adam", "muon"])
def test_both_frameworks_make_equal_steps(name: str) -> None:
    from hvdtrain.frameworks.pytorch import _optimizer

    config = TrainConfig(optimizer=name, weight_decay=0.1, lr=0.1)  # type: ignore[arg-type]
    begun = {key: drawn(*shape, seed=9).float().numpy() for key, shape in ARRAYS.items()}
    one, other = Named(ARRAYS, {}), Held(ARRAYS, tf.float32, None)
    load(one, begun)
    load(other, begun)
    named = list(one.named_parameters())
    theirs = OPTIMIZERS[name](other.weights, config)
    optimizer = _optimizer(named, config)
    for step in range(5):
        for number, (_, weight) in enumerate(named):
            weight.grad = drawn(*weight.shape, seed=100 * step + number).float()
        gradients = [each.grad.permute(2, 3, 1, 0) if each.ndim == 4 else each.grad for _, each in named]
        theirs.update(other.weights, [tf.constant(each.numpy()) for each in gradients], tf.constant(0.1))
        optimizer.step()
    for key, weight in named:
        np.testing.assert_allclose(neutral(variables(other)[key]), weight.detach().numpy(), rtol=1e-5, atol=1e-5)
    if name == "muon":
        assert {key.partition(".")[0] for key in theirs.slots} == {"momentum"}
        assert {key for state in optimizer.state.values() for key in state} == {"momentum_buffer"}


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_keras_twin(rest: Any, tmp_path: Path) -> None:
    """Equal steps, in a saved and loaded model too."""
    from hvdtrain.keras import Muon as KerasMuon

    keras = tf.keras
    layers = [keras.layers.Embedding(7, 4), keras.layers.Conv1D(6, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(KerasMuon(0.1, 0.8, rest=rest, rest_scale=0.5, exclude=["dense"]), "mse")

    def torchs(array: Any) -> Any:
        """Kernels (..., in, out) as PyTorch's (out, in, ...)."""
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, (-1, -2), (0, 1)) if array.ndim > 1 else array))

    weights = [torch.nn.Parameter(torchs(each.numpy())) for each in model.trainable_variables]
    groups = [{"params": weights[1:2], "method": "muon"}, {"params": [weights[0], *weights[2:]], "method": rest}]
    groups[1]["lr"] = 0.05
    theirs = Muon(groups, 0.1, 0.8)
    inputs, targets = np.arange(20).reshape(4, 5) % 7, drawn(4, 3).float().numpy()
    for step in range(6):
        if step == 3:
            model.save(tmp_path / "model.keras")
            model = keras.models.load_model(tmp_path / "model.keras")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = torchs(tf.convert_to_tensor(gradient).numpy())
        model.optimizer.apply(gradients, model.trainable_variables)
        theirs.step()
    for weight, variable in zip(weights, model.trainable_variables, strict=True):
        np.testing.assert_allclose(torchs(variable.numpy()), weight.detach().numpy(), rtol=1e-5, atol=1e-5)
    model.fit(inputs, targets, verbose=0)  # in a graph
    with pytest.raises(ValueError, match="'lion' is unknown; hint: sgd, adamw"):
        KerasMuon(rest="lion")  # type: ignore[arg-type]


RUN = [*SMALL, "--optimizer", "muon", "--lr", "0.02", "--epochs", "2", "--epoch-samples", "240", "--ema", "0.9"]


@pytest.mark.parametrize(
    ("framework", "precision"), [("torch", "fp32"), pytest.param("tensorflow", "fp16", marks=pytest.mark.slow)]
)
def test_muon_trains_and_a_resumed_run_equals_the_uninterrupted_one(
    framework: str, precision: str, tmp_path: Path
) -> None:
    flags = [*RUN, "--framework", framework, "--precision", precision, "--checkpoint-steps", "3"]
    here("resnet", *flags, "--keep-checkpoints", "9", "--run-dir", str(tmp_path / "whole"))
    cut_off(tmp_path / "whole", tmp_path / "cut", 6)
    here("resnet", "--resume", str(tmp_path / "cut"))
    tolerance = 0.0 if framework == "torch" else 1e-5
    assert_same_arrays(tmp_path / "whole", tmp_path / "cut", rtol=tolerance, atol=tolerance)
    assert [each.step for each in read_run(tmp_path / "cut")["resumed"]] == [6]
    losses = [step.loss for step in read_run(tmp_path / "whole")["step"]]
    assert losses[-1] < losses[0] - 0.2
    names = [name.partition("/")[2] for name in newest_arrays(tmp_path / "whole")]
    assert "momentum.layer1.0.conv1.weight" in names and not any(name.startswith("adam") for name in names)


def test_options_of_optimizers_and_schedules() -> None:
    plan = here("resnet", "--dry-run", "--optimizer", "adamw", "--warmup-epochs", "0.25", "--schedule", "linear")
    assert plan["config"]["optimizer"] == "adam", "one name in records"
    assert plan["plan"]["warmup_steps"] == round(plan["plan"]["steps_per_epoch"] / 4)
    with failing(78, "--optimizer muon: its servers only make plain SGD steps"):
        here("resnet", "--dry-run", "--optimizer", "muon", "--strategy", "async-ps")
