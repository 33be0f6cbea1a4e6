"""The multilayer perceptron: its numbers, and the law that the two twins are one network with one loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conftest import failing
from twins import Arrays, Found, load, tensorflow_gradients, tf, told, torch_gradients

from hvdtrain.models import mlp_tf, mlp_torch
from hvdtrain.models.mlp import MLPSpec, initial_state, multiply_adds, parameters
from hvdtrain.solar import Forecast
from hvdtrain.system.exits import BAD_CONFIG

SPEC = MLPSpec(inputs=7, hidden=(12, 5), outputs=4)


def of_torch(spec: MLPSpec, loss: str, state: Arrays, drawn: Any) -> Found:
    model = mlp_torch.MLPTorch(spec, loss)
    load(model, state)
    return torch_gradients(model, drawn)


def of_tensorflow(spec: MLPSpec, loss: str, state: Arrays, drawn: Any) -> Found:
    model = mlp_tf.MLPTF(spec, loss)
    assert {name: tuple(each.shape) for name, each in model.weights.items()} == parameters(spec)
    load(model, state)
    signature = [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in drawn]
    graph = tf.function(lambda *arrays: tensorflow_gradients(model, arrays), input_signature=signature)
    return told(graph(*map(tf.constant, drawn)))


def reference(spec: MLPSpec, state: Arrays, x: np.ndarray) -> np.ndarray:
    for layer in range(len(spec.sizes) - 1):
        x = np.maximum(x, 0) if layer else x
        x = x @ state[f"layers.{layer}.weight"].T.astype(np.float64) + state[f"layers.{layer}.bias"]
    return x


@pytest.mark.parametrize("hidden", [(), (12, 5)])
@pytest.mark.parametrize("loss", ["cross_entropy", "forecast_error"])
def test_the_twins_are_one_network_with_one_loss(loss: str, hidden: tuple[int, ...]) -> None:
    spec = MLPSpec(inputs=7, hidden=hidden, outputs=4 if loss == "cross_entropy" else 1)
    draw = np.random.default_rng(5)
    x = draw.normal(size=(33, 7)).astype(np.float32)
    labels, targets = draw.integers(0, 3, 33), draw.normal(size=(33, 2)).astype(np.float32)
    state = {name: draw.normal(0, 0.5, shape).astype(np.float32) for name, shape in parameters(spec).items()}
    outputs = reference(spec, state, x)
    if loss == "cross_entropy":
        exact = (np.log(np.exp(outputs).sum(1)) - outputs[np.arange(33), labels]).sum()
        confusion = np.zeros((4, 4))
        np.add.at(confusion, (labels, outputs.argmax(1)), 1)
        expected = {"confusion": confusion.ravel()}
    else:
        truth, last = targets.T.astype(np.float64)
        error = outputs[:, 0] - truth
        exact = (error**2).sum()
        expected = {"absolute": abs(error).sum(), "squared": (error**2).sum(), "signed": error.sum()}
        expected |= {"truth": truth.sum(), "truth_squared": (truth**2).sum()}
        expected["persistence"] = ((last - truth) ** 2).sum()
        assert set(expected) == set(Forecast.sums)
    drawn = x, labels if loss == "cross_entropy" else targets
    one, other = of_torch(spec, loss, state, drawn), of_tensorflow(spec, loss, state, drawn)
    for total, sums, _ in (one, other):
        assert total == pytest.approx(exact, rel=1e-5)
        assert set(sums) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-5, atol=1e-4)
    assert list(one[2]) == list(other[2]) == list(parameters(spec))
    for name, gradient in one[2].items():
        np.testing.assert_allclose(gradient, other[2][name], rtol=1e-4, atol=1e-4)


def test_numbers_of_a_spec() -> None:
    assert sum(map(math.prod, parameters(SPEC).values())) == 7 * 12 + 12 + 12 * 5 + 5 + 5 * 4 + 4
    assert multiply_adds(SPEC) == (7 * 12 + 12 * 5 + 5 * 4) / 3
    with failing(BAD_CONFIG, "layers of 7, 0, 4"):
        MLPSpec(inputs=7, hidden=(0,), outputs=4)


def test_initial_values_are_glorots_and_depend_on_seed_and_name_only() -> None:
    big = MLPSpec(inputs=300, hidden=(200,), outputs=4)
    state = initial_state(big, 3)
    assert {name: each.shape for name, each in state.items()} == parameters(big)
    assert {each.dtype for each in state.values()} == {np.dtype(np.float32)}
    bound = (6 / 500) ** 0.5
    assert 0.99 * bound < abs(state["layers.0.weight"]).max() <= bound
    assert abs(state["layers.0.weight"].mean()) < 0.01 * bound
    assert not state["layers.0.bias"].any()
    other = initial_state(MLPSpec(inputs=300, hidden=(200,), outputs=9), 3)
    np.testing.assert_array_equal(state["layers.0.weight"], other["layers.0.weight"])
    assert not np.array_equal(state["layers.0.weight"], initial_state(big, 4)["layers.0.weight"])
