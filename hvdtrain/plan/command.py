"""The command `hvdtrain plan`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config.options import TrainConfig
from hvdtrain.launch.link import address_of
from hvdtrain.plan import learning, observe, prediction, probe, profile, report, sizes
from hvdtrain.plan.network import LATENCY_S, Link
from hvdtrain.plan.observe import global_batch
from hvdtrain.plan.prediction import Host
from hvdtrain.plan.profile import Profile
from hvdtrain.plan.report import Plan
from hvdtrain.strategies import presets
from hvdtrain.strategies.spec import Spec, parse
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate, show_rate

PURPOSE = """Predict the time of a training step for other hosts, links and strategies, before you use them.

The model is profiled on this machine in at most 30 s, and trained for at most 75 s more if the batch of a step grows
with the hosts; the profile is kept in ~/.cache/hvdtrain. Other options go to the workload. A script of your own, which
uses DistributedDataParallel, a trainer or hvdtrain.torch, is started as one process, without a
launcher, and ended when some of its steps have been timed. With --parameters nothing is run.

examples:
  hvdtrain plan resnet --hosts 1..16 --rates 10mbit,100mbit,1gbit --width 0.25
  hvdtrain plan train.py --lr 0.1 --hosts 2,4 --rates 1gbit
  hvdtrain plan resnet -H a:1,b:1,c:1 --global-batch-size 128
  hvdtrain plan --parameters 124M --trainable 2M --step-seconds 0.8 --hosts 1..8 --rates 30mbit,1gbit
"""
MOST_HOSTS = 10_000
MANY_COUNTS = 32
"""Longest range of hosts that is predicted in full"""
UNEQUAL = 1.1
"""Ratio of the slowest to the fastest host's computation above which a plan names the slowest host"""
BOUNDS = {"latency": (0, 60_000), "ranks_per_host": (1, 1024), "cores": (0.01, 10_000), "global_batch_size": (1, 10**9)}
"""Least and most of each option that is a number"""


class PlanParser(Parser):
    """Leaves options that it does not know, and all after `--`, to the workload or script, in `flags`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(args)
        end = words.index("--") if "--" in words else len(words)
        options, flags = self.parse_known_args(words[:end], namespace)
        flags += words[end + 1 :]
        if flags and not options.workload:
            self.error(f"unrecognized arguments: {' '.join(flags)}")
        options.flags = flags
        return options


def parser() -> Parser:
    top = PlanParser(prog="hvdtrain plan", description=PURPOSE)
    top.add_argument("workload", nargs="?", help="a workload: see `hvdtrain train`, or a script")
    top.add_argument("--parameters", metavar="N", help="plan a model of this size, such as 124M, which is not here")
    top.add_argument("--trainable", metavar="N", help="with --parameters: how many are trained (default: all)")
    top.add_argument("--step-seconds", type=float, metavar="S", help="with --parameters: of a step on one host")
    help = "numbers of hosts: 1..16 or 1,2,4; long ranges are thinned (default: 1,2,4,8)"
    top.add_argument("--hosts", metavar="LIST", help=help)
    top.add_argument("-H", dest="cluster", metavar="A:2,B:2", help="measure these hosts and their links over ssh")
    top.add_argument("--rates", metavar="LIST", help="rates of every host's link (default: 10mbit,100mbit,1gbit)")
    top.add_argument("--slow", metavar="RATE[/RATE]", help="rate of the last host's link, or its rates up and down")
    top.add_argument("--latency", type=float, default=1e3 * LATENCY_S, metavar="MS", help="(default: %(default)g ms)")
    top.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(default: 1)")
    top.add_argument("--global-batch-size", type=int, metavar="N", help="samples of a step (default: it grows)")
    top.add_argument("--cores", type=float, metavar="N", help="cores of each host (default: this machine's)")
    top.add_argument("--strategy", action="append", metavar="S", help="predict this one; give it again for more")
    top.add_argument("--fresh", action="store_true", help="profile again, for example after other work has ended")
    top.add_argument("--json", action="store_true", help="print one JSON document")
    top.set_defaults(pilot=True)
    return top


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    if bool(options.workload) == bool(options.parameters):
        raise Failure(
            "plan from one thing; hint: name a workload or a script, or give --parameters (see --help)", exits.USAGE
        )
    if bool(options.parameters) != (options.step_seconds is not None) or (options.trainable and not options.parameters):
        hint = "--parameters 124M --trainable 2M --step-seconds 0.8"
        raise Failure(f"--parameters and --step-seconds belong together; hint: {hint}", exits.USAGE)
    if launch_env().size > 1:
        raise Failure("hvdtrain plan is one process; hint: start it without a launcher", exits.USAGE)
    for name, (least, most) in BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise Failure(f"--{name.replace('_', '-')} {value}: hint: give {least:g} to {most:,}", exits.USAGE)
    _hosts(options, 1_000_000, 2)  # raises Failure for a wrong rate, before the profile takes its time
    if options.cluster is not None and any((options.hosts, options.rates, options.slow)):
        raise Failure("-H cannot be combined with --hosts, --rates or --slow; hint: leave them out", exits.USAGE)
    options.hosts = counts_of("1,2,4,8" if options.hosts is None else options.hosts)
    rates = "10mbit,100mbit,1gbit" if options.rates is None else options.rates
    options.rates = list(dict.fromkeys(map(parse_rate, rates.split(","))))
    names, cluster = prediction.reducers(_wanted(options)), list[Host]()
    if options.cluster is not None:
        cluster = probe.hosts_of(options.cluster)
        options.ranks_per_host = max(host.ranks for host in cluster)
    make = _from_sizes if options.parameters else _from_workload
    made, config, notes, cluster = make(options, names, cluster)
    if "optimizer" not in made.setup:
        notes.append("the optimizer is not known: presets and steps to an accuracy are those of Adam")
        made = msgspec.structs.replace(made, setup={**made.setup, "optimizer": presets.UNKNOWN})
    able, refused = exchanges_of(options, config, made)
    plan = _measured_hosts(made, config, cluster, able) if cluster else _equal_hosts(made, config, options, able)
    plan = dataclasses.replace(plan, refused=refused, notes=[*plan.notes, *notes])
    print(json.dumps(report.as_json(plan)) if options.json else report.text(plan))
    return exits.OK


def counts_of(text: str) -> list[int]:
    """Parse numbers of hosts: `1..16` or `1,2,4`. In a long range they grow by an eighth. Raises Failure (2)."""
    counts: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", word.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MOST_HOSTS:
            raise Failure(f"--hosts {text}: hint: give 1..16 or 1,2,4, each from 1 to {MOST_HOSTS}", exits.USAGE)
        is_long = high - low >= MANY_COUNTS
        while low < high:
            counts.add(low)
            low += max(1, low // 8) if is_long else 1
        counts.add(high)
    return sorted(counts)


# --- plans ------------------------------------------------------------------------------------------------------------


def _wanted(options: Any, optimizer: str | None = None) -> list[Spec]:
    """Return the strategies of a plan; without an optimizer, all that presets may stand for. Raises Failure (78)."""
    families = [optimizer] if optimizer else presets.FAMILIES
    return list(dict.fromkeys(parse(name, each) for name in options.strategy or learning.SHOWN for each in families))


def exchanges_of(options: Any, config: TrainConfig, made: Profile) -> tuple[list[Spec], dict[str, str]]:
    """Return the strategies to predict, and why others cannot run or be predicted. Raises Failure (78) if none can."""
    able, refused = [], dict[str, str]()
    for exchange in _wanted(options, made.setup.get("optimizer")):
        try:
            exchange.check(config)
            if made.drop_in and exchange.capabilities.backend not in ("tcp", "horovod"):
                raise Failure(f"--strategy {exchange}: works with workloads only")
            if exchange.capabilities.backend == "horovod" and importlib.util.find_spec("horovod") is None:
                raise Failure(f"--strategy {exchange}: Horovod is not installed; hint: hvdtrain build-horovod")
            if reason := prediction.unpredictable(made, exchange):
                raise Failure(f"--strategy {reason}")
            able.append(exchange)
        except Failure as failure:
            refused[str(exchange)] = str(failure)
    if not able:
        raise Failure(next(iter(refused.values())), exits.BAD_CONFIG)
    return able, refused


def _hosts(options: Any, rate: int, count: int) -> list[Host]:
    """Return hosts with links of this rate, except for --slow. Raises Failure (2)."""
    latency_s = options.latency / 1e3
    links = [Link.of_rate(rate, latency_s=latency_s)] * count
    if options.slow is not None and count > 1:
        up, _, down = options.slow.partition("/")
        links[-1] = Link.of_rate(parse_rate(up), parse_rate(down) if down else None, latency_s)
    return [
        Host(name=str(number), link=link, ranks=options.ranks_per_host, cores=options.cores)
        for number, link in enumerate(links, start=1)
    ]


Cases = Mapping[str, Mapping[int, tuple[Sequence[Host], int]]]
"""Name of the network -> number of hosts -> the hosts, and the samples of a step"""


def _plan(made: Profile, exchanges: Sequence[Spec], one: tuple[Sequence[Host], int], cases: Cases) -> Plan:
    """Predict all cases. `one`: a single host."""

    def predictions(hosts: Sequence[Host], batch: int) -> list[prediction.Prediction]:
        return [prediction.predict(made, each, hosts, batch) for each in exchanges]

    alone = prediction.predict(made, exchanges[0], *one)
    networks, accumulated = {}, {}
    for name, by_count in cases.items():
        if len(by_count) > MANY_COUNTS:
            print(f"{name}: predicting {len(by_count)} numbers of hosts", file=sys.stderr, flush=True)
        networks[name] = {count: predictions(*case) for count, case in by_count.items() if count > 1} or {1: [alone]}
        accumulated[name] = [
            prediction.predict(made, each, *by_count[max(by_count)], accumulation=count)
            for count in learning.ACCUMULATED
            for each in exchanges
            if str(each) == prediction.EXACT_REDUCER and max(by_count) > 1
        ]
    one_host = dataclasses.replace(alone, steps_factor=(1.0, 1.0))
    return Plan(profile=made, one=one_host, networks=networks, accumulated=accumulated)


def _equal_hosts(made: Profile, config: TrainConfig, options: Any, exchanges: Sequence[Spec]) -> Plan:
    """Plan for --hosts equal hosts and --rates."""

    def case(rate: int, count: int) -> tuple[list[Host], int]:
        return _hosts(options, rate, count), global_batch(config, count * options.ranks_per_host)

    cases = {show_rate(rate): {count: case(rate, count) for count in options.hosts} for rate in options.rates}
    return _plan(made, exchanges, case(options.rates[0], 1), cases)


def _measured_hosts(made: Profile, config: TrainConfig, cluster: Sequence[Host], exchanges: Sequence[Spec]) -> Plan:
    """Plan for the first hosts of -H, and say what the slowest one costs."""

    def case(hosts: Sequence[Host]) -> tuple[Sequence[Host], int]:
        return hosts, global_batch(config, sum(host.ranks for host in hosts))

    cases = {count: case(cluster[:count]) for count in range(1, len(cluster) + 1)}
    plan = _plan(made, exchanges, cases[1], {"measured links": cases})
    speeds = [f"{host.name} {8e-6 * host.link.up:.3g} up, {8e-6 * host.link.down:.3g} down" for host in cluster]
    nodes = prediction.nodes_of(made, cluster, cases[len(cluster)][1] / sum(host.ranks for host in cluster))
    steps_s = {node.name: node.backward_s + node.update_s for node in nodes}
    slowest, fastest = max(steps_s, key=steps_s.__getitem__), min(steps_s, key=steps_s.__getitem__)
    notes = [f"Mbit/s: {', '.join(speeds)}"]
    if steps_s[slowest] > UNEQUAL * steps_s[fastest]:
        rest = case([host for host in cluster if host.name != slowest])
        without = prediction.best([prediction.predict(made, each, *rest) for each in exchanges])
        gain = without.samples_per_s / plan.best("measured links")[len(cluster)].samples_per_s
        notes.append(
            f"host {slowest} is the slowest: it computes a step in {steps_s[slowest]:.3g} s, host {fastest} in "
            f"{steps_s[fastest]:.3g} s; without {slowest}, the job would be {gain:.2f} times as fast"
        )
    return dataclasses.replace(plan, notes=notes, steps_s=steps_s)


def _from_workload(
    options: Any, names: Sequence[str], cluster: list[Host]
) -> tuple[Profile, TrainConfig, list[str], list[Host]]:
    """Return the profile, the workload's options, notes, and the hosts of -H with their own profiles."""
    if cluster:
        addresses = {host.name: address_of(host.name) for host in cluster}
        by_host = observe.on_hosts(addresses, options, range(1, len(cluster) + 1), names)
        found, *_ = by_host.values()
        cluster = [dataclasses.replace(host, profile=by_host[host.name].profile) for host in cluster]
    else:
        found = observe.observed(options, options.hosts, names)
    assert found.profile and found.config
    coding = [host.profile.coding_s for host in cluster if host.profile]
    known = set(found.profile.coding_s).intersection(*coding)
    made = profile.with_coding(found.profile, {name: max(each[name] for each in coding) for name in known if coding})
    return made, found.config, list(found.notes), cluster


def _from_sizes(
    options: Any, names: Sequence[str], cluster: list[Host]
) -> tuple[Profile, TrainConfig, list[str], list[Host]]:
    size = options.global_batch_size
    made, notes = sizes.profiled(
        options.parameters, options.trainable, options.step_seconds, names, options.ranks_per_host, size
    )
    return made, TrainConfig(framework="torch", batch_size=None if size else 1, global_batch_size=size), notes, cluster
