"""Reducers with error feedback lose nothing, and send the bytes that `cost` predicts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import fake_hosts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies import parse, registry
from hvdtrain.strategies.cost import Shape, elements
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.powersgd import PowerSGD

Kind = tuple[type[Reducer], Any]
REDUCERS: dict[str, type[Reducer]] = {name: registry.lookup(name) for name in registry.names(Reducer)}
KINDS: dict[str, Kind] = {
    "int8": (REDUCERS["int8"], None),
    **{name: (REDUCERS[name], None) for name in ("int4", "int2")},
    **{f"powersgd {bits}": (PowerSGD, PowerSGD.Settings(bits=bits)) for bits in (32, 8, 4)},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
SHAPES: list[Shape] = [(3, 700), (7,), (40, 30), (1300, 1), (5,), (2, 2, 2, 2)]


class Job:
    """The reducers of all hosts."""

    def __init__(self, kind: Kind, hosts: int, shapes: Sequence[Shape] = SHAPES) -> None:
        reducer, self.settings = kind
        self.hosts, self.shapes = hosts, shapes
        self.reducers = [reducer(shapes, self.settings) for _ in range(hosts)]

    def round(self, vectors: np.ndarray) -> np.ndarray:
        """All-reduce `vectors` (hosts, numbers), checking equal bits on all hosts and the predicted bytes."""
        out, sent = fake_hosts.rounds(self.reducers, vectors)
        assert sent == self.reducers[0].cost(self.shapes, self.hosts, self.settings).sent_bytes
        return out

    def residual(self) -> np.ndarray:
        return residual(self.reducers)

    def largest_residual(self) -> float:
        return max(float(np.abs(reducer.state()[reducer.residual_key]).max()) for reducer in self.reducers)


def residual(reducers: Sequence[Reducer]) -> np.ndarray:
    """Return the sum of the hosts' residuals."""
    return np.sum([reducer.state()[reducer.residual_key].astype(np.float64) for reducer in reducers], axis=0)


def gradients(seed: int, hosts: int, shapes: Sequence[Shape] = SHAPES) -> np.ndarray:
    """Return (hosts, numbers), with a different magnitude for each array."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((hosts, elements([shape]))) * 10 ** rng.uniform(-3, 0) for shape in shapes]
    return np.concatenate(arrays, axis=1).astype(np.float32)


@given(seed=some.integers(0, 2**32), hosts=some.integers(2, 5), rounds=some.integers(1, 3), big=some.booleans())
@settings(max_examples=25)
@every_kind
def test_nothing_is_lost(kind: Kind, seed: int, hosts: int, rounds: int, big: bool) -> None:
    shapes = SHAPES if big else [(2,), (1, 1)]
    job = Job(kind, hosts, shapes)
    for number in range(rounds):
        vectors = gradients(seed + number, hosts, shapes)
        expected, largest_before = vectors.astype(np.float64).sum(axis=0) + job.residual(), job.largest_residual()
        actual = job.round(vectors) + job.residual()
        rounding = 2e-7 * hosts * max(np.abs(vectors).max(), largest_before, job.largest_residual())
        np.testing.assert_allclose(actual, expected, atol=rounding, rtol=0)


@pytest.mark.parametrize("name", ["int2", "int4", "powersgd 4"])
def test_the_mean_output_converges_to_constant_gradients(name: str) -> None:
    job, vectors = Job(KINDS[name], 4), gradients(0, 4)
    exact, total, errors = vectors.sum(axis=0, dtype=np.float64), np.zeros(vectors.shape[1]), {}
    for number in range(1, 401):
        total += job.round(vectors)
        errors[number] = np.linalg.norm(total / number - exact) / np.linalg.norm(exact)
    assert errors[400] < 0.15
    assert errors[400] < 0.6 * errors[100]


@every_kind
def test_a_resumed_job_continues_bit_for_bit(kind: Kind) -> None:
    hosts = 3
    whole, resumed = Job(kind, hosts), Job(kind, hosts)
    for number in range(3):
        whole.round(gradients(number, hosts))
    states = [reducer.state() for reducer in whole.reducers]
    outputs = [whole.round(gradients(number, hosts)) for number in range(3, 6)]  # this does not change the states
    for reducer, state in zip(resumed.reducers, states, strict=True):
        reducer.load(state)
        for array in state.values():
            array[:] = 0  # `load` copies
    for number, expected in enumerate(outputs, 3):
        assert resumed.round(gradients(number, hosts)).tobytes() == expected.tobytes()
    for old, new in zip(whole.reducers, resumed.reducers, strict=True):
        assert old.state()[old.residual_key].tobytes() == new.state()[new.residual_key].tobytes()


@every_kind
def test_one_host_is_exact_and_adds_the_residual_of_several_hosts(kind: Kind) -> None:
    alone, vectors = Job(kind, 1), gradients(1, 1)
    vectors[0, 3] = -0.0
    assert alone.round(vectors).tobytes() == vectors[0].tobytes()
    assert not alone.residual().any()
    several = Job(kind, 3)
    several.round(gradients(2, 3))
    state = several.reducers[1].state()
    error = state[several.reducers[1].residual_key]
    assert error.any()
    alone.reducers[0].load(state)
    np.testing.assert_array_equal(alone.round(vectors), vectors[0] + error)
    assert not alone.residual().any()


@pytest.mark.parametrize("now", [1, 2, 5])
@pytest.mark.parametrize("name", [name for name, one in REDUCERS.items() if one.residual_key])
def test_residuals_survive_a_resume_on_any_number_of_hosts(name: str, now: int) -> None:
    """Two all-reduces on three hosts, two on `now`: the inputs equal the outputs plus the residuals.

    On one host no residual remains. State other than the residual, such as powersgd's Q, is equal on all hosts.
    """

    def rounds(reducers: Sequence[Reducer], seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums of inputs and outputs."""
        inputs, outputs = np.zeros(elements(SHAPES)), np.zeros(elements(SHAPES))
        for number in (seed, seed + 1):
            vectors = gradients(number, len(reducers))
            inputs += vectors.sum(axis=0, dtype=np.float64)
            outputs += fake_hosts.rounds(reducers, vectors)[0]
        return inputs, outputs

    before, after = ([REDUCERS[name](SHAPES) for _ in range(hosts)] for hosts in (3, now))
    first_in, first_out = rounds(before, 0)
    states = [each.state() for each in before]
    for index, each in enumerate(after):
        each.load(each.reshard_state(states, first=index == 0))
    assert residual(before).any()
    np.testing.assert_allclose(residual(after), residual(before), rtol=0, atol=1e-6)
    for other in (each.state() for each in after):
        for kind, array in other.items():
            assert kind == after[0].residual_key or array.tobytes() == states[0][kind].tobytes()
    then_in, then_out = rounds(after, 10)
    assert now > 1 or not residual(after).any()
    np.testing.assert_allclose(first_out + then_out + residual(after), first_in + then_in, rtol=0, atol=1e-4)


@pytest.mark.parametrize("text", ["int4", "local-sgd:every=3,staleness=1+int8"])
@pytest.mark.parametrize("now", [1, 2, 3])
def test_the_first_rank_gets_the_residuals_of_all_ranks(text: str, now: int) -> None:
    """If the number of ranks does not change, each rank keeps the rest of its state."""
    exchange, drawn = parse(text), np.random.default_rng(now)

    def ranks(size: int) -> list[Any]:
        worlds: list[Any] = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
        return [exchange.make(TrainConfig(strategy=text), world, SHAPES) for world in worlds]

    states = [each.state() | {"began": np.full(1, rank)} for rank, each in enumerate(ranks(2))]
    (error,) = (name for name in states[0] if "error" in name)
    for state in states:
        state[error] = drawn.integers(-9, 9, state[error].shape).astype(np.float32)
    after = [each.reshard_state(states) for each in ranks(now)]
    np.testing.assert_array_equal(sum(each[error] for each in after), states[0][error] + states[1][error])
    if exchange.capabilities.local_updates:
        assert [each["began"] for each in after] == ([0, 1] if now == 2 else [0] * now)


@every_kind
def test_zeros_stay_zeros(kind: Kind) -> None:
    job = Job(kind, 3)
    assert not job.round(np.zeros((3, elements(SHAPES)), np.float32)).any()
    assert not job.residual().any()
