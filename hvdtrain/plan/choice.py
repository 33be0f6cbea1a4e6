"""`--strategy auto`: all ranks measure the model and the links, and rank 0 chooses a strategy by prediction.

The first choice is made before step 0. `training.adaptive` lets it be made again when steps take another time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.plan import learning
from hvdtrain.plan.network import Link, measured
from hvdtrain.plan.prediction import EXACT_REDUCER, Host, Prediction, best, predict, reducers
from hvdtrain.plan.profile import Profile, with_coding
from hvdtrain.plan.simulation import Node
from hvdtrain.strategies.automatic import Rule
from hvdtrain.strategies.spec import Spec, parse
from hvdtrain.system import cgroup
from hvdtrain.system.exits import Failure

WORTH = 1.03
"""Plain all-reduce stays unless it takes this many times as long as the best strategy"""
GAIN = 1.1
"""A strategy that runs stays unless it takes this many times as long as the chosen one"""
FAST_LINK = Link.of_rate(10e9)
"""Assumed if no link could be measured"""


class Chosen(NamedTuple):
    strategy: str
    reason: str


def candidates(rule: Rule, config: TrainConfig) -> list[Spec]:
    """Return the strategies that the rule allows and that run with the other options. Exact sums come first."""
    allowed = []
    for name in learning.candidates(config.optimizer):
        exchange, record = parse(name), learning.records(config.optimizer)[name]
        if rule.exact and not record.exact:
            continue
        if rule.within is not None and (record.loss_points is None or record.loss_points > rule.within):
            continue
        try:
            exchange.check(config)
        except Failure:
            continue
        allowed.append(exchange)
    return allowed


def choose(
    profile: Profile,
    ranks: Communicator,
    exchanges: Sequence[Spec],
    global_batch: int,
    current: str | None = None,
    links: Sequence[Mapping[str, Any]] | None = None,
) -> Chosen:
    """Return the strategy and the reason, equal on all ranks. Collective.

    `profile`: of this rank, measured while all ranks compute. `exchanges`: what to choose from. `current`: the strategy
    that runs, if one does. `links`: by default those that were measured last.
    """
    point = profile.points[0]
    facts = ranks.gather(
        {
            "host": [ranks.host, ranks.group.endpoint.address],  # hosts may share a name
            "backward_s": point.backward_s,
            "update_s": point.update_s,
            "averaging_s": profile.averaging_s,
            "waking_s": profile.waking_s,
            "variation": point.variation,
            "threads": profile.threads,
            "cores": cgroup.host_cores(),
            "coding_s": profile.coding_s,
        }
    )
    links = ranks.links if links is None else links
    chosen = _chosen(profile, facts, links, exchanges, global_batch, current) if ranks.rank == 0 else None
    return Chosen(*ranks.gather(chosen)[0])


def _chosen(
    profile: Profile,
    facts: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    exchanges: Sequence[Spec],
    global_batch: int,
    current: str | None,
) -> Chosen:
    by_host: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in facts:
        by_host.setdefault(tuple(each["host"]), []).append(each)
    owners = [(link["host"], link["address"]) for link in links]
    following = [*owners[1:], *owners[:1]]  # each host sends to the next
    goodputs = measured([{**a, "host": b, "goodput_to": c} for a, b, c in zip(links, owners, following, strict=True)])
    slowest = min(goodputs.values(), key=lambda link: min(link.up, link.down), default=FAST_LINK)
    hosts, nodes = [], []
    for host, members in by_host.items():
        link, name = goodputs.get(host, slowest), host[0]
        hosts.append(Host(name=name, link=link, ranks=len(members)))
        nodes.append(
            Node(
                name=name,
                link=link,
                backward_s=max(each["backward_s"] for each in members),
                update_s=max(each["update_s"] for each in members),
                averaging_s=sum(each["averaging_s"] for each in members),
                waking_s=max(each["waking_s"] for each in members),
                threads=sum(each["threads"] for each in members),
                cores=members[0]["cores"],
                variation=max(each["variation"] for each in members),
            )
        )
    coding = [each["coding_s"] for each in facts if each["coding_s"]]
    known = set.intersection(*(set(each) for each in coding)) if coding else set()
    profile = with_coding(profile, {name: max(each[name] for each in coding) for name in known})
    usable = [each for each in exchanges if set(reducers([each])) <= known]
    predictions = [predict(profile, each, hosts, global_batch, nodes) for each in usable]
    if not predictions:
        return Chosen(current or EXACT_REDUCER, "coding could not be measured in time")
    return decide(predictions, current)


def decide(predictions: Sequence[Prediction], current: str | None = None) -> Chosen:
    """Return the best of the predictions, but plain all-reduce if nothing is clearly better.

    If a strategy runs now (`current`), it stays unless the best one gains so much that it pays to change.
    """
    chosen = _best(predictions)
    if current in (None, chosen.strategy):
        return chosen
    by_name = {each.strategy: each for each in predictions}
    now, new = by_name.get(current or ""), by_name[chosen.strategy]
    if now and now.ranking_s >= GAIN * new.ranking_s:
        return Chosen(chosen.strategy, f"{chosen.reason}; {now.strategy} {now.step_s:.3g} s")
    running = f"{now.step_s:.3g} s per step predicted; " if now else ""
    return Chosen(current or "", f"{running}{new.strategy}, {new.step_s:.3g} s, does not gain enough")


def _best(predictions: Sequence[Prediction]) -> Chosen:
    plain = next((each for each in predictions if each.strategy == EXACT_REDUCER), None)
    top = best(predictions)
    if plain and plain.ranking_s <= WORTH * top.ranking_s:
        others = [each for each in predictions if each is not plain]
        rest = f"; {best(others).strategy} {best(others).step_s:.3g} s" if others else ""
        return Chosen(plain.strategy, f"{plain.step_s:.3g} s per step predicted{rest}; {plain.bottleneck} decides")
    compared = f"; exact sums {plain.step_s:.3g} s, limited by {plain.bottleneck}" if plain else ""
    return Chosen(top.strategy, f"{top.step_s:.3g} s per step predicted{compared}{top.learns}")
