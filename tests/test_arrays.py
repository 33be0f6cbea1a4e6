"""Reducers and local SGD on PyTorch tensors: hosts with NumPy arrays and hosts with tensors get the same bits."""

from __future__ import annotations

from typing import Any

import fake_hosts
import numpy as np
import pytest
import torch

from hvdtrain.comm import arrays
from hvdtrain.strategies import parse

SHAPES = [(24, 12, 3, 3), (24,), (7, 24), (7,), (5, 40)]
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)
REDUCERS = ["hierarchical", "bf16", "int8", "int4", "int2", "powersgd:rank=1", "powersgd:rank=3,bits=4"]
ROUNDS = 4


def outputs(spec: str, kinds: list[str], scale: float = 1.0, bad: float = 0.0) -> list[list[bytes]]:
    """For each host, the bytes of the sums of some rounds. `kinds`: numpy, or a device of PyTorch, of each host."""
    chosen = parse(spec).reducer
    assert chosen is not None
    reducers = [chosen.cls(SHAPES, chosen.settings) for _ in kinds]
    inputs = np.random.default_rng(0).standard_normal((ROUNDS, len(kinds), SIZE), np.float32) * np.float32(scale)
    inputs[1, 0, 100] += bad

    def host(hosts: Any) -> list[bytes]:
        kind, results = kinds[hosts.index], []
        for values in inputs[:, hosts.index].copy():
            vector = values if kind == "numpy" else torch.from_numpy(values).to(kind)
            reducers[hosts.index].all_reduce(vector, hosts)
            results.append(arrays.to_host(vector).tobytes())
        if not bad:
            reducers[hosts.index].load(reducers[hosts.index].state())
        return results

    return fake_hosts.run(len(kinds), host)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    return str(request.param)


@pytest.mark.parametrize("scale", [1.0, 1e-37])
@pytest.mark.parametrize("spec", REDUCERS)
def test_hosts_decode_the_same_bits(spec: str, scale: float, device: str) -> None:
    first, *others = outputs(spec, ["numpy", device, device, "numpy"], scale)
    assert all(other == first for other in others)
    assert np.frombuffer(first[0], np.float32).any() or scale < 1


@pytest.mark.parametrize("spec", [spec for spec in REDUCERS if not spec.startswith("powersgd")])
def test_tensors_give_the_same_bits_as_numpy(spec: str, device: str) -> None:
    assert outputs(spec, [device] * 3) == outputs(spec, ["numpy"] * 3)


@pytest.mark.parametrize("spec", ["powersgd:rank=1", "powersgd:rank=3,bits=4", "powersgd:rank=3,bits=32"])
def test_low_rank_sums_of_tensors_are_those_of_numpy(spec: str, device: str) -> None:
    """The products that each host makes of its own numbers may round differently."""
    for one, other in zip(outputs(spec, [device] * 2)[0], outputs(spec, ["numpy"] * 2)[0], strict=True):
        one, other = (np.frombuffer(each, np.float32) for each in (one, other))
        assert np.linalg.norm(one - other) < 2e-3 * np.linalg.norm(other)


@pytest.mark.parametrize("spec", ["hierarchical", "bf16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_reach_all_hosts(spec: str, bad: float, device: str) -> None:
    for results in outputs(spec, ["numpy", device], bad=bad):
        assert not np.isfinite(np.frombuffer(results[1], np.float32)[100])
        assert np.isfinite(np.frombuffer(results[1], np.float32)[1000:]).all()
