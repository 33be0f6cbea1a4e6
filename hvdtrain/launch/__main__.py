"""Starts ranks with settings that suit the link between their hosts: launch/mpirun.sh and launch/horovodrun.sh.

Hosts come from -H, a hostfile or the Slurm allocation, the network interface from the routes to them, the link's rate
from --rate, from the throttle, from tc or from the hardware. What follows from these (`tuning`) is printed, each value
with its reason, kept in the run's manifest, and gives way to --set, --mca and variables that are set already. The
environment of the ranks is an allow-list, and no value of it stands on a command line of ours (Horovod writes them on
ssh's with --gloo).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hvdtrain.lab import throttle
from hvdtrain.launch import launched_by, output, tuning
from hvdtrain.launch.supervise import Job, lost_host
from hvdtrain.launch.tuning import GLOO, MPI, Setting
from hvdtrain.system import cgroup as quota
from hvdtrain.system import exits, hosts, net
from hvdtrain.system.arguments import Parser
from hvdtrain.system.commands import Command, find, run
from hvdtrain.system.environment import FOR_LAUNCHERS, FOR_RANKS, passes
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots
from hvdtrain.system.rates import parse_rate, show_rate
from hvdtrain.system.redaction import is_secret, redacted, without_secrets

HOROVODRUNS = {"pml", "btl_tcp_if_include"}  # parameters of Open MPI that horovodrun itself gives
SURVIVE = ("python3", "-P", "-m", "hvdtrain.launch.survive")
SLEEPER = Path(sys.prefix, "lib", "sleep_when_idle.so")
EXAMPLES = """examples:
  launch/mpirun.sh -np 2 python -m hvdtrain.resnet        on this machine
  launch/mpirun.sh -H a:2,b:2 --logs logs --show-rank 0 python -m hvdtrain.resnet --epochs 1
  launch/horovodrun.sh -np 4 --hostfile hostfiles/virtual4.txt python -m hvdtrain.resnet
  launch/mpirun.sh python -m hvdtrain.resnet              in a Slurm allocation
  launch/mpirun.sh --dry-run -H a:2,b:2 --rate 10mbit python -m hvdtrain.resnet

SIGTERM, SIGINT and SIGUSR1 make the ranks save a checkpoint and end with 75; a second SIGTERM or SIGINT ends them now.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be started."""

    launcher: str
    backend: str
    ranks: int
    hosts: list[Slots]
    interface: str | None
    settings: list[Setting]
    passed: list[str]
    """Variables that -x names"""
    command: Command


def parser(launcher: str) -> Parser:
    top = Parser(
        prog=f"launch/{launcher}.sh",
        usage=f"launch/{launcher}.sh [options] COMMAND [ARGUMENT ...]",
        description=f"Starts COMMAND on every rank with {launcher}; its settings suit the link between the hosts.",
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    add = top.add_argument
    add("-np", "-n", "--np", type=int, metavar="N", help="ranks (default: all slots); without hosts: on this machine")
    add("-H", "--hosts", "--host", metavar="a:2,b:2", help="hosts and their slots")
    add("--hostfile", "-hostfile", "--machinefile", type=Path, metavar="FILE", help="one `host slots=2` per line")
    add("--nic", metavar="DEVICE", help="network interface between the hosts (default: that of the route to them)")
    add("--rate", metavar="RATE", help="rate of the link, as 10mbit (default: as throttled, or as the hardware says)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of yours in place of ours")
    add("--mca", action="append", default=[], nargs=2, metavar=("NAME", "VALUE"), help="a parameter of Open MPI")
    add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="pass this variable to the ranks too")
    add("--grace", type=float, default=25, metavar="SECONDS", help="for the checkpoint after SIGTERM (default: 25)")
    if launcher == "horovodrun":
        add("--gloo", action="store_true", help="Horovod on Gloo and not on MPI")
    add("--survive", action="store_true", help="a rank that the strategy can do without may die")
    add("--logs", type=Path, metavar="DIR", help="add each rank's output to DIR/rank0000/stdout, stderr on its host")
    add("--show-rank", metavar="N,...", help="only the output of these ranks comes here (default: of all)")
    add("--quiet", action="store_true", help="do not print the settings (the run's manifest keeps them)")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs")
    return top


# --- hosts and link --------------------------------------------------------------------------------------------------


def find_hosts(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[list[Slots], str]:
    """The hosts and where they come from."""
    if options.np is not None and options.np < 1:
        raise Failure(f"-np {options.np}: give 1 or more", exits.USAGE)
    if options.hosts is not None and options.hostfile:
        raise Failure("-H and --hostfile both name hosts; give one of them", exits.USAGE)
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts), "-H"
    if options.hostfile:
        return hosts.read_hostfile(options.hostfile), str(options.hostfile)
    from_slurm = hosts.from_slurm(environment)
    if from_slurm:
        return from_slurm, f"Slurm job {environment.get('SLURM_JOB_ID', '?')}"
    if options.np is not None:
        return [Slots("localhost", options.np)], "-np: this machine"
    raise Failure(
        "no hosts: give -H a:2,b:2, --hostfile FILE, or -np 2 for this machine, or start it in a Slurm allocation",
        exits.USAGE,
    )


def placed(found: Sequence[Slots], ranks: int) -> list[Slots]:
    """The ranks of each host that gets some, filled in order."""
    result, left = [], ranks
    for slot in found:
        if left > 0:
            result.append(Slots(slot.host, min(slot.slots, left)))
            left -= slot.slots
    return result


def address_of(host: str) -> str:
    """The IPv4 address of a host. Raises Failure (69)."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Failure(
            f"host {host} has no IPv4 address ({error.strerror or error}); check the spelling, or add it to /etc/hosts",
            exits.UNREACHABLE,
        ) from error


def choose_interface(names: Sequence[str], asked: str | None) -> tuple[str | None, str]:
    """The interface to the other hosts and why this one; None if all hosts are this one.

    Raises Failure: 69 for a host without address or route, 78 for an unknown interface.
    """
    others = [name for name in names if not net.is_own(address_of(name))]
    if not others and not asked:
        return None, "all ranks are on this host"
    find("ip")  # says what to install
    if asked:
        known = [name for _, name in socket.if_nameindex()]
        if asked not in known:
            raise Failure(f"no network interface {asked} here; there are {', '.join(known)}", exits.BAD_CONFIG)
        return asked, "--nic"
    ways: dict[str, str] = {}
    for name in others:
        device = net.route_device(address_of(name))
        if device is None:
            raise Failure(f"host {name} ({address_of(name)}): no route to it from here", exits.UNREACHABLE)
        ways.setdefault(device, name)
    first, host = next(iter(ways.items()))
    more = [f"{device} to {name}" for device, name in ways.items() if device != first]
    return first, f"the route to {host}" + (f"; also {', '.join(more)}: choose with --nic" if more else "")


def network_of(device: str, names: Sequence[str]) -> str:
    """For Open MPI: the network, if all others are in it (interfaces may be named otherwise there), or the name."""
    network = net.network(device)
    # This host's own name leads to 127.0.1.1 on Debian.
    others = [address for address in map(address_of, names) if not net.is_own(address)]
    inside = network is not None and all(ipaddress.ip_address(address) in network for address in others)
    return str(network) if inside else device


def find_rate(asked: str | None, device: str) -> tuple[int | None, str]:
    """The link's rate in bit/s, the slower direction, and who says so."""
    if asked:
        return parse_rate(asked), "--rate"
    shape = throttle.requested()
    if shape and shape.get("dev") in (device, None):
        rates = [shape[key] for key in ("up_mbit", "down_mbit") if shape.get(key)]
        if rates:
            return round(min(rates) * 1e6), "as throttled"
    with contextlib.suppress(Failure, ValueError):
        for queue in json.loads(run(["tc", "-json", "qdisc", "show", "dev", device]) or "[]"):
            rate = queue.get("options", {}).get("rate")
            if queue.get("kind") == "tbf" and isinstance(rate, int):
                return rate * 8, f"tc on {device}"
    # A veth, which is no device of the machine, says 10000 whatever it is.
    if Path(f"/sys/class/net/{device}/device").exists() and (speed := net.speed_mbit(device)):
        return speed * 1_000_000, f"{device}'s hardware"
    return None, f"nobody says; settings for {show_rate(tuning.ASSUMED_BIT_S)} (--rate tells it)"


# --- settings and command --------------------------------------------------------------------------------------------


def overridden(chosen: Sequence[Setting], options: argparse.Namespace, environment: Mapping[str, str]) -> list[Setting]:
    """The settings after what the user set: by --set and --mca, by -x NAME=VALUE, or in the environment."""
    mine = {}
    for text in [*options.set, *(text for text in options.x if "=" in text)]:
        name, equals, value = text.partition("=")
        if not equals or not name.replace("_", "").isalnum():
            raise Failure(f"--set {text}: expected NAME=VALUE, as in --set HOROVOD_CYCLE_TIME=5", exits.USAGE)
        mine[name] = value
    parameters = dict(options.mca)
    result = []
    for setting in chosen:
        if setting.mca and setting.name in parameters:
            result.append(dataclasses.replace(setting, value=parameters.pop(setting.name), reason="--mca"))
        elif setting.name in mine:
            result.append(dataclasses.replace(setting, value=mine.pop(setting.name), reason="--set"))
        elif setting.variable in environment:
            reason = f"the environment's {setting.variable}"
            result.append(dataclasses.replace(setting, value=environment[setting.variable], reason=reason))
        else:
            result.append(setting)
    # By the way: what --set names and we do not is a variable of the ranks.
    result += [Setting(name, value, "--set") for name, value in mine.items()]
    return result + [Setting(name, value, "--mca", mca=True) for name, value in parameters.items()]


def child_environment(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """What mpirun or horovodrun gets: the listed variables, what -x names, and the settings."""
    kept = {name: value for name, value in environment.items() if passes(name, (*FOR_LAUNCHERS, *plan.passed))}
    if os.geteuid() == 0:  # in a container everybody is root, and mpirun wants to be told twice
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {setting.name: setting.value for setting in plan.settings if not setting.mca}


def mca_words(plan: Plan, but: Collection[str] = ()) -> Command:
    told = [setting for setting in plan.settings if setting.mca and setting.name not in but]
    return [word for setting in told for word in ("--mca", setting.name, setting.value)]


def mpirun_command(plan: Plan, variables: Sequence[str]) -> Command:
    """mpirun with each of the ranks' variables by name only."""
    words = ["mpirun", "-np", str(plan.ranks), "-H", hosts.as_argument(plan.hosts)]
    words += ["--bind-to", "none", "--map-by", "slot", *mca_words(plan)]
    own = [setting.name for setting in plan.settings if not setting.mca]
    for name in sorted(variables):
        if passes(name, (*FOR_RANKS, *plan.passed, *own)):
            words += ["-x", name]
    return [*words, *plan.command]


def horovodrun_command(plan: Plan) -> Command:
    """horovodrun, which passes on all of its own (by then filtered) environment."""
    words = ["horovodrun", "--gloo" if plan.backend == GLOO else "--mpi"]
    words += ["-np", str(plan.ranks), "-H", hosts.as_argument(plan.hosts)]
    if plan.interface:
        words += ["--network-interfaces", plan.interface]
    if plan.backend == MPI:
        words.append(f"--mpi-args={shlex.join(mca_words(plan, HOROVODRUNS))}")
    return [*words, *plan.command]


def make_plan(launcher: str, options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Plan, list[str]]:
    """The plan, and what is to be said of it."""
    if not options.command:
        raise Failure(f"no command given; for example launch/{launcher}.sh -H a:2,b:2 python -m hvdtrain.resnet", 2)
    if launcher == "horovodrun" and (own := HOROVODRUNS & dict(options.mca).keys()):
        what = f"--mca {min(own)}: horovodrun sets it itself; give --nic for the interface, or use launch/mpirun.sh"
        raise Failure(what, exits.USAGE)
    found, source = find_hosts(options, environment)
    slots = sum(slot.slots for slot in found)
    ranks = slots if options.np is None else options.np
    if ranks > slots:
        raise Failure(f"-np {ranks}: {source} has {slots} slots ({hosts.as_argument(found)})", exits.USAGE)
    used = placed(found, ranks)
    names = [slot.host for slot in used]
    interface, why = choose_interface(names, options.nic)
    rate, said = find_rate(options.rate, interface) if interface else (None, "")
    link = tuning.Link(
        hosts=len(used),
        ranks=ranks,
        most_ranks=max(slot.slots for slot in used),
        cores=quota.process_cores(),
        rate_bit_s=rate,
        network=network_of(interface, names) if interface else None,
        quota=quota.process_cores() < len(os.sched_getaffinity(0)),
        sleeper=str(SLEEPER) if SLEEPER.is_file() else None,
    )
    backend = GLOO if getattr(options, "gloo", False) else MPI
    passed = [text.partition("=")[0] for text in options.x]
    ours = tuning.settings(link, backend)
    settings = overridden(ours, options, environment)
    if any(setting.name == "OMP_NUM_THREADS" and setting in ours for setting in settings):
        settings.append(
            Setting(quota.LAUNCHERS_OWN, "1", "so that ranks of hvdtrain go by the cores of their own host")
        )
    plan = Plan(
        launcher=launcher,
        backend=backend,
        ranks=ranks,
        hosts=used,
        interface=interface,
        settings=settings,
        passed=passed,
        command=output.wrapped(
            [*SURVIVE, *options.command] if options.survive else options.command,
            ranks,
            options.logs,
            options.show_rank,
        ),
    )
    told = [f"hosts={hosts.as_argument(used)}  # {ranks} ranks; from {source}"]
    told.append(f"nic={plan.interface or 'none'}  # {why}")
    told.append(f"backend={backend}  # {tuning.BACKENDS[backend]}")
    if interface:
        told.append(f"rate={show_rate(rate) if rate else 'unknown'}  # {said}")
    told += [f"{one.name}=...  # {one.reason}" if _private(one, passed) else str(one) for one in plan.settings]
    slower = tuning.advice(link, backend)
    return plan, [*told, slower] if slower else told


def _private(setting: Setting, passed: Collection[str]) -> bool:
    """Whether the value is nobody's business: of a secret, or given by -x."""
    named = setting.name in passed or is_secret(setting.name)
    return not setting.mca and (named or redacted(setting.value) != setting.value)


def typed(plan: Plan, options: argparse.Namespace) -> str:
    """The launcher as one would type it to start the same ranks again; in a Slurm allocation that has the hosts.

    Values of -x and of secrets, which may be nobody's business, are left out: their variables stand there by name.
    """
    words = [f"launch/{plan.launcher}.sh"]
    words += ["--gloo"] if plan.launcher == "horovodrun" and plan.backend == GLOO else []
    if options.hosts or options.hostfile or plan.hosts[0].host == "localhost":
        words += ["-H", hosts.as_argument(plan.hosts)]
    elif options.np:
        words += ["-np", str(plan.ranks)]
    words += ["--survive"] if options.survive else []
    for name in ("nic", "rate", "logs"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name}", str(value)]
    for text in options.set:
        words += ["-x", name] if is_secret(name := text.partition("=")[0]) else ["--set", text]
    for name, value in options.mca:
        words += ["--mca", name, value]
    for name in plan.passed:
        words += ["-x", name]
    return shlex.join(without_secrets(words))


def start(launcher: str, arguments: list[str], environment: Mapping[str, str]) -> int:
    options = parser(launcher).parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    plan, told = make_plan(launcher, options, environment)
    for line in told if not options.quiet else []:
        print(f"{launcher}.sh: {line}", file=sys.stderr)
    inner = child_environment(plan, environment)
    if not options.dry_run:  # of no interest to who reads the command
        kept = [one for one in plan.settings if not _private(one, plan.passed)]
        inner |= launched_by.to_environment(typed(plan, options), kept)
    command = mpirun_command(plan, list(inner)) if launcher == "mpirun" else horovodrun_command(plan)
    if options.dry_run:
        made = [f"{name}={value}" for name, value in sorted(inner.items()) if environment.get(name) != value]
        print(shlex.join(["env", *made, *command] if made else command))
        return exits.OK
    for program in {command[0], "mpirun" if plan.backend == MPI else command[0]}:
        if shutil.which(program, path=inner.get("PATH", os.defpath)) is None:
            raise Failure(f"no {program} in PATH; run `make setup`, or load your cluster's MPI", exits.UNREACHABLE)
    sys.stderr.flush()
    names = [slot.host for slot in plan.hosts]
    job = Job(command, inner, options.grace, lost=lambda: lost_host(names), tells_code=plan.backend == MPI)
    return job.wait()


def main(arguments: list[str]) -> int:
    """`mpirun` or `horovodrun`, then its options and the command to start. The exit code is the job's."""
    if not arguments or arguments[0] not in ("mpirun", "horovodrun"):
        asked = arguments in (["--help"], ["-h"])
        print(f"{__doc__}\nSee launch/mpirun.sh --help.", file=sys.stdout if asked else sys.stderr)
        return exits.OK if asked else exits.USAGE
    return start(arguments[0], arguments[1:], os.environ)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
