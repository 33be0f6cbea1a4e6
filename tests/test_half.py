"""`--strategy fp16` and `bf16`: what crosses the network in 16 bits, and how far from the exact sum that may be."""

from __future__ import annotations

import fake_hosts
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16
from hvdtrain.strategies.reducers.cast import BF16, BLOCK, FP16, Half, scale_exponent

UNIT = {FP16: 2.0**-11, BF16: 2.0**-8}
"""Largest relative error of rounding once"""
FLOOR = {FP16: 2.0**-40, BF16: 0.0}
"""Largest error of rounding what is far below the largest number, as a share of that"""
both = pytest.mark.parametrize("kind", [FP16, BF16])
floats = some.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def exchanged(kind: type[Half], vectors: np.ndarray) -> np.ndarray:
    """The outcome of a round; the same bits on all hosts, and the bytes that were foretold."""
    hosts, size = vectors.shape
    out, sent = fake_hosts.rounds([kind([(size,)]) for _ in range(hosts)], vectors)
    assert sent == (kind.cost([(size,)], hosts).sent_bytes if size else 0)
    return out


def passed(kind: type[Half], values: np.ndarray) -> np.ndarray:
    """What one message makes of float32 numbers."""
    reducer, out = kind([(values.size,)]), np.empty_like(values)
    message = np.empty(kind.head + values.size, np.uint16)
    reducer.encode(values, message)
    reducer.decode(message, out)
    return out


@given(data=some.data(), hosts=some.integers(1, 5), size=some.integers(0, 23))
@both
def test_the_sum_is_off_by_two_roundings_at_most(
    kind: type[Half], data: some.DataObject, hosts: int, size: int
) -> None:
    numbers = data.draw(some.lists(floats, min_size=hosts * size, max_size=hosts * size))
    vectors = np.array(numbers, np.float32).reshape(hosts, size)
    got, exact = exchanged(kind, vectors).astype(np.float64), vectors.astype(np.float64).sum(axis=0)
    if hosts == 1:
        np.testing.assert_array_equal(got, exact)
        return
    magnitude = np.abs(vectors.astype(np.float64)).sum(axis=0)
    bound = UNIT[kind] * (np.abs(exact) + magnitude) + (UNIT[kind] ** 2 + hosts * 2.0**-23) * magnitude
    bound += 2 * hosts * FLOOR[kind] * np.abs(vectors).max(initial=0) + 2.0**-149
    assert (np.abs(got - exact) <= bound).all()


@given(data=some.data(), hosts=some.integers(2, 5), size=some.integers(1, 23), power=some.integers(-100, 100))
@both
def test_representable_sums_of_representable_numbers_are_exact(
    kind: type[Half], data: some.DataObject, hosts: int, size: int, power: int
) -> None:
    most = int(1 / UNIT[kind]) // hosts
    numbers = data.draw(some.lists(some.integers(-most, most), min_size=hosts * size, max_size=hosts * size))
    vectors = np.ldexp(np.array(numbers, np.float32), power).reshape(hosts, size)
    np.testing.assert_array_equal(exchanged(kind, vectors), vectors.sum(axis=0))


def test_every_binary16_arrives_as_it_was() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)].astype(np.float32)
    assert finite.size > BLOCK, "more than one block"
    assert passed(FP16, finite).tobytes() == finite.tobytes()
    small = finite[np.abs(finite) < 1]
    assert passed(FP16, small).tobytes() == small.tobytes(), "scaled up"
    np.testing.assert_array_equal(
        passed(FP16, every.astype(np.float32)), every.astype(np.float32), "with NaN, infinity"
    )


def test_every_bfloat16_arrives_as_it_was() -> None:
    every = from_bf16(np.arange(2**16, dtype=np.uint16))
    np.testing.assert_array_equal(passed(BF16, every), every)


@given(some.lists(floats, min_size=1, max_size=50))
def test_fp16_rounds_as_numpy_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    factor = 2.0 ** scale_exponent(values)
    scaled = (values * factor).astype(np.float16).astype(np.float64)
    normal = np.abs(scaled) >= 2.0**-14
    np.testing.assert_array_equal(passed(FP16, values)[normal], scaled[normal] / factor)


def test_fp16_rounds_ties_to_even() -> None:
    values = np.arange(2**13, dtype=np.float32)  # halfway between two above 2048
    np.testing.assert_array_equal(passed(FP16, values), values.astype(np.float16))


@pytest.mark.parametrize("largest", [1.0, 65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 3e38, 2.0**-149])
def test_an_fp16_message_is_binary16_near_its_upper_end(largest: float) -> None:
    message = np.empty(3, np.uint16)
    FP16([(2,)]).encode(np.array([largest, -largest], np.float32), message)
    sent = message[1:].view(np.float16).astype(np.float32)
    assert sent[0] == -sent[1]
    assert sent[0] == largest * 2.0**126 if largest < 1e-40 else 32760 <= sent[0] <= 65504


@given(some.integers(0, 2**32 - 1))
def test_bf16_is_the_nearest_and_of_two_the_even(bits: int) -> None:
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


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-6, 1.0, 65519.0, 65520.0, 1e9, 1e37])
@both
def test_no_size_of_gradients_overflows_or_vanishes(kind: type[Half], size: float) -> None:
    vectors = (np.random.default_rng(0).uniform(0.5, 1, (4, 100)) * size).astype(np.float32)
    np.testing.assert_allclose(exchanged(kind, vectors), vectors.sum(axis=0, dtype=np.float64), rtol=2.1 * UNIT[kind])


@both
def test_sums_smaller_than_their_parts_and_zeros(kind: type[Half]) -> None:
    vectors = np.array([[1e-8, 0, 3], [-1e-8, 0, -3]], np.float32)
    np.testing.assert_allclose(exchanged(kind, vectors), 0, atol=UNIT[kind] * 3e-8)
    np.testing.assert_array_equal(exchanged(kind, np.zeros((3, 7), np.float32)), 0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@both
def test_infinity_and_nan_reach_all_hosts(kind: type[Half], bad: float) -> None:
    for host in range(3):
        vectors = np.ones((3, 10), np.float32)
        vectors[host, 5] = bad
        got = exchanged(kind, vectors)
        np.testing.assert_array_equal(got[5], bad)
        np.testing.assert_array_equal(np.delete(got, 5), 3)


@both
def test_half_the_bytes_of_an_exact_sum(kind: type[Half]) -> None:
    shapes = list(parameters(ResNetSpec(channels=1, classes=10, width=0.25)).values())
    exact = 2 * 3 * 4 * sum(int(np.prod(shape)) for shape in shapes) / 4
    assert kind.cost(shapes, 4).sent_bytes == pytest.approx(exact / 2, rel=1e-5)
    assert kind.cost(shapes, 1).sent_bytes == 0
    assert kind(shapes).state() == {}
