"""Sums in 8 and 4 bits: the parts that each host says are included add up to the result."""

from __future__ import annotations

from typing import Any

import fake_hosts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.strategies.cost import Cost
from hvdtrain.strategies.reducers import quantize


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sent_bytes(numbers: int, hosts: int, bits: int) -> float:
    """Return the bytes that each host sends."""
    return Cost(phases=quantize.sum_phases(numbers, hosts, bits)).sent_bytes


def totals(inputs: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the sum, the included part of each host, and the bytes that each host sends."""

    def host(hosts: Any) -> tuple[np.ndarray, np.ndarray, int]:
        values = inputs[hosts.index].copy()
        own = quantize.quantized_sum(values, hosts, bits)
        return values, own, hosts.sent_bytes

    results = fake_hosts.run(len(inputs), host)
    assert len({(values.tobytes(), sent) for values, _, sent in results}) == 1
    return results[0][0], np.stack([own for _, own, _ in results]), results[0][2]


@settings(max_examples=80)
@given(
    size=st.integers(0, 700),
    hosts=st.integers(1, 5),
    bits=st.sampled_from([32, 8, 4]),
    scale=st.sampled_from([1e-38, 1e-30, 1.0, 1e30]),
    seed=st.integers(0, 999),
)
def test_included_parts_add_up_to_the_result(size: int, hosts: int, bits: int, scale: float, seed: int) -> None:
    inputs = normal(seed, hosts, size) * np.float32(scale)
    out, own, sent = totals(inputs, bits)
    exact = inputs.sum(axis=0, dtype=np.float64)
    largest = max((float(np.abs(part).max(initial=0)) for part in (*inputs, out)), default=0.0)
    np.testing.assert_allclose(own.sum(axis=0, dtype=np.float64), out, atol=3e-6 * largest * hosts, rtol=0)
    half_a_step = 0.51 / (2 ** (bits - 1) - 1) * largest + 2 * float(quantize.TINY)
    np.testing.assert_allclose(out, exact, atol=(hosts + 1) * half_a_step + 1e-6 * largest, rtol=0)
    assert sent == sent_bytes(size, hosts, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_multiples_of_the_scale_are_exact(bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    inputs = np.zeros((3, 1000), np.float32)
    inputs[1] = np.random.default_rng(0).integers(-top, top + 1, 1000) * 0.25
    inputs[1, ::64] = top * 0.25
    out, own, _ = totals(inputs, bits)
    assert np.array_equal(out, inputs[1])
    assert np.array_equal(own, inputs)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_has_its_own_scale(bits: int) -> None:
    inputs = normal(0, 2, 64 * 8)
    inputs[:, 64:128] *= 1e-20
    out, _, _ = totals(inputs, bits)
    assert np.abs(out - inputs.sum(axis=0))[64:128].max() < 1e-20


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits: int) -> None:
    out, own, _ = totals(np.zeros((3, 500), np.float32), bits)
    assert not out.any()
    assert not own.any()


def test_a_quarter_and_an_eighth_of_the_bytes() -> None:
    exact = 2 * 3 * 4 * 10_000 / 4
    assert sent_bytes(10_000, 4, 32) == exact
    assert sent_bytes(10_000, 4, 8) == 2 * 3 * 40 * 68 == pytest.approx(exact / 4, rel=0.1)
    assert sent_bytes(10_000, 4, 4) == 2 * 3 * 40 * 36 == pytest.approx(exact / 8, rel=0.2)
