"""Predictions: seconds per step for hosts and a strategy, where they go, and what that means for training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.plan import interval, learning
from hvdtrain.plan.coding import work
from hvdtrain.plan.network import Link
from hvdtrain.plan.profile import Profile
from hvdtrain.plan.simulation import Message, Node, Traffic, simulate, transfer_s
from hvdtrain.strategies.algorithms.synchronous import buckets
from hvdtrain.strategies.cost import Cost, Layout, Phase, elements
from hvdtrain.strategies.spec import Spec, component

EXACT_REDUCER = "hierarchical"
MOST_WASTE = 0.1
"""Share of a step outside computation below which computation is the bottleneck"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host of a plan."""

    name: str
    link: Link
    ranks: int = 1
    cores: float | None = None
    """None: the cores of the profiled host"""
    profile: Profile | None = None
    """Measured on this host; None: the plan's"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What to expect of a strategy on some hosts."""

    strategy: str
    hosts: int
    ranks: int
    global_batch: int
    step_s: float
    computing_s: float
    """Of the slowest host, with nothing else on it"""
    coding_s: float
    """Time that coding, and averaging weights, add to the step"""
    waiting_s: float
    """Rest of the step: waiting for links and for slower hosts"""
    sent_bytes: float
    """Payload per host and step; on one host per rank"""
    bottleneck: str
    """For people"""
    steps_factor: tuple[float, float] | None = None
    """Steps to a target accuracy relative to exact sums; None if it was not recorded"""
    noise_scale: tuple[float, float | None] | None = None
    """See `Profile`"""
    loss_points: float | None = None
    accumulation: int = 1
    """Batches of each rank, one in a step, that a script accumulates for an update"""
    interval_s: tuple[float, float] | None = None
    """90 % interval of `step_s`; None if the model's error is not known for this kind of strategy"""

    @property
    def samples_per_s(self) -> float:
        return self.global_batch / self.step_s

    def speedup(self, one: Prediction) -> float:
        """Return the samples per second relative to one host."""
        return self.samples_per_s / one.samples_per_s

    def speedup_to_target(self, one: Prediction) -> tuple[float, float] | None:
        """Return the 90 % interval of the speed-up to the same accuracy, from the number of steps and their times.

        Only the number of steps counts if the intervals of times are not known. None without a record of the strategy,
        or of a larger batch.
        """
        epochs = self.epochs_factor(one)
        if self.steps_factor is None or epochs is None:
            return None
        (least, most), (fewest, epochs_most) = self.steps_factor, epochs
        expected = (least + most) / 2
        speedup = self.speedup(one) / expected
        (low, high), (one_low, one_high) = (each.interval_s or (each.step_s, each.step_s) for each in (self, one))
        slower = interval.combined(most / expected, high / self.step_s, one.step_s / one_low)
        faster = interval.combined(expected / least, self.step_s / low, one_high / one.step_s)
        return speedup / slower / epochs_most, speedup * faster / fewest

    def epochs_factor(self, one: Prediction) -> tuple[float, float] | None:
        """Return least and most epochs to the same accuracy that this batch needs, relative to one host's batch."""
        if self.global_batch == one.global_batch:
            return 1.0, 1.0
        scale = self.noise_scale
        return learning.epochs_factor(self.global_batch, one.global_batch, scale) if scale else None

    @property
    def ranking_s(self) -> float:
        """Seconds per step, weighted by the mean of the recorded numbers of steps, if there is a record."""
        return self.step_s * (sum(self.steps_factor) / 2 if self.steps_factor else 1.0)

    @property
    def learns(self) -> str:
        """What was recorded of its steps and its accuracy, for people; empty for exact sums."""
        fewest, most = self.steps_factor or (1.0, 1.0)
        loss = f", {self.loss_points:g} points less accuracy at the end" if self.loss_points else ""
        return "" if most == 1 else f"; recorded: {fewest:g} to {most:g} times as many steps to a target{loss}"

    def as_json(self, one: Prediction) -> dict[str, Any]:
        more = {
            "speedup": self.speedup(one),
            "epochs_factor": self.epochs_factor(one),
            "speedup_to_target": self.speedup_to_target(one),
        }
        return dataclasses.asdict(self) | {"samples_per_s": self.samples_per_s} | more


def nodes_of(profile: Profile, hosts: Sequence[Host], rank_batch: float) -> list[Node]:
    """Return what each host computes in a step with this batch per rank, from the profile of one rank."""
    nodes = []
    for host in hosts:
        made = host.profile or profile
        cores = host.cores or made.cores
        alone = min(made.threads, made.cores)  # cores of the profiled rank
        slower = alone * host.ranks / min(made.threads * host.ranks, cores)
        local_s = 0.0 if len(hosts) > 1 else _local_s(profile, host)
        nodes.append(
            Node(
                name=host.name,
                link=host.link,
                backward_s=made.backward_s(rank_batch) * slower,
                update_s=made.update_s * slower + local_s,
                averaging_s=made.averaging_s * host.ranks,
                waking_s=made.waking_s,
                threads=made.threads * host.ranks,
                cores=cores,
                variation=made.variation,
            )
        )
    return nodes


def _local_s(profile: Profile, host: Host) -> float:
    """Return the processor seconds of summing gradients in the host's leader, like a sum with a second host."""
    return (host.ranks - 1) * profile.coding_s.get(EXACT_REDUCER, 0.0)


def predict(
    profile: Profile,
    exchange: Spec,
    hosts: Sequence[Host],
    global_batch: int,
    nodes: Sequence[Node] = (),
    accumulation: int = 1,
) -> Prediction:
    """Predict a training step, which with accumulation is one batch; see `unpredictable`.

    `nodes`: of the hosts, by default those of the profile.
    """
    ranks, optimizer = sum(host.ranks for host in hosts), profile.setup.get("optimizer")
    nodes = nodes or nodes_of(profile, hosts, global_batch / ranks)
    cost = exchange.cost(profile.shapes, Layout(ranks=ranks, hosts=len(hosts)))
    cost = dataclasses.replace(cost, every=cost.every * accumulation)
    nodes = [dataclasses.replace(node, averaging_s=node.averaging_s * cost.share) for node in nodes]
    traffic = traffic_of(profile, exchange, cost, hosts)
    simulated_s = simulate(nodes, traffic)
    uncoded = [dataclasses.replace(each, coding_s=0.0) for each in traffic.messages]
    idle = [dataclasses.replace(node, averaging_s=0.0) for node in nodes]
    without_s = simulate(idle, dataclasses.replace(traffic, messages=tuple(uncoded)))
    computing_s = max(node.backward_s + node.update_s / accumulation for node in nodes)
    coding_s = max(0.0, simulated_s - without_s)
    backend = exchange.capabilities.backend
    step_s = simulated_s * (profile.factors.get(backend, 1.0) if len(hosts) > 1 else 1.0)
    recorded = learning.of(exchange, optimizer)
    if accumulation > 1:
        steps = learning.accumulated(accumulation, global_batch, optimizer, profile.noise_scale)
        recorded = learning.Learning(steps, None) if steps else None
    return Prediction(
        strategy=str(exchange),
        hosts=len(hosts),
        ranks=ranks,
        global_batch=global_batch,
        step_s=step_s,
        computing_s=computing_s,
        coding_s=coding_s,
        waiting_s=max(0.0, step_s - computing_s - coding_s),
        sent_bytes=cost.sent_bytes if len(hosts) > 1 else 0.0,
        bottleneck=_bottleneck(nodes, traffic, simulated_s, computing_s, coding_s),
        steps_factor=recorded.steps if recorded else None,
        noise_scale=profile.noise_scale,
        loss_points=recorded.loss_points if recorded else None,
        accumulation=accumulation,
        interval_s=interval.of(step_s, len(hosts), computing_s / step_s, profile, backend),
    )


def traffic_of(profile: Profile, exchange: Spec, cost: Cost, hosts: Sequence[Host]) -> Traffic:
    """Return the messages of a strategy's phases, with the time of coding that the profile measured.

    Coding takes time in proportion to the numbers coded, or to the bytes if numbers are sent as they are.
    """
    if len(hosts) == 1 or not cost.phases:
        return Traffic()
    reducer = str(exchange.reducer) if exchange.reducer else EXACT_REDUCER
    each = exchange.reducer or component(EXACT_REDUCER)
    pair = each.cls.cost(profile.shapes, 2, each.settings)
    total_s = profile.coding_s[reducer] * work(cost) / work(pair)
    whole = sum(map(_amount, cost.phases)) or 1.0
    local_s = max(_local_s(profile, host) for host in hosts) / len(cost.phases)
    messages = []
    for phase in cost.phases:
        for ready, share in _divided(profile, phase):
            sent = phase.bytes_per_peer * phase.peers
            received = sent if phase.received_per_peer is None else phase.received_per_peer * phase.peers
            messages.append(
                Message(
                    ready=ready,
                    sent=sent * share,
                    received=received * share,
                    hops=phase.hops,
                    coding_s=(total_s * _amount(phase) / whole + local_s) * share,
                    central=phase.received_per_peer is not None,
                )
            )
    return Traffic(
        messages=tuple(messages),
        every=cost.every,
        staleness=max(0, round(max(phase.needed_at for phase in cost.phases)) - 1),
        after_update=exchange.capabilities.local_updates,
        independent=cost.independent,
        in_parts=exchange.reducer is not None and not exchange.capabilities.local_updates,
    )


def _amount(phase: Phase) -> float:
    return phase.numbers or phase.bytes_per_peer * phase.peers / 4e3  # copying is much faster than coding


def _divided(profile: Profile, phase: Phase) -> list[tuple[float, float]]:
    """Return when parts of a phase are ready, and their shares.

    A framework's own ring starts with the first gradients and sends the others as they are computed.
    """
    if phase.ready_at > 0:
        return [(profile.ready_at(phase.ready_at), 1.0)]
    ranges = buckets(profile.shapes)
    whole = elements(profile.shapes)
    return [
        (profile.ready_at(number / len(ranges)), elements(profile.shapes[i] for i in each) / whole)
        for number, each in enumerate(ranges, start=1)
    ]


def _bottleneck(nodes: Sequence[Node], traffic: Traffic, step_s: float, computing_s: float, coding_s: float) -> str:
    """Name the part that limits the step."""
    if len(nodes) == 1 or step_s - computing_s < MOST_WASTE * step_s:
        slowest = max(nodes, key=lambda node: node.backward_s + node.update_s)
        return _of("computation", slowest.name, [node.backward_s + node.update_s for node in nodes])
    if coding_s > step_s - computing_s - coding_s:
        return "the time of coding"
    seconds = [
        sum(transfer_s(node, message, first=number == 0, hosts=len(nodes)) for message in traffic.messages)
        for number, node in enumerate(nodes)
    ]
    slowest_s = max(seconds)
    node = nodes[seconds.index(slowest_s)]
    if sum(message.hops for message in traffic.messages) * node.link.latency_s > slowest_s / 2:
        return "the latency of the network"
    return _of("the link", node.name, seconds)


def _of(what: str, name: str, values: Sequence[float]) -> str:
    alike = math.isclose(min(values), max(values), rel_tol=0.01)
    return f"{what} of {'one host' if len(values) == 1 else 'all hosts' if alike else f'host {name}'}"


def best(predictions: Sequence[Prediction]) -> Prediction:
    """Return the prediction with the least time to a target, among those with a record if there are any."""
    recorded = [each for each in predictions if each.steps_factor]
    return min(recorded or predictions, key=lambda each: each.ranking_s)


def unpredictable(profile: Profile, exchange: Spec) -> str | None:
    """Return why a strategy cannot be predicted from this profile; None if it can."""
    missing = set(reducers([exchange])) - set(profile.coding_s)
    if missing:
        return f"{exchange}: no time was left to measure {', '.join(missing)}; hint: give fewer --strategy"
    cost = exchange.cost(profile.shapes, Layout(ranks=2, hosts=2))
    if exchange.reducer is None and any(phase.codec != "fp32" for phase in cost.phases):
        return f"{exchange}: its own compression cannot be measured; hint: a reducer, see `hvdtrain strategies`"
    return None


def reducers(exchanges: Sequence[Spec]) -> list[str]:
    """Return the reducers whose cost of coding these strategies need."""
    return list(dict.fromkeys([EXACT_REDUCER, *(str(each.reducer) for each in exchanges if each.reducer)]))
