"""What a run is: what must be equal for a checkpoint to continue it, and in what two descriptions of it differ.

Must match: workload, model, data, optimizer, exchange, the size of the global batch, micro-batches, the samples
of an epoch where they are told, seed. May change:
everything else, such as the learning rate, the number of epochs, the framework; and who trains: the number of ranks,
their hosts, their shares of a batch, the stages that the model is cut into, wherever the exchange can hand its state on
(`strategies.Strategy.bound`).
"""

from __future__ import annotations

from typing import Any


def differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """`width: 0.125 there, 1.0 here` for each setting in which two descriptions differ, nested ones included."""
    found = []
    for name in there | here:
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differing(old, new)
        elif old != new:
            found.append(f"{name}: {old!a:.80} there, {new!a:.80} here")
    return found
