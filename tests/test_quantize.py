"""Sums in 8, 4 and 2 bits: the parts that each host says are included add up to the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_hosts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.strategies.cost import Cost
from hvdtrain.strategies.reducers import cast, compiled, quantize


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sent_bytes(numbers: int, hosts: int, bits: int) -> float:
    """Return the bytes that each host sends."""
    return Cost(phases=quantize.sum_phases(numbers, hosts, bits)).sent_bytes


def totals(inputs: np.ndarray, bits: int, rest: bool = False) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the sum, the included part of each host (or the rest), and the bytes that each host sends."""

    def host(hosts: Any) -> tuple[np.ndarray, np.ndarray, int]:
        own = inputs[hosts.index].copy()
        values = np.empty_like(own)
        quantize.quantized_sum(own, values, hosts, bits, rest=rest)
        return values, own, hosts.sent_bytes

    results = fake_hosts.run(len(inputs), host)
    assert len({(values.tobytes(), sent) for values, _, sent in results}) == 1
    return results[0][0], np.stack([own for _, own, _ in results]), results[0][2]


@settings(max_examples=80)
@given(
    size=st.integers(0, 700),
    hosts=st.integers(1, 5),
    bits=st.sampled_from([32, 8, 4, 2]),
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
    again, rest, _ = totals(inputs, bits, rest=True)
    assert np.array_equal(again, out)
    assert np.array_equal(rest, inputs - own)


@settings(max_examples=80)
@given(
    size=st.integers(0, 100_000),
    bits=st.sampled_from([8, 4, 2]),
    bad=st.sampled_from([0.0, np.nan, -np.inf, 1e-37, 3e38]),
    seed=st.integers(0, 999),
)
def test_compiled_and_numpy_give_the_same_bits(size: int, bits: int, bad: float, seed: int) -> None:
    assert compiled.loops(), "needs a C compiler"
    rng = np.random.default_rng(seed)
    values = normal(seed, size) * np.float32(10.0) ** rng.integers(-3, 4, size).astype(np.float32)
    values[: size // 3 : 50] = bad
    blocks, results = -(-size // quantize.LENGTH) + 2, []
    for loops in (compiled.loops, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "loops", loops)
            message = quantize.encode(values, blocks, bits)
            decoded = [values.copy() for _ in range(3)]
            for how in (compiled.SET, compiled.ADD, compiled.SUBTRACT):
                quantize.decode(message, decoded[how], bits, how)
            halves = np.empty(size + 1, np.uint16)
            cast.encode(values, halves)
            cast.decode(halves.view(np.uint8), wide := values.copy(), compiled.ADD)
        results.append([message, *decoded, halves, wide])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype == np.float32)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_multiples_of_the_scale_are_exact(bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    inputs = np.zeros((3, 20_000), np.float32)  # with all 243 contents of a byte of five numbers
    inputs[1] = np.random.default_rng(0).integers(-top, top + 1, 20_000) * 0.25
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


@pytest.mark.parametrize("loops", [compiled.loops, lambda: None], ids=["compiled", "numpy"])
def test_a_short_message_is_an_error(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "loops", loops)
    values = normal(0, 100)
    for bits in (8, 4, 2):
        message = quantize.encode(values, 2, bits)
        for short in (message[:-40], message[:9], message[:0]):
            with pytest.raises(RuntimeError, match="fewer than 100 numbers"):
                quantize.decode(short, values, bits)
    with pytest.raises(RuntimeError, match="fewer than 100 numbers"):
        cast.decode(np.zeros(198, np.uint8), values)


def test_code_is_compiled_again_if_it_is_damaged_and_a_line_says_if_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -O2")
    load = compiled.loops.__wrapped__
    assert load()
    (library,) = (tmp_path / "hvdtrain").iterdir()
    library.unlink()
    library.touch()
    assert load() and library.stat().st_size
    library.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nope")
    assert load() and not capfd.readouterr().err
    monkeypatch.setenv("CC", "no-such-compiler")
    assert load() is None
    line = capfd.readouterr().err
    assert line.count("\n") == 1 and "; hint: " in line
