"""powersgd: outputs plus residuals equal the inputs, and all hosts get the same bits."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import pytest
from conftest import finished
from fake_hosts import rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.strategies.cost import elements
from hvdtrain.strategies.reducers import matrices
from hvdtrain.strategies.reducers.powersgd import PowerSGD, add_terms, product
from hvdtrain.system.exits import Failure

MIXED = [(24, 8, 3, 3), (24,), (), (6, 5), (5, 1, 7, 7), (1, 40), (64, 20), (20,)]
Bits = Literal[32, 8, 4]


def settings_of(rank: int, bits: Bits = 32) -> PowerSGD.Settings:
    return PowerSGD.Settings(rank=rank, bits=bits)


def reducers_of(hosts: int, shapes: Sequence[Sequence[int]], rank: int, bits: Bits = 32) -> list[PowerSGD]:
    return [PowerSGD(shapes, settings_of(rank, bits)) for _ in range(hosts)]


def residual(reducers: list[PowerSGD]) -> np.ndarray:
    """Return the sum of the hosts' residuals."""
    return np.sum([reducer.state()["error"].astype(np.float64) for reducer in reducers], axis=0)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def low_rank(seed: int, rows: int, columns: int, rank: int) -> np.ndarray:
    return normal(seed, rows, rank) @ normal(seed + 1, rank, columns)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / max(float(np.linalg.norm(b)), 1e-30))


shapes_of_arrays = st.lists(
    st.lists(st.integers(1, 9), max_size=4).map(tuple) | st.tuples(st.integers(1, 40), st.integers(1, 90)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60)
@given(
    shapes=shapes_of_arrays,
    hosts=st.integers(1, 4),
    rank=st.integers(1, 6),
    bits=st.sampled_from(get_args(Bits)),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]),
    seed=st.integers(0, 999),
)
def test_nothing_is_lost(
    shapes: list[tuple[int, ...]], hosts: int, rank: int, bits: Bits, scale: float, seed: int
) -> None:
    reducers = reducers_of(hosts, shapes, rank, bits)
    for turn in range(3):
        inputs = normal(seed + turn, hosts, elements(shapes)) * np.float32(scale)
        inputs_and_residual = inputs.sum(axis=0, dtype=np.float64) + residual(reducers)
        out, sent = rounds(reducers, inputs)
        size = float(np.abs(inputs_and_residual).max()) * hosts
        np.testing.assert_allclose(out + residual(reducers), inputs_and_residual, atol=1e-5 * size, rtol=0)
        assert sent == PowerSGD.cost(shapes, hosts, settings_of(rank, bits)).sent_bytes
        assert hosts > 1 or (np.array_equal(out, inputs[0]) and sent == 0), "one host gets its own"


def test_four_hosts_equal_one_host_with_their_sum() -> None:
    four, one = reducers_of(4, MIXED, 2), reducers_of(2, MIXED, 2)
    for turn in range(4):
        inputs = normal(turn, 4, elements(MIXED))
        whole = inputs.sum(axis=0)
        assert distance(rounds(four, inputs)[0], rounds(one, [whole, np.zeros_like(whole)])[0]) < 1e-5
        assert distance(residual(four), residual(one)) < 1e-5


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (3, 3, 8, 9)])
def test_full_rank_is_exact(shape: tuple[int, ...]) -> None:
    """Also next to a larger matrix, whose rank is not full, and next to a smaller one."""
    size = math.prod(shape)
    inputs = normal(3, 3, size + 70 * 90)
    out, _ = rounds(reducers_of(3, [shape, (70, 90)], 12), inputs)
    whole = inputs.sum(axis=0)
    assert distance(out[:size], whole[:size]) < 1e-5
    assert distance(out[size:], whole[size:]) > 0.1
    inputs = normal(4, 2, 12 * 300 + 5 * 5)
    assert distance(rounds(reducers_of(2, [(12, 300), (5, 5)], 12), inputs)[0], inputs.sum(axis=0)) < 1e-5


@pytest.mark.parametrize(("rank", "true"), [(1, 1), (2, 2), (7, 5)])
def test_a_matrix_of_at_most_the_rank_is_exact(rank: int, true: int) -> None:
    whole = low_rank(5, 40, 90, true)
    parts = normal(7, 2, 40, 90)
    inputs = np.stack([parts[0] - parts[1], whole - parts[0] + parts[1]]).reshape(2, -1)
    reducers = reducers_of(2, [(40, 90)], rank)
    for _ in range(3):
        assert distance(rounds(reducers, inputs)[0], whole.ravel()) < 1e-5


def test_vectors_are_exact() -> None:
    shapes = [(7,), (64, 64), (), (1, 9), (0, 7), (9,)]
    inputs = normal(1, 3, elements(shapes))
    out, _ = rounds(reducers_of(3, shapes, 1), inputs)
    exact = inputs[0] + inputs[1] + inputs[2]
    vectors = np.r_[:7, 7 + 64 * 64 : len(out)]
    assert np.array_equal(out[vectors], exact[vectors])
    assert not np.array_equal(out, exact)


@pytest.mark.parametrize("bits", get_args(Bits))
def test_zeros_stay_zeros_and_training_continues_after_them(bits: Bits) -> None:
    shapes = [(16, 64), (64, 16), (20, 60)]
    reducers = reducers_of(2, shapes, 3, bits)
    for _ in range(2):
        assert not rounds(reducers, np.zeros((2, elements(shapes)), np.float32))[0].any()
        assert not residual(reducers).any()
    inputs = normal(0, 2, elements(shapes))
    inputs[:, :1024] = 0
    out, _ = rounds(reducers, inputs)
    assert not out[:1024].any()
    assert np.isfinite(out).all()
    assert out[1024:2048].any()
    assert out[2048:].any()
    whole = low_rank(0, 16, 64, 3).ravel()
    inputs[0, :1024] = whole
    assert distance(rounds(reducers, inputs)[0][:1024], whole) < {32: 1e-5, 8: 0.05, 4: 0.9}[bits]


@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-5])
def test_nearly_dependent_columns_are_a_projection(noise: float) -> None:
    whole = low_rank(2, 48, 60, 1) + np.float32(noise) * normal(4, 48, 60)
    reducers = reducers_of(2, [(48, 60)], 4)
    for _ in range(5):
        error = residual(reducers)
        out, _ = rounds(reducers, np.stack([whole, np.zeros_like(whole)]).reshape(2, -1))
        assert distance(out, whole.ravel() + error) < 1e-5 + noise * 10
    assert np.linalg.norm(residual(reducers)) <= (1e-5 + 10 * noise) * np.linalg.norm(whole)


@pytest.mark.parametrize("apart", [0.0, 1e-6, 1e-3])
def test_a_start_of_nearly_equal_columns_gives_a_projection(apart: float) -> None:
    """The output is perpendicular to the residual, so their squares add up."""
    whole = normal(0, 50 * 60)
    reducers = reducers_of(2, [(50, 60)], 5)
    start = (normal(1, 60) + np.float32(apart) * normal(2, 5, 60)).astype(np.float32)
    for reducer in reducers:
        reducer.load({**reducer.state(), "q": start.ravel()})
    out, _ = rounds(reducers, np.stack([whole, np.zeros_like(whole)]))
    squares = [float(np.linalg.norm(part.astype(np.float64)) ** 2) for part in (out, residual(reducers), whole)]
    assert abs(squares[0] + squares[1] - squares[2]) < 1e-5 * squares[2]


@pytest.mark.parametrize("bits", get_args(Bits))
@pytest.mark.parametrize("where", [5, 24 * 72 + 5, -1])
def test_nan_is_not_hidden(bits: Bits, where: int) -> None:
    """NaN and infinity arrive, in a matrix and in vectors."""
    inputs = normal(0, 2, elements(MIXED))
    inputs[1, where] = np.nan
    assert np.isnan(rounds(reducers_of(2, MIXED, 2, bits), inputs)[0][where])
    inputs[1, where] = np.inf
    assert not np.isfinite(rounds(reducers_of(2, MIXED, 2, bits), inputs)[0][where])


def test_the_state_of_another_rank_setting_is_rejected() -> None:
    with pytest.raises(Failure, match="q of powersgd has 206 numbers"):
        reducers_of(1, MIXED, 1)[0].load(reducers_of(1, MIXED, 2)[0].state())
    with pytest.raises(Failure, match="error"):
        reducers_of(1, MIXED, 1)[0].load(reducers_of(1, [*MIXED, (3,)], 1)[0].state())


def test_tensorflows_layout_gives_the_transpose() -> None:
    """(height, width, in, out) and (out, in, height, width) give transposed results."""
    tf_shapes, torch_shapes = [(3, 3, 6, 20), (20,), (4, 12, 4)], [(20, 6, 3, 3), (20,), (4, 12, 4)]
    tensorflow, torch = reducers_of(2, tf_shapes, 3), reducers_of(2, torch_shapes, 3)
    order = np.arange(1080).reshape(3, 3, 6, 20).transpose(3, 2, 0, 1).ravel()
    # The long side of the first matrix is (h, w, in) or (in, h, w). Start with equal rows of Q.
    state = tensorflow[0].state()
    rank = matrices.plan(torch_shapes, 3)[0][0].rank
    first = state["q"][: rank * 54].reshape(rank, 3, 3, 6).transpose(0, 3, 1, 2).ravel()
    for reducer in torch:
        reducer.load({"error": state["error"], "q": np.concatenate([first, state["q"][rank * 54 :]])})
    for turn in range(4):
        inputs = normal(turn, 2, elements(tf_shapes))
        moved = np.concatenate([inputs[:, order], inputs[:, 1080:]], axis=1)
        out, same = rounds(tensorflow, inputs)[0], rounds(torch, moved)[0]
        assert distance(same, np.concatenate([out[order], out[1080:]])) < 1e-5


@pytest.mark.parametrize(("bits", "off"), [(8, 0.02), (4, 0.3)])
def test_rounding_adds_little_to_the_error_of_a_low_rank(bits: Bits, off: float) -> None:
    """Compares the residuals after 20 rounds with 32 bits and with fewer."""
    shapes = [(64, 32, 3, 3), (64,), (32, 64), (10, 64)]
    inputs = normal(0, 4, elements(shapes))
    residuals = []
    for reducers in (reducers_of(4, shapes, 2), reducers_of(4, shapes, 2, bits)):
        for _ in range(20):
            rounds(reducers, inputs)
        residuals.append(float(np.linalg.norm(residual(reducers))))
    assert residuals[1] < (1 + off) * residuals[0]


def test_a_warm_start_finds_the_best_projection() -> None:
    singular = 0.7 ** np.arange(40)
    left_side, right_side = np.linalg.qr(normal(0, 40, 40))[0], np.linalg.qr(normal(1, 90, 40))[0]
    whole = ((left_side * singular) @ right_side.T).astype(np.float32)
    best = float(np.linalg.norm(singular[3:]) / np.linalg.norm(singular))
    reducers = reducers_of(2, [(40, 90)], 3)
    missed = []
    for _ in range(12):
        missed.append(distance(rounds(reducers, np.stack([whole, 0 * whole]).reshape(2, -1))[0], whole.ravel()))
        for reducer in reducers:
            reducer.load({**reducer.state(), "error": np.zeros(whole.size, np.float32)})
    assert missed[0] > 1.05 * best
    assert missed[-1] < 1.001 * best


@settings(max_examples=60)
@given(st.integers(1, 32), st.integers(2, 70), st.integers(2, 300))
def test_the_fast_product_rounds_like_single_operations(rank: int, rows: int, columns: int) -> None:
    p, q = normal(rank, rank, rows), normal(rows, rank, columns)
    fast, slow = np.empty((2, columns, rows), np.float32)
    term = np.empty_like(fast)
    product(p, q, fast.T, term.T)
    add_terms(p, q, slow.T, term.T)
    assert fast.tobytes() == slow.tobytes()


class GivenSums:
    """A leader group of two hosts of which only one exists. Sums are random."""

    count, index, sent_bytes = 2, 0, 0

    def __init__(self) -> None:
        self.turn = 0

    def all_reduce(self, values: np.ndarray) -> None:
        self.turn += 1
        values[:] = normal(self.turn, values.size)


def digest_of_given_sums() -> str:
    reducer, values = PowerSGD(MIXED, settings_of(6)), normal(0, elements(MIXED))
    reducer.all_reduce(values, GivenSums())  # type: ignore[arg-type]
    return hashlib.sha256(values.tobytes()).hexdigest()


def test_processors_of_different_types_get_the_same_bits() -> None:
    """Without fused multiply-add OpenBLAS rounds differently. Both it and NumPy can do without."""
    program = "import test_powersgd; print(test_powersgd.digest_of_given_sums())"
    digests = {
        finished([sys.executable, "-c", program], extra={**limits, "PYTHONPATH": "tests"}).stdout
        for limits in (
            {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "X86_V3"},
            {"OPENBLAS_CORETYPE": "Haswell"},
        )
    }
    assert len(digests) == 1 and digests != {""}
