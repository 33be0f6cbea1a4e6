"""What a dense layer's gradient is made of, where that is less than the gradient: its inputs and output gradients.

The gradient of a weight (a, b) that n rows were multiplied with is slopes.T @ inputs, of slopes (n, a) and inputs (n,
b): the sum over rows of outer products, and over ranks of all ranks' rows. So each rank sends n (a + b) numbers instead
of a b, all get all rows, and each makes the sum in one product; no rank makes the product of its own rows. It is exact,
up to the order in which numbers are added. All other arrays, and the layers for which that is no less, are summed
between hosts as ever. Which way a layer goes is known before step 0: with h hosts and n rows on each, (h-1) n (a + b)
numbers against 2(h-1)/h a b, so factors are less where n h < 2 a b / (a + b); more ranks make them worse, a small batch
better. The ranks of a host collect their rows in its first one, and rows cross the network once for each other host.

It costs work: each rank multiplies the rows of all ranks. All ranks must round that product alike (the same kind of
processor, the same number of threads), or their weights drift apart in the last digit; --check-replicas notices.

Xie et al., "Distributed machine learning via sufficient factor broadcasting", 2015;
Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU clusters", 2017.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements, ring_bytes
from hvdtrain.strategies.replicas import Exchanged, Factored, Vectors

FLOAT_BYTES = 4
USUAL_HOSTS = 2
"""For which a lone process says what would be sent"""


class Factors(Strategy):
    """No schedule and no reducer: what it sums is not in the vector. It keeps no state."""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        ways, parts = chosen(shapes, layout), senders(layout)
        rest = [shape for index, shape in enumerate(shapes) if index not in ways]
        sent = sum(ways.values()) + ring_bytes(FLOAT_BYTES * elements(rest), parts)
        work = sum(layout.rows[index] * (layout.ranks - 1) * elements([shapes[index]]) for index in ways)
        rounds = (3 if ways else 2) * (parts - 1)
        return Cost(sent_bytes=sent, rounds=rounds, work=work, ways=told(shapes, layout))

    def plan(self, layout: Layout) -> None:
        hosts = self._world.hosts_count  # a rank's own layout is a guess if hosts are unequal
        self.factored = list(chosen(self._shapes, dataclasses.replace(layout, hosts=hosts)))

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector, holder = replica.vector(), cast(Factored, replica)
        factors = holder.factors() if self.factored else {}
        ranks, sent_before = self._world, self._world.sent_bytes
        with clock.span("communication"):
            ranks.local_reduce(vector)
            if leaders := ranks.leaders:
                leaders.all_reduce(vector)
            ranks.local_broadcast(vector)
            everyones = [self._read(each, factors) for each in ranks.collect(joined(factors))] if factors else []
        with clock.span("compute"):
            if factors:
                holder.multiply({i: tuple(zip(*(each[i] for each in everyones), strict=True)) for i in factors})
            replica.apply(lr)
        size = self._size - elements([self._shapes[index] for index in factors])
        return Exchanged.of(vector[size:], ranks.sent_bytes - sent_before)

    def _read(self, message: np.ndarray, order: Mapping[int, Any]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """What `joined` made of a rank's factors."""
        counts, rest = message[: 8 * len(order)].view(np.int64), message[8 * len(order) :].view(np.float32)
        found = {}
        for index, count in zip(order, counts.tolist(), strict=True):
            a, b = self._shapes[index]
            first, second, rest = np.split(rest, [count * a, count * (a + b)])
            found[index] = first.reshape(count, a), second.reshape(count, b)
        return found


def joined(factors: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """One message: how many rows each has, and the rows."""
    counts = np.array([len(first) for first, _ in factors.values()]).view(np.float32)
    return np.concatenate([counts, *(each.reshape(-1) for pair in factors.values() for each in pair)])


def senders(layout: Layout) -> int:
    """Hosts, or on one host its ranks."""
    return layout.hosts if layout.hosts > 1 else layout.ranks


def chosen(shapes: Sequence[Shape], layout: Layout) -> dict[int, float]:
    """Which arrays are sent as factors: place -> bytes that each host gives to the network."""
    ways, parts = {}, senders(layout)
    for index, (shape, rows) in enumerate(zip(shapes, layout.rows, strict=False)):
        sent = FLOAT_BYTES * (parts - 1) * rows * layout.ranks / parts * sum(shape)
        if 0 < sent < ring_bytes(FLOAT_BYTES * elements([shape]), parts):
            ways[index] = sent
    return ways


def told(shapes: Sequence[Shape], layout: Layout) -> tuple[str, ...]:
    """Each dense layer's way and bytes as in `Cost.sent_bytes`; what they would be for a process that is alone."""
    lines = []
    if layout.ranks == 1:
        layout = dataclasses.replace(layout, ranks=USUAL_HOSTS, hosts=USUAL_HOSTS)
        lines.append(f"if there were {USUAL_HOSTS} hosts with as many samples each")
    ways = chosen(shapes, layout)
    for index, (shape, rows) in enumerate(zip(shapes, layout.rows, strict=False)):
        if rows:
            whole = ring_bytes(FLOAT_BYTES * elements([shape]), senders(layout))
            way = f"factors, {ways[index] / 1e6:.3f} MB instead of" if index in ways else "whole,"
            lines.append(f"{' x '.join(map(str, shape))} {way} {whole / 1e6:.3f} MB")
    return tuple(lines) if any(layout.rows) else ()
