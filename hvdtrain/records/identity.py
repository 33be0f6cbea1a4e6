"""The identity of a run: the settings that must be equal to resume it from a checkpoint.

These are workload, model, data, optimizer, exchange, global batch, micro-batches, samples per epoch and seed. All
other settings may change, such as the learning rate, the number of epochs and the framework. The number of ranks, their
hosts, their shares of a batch and the pipeline stages may change if the exchange can reshard its state
(`strategies.Strategy.bound`).
"""

from __future__ import annotations

from typing import Any


def differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """`width: 0.125 there, 1.0 here` for each setting that differs, including nested ones."""
    differences = []
    for name in there | here:
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            differences += differing(old, new)
        elif old != new:
            differences.append(f"{name}: {old!a:.80} there, {new!a:.80} here")
    return differences
