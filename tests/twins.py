"""Models of both frameworks, spoken to in NumPy arrays of the neutral layout. Whoever imports this is skipped where one
of the frameworks is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

Arrays = dict[str, np.ndarray]
Found = tuple[float, dict[str, Any], Arrays]
"""A loss, the metric's sums, and gradients by name"""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model:
    """A model, or a part of one, with the values of a state."""

    def __init__(self, model: Any, state: Arrays) -> None:
        self.model = model
        load(model, state)

    def load(self, state: Arrays) -> None:
        load(self.model, state)

    def state(self) -> Arrays:
        if isinstance(self.model, torch.nn.Module):
            return {name: array.numpy().copy() for name, array in self.model.state_dict().items()}
        return {name: neutral(variable) for name, variable in variables(self.model).items()}


def load(model: Any, state: Arrays) -> None:
    """Gives a model, or a part of one, its values in the state."""
    if isinstance(model, torch.nn.Module):
        model.load_state_dict({name: torch.from_numpy(state[name]) for name in model.state_dict()})
    else:
        for name, variable in variables(model).items():
            variable.assign(state[name].transpose(2, 3, 1, 0) if state[name].ndim == 4 else state[name])


def variables(model: Any) -> dict[str, Any]:
    """What a TensorFlow model holds, trained or not."""
    return dict(model.weights) | dict(getattr(model, "buffers", {}))


def neutral(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.numpy()  # which sparse gradients do not have
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array


def torch_gradients(model: Any, arrays: Sequence[np.ndarray], training: bool = True, mean_of: int = 1) -> Found:
    model.train(training).zero_grad()
    loss, sums = model.loss(*map(torch.from_numpy, arrays))
    loss = loss / mean_of
    loss.backward()
    gradients = {name: each.grad.numpy().copy() for name, each in model.named_parameters()}
    return loss.item(), {name: each.tolist() for name, each in sums.items()}, gradients


def tensorflow_gradients(model: Any, arrays: Sequence[Any], training: bool = True, mean_of: Any = 1) -> Any:
    """The same in tensors, also within a graph; `told` makes NumPy's arrays of them."""
    with tf.GradientTape() as tape:
        loss, sums = model.loss(*arrays, training=training)
        loss = loss / mean_of
    return loss, sums, tape.gradient(loss, model.weights)


def told(found: Any) -> Found:
    loss, sums, gradients = found
    arrays = {name: neutral(each) for name, each in gradients.items()}
    return float(loss), {name: each.numpy().tolist() for name, each in sums.items()}, arrays
