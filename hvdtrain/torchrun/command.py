"""Start a DDP script on all hosts: `hvdtrain launch torchrun -H a:2,b:2 --strategy fast train.py`.

`torchrun.host` starts the ranks of each host, with torchrun's variables. The script runs under `hvdtrain.ddp` and
needs no line of hvdtrain. mpirun starts `torchrun.host` on the hosts, if there are others than this one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.launch import __main__ as launch
from hvdtrain.launch import launched_by, prepare, tuning
from hvdtrain.launch.link import address_of, choose_interface, find_hosts, network_of
from hvdtrain.launch.mpi import Mpi
from hvdtrain.launch.mpi import find as find_mpi
from hvdtrain.launch.tuning import MPI, Link
from hvdtrain.strategies import automatic
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.strategies.spec import parse
from hvdtrain.system import exits, hosts, net
from hvdtrain.system.arguments import Parser
from hvdtrain.system.environment import left_out
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots
from hvdtrain.system.redaction import without_secrets
from hvdtrain.torchrun import key

PROGRAM = "hvdtrain launch torchrun"
EXAMPLE = f"{PROGRAM} -H a:1,b:1 train.py"
FIRST_PORT, PORTS = 20_000, 10_000
"""Below the ephemeral ports, so that no connection has taken the port"""
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "plm_rsh_args", "orte_keep_fqdn_hostnames")
"""Settings of mpirun.sh that matter to a script: its memory, and how mpirun reaches the other hosts"""


def parser() -> Parser:
    top = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Start a script on all hosts whose DistributedDataParallel exchanges by a strategy.",
        epilog=f"examples:\n  {PROGRAM} -H a:1,b:1 --strategy fast examples/hf_lora.py",
    )
    top.set_defaults(np=None, set=[], mca=[])
    add = top.add_argument
    add("-H", "--hosts", metavar="a:2,b:2", help="hosts and their ranks, the same number on each")
    add("--hostfile", type=Path, metavar="FILE", help="file with one `host slots=2` per line")
    add("--nic", metavar="DEVICE", help="network interface between the hosts (default: from the route)")
    add(
        "--strategy",
        metavar="S",
        help="exact, balanced, fast, auto or see `hvdtrain strategies` (default: HVDTRAIN_STRATEGY, or exact)",
    )
    add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="also pass this variable to other hosts")
    add("--sync", action="store_true", help="first copy the script's folder to the other hosts")
    launch.add_grace(top)
    add("--dry-run", action="store_true", help="print the command and start nothing")
    add("-m", action="store_true", dest="module", help="SCRIPT names a module")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    return top


def checked(options: argparse.Namespace) -> str:
    """The strategy. Raises Failure (2, 78) for a script or a strategy that does not exist."""
    options.script = options.script[options.script[:1] == ["--"] :]
    if not options.script:
        raise Failure(f"no script given; hint: {EXAMPLE}", exits.USAGE)
    if not (options.module or options.dry_run or Path(options.script[0]).is_file()):
        raise Failure(f"{options.script[0]}: no such script; hint: name a file, or -m MODULE", exits.USAGE)
    strategy = options.strategy or os.environ.get("HVDTRAIN_STRATEGY") or DEFAULT_REDUCER
    if automatic.rule(strategy) is None:
        parse(strategy)
    return strategy


def addresses_of(names: Sequence[str], nic: str | None) -> list[str]:
    """The address of each host as the others reach it. Raises Failure (2) if two are one host.

    This machine's own name may resolve to 127.0.1.1, so its address is that of the interface to the others.
    """
    found: dict[str, str] = {}
    for name in names:
        address = address_of(name)
        if nic and net.is_own(address) and (own := net.addresses().get(nic)):
            address = str(own.ip)
        elif not nic:
            address = "127.0.0.1"
        if (other := found.setdefault(address, name)) != name:
            what = f"{other} and {name} are the same host ({address})"
            raise Failure(f"{what}; hint: give it once, with all its ranks", exits.USAGE)
    return list(found)


def make_plan(options: argparse.Namespace, found: Sequence[Slots], source: str, job: str) -> launch.Plan:
    """Plan the processes on each host and their settings. Raises Failure as `choose_interface` does.

    `job`: a word that differs between jobs.
    """
    each, names = found[0].slots, [slot.host for slot in found]
    if len({slot.slots for slot in found}) != 1:
        what = f"{source} {hosts.as_argument(found)}: torchrun needs the same number of ranks on each host"
        raise Failure(f"{what}; hint: -H a:2,b:2", exits.USAGE)
    nic, _ = choose_interface(names, options.nic)
    nic = None if all(net.is_own(address_of(name)) for name in names) else nic
    addresses = addresses_of(names, nic)
    network = network_of(nic, names) if nic else None
    link = Link(hosts=len(found), ranks=len(found), most_ranks=each, cores=1, rate_bit_s=None, network=network)
    mpi = find_mpi(os.environ.get("PATH", os.defpath)) if nic else Mpi()
    # A device may have another name on other hosts.
    kept = (*SETTINGS, "oob_tcp_if_include") if network and "/" in network else SETTINGS
    chosen = [setting for setting in mpi.adapted(tuning.settings(link, MPI)) if setting.name in kept]
    port = FIRST_PORT + secrets.randbelow(PORTS)
    command = [sys.executable, "-m", "hvdtrain.torchrun.host", "--hosts", ",".join(addresses)]
    command += ["--ranks", str(each), "--port", str(port), "--job", job]
    command += ["--key"] if nic and not options.dry_run else []  # someone who pastes the command has no launcher
    command += ["--nic", options.nic] if options.nic else []
    command += [sys.executable, "-u", "-m", "hvdtrain.ddp"]
    command += ["--strategy", options.strategy] if options.strategy else []
    command += ["-m"] if options.module else []
    return launch.Plan(
        launcher="mpirun",
        backend=MPI,
        ranks=len(found),
        hosts=[Slots(name, 1) for name in names],
        interface=nic,
        settings=launch.overridden(chosen, options, os.environ),
        passed=[text.partition("=")[0] for text in options.x],
        command=[*command, *options.script],
        logs=None,
        mpi=mpi,
    )


def sync(options: argparse.Namespace, plan: launch.Plan) -> None:
    """Bring the script's folder to the other hosts. Raises Failure as `prepare.sources` and `prepare.copy` do."""
    folder = Path.cwd() if options.module else Path(options.script[0]).absolute().parent
    files, line = prepare.sources(folder)
    say(line)
    for name in prepare.others([slot.host for slot in plan.hosts]):
        say(prepare.copy(name, folder, files))


def main(arguments: list[str]) -> int:
    """Return the job's exit code. Raises Failure (2, 69, 78) for what cannot be started."""
    options = parser().parse_args(arguments)
    strategy = checked(options)
    found, source = find_hosts(options, os.environ)
    job = secrets.token_hex(4)
    plan = make_plan(options, found, source, job)
    total, names = sum(slot.slots for slot in found), ", ".join(slot.host for slot in found)
    over = f" over {plan.interface}" if plan.interface else ""
    say(f"{total} rank{'s' * (total > 1)} on {names}{over}, strategy {strategy}")
    others = [at for slot in found if not net.is_own(at := address_of(slot.host))] if options.nic else []
    if outside := [at for at in others if net.route_device(at) != options.nic]:
        say(
            f"output and -x variables do not go over {options.nic}; hint: -H with the addresses on it, not {outside[0]}"
        )
    if plan.interface and (missing := left_out(os.environ, plan.passed)):
        listed = textwrap.shorten(", ".join(missing), 36, placeholder=" ...")
        say(f"-x NAME passes what other hosts do not get: {listed}")
    inner = launch.child_environment(plan, os.environ)
    inner = inner if plan.interface else {**os.environ, **inner}  # on this machine ranks inherit everything
    typed = [*PROGRAM.split(), "-H", hosts.as_argument(found)]
    typed += [
        word for name in ("nic", "strategy") if (value := getattr(options, name)) for word in (f"--{name}", value)
    ]
    typed += ["--sync"] if options.sync else []
    typed += [word for name in plan.passed for word in ("-x", name)]
    if not options.dry_run:
        line = shlex.join(without_secrets(typed))
        inner |= launched_by.to_environment(line, launch.shown(plan), total, len(found))
    command = launch.mpirun_command(plan, list(inner)) if plan.interface else plan.command
    if options.sync and not options.dry_run:
        sync(options, plan)
    if options.dry_run or not plan.interface:
        return launch.run(plan, command, inner, options)
    with key.handed_over([slot.host for slot in plan.hosts], job):
        return launch.run(plan, command, inner, options)


def say(text: str) -> None:
    print(f"launch torchrun: {text}", file=sys.stderr, flush=True)
