"""The reducer `bf16`: what is sent in 16 bits, and how far the result may be from the exact sum."""

from __future__ import annotations

import fake_hosts
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16
from hvdtrain.strategies.reducers.cast import BF16, decode, encode

UNIT = 2.0**-8
"""Largest relative error of rounding once"""
floats = some.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def exchanged(vectors: np.ndarray) -> np.ndarray:
    """Return the sum, after checking that each host sends the bytes that `cost` predicts."""
    hosts, size = vectors.shape
    out, sent = fake_hosts.rounds([BF16([(size,)]) for _ in range(hosts)], vectors)
    assert sent == BF16.cost([(size,)], hosts).sent_bytes
    return out


@given(data=some.data(), hosts=some.integers(1, 5), size=some.integers(0, 23))
def test_the_error_is_at_most_that_of_two_roundings(data: some.DataObject, hosts: int, size: int) -> None:
    numbers = data.draw(some.lists(floats, min_size=hosts * size, max_size=hosts * size))
    vectors = np.array(numbers, np.float32).reshape(hosts, size)
    got, exact = exchanged(vectors).astype(np.float64), vectors.astype(np.float64).sum(axis=0)
    if hosts == 1:
        np.testing.assert_array_equal(got, exact)
        return
    magnitude = np.abs(vectors.astype(np.float64)).sum(axis=0)
    bound = UNIT * (np.abs(exact) + magnitude) + (UNIT**2 + hosts * 2.0**-23) * magnitude + 2.0**-149
    assert (np.abs(got - exact) <= bound).all()


@given(data=some.data(), hosts=some.integers(2, 5), size=some.integers(1, 23), power=some.integers(-100, 100))
def test_representable_sums_of_representable_numbers_are_exact(
    data: some.DataObject, hosts: int, size: int, power: int
) -> None:
    most = int(1 / UNIT) // hosts
    numbers = data.draw(some.lists(some.integers(-most, most), min_size=hosts * size, max_size=hosts * size))
    vectors = np.ldexp(np.array(numbers, np.float32), power).reshape(hosts, size)
    np.testing.assert_array_equal(exchanged(vectors), vectors.sum(axis=0))


def test_every_bfloat16_survives_encoding() -> None:
    every = from_bf16(np.arange(2**16, dtype=np.uint16))
    message, out = np.empty(every.size, np.uint16), np.empty_like(every)
    encode(every, message)
    decode(message, out)
    np.testing.assert_array_equal(out, every)


@given(some.integers(0, 2**32 - 1))
def test_numbers_are_rounded_to_the_nearest_ties_to_even(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    got = from_bf16(to_bf16(value))
    if np.isnan(value[0]):
        assert np.isnan(got[0])
        return
    below = bits >> 16 << 16
    near = np.array([below, (below + 0x10000) & 0xFFFFFFFF], np.uint32).view(np.float32)
    if not np.isfinite(near).all():
        return
    errors = np.abs(near.astype(np.float64) - value)
    best = (below >> 16) & 1 if errors[0] == errors[1] else int(errors[1] < errors[0])
    assert got.tobytes() == near[best : best + 1].tobytes()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e9, 1e37])
def test_gradients_of_any_magnitude_neither_overflow_nor_vanish(size: float) -> None:
    vectors = (np.random.default_rng(0).uniform(0.5, 1, (4, 100)) * size).astype(np.float32)
    np.testing.assert_allclose(exchanged(vectors), vectors.sum(axis=0, dtype=np.float64), rtol=2.1 * UNIT)
