"""`hvdtrain doctor`: find problems that would make a job hang or run slowly, before it starts.

It checks this machine, each host over one ssh connection, and the links between all of them. Nothing is installed or
changed: hosts run a small script that arrives over ssh (`probe`) and ends with the connection.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain.doctor import checks, host_checks, link_checks
from hvdtrain.doctor.checks import FAIL, OK, WARN, Check
from hvdtrain.system import exits, launchers, net
from hvdtrain.system.agent import LOCAL, Agent, Unreachable, ssh_command
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots, from_slurm, parse_hosts, read_hostfile

SCHEMA = "hvdtrain/doctor/1"
COLOURS = {OK: "32", WARN: "33", FAIL: "31"}
CLOCK_SAMPLES = 5

PURPOSE = """Find problems that would make a job hang or run slowly, before it starts.

Run it where you will start the job, with the job's environment active. It prints one line per check: ok, warn or fail,
the finding, and how to fix it. It changes nothing on any host.

examples:
  hvdtrain doctor                          # this machine; in a Slurm allocation, its hosts too
  hvdtrain doctor -H a:2,b:2               # and these hosts, and the links between them
  hvdtrain doctor -H a:2,b:2 train.py data # and whether each host has these files
  hvdtrain doctor --hostfile hosts.txt --nic eth1 --json
  hvdtrain cluster exec a -- hvdtrain doctor -H a:2,b:2    # inside a virtual cluster

Exit code: 0 no failure, 1 a failure, 2 usage error, 65 malformed hostfile.
"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain doctor", description=PURPOSE)
    which = top.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="A:2,B:2", help="hosts and their slots, as for horovodrun")
    which.add_argument("--hostfile", metavar="FILE", type=Path, help="hosts as `a slots=2` lines")
    top.add_argument("paths", nargs="*", metavar="PATH", help="what every host needs, such as the script and its data")
    top.add_argument("--nic", metavar="DEV", help="interface for the job's data, on every host")
    top.add_argument("--run-dir", metavar="DIR", default="results", help="folder for run folders (default: results)")
    top.add_argument("--quick", action="store_true", help="do not load Horovod or measure bandwidth")
    top.add_argument("--json", action="store_true", help="one JSON document")
    return top


class Report:
    """Prints checks as they finish. On a terminal it also shows the current activity."""

    def __init__(self, *, as_json: bool) -> None:
        self.checks: list[Check] = []
        self._as_json = as_json
        self._colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def add(self, *checks: Check) -> None:
        for check in checks:
            self.checks.append(check)
            if not self._as_json:
                self.progress("")
                print(self.line(check), flush=True)

    def line(self, check: Check) -> str:
        text = f"{check.status:<4}  {check.where}: {check.what}" + (f"  — {check.fix}" if check.fix else "")
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
        return f"\x1b[{COLOURS[check.status]}m{text[:4]}\x1b[0m{text[4:]}" if self._colours else text

    def progress(self, activity: str) -> None:
        """Show the current activity. An empty text removes the line."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            text = f"... {activity}"[:width] if activity else ""
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def end(self, hosts: Sequence[Slots]) -> int:
        """Print the last line, or the JSON document. Returns the exit code."""
        self.progress("")
        counted = Counter(check.status for check in self.checks)
        counts = {status: counted[status] for status in (OK, WARN, FAIL)}
        if self._as_json:
            document = {
                "schema": SCHEMA,
                "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "hosts": [dataclasses.asdict(host) for host in hosts],
                "healthy": counts[FAIL] == 0,
                "counts": counts,
                "checks": [dataclasses.asdict(check) for check in self.checks],
            }
            print(json.dumps(document))
        else:
            print(f"{counts[FAIL]} failed, {counts[WARN]} warnings, {counts[OK]} ok")
        return exits.FAILED if counts[FAIL] else exits.OK


# --- hosts -----------------------------------------------------------------------------------------------------------


def own_names() -> set[str]:
    name = socket.gethostname()
    return {"localhost", name, name.partition(".")[0], socket.getfqdn()}


def is_here(host: str) -> bool:
    """Whether a listed host is this machine, by its name or its address (as horovodrun decides)."""
    return host in own_names() or any(map(net.is_own, _addresses(host)))


@dataclasses.dataclass
class Hosts:
    """The hosts of an examination, by the names under which they are listed, and their facts."""

    here: str
    """Name of this machine."""
    several: bool
    """Whether other hosts than this machine are listed."""
    python: str
    """The Python that `python -m hvdtrain.resnet` starts."""
    options: argparse.Namespace
    report: Report
    agents: dict[str, Agent] = dataclasses.field(default_factory=dict)
    """Hosts that answer."""
    facts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    clocks: dict[str, list[tuple[float, float, float]]] = dataclasses.field(default_factory=dict)
    """Clock samples, as `host_checks.clock_offset` takes them."""
    lost: dict[str, Check] = dataclasses.field(default_factory=dict)
    """Hosts that do not answer, each with the failed check."""


@contextlib.contextmanager
def connected(listed: Sequence[Slots], options: argparse.Namespace, report: Report) -> Iterator[Hosts]:
    """Start an agent on each host and on this machine. All end with the block."""
    local = [slot.host for slot in listed if is_here(slot.host)]
    own = own_names()
    here = next((host for host in local if host in own), None) or (local[0] if len(listed) == 1 and local else None)
    here = here or next(
        (host for host in local if not any(map(host_checks.is_loopback, _addresses(host)))), socket.gethostname()
    )
    several = len(listed) > 1 or len(local) < len(listed)
    hosts = Hosts(here, several, shutil.which("python") or sys.executable, options, report)
    with contextlib.ExitStack() as stack:
        agents = {here: stack.enter_context(Agent(here, LOCAL))}
        for slot in listed:
            if slot.host == here:
                continue
            misleading = host_checks.listed_name(slot.host, _addresses(slot.host)) if slot.host in local else None
            if misleading:
                hosts.lost[slot.host] = misleading
            elif shutil.which("ssh") is None:
                missing = Unreachable("no ssh program on this machine", "apt-get install openssh-client")
                hosts.lost[slot.host] = unreachable(slot.host, missing)
            else:
                agents[slot.host] = stack.enter_context(Agent(slot.host, ssh_command(slot.host, hosts.python)))
        for host, agent in agents.items():
            try:
                agent.hello()
                hosts.agents[host] = agent
            except Unreachable as problem:
                hosts.lost[host] = unreachable(host, problem)
        yield hosts


def unreachable(host: str, problem: Unreachable) -> Check:
    return Check(name="ssh", status=FAIL, where=host, what=f"ssh login failed: {problem.reason}", fix=problem.fix)


def _addresses(host: str) -> list[str]:
    """The host's first IPv4 address. Empty if the name is unknown."""
    try:
        return net.ipv4_addresses(host)[:1]
    except OSError:
        return []


def ask_all(hosts: Hosts, needed: list[str]) -> None:
    """Collect facts and clock samples from all hosts at the same time. Hosts that do not answer become lost."""
    waiting: dict[str, Future[Any]] = {}
    for host, agent in hosts.agents.items():
        waiting[host] = agent.start(
            "facts",
            python=hosts.python,
            packages=list(checks.PACKAGES),
            folder=str(Path.cwd()),
            run_folder=hosts.options.run_dir,
            needed=needed,
            paths=hosts.options.paths,
        )
    for host, future in waiting.items():
        try:
            hosts.facts[host] = future.result(timeout=30)
            if host != hosts.here:
                hosts.clocks[host] = [_clock_sample(hosts.agents[host]) for _ in range(CLOCK_SAMPLES)]
        except TimeoutError:
            problem = Unreachable("it did not answer within 30 s of the login", "check its load and disks (df, NFS)")
            hosts.lost[host] = unreachable(host, problem)
        except Unreachable as problem:
            hosts.lost[host] = unreachable(host, problem)
    for host in hosts.lost:
        hosts.agents.pop(host, None)
    if hosts.here in hosts.lost:
        raise Failure(f"this machine: {hosts.lost[hosts.here].what}", exits.FAILED)
    hosts.facts[hosts.here]["ssh_connection"] = []  # the user's login to this machine is unrelated to the job


def _clock_sample(agent: Agent) -> tuple[float, float, float]:
    asked = time.time()
    remote = float(agent.ask("clock"))
    return asked, remote, time.time()


# --- the examination -------------------------------------------------------------------------------------------------


def examine(listed: Sequence[Slots], options: argparse.Namespace, report: Report) -> None:
    """Run all checks, in the order in which a user would fix the problems."""
    report.progress("connecting to " + (", ".join(slot.host for slot in listed) or "this machine"))
    with connected(listed, options, report) as hosts:
        ask_all(hosts, launcher_programs())
        software(hosts)
        used = {host: nic_of(host, hosts) for host in hosts.agents}
        for slot in listed or [Slots(hosts.here, 0)]:
            if slot.host in hosts.lost:
                report.add(hosts.lost[slot.host])
            else:
                examine_host(slot, hosts, used[slot.host])
        if hosts.several and hosts.here not in [slot.host for slot in listed]:
            examine_host(Slots(hosts.here, 0), hosts, used[hosts.here])
        report.add(*host_checks.same_addresses(hosts.facts, options.nic))
        reachable = {host: nic for host, nic in used.items() if nic}
        if hosts.several and len(reachable) > 1:
            computing = [slot.host for slot in listed]
            between = {host: nic for host, nic in reachable.items() if host in computing}
            report.add(*host_checks.same_mtu(between), *host_checks.same_names(between), *names(hosts, [*between]))
            links(hosts, reachable, computing)


def launcher_programs() -> list[str]:
    """Programs that mpirun starts on each host: Open MPI's daemon, by the path or name that it will use."""
    if shutil.which("mpirun") is None:
        return []
    known = launchers.mpi_version(checks.read_output(["mpirun", "--version"])[1])
    if known is None or known[0] != "Open MPI":
        return []
    newer = known[1].startswith("5")
    agent, variable = ("prted", "PRTE_MCA_prte_launch_agent") if newer else ("orted", checks.LAUNCH_AGENT)
    return os.environ.get(variable, agent).split()[:1]


def software(hosts: Hosts) -> None:
    """Check Python, Horovod and MPI of this machine."""
    here, facts, report, quick = hosts.here, hosts.facts[hosts.here], hosts.report, hosts.options.quick
    built = facts["environment"]["horovod_for"] if facts["environment"] else []
    report.add(*checks.environment(here, facts, hosts.python))
    if built and not quick:
        report.progress(f"loading Horovod for {' and '.join(built)}")
    loaded = {} if quick else checks.load(hosts.python, built)
    if facts["environment"] and "horovod" in facts["environment"]["packages"]:
        report.add(*checks.horovod(here, built, loaded))
    report.add(*checks.mpi(here, loaded, facts["environment"], several=hosts.several))
    report.add(*checks.wheel_settings(here, facts, os.environ, hosts.several))
    report.add(*checks.exposed(here, os.environ))


def nic_of(host: str, hosts: Hosts) -> dict[str, Any] | None:
    """The interface that a host's data uses. For this machine, the one whose address the other hosts see.

    ssh may use IPv6, or pass through another host. In that case it is the interface of this machine's route to the
    other hosts, and for another host the interface of the address under which it is listed.
    """
    facts, towards = hosts.facts[host], None
    own = {entry["address"]: entry["name"] for entry in facts["interfaces"]}
    if host == hosts.here:
        others = [other for other in hosts.agents if other != hosts.here]
        seen = [by for other in others for by in hosts.facts[other]["ssh_connection"][:1] if by in own]
        towards = max(seen, key=seen.count, default=None)  # the address that most hosts see
        if towards is None:
            device = net.route_device(next((to for other in others for to in _addresses(other)), "192.0.2.1"))
            towards = next((address for address, name in own.items() if name == device), None)
    elif not own.keys() & set(facts["ssh_connection"][2:3]):
        towards = next(iter(_addresses(host)), None)
    return host_checks.data_nic(facts, hosts.options.nic, towards)


def examine_host(slot: Slots, hosts: Hosts, used: Mapping[str, Any] | None) -> None:
    """Check one host, which may be this machine."""
    host, facts, here, report = slot.host, hosts.facts[slot.host], hosts.facts[hosts.here], hosts.report
    if host != hosts.here:
        login_s = hosts.agents[host].login_s
        what = f"ssh login without a prompt, in {login_s:.2f} s"
        report.add(Check(name="ssh", status=OK, where=host, what=what, facts={"login_s": login_s}))
        report.add(*host_checks.shell(host, hosts.agents[host].noise))
        report.add(host_checks.same_environment(host, facts, here, hosts.python))
        report.add(host_checks.same_code(host, facts, here, str(Path.cwd())))
        report.add(*host_checks.needed_programs(host, facts))
        report.add(host_checks.clock(host, hosts.clocks[host]))
    report.add(*host_checks.same_paths(host, facts, here))
    report.add(host_checks.name_resolution(host, facts, used, hosts.several))
    report.add(host_checks.interfaces(host, facts, used, hosts.options.nic, hosts.several))
    report.add(*(host_checks.medium(host, facts, used) if hosts.several else []))
    report.add(*host_checks.throttled(host, facts), *(host_checks.sleeping(host, facts) if hosts.several else []))
    report.add(host_checks.disk(host, facts))
    if slot.slots:
        report.add(host_checks.slots(host, facts, slot.slots))


def names(hosts: Hosts, computing: Sequence[str]) -> list[Check]:
    """Check that the hosts know each other's own names."""
    facts = {host: hosts.facts[host] for host in computing}
    own = sorted({of_host["host"] for of_host in facts.values()})
    waiting = {host: hosts.agents[host].start("resolve", names=own) for host in computing}
    resolved = {}
    for host, future in waiting.items():
        with contextlib.suppress(TimeoutError, Unreachable):
            resolved[host] = future.result(timeout=30)
    return host_checks.known_names(facts, resolved)


def links(hosts: Hosts, used: Mapping[str, Mapping[str, Any]], listed: list[str]) -> None:
    """Check ports between all hosts and this machine, and bandwidth between the hosts that will compute.

    `used`: the interface of each host's data.
    """
    report, addresses = hosts.report, {host: nic["address"] for host, nic in used.items()}
    report.progress("high ports between " + ", ".join(addresses))
    agents = {host: hosts.agents[host] for host in addresses}
    try:
        tried = link_checks.try_ports(agents, addresses)
    except (Unreachable, TimeoutError) as problem:
        fix = "run the doctor again; if that fails too, check the ssh connections"
        what = f"ports could not be tried: {problem}"
        report.add(Check(name="ports", status=FAIL, where=", ".join(agents), what=what, fix=fix))
        return
    report.add(*link_checks.judge_ports(tried, addresses))
    computing = {host: agents[host] for host in listed if host in agents}
    if len(computing) > 1 and not hosts.options.quick:
        nic_mbit = {host: nic["speed_mbit"] for host, nic in used.items()}
        link_checks.speeds(computing, addresses, tried, nic_mbit, report.progress, report.add)


def main(arguments: list[str]) -> int:
    """Run the command. Returns 0, or 1 after a failed check. Raises Failure (2, 65, 78) if the hosts are malformed."""
    options = parser().parse_args(arguments)
    if options.hosts is not None:
        listed = parse_hosts(options.hosts)
    else:
        listed = read_hostfile(options.hostfile) if options.hostfile else from_slurm(os.environ) or []
    report = Report(as_json=options.json)
    try:
        examine(listed, options, report)
    finally:
        report.progress("")
    return report.end(listed)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "hvdtrain doctor")
