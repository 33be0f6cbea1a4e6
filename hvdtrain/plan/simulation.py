"""Simulates some training steps of all hosts: computation, exchange thread, processor and links.

Each host has two processes, as a rank has two threads. One computes forward, backward and update. The other one runs
the phases of each exchange: it waits until the gradients of the phase are computed, encodes them on the processor,
which it shares with the computation, and sends them over the host's link. A phase begins when all hosts have reached
it and ends when the slowest link is done, so the slowest host decides.

Equal hosts behave alike, so at most `SAMPLED` of them are simulated. Nothing else is simplified for large numbers of
hosts, which may all differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Generator, Sequence
from statistics import NormalDist
from typing import Any

import simpy

from hvdtrain.plan.network import Link

SAMPLED = 4
"""Hosts simulated for each group of equal hosts if their steps vary; one is enough if they do not"""
LEAST_STEPS = 16
"""Steps over which times are averaged"""
MANY, FEW_STEPS = 100, 8
"""Unequal hosts above which fewer steps are simulated"""
SEED = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A host: its computation in each step when nothing else runs there, and its link."""

    name: str
    link: Link
    backward_s: float
    """Forward and backward, of all ranks of the host"""
    update_s: float
    averaging_s: float = 0.0
    """Copying and adding weights in each exchange of weights, in seconds of one core"""
    waking_s: float = 0.0
    """Mean delay of the exchange thread at each message, while the host computes"""
    threads: float = 1.0
    """Threads that compute"""
    cores: float = 2.0
    variation: float = 0.0
    """Standard deviation of a step's computation, relative to its mean"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """A phase of an exchange for one host. Bytes are payload."""

    ready: float
    """Share of `backward_s` after which the gradients are computed"""
    sent: float
    received: float
    hops: int
    coding_s: float = 0.0
    """Seconds of one core"""
    central: bool = False
    """Whether these are the first host's messages to all others. Each other host has one, in the other direction"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The exchanges of a run."""

    messages: tuple[Message, ...] = ()
    every: int = 1
    """Steps per exchange"""
    staleness: int = 0
    """Steps computed before the result is needed"""
    after_update: bool = False
    """Whether weights are exchanged after the update, instead of gradients before it"""
    independent: bool = False
    """Whether hosts do not wait for each other"""
    in_parts: bool = False
    """Whether the weights of each bucket are updated as soon as its sum has arrived"""


class Processor:
    """Cores that the operating system divides among running threads."""

    def __init__(self, env: simpy.Environment, cores: float) -> None:
        self._env, self._cores = env, cores
        self._work: dict[simpy.Event, list[float]] = {}
        """Running work: core seconds that remain, and threads"""
        self._since, self._version = 0.0, 0

    @property
    def busy(self) -> bool:
        return bool(self._work)

    def run(self, core_s: float, threads: float) -> simpy.Event:
        """Return the event at which work of `core_s` core seconds has ended, on this number of threads."""
        done = self._env.event()
        if core_s <= 0:
            return done.succeed()
        self._advance()
        self._work[done] = [core_s, threads]
        self._schedule()
        return done

    def _speed(self, threads: float) -> float:
        running = sum(each for _, each in self._work.values())
        return threads * min(1.0, self._cores / running)

    def _advance(self) -> None:
        passed_s, self._since = self._env.now - self._since, self._env.now
        for work in self._work.values():
            work[0] -= passed_s * self._speed(work[1])

    def _schedule(self) -> None:
        self._version += 1
        if self._work:
            done = min(self._work, key=lambda each: self._work[each][0] / self._speed(self._work[each][1]))
            left, threads = self._work[done]
            ended, version = self._env.timeout(max(0.0, left / self._speed(threads))), self._version
            ended.callbacks.append(lambda _: self._finish(done, version))

    def _finish(self, done: simpy.Event, version: int) -> None:
        if version == self._version:  # otherwise other work has begun or ended since
            self._advance()
            del self._work[done]
            done.succeed()
            self._schedule()


class _Simulation:
    def __init__(
        self, nodes: Sequence[Node], copies: Sequence[float], traffic: Traffic, begin: int, steps: int
    ) -> None:
        """`begin`: the first of `steps` steps that is timed."""
        self.env = simpy.Environment()
        self.nodes, self.copies, self.traffic, self.begin, self.steps = nodes, copies, traffic, begin, steps
        self.ends: list[list[float]] = [[] for _ in nodes]
        self._barriers: dict[tuple[int, ...], tuple[list[int], simpy.Event]] = {}
        self._events: dict[tuple[Any, ...], simpy.Event] = {}
        self._last = {message.ready: place for place, message in enumerate(traffic.messages)}
        """The last message of the gradients that are ready then"""
        self._fractions = sorted({*self._last, 1.0})
        for index, node in enumerate(nodes):
            processor = Processor(self.env, node.cores)
            self.env.process(self._compute(index, node, processor))
            if traffic.messages:
                self.env.process(self._exchange(index, node, processor))

    def _event(self, *key: Any) -> simpy.Event:
        return self._events.setdefault(key, self.env.event())

    def _compute(self, index: int, node: Node, processor: Processor) -> Generator[Any, Any, None]:
        traffic, used = self.traffic, min(node.threads, node.cores)
        for step, drawn in enumerate(self._draws(index)):
            number, rest = divmod(step + 1, traffic.every)
            due = not rest and bool(traffic.messages)
            slowness = self._slowness(node, self.copies[index], drawn)
            for before, fraction in itertools.pairwise([0.0, *self._fractions]):
                yield processor.run(used * node.backward_s * slowness * (fraction - before), node.threads)
                if due and not traffic.after_update:
                    self._event("ready", index, number, fraction).succeed()
            if traffic.after_update:
                yield processor.run(used * node.update_s + due * node.averaging_s, node.threads)
                if due:
                    for fraction in self._fractions:
                        self._event("ready", index, number, fraction).succeed()
            arriving, rest = divmod(step + 1 - traffic.staleness, traffic.every)
            if traffic.in_parts and due:
                for fraction in sorted(self._last):
                    yield self._event("arrived", index, number, fraction)
                    yield processor.run(used * node.update_s / len(self._last), node.threads)
            elif arriving > 0 and not rest and traffic.messages:
                yield self._event("done", index, arriving)
            if not traffic.after_update and not traffic.in_parts:
                yield processor.run(used * node.update_s, node.threads)
            self.ends[index].append(self.env.now)

    def _draws(self, index: int) -> list[float]:
        """Return a number from 0 to 1 for each step. The timed steps have equally spaced numbers in random order.

        So the mean of a host's computation is exact: random numbers would make a step shorter than its computation.
        """
        generator, timed = random.Random(f"{SEED} {index}"), self.steps - self.begin
        spaced = [(place + 0.5) / timed for place in range(timed)]
        generator.shuffle(spaced)
        return [generator.random() for _ in range(self.begin)] + spaced

    def _slowness(self, node: Node, copies: float, drawn: float) -> float:
        """Draw the slowest of `copies` equal hosts, relative to the mean."""
        if not node.variation:
            return 1.0
        drawn = min(max(drawn, 1e-9), 1 - 1e-9) ** (1 / copies)
        return max(0.5, 1 + node.variation * NormalDist().inv_cdf(min(drawn, 1 - 1e-9)))

    def _exchange(self, index: int, node: Node, processor: Processor) -> Generator[Any, Any, None]:
        traffic, generator = self.traffic, random.Random(f"{SEED} {index} waking")
        for number in range(1, self.steps // traffic.every + 1):
            for place, message in enumerate(traffic.messages):
                yield self._event("ready", index, number, message.ready)
                yield processor.run(message.coding_s, 1)
                yield self._meet(number, place, 0)
                if node.waking_s and processor.busy:
                    delays = (generator.expovariate(1 / node.waking_s) for _ in range(message.hops))
                    yield self.env.timeout(sum(delays))
                yield self.env.timeout(transfer_s(node, message, first=index == 0, hosts=round(sum(self.copies))))
                yield self._meet(number, place, 1)
                if place == self._last[message.ready]:
                    self._event("arrived", index, number, message.ready).succeed()
            self._event("done", index, number).succeed()

    def _meet(self, *key: int) -> simpy.Event:
        """Return the event at which all hosts have called this with the same key."""
        if self.traffic.independent:
            return self.env.event().succeed()
        arrived, event = self._barriers.setdefault(key, ([0], self.env.event()))
        arrived[0] += 1
        if arrived[0] == len(self.nodes):
            event.succeed()
            del self._barriers[key]
        return event


def transfer_s(node: Node, message: Message, *, first: bool = True, hosts: int = 1) -> float:
    """Return the seconds in which a host's links carry a message, without waiting for others."""
    return node.link.seconds(*_amounts(message, first, hosts)) + message.hops * node.link.latency_s


def _amounts(message: Message, first: bool, hosts: int) -> tuple[float, float]:
    """Return the bytes that a host sends and receives."""
    if message.central and not first:
        return message.received / max(1, hosts - 1), message.sent / max(1, hosts - 1)
    return message.sent, message.received


def simulate(nodes: Sequence[Node], traffic: Traffic) -> float:
    """Return the mean seconds of a step. With one host nothing is sent."""
    if len(nodes) == 1:
        return nodes[0].backward_s + nodes[0].update_s
    groups: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        alike = dataclasses.replace(node, name="first" if place == 0 else "")  # the first one may be the centre
        groups[alike] = groups.get(alike, 0) + 1
    some, copies = [], []
    for node, count in groups.items():
        sampled = min(count, SAMPLED if node.variation else 1)
        some += [node] * sampled
        copies += [count / sampled] * sampled
    period = traffic.every
    begin = period * (2 + -(-traffic.staleness // period))
    steps = begin + period * -(-(LEAST_STEPS if len(some) <= MANY else FEW_STEPS) // period)
    run = _Simulation(some, copies, traffic, begin, steps)
    run.env.run()
    return max(ends[-1] - ends[begin - 1] for ends in run.ends) / (steps - begin)
