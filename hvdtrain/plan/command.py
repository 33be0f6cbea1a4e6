"""The command `hvdtrain plan`."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config.options import TrainConfig
from hvdtrain.plan import coding, learning, observe, prediction, probe, profile, recorded, report
from hvdtrain.plan.network import LATENCY_S, Link, Uplink
from hvdtrain.plan.observe import global_batch
from hvdtrain.plan.prediction import Host
from hvdtrain.plan.profile import Profile
from hvdtrain.plan.report import Plan
from hvdtrain.results import figures
from hvdtrain.strategies.spec import Exchange, parse
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import goodput_both_ways, parse_rate, show_rate

PURPOSE = """Predict the time of a training step for other hosts, links and strategies, before you use them.

The model is profiled on this machine in at most 30 s, and trained for 10 s more if the batch of a step grows with the
hosts; the profile is kept in ~/.cache/hvdtrain. Other options go to the workload. A script of your own that uses
hvdtrain.torch or hvdtrain.train is started as one process, without a launcher, and ended when some of its steps have
been timed. With --from, a recorded run takes the place of the profile.

examples:
  hvdtrain plan resnet --hosts 1..16 --rates 10mbit,100mbit,1gbit --width 0.25
  hvdtrain plan train.py --lr 0.1 --hosts 2,4 --rates 1gbit
  hvdtrain plan resnet -H a:1,b:1,c:1 --global-batch-size 128
  hvdtrain plan --from results/RUN --hosts 2,8 --rates 10mbit
"""
MOST_HOSTS = 10_000


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
    top = PlanParser(prog="hvdtrain plan", description=PURPOSE, allow_abbrev=False)
    top.add_argument("workload", nargs="?", help="a workload: see `hvdtrain train`, or a script")
    top.add_argument("--from", dest="run", type=Path, metavar="RUN", help="plan from the run in this folder")
    top.add_argument(
        "--hosts", default=None, metavar="LIST", help="numbers of hosts: 1..16 or 1,2,4 (default: 1,2,4,8)"
    )
    top.add_argument("-H", dest="cluster", metavar="A:2,B:2", help="measure the links of these hosts over ssh")
    top.add_argument(
        "--rates", default=None, metavar="LIST", help="rates of every host's link (default: 10mbit,100mbit,1gbit)"
    )
    top.add_argument(
        "--slow", default=None, metavar="RATE[/RATE]", help="rate of the last host's link, or its rates up and down"
    )
    top.add_argument("--switch", type=int, metavar="N", help="hosts of each switch, if there are several switches")
    top.add_argument("--uplink", metavar="RATE", help="rate of the link from each switch to the others")
    top.add_argument(
        "--latency", type=float, default=1e3 * LATENCY_S, metavar="MS", help="of a message (default: %(default)g ms)"
    )
    top.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="(default: 1)")
    top.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples of a step over all ranks (default: it grows)"
    )
    top.add_argument("--cores", type=float, metavar="N", help="cores of each host (default: this machine's)")
    top.add_argument("--strategy", action="append", metavar="S", help="predict this one; give it again for more")
    top.add_argument("--figure", type=Path, metavar="FILE", help="draw time against hosts: .svg, .png or .pdf")
    top.add_argument("--fresh", action="store_true", help="profile again, although there is a profile")
    top.add_argument("--json", action="store_true", help="print one JSON document")
    return top


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    if bool(options.workload) == bool(options.run):
        raise Failure(
            "plan from one thing; hint: name a workload or a script, or give --from RUN (see --help)",
            exits.USAGE,
        )
    if launch_env().size > 1:
        raise Failure("hvdtrain plan is one process; hint: start it without a launcher", exits.USAGE)
    if options.figure and options.figure.suffix[1:] not in figures.FORMATS:
        raise Failure(f"--figure {options.figure}: not .svg, .png or .pdf; hint: give FILE.svg", exits.USAGE)
    if options.figure:
        _check_writable(options.figure)
    if not options.latency >= 0:
        raise Failure(f"--latency {options.latency:g}: hint: give milliseconds, 0 or more", exits.USAGE)
    if not 1 <= options.ranks_per_host <= 1024 or (options.cores is not None and not options.cores > 0):
        raise Failure("--ranks-per-host and --cores: hint: give a number above 0", exits.USAGE)
    if bool(options.switch) != bool(options.uplink) or (options.switch or 1) < 1:
        raise Failure("--switch and --uplink belong together; hint: --switch 24 --uplink 10gbit", exits.USAGE)
    links_of(options, 1_000_000, 2)  # raises Failure for a wrong rate, before the profile takes its time
    uplink_of(options)
    if options.global_batch_size is not None and options.global_batch_size < 1:
        raise Failure("--global-batch-size: hint: give a number above 0", exits.USAGE)
    if options.global_batch_size is not None and options.run:
        raise Failure("--global-batch-size cannot be combined with --from; hint: leave it out", exits.USAGE)
    if options.cluster and (options.run or options.hosts or options.rates or options.slow or options.switch):
        raise Failure(
            "-H cannot be combined with --from, --hosts, --rates, --slow or --switch; hint: leave them out", exits.USAGE
        )
    counts = counts_of(options.hosts) if options.hosts else None
    rates = rates_of(options.rates) if options.rates else None
    plan = _from_run(options, counts, rates) if options.run else _from_workload(options, counts, rates)
    if options.figure:
        figures.save(report.figure(plan), options.figure)
    print(json.dumps(report.as_json(plan)) if options.json else report.text(plan))
    return exits.OK


def _check_writable(path: Path) -> None:
    """Raise Failure (73) for a file that cannot be written, before the profile takes its time."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise files.unwritable(path, error, "give a file in a folder that is writable") from error


def counts_of(text: str) -> list[int]:
    """Parse numbers of hosts: `1..16` or `1,2,4`. Raises Failure (2)."""
    counts: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", word.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MOST_HOSTS or high - low > 1000:
            raise Failure(f"--hosts {text}: hint: give 1..16 or 1,2,4, each from 1 to {MOST_HOSTS}", exits.USAGE)
        counts |= {*range(low, high + 1)}
    return sorted(counts)


def rates_of(text: str) -> list[int]:
    """Parse rates in bit/s. Raises Failure (2)."""
    return list(dict.fromkeys(parse_rate(word) for word in text.split(",")))


# --- plans ------------------------------------------------------------------------------------------------------------


def _wanted(options: Any) -> list[Exchange]:
    """Return the strategies of a plan. Raises Failure (78) for unknown names."""
    return [parse(name) for name in options.strategy or (*learning.CANDIDATES, *learning.OTHERS)]


def exchanges_of(options: Any, config: TrainConfig, made: Profile) -> tuple[list[Exchange], dict[str, str]]:
    """Return the strategies to predict, and why others cannot run or be predicted. Raises Failure (78) if none can."""
    able, refused = [], dict[str, str]()
    for exchange in _wanted(options):
        try:
            exchange.check(config)
            if made.drop_in and exchange.capabilities.backend not in ("tcp", "horovod"):
                raise Failure(f"--strategy {exchange}: works with hvdtrain.train and workloads only")
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


def links_of(options: Any, rate: int, count: int) -> list[Link]:
    """Return a link for each host. Raises Failure (2)."""
    latency_s = options.latency / 1e3
    links = [Link.of_rate(rate, latency_s=latency_s)] * count
    if options.slow and count > 1:
        up, _, down = options.slow.partition("/")
        links[-1] = Link.of_rate(parse_rate(up), parse_rate(down) if down else None, latency_s)
    return links


def uplink_of(options: Any) -> Uplink | None:
    """Return the uplink of every switch. Raises Failure (2)."""
    if not options.switch:
        return None
    return Uplink(hosts=options.switch, rate=goodput_both_ways(parse_rate(options.uplink)) / 8)


def _hosts(options: Any, rate: int, count: int) -> list[Host]:
    links, uplink = links_of(options, rate, count), uplink_of(options)
    return [
        Host(name=str(number), link=link, ranks=options.ranks_per_host, cores=options.cores, uplink=uplink)
        for number, link in enumerate(links, start=1)
    ]


def _plan(
    made: Profile,
    config: TrainConfig,
    options: Any,
    counts: Sequence[int],
    rates: Sequence[int],
    exchanges: Sequence[Exchange],
    **more: Any,
) -> Plan:
    ranks = options.ranks_per_host
    one = prediction.predict(made, exchanges[0], _hosts(options, rates[0], 1), global_batch(config, ranks))

    def predictions(rate: int, count: int) -> list[prediction.Prediction]:
        hosts, batch = _hosts(options, rate, count), global_batch(config, count * ranks)
        staged = prediction.predict_stages(made, hosts, batch) if ranks == 1 and not options.strategy else None
        found = [prediction.predict(made, each, hosts, batch) for each in exchanges]
        return found + ([staged] if staged else [])

    networks = {
        show_rate(rate): {count: predictions(rate, count) for count in counts if count > 1} or {1: [one]}
        for rate in rates
    }
    return Plan(profile=made, one=dataclasses.replace(one, steps_factor=(1.0, 1.0)), networks=networks, **more)


def _from_workload(options: Any, counts: Sequence[int] | None, rates: Sequence[int] | None) -> Plan:
    counts, rates = counts or [1, 2, 4, 8], rates or [10_000_000, 100_000_000, 1_000_000_000]
    cluster = probe.hosts_of(options.cluster) if options.cluster else []
    if cluster:
        counts, options.ranks_per_host = list(range(1, len(cluster) + 1)), max(host.ranks for host in cluster)
    profiler = observe.Profiler(options, counts, prediction.reducers(_wanted(options)))
    if observe.is_script(options.workload):
        observe.script(Path(options.workload), options.flags, profiler)
    else:
        size = [f"--global-batch-size={options.global_batch_size}"] if options.global_batch_size else []
        observe.workload(options.workload, [*options.flags, *size], profiler)
    assert profiler.profile is not None and profiler.config is not None
    able, refused = exchanges_of(options, profiler.config, profiler.profile)
    more: dict[str, Any] = {"refused": refused, "notes": profiler.notes}
    if cluster:
        return _cluster(profiler.profile, profiler.config, cluster, able, **more)
    return _plan(profiler.profile, profiler.config, options, counts, rates, able, **more)


def _from_run(options: Any, counts: Sequence[int] | None, rates: Sequence[int] | None) -> Plan:
    run = recorded.read(options.run)
    config = TrainConfig(
        framework=run.flags.get("framework", "auto"),
        precision=run.flags.get("precision", "fp32"),
        global_batch_size=run.global_batch if run.flags.get("global_batch_size") else None,
        batch_size=None if run.flags.get("global_batch_size") else run.flags.get("batch_size"),
    )
    names = prediction.reducers([*_wanted(options), run.exchange])
    known = run.profile.coding_s if run.profile else {}
    missing = [name for name in names if name not in known]
    coding_s = coding.measure(missing, run.manifest.shapes, profile.CODING_S)
    made = recorded.as_profile(run, _wanted(options), coding_s)
    able, refused = exchanges_of(options, config, made)
    hosts = run.hosts()
    own = prediction.predict(made, run.exchange, hosts, run.global_batch)
    notes = [
        f"recorded: {run.exchange} on {len(hosts)} hosts, {run.step_s:.3g} s per step; {own.bottleneck} decides",
        *(f"that is {factor:.2f} times the simulated time, as all predictions are" for factor in made.factors.values()),
    ]
    if missing and made.machine.get("processor") != profile.machine()["processor"]:
        notes.append("the cost of coding was measured on this machine, which has another processor than the run's")
    options.ranks_per_host = hosts[0].ranks
    if len(hosts) > 1 and not run.links:
        notes = ["the run did not measure its links, so predictions are not adjusted to its step time"]
        if rates is None:
            raise Failure(f"{run.folder}: the run did not measure its links; hint: add --rates", exits.BAD_DATA)
    elif rates is None and len(hosts) > 1 and counts is None:
        return _own_hosts(made, run, hosts, able, refused=refused, notes=notes)
    counts = counts or sorted({1, len(hosts)})
    rates = rates or [10_000_000, 100_000_000, 1_000_000_000]
    return _plan(made, config, options, counts, rates, able, refused=refused, notes=notes)


def _cluster(
    made: Profile,
    config: TrainConfig,
    hosts: Sequence[Host],
    exchanges: Sequence[Exchange],
    notes: Sequence[str],
    **more: Any,
) -> Plan:
    """Plan for the first hosts of a cluster whose links were measured, and for all of them."""

    def predictions(some: Sequence[Host]) -> list[prediction.Prediction]:
        batch = global_batch(config, sum(host.ranks for host in some))
        return [prediction.predict(made, each, some, batch) for each in exchanges]

    one = dataclasses.replace(predictions(hosts[:1])[0], steps_factor=(1.0, 1.0))
    counts = {count: predictions(hosts[:count]) for count in range(2, len(hosts) + 1)}
    rates = ", ".join(f"{host.name} {8e-6 * host.link.up:.3g} up, {8e-6 * host.link.down:.3g} down" for host in hosts)
    return Plan(profile=made, one=one, networks={"measured links": counts}, notes=[f"Mbit/s: {rates}", *notes], **more)


def _own_hosts(
    made: Profile, run: recorded.Recorded, hosts: Sequence[Host], able: Sequence[Exchange], **more: Any
) -> Plan:
    """Plan other strategies for the run's own hosts and links."""
    exchanges = {str(each): each for each in [run.exchange, *able]}.values()
    single = round(run.global_batch / len(hosts)) if not run.flags.get("global_batch_size") else run.global_batch
    one = prediction.predict(made, run.exchange, hosts[:1], single)
    found = [prediction.predict(made, each, hosts, run.global_batch) for each in exchanges]
    one = dataclasses.replace(one, steps_factor=(1.0, 1.0))
    return Plan(profile=made, one=one, networks={"the run's links": {len(hosts): found}}, **more)
