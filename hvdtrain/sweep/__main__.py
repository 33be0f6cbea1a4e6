"""The command line of the sweep runner: `hvdtrain sweep FILE.toml`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from hvdtrain.sweep import command, execute, file, grid, missing, network, show
from hvdtrain.sweep.dry_run import DryRun, dry_runs, known_flags, run_flags
from hvdtrain.sweep.execute import Task
from hvdtrain.sweep.process import Children
from hvdtrain.sweep.show import Outcome
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secrets

PURPOSE = """Run a grid of experiments described by a TOML file. For each run, the sweep sets and measures the rate of
the links, launches the job and checks its records. Run the same command again to continue after an interruption.

examples:
  hvdtrain sweep quick --dry-run
  hvdtrain sweep quick && hvdtrain results scaling results/quick
  hvdtrain sweep bandwidth_digits --only '*allreduce*' --set seed=1
  hvdtrain sweep cruz2021_devices --set data=fish
"""
SECTIONS = {
    "Keys at the top of the file": file.TOP,
    "Keys of [cluster] (set virtual or hostfile; without [cluster], this machine is used)": file.CLUSTER,
    "Keys of [[grid]] and [defaults] (a value, or a list of values to combine)": file.SETTINGS,
    "Keys of [[grid]] with a single value": file.GRID,
}
REST = """Any other key of a grid is a flag of the workload: batch_size = [16, 32] means --batch-size 16, then 32.
With a command, lr = 0.1 means --lr 0.1, OMP_NUM_THREADS = 1 is a variable, and strategy sets HVDTRAIN_STRATEGY.

Exit codes: 0 all runs are done, except for skipped ones; 1 a run failed twice or is marked; 2 usage; 69 all runs were
skipped; 73, 74 cannot write; 75 stopped, run again to continue; 78 bad file."""


def manual() -> str:
    """Describes the file's keys for --help."""
    lines = []
    for title, known in SECTIONS.items():
        lines += [f"{title}:", *(f"  {key:<16}{hint.__metadata__[-1]}" for key, hint in known.items())]
    return "\n".join([*lines, REST])


def parser() -> Parser:
    top = Parser(prog="hvdtrain sweep", description=PURPOSE, epilog=manual())
    add = top.add_argument
    add(
        "file",
        metavar="FILE.toml",
        type=Path,
        help="the sweep: a file, or the name of one of hvdtrain's own, such as quick",
    )
    add("--root", type=Path, default=Path("results"), metavar="DIR", help="parent of the sweep's folder (results)")
    add("--dry-run", action="store_true", help="list runs and commands; run nothing")
    add("--only", action="append", default=[], metavar="GLOB", help="only runs with matching names (repeatable)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the file (repeatable)")
    add("--json", action="store_true", help="print one JSON document on stdout")
    return top


def prepare(options: argparse.Namespace) -> tuple[Task, int]:
    """Expands the file into runs. Returns the task and the number of duplicate combinations.

    Every workload checks its settings here, so errors appear before the first run. Raises Failure (2, 69, 78).
    """
    file.read(options.file, options.set)  # find errors before asking workloads for their flags, which takes seconds
    sweep = file.read(options.file, options.set, known_flags)
    experiments, duplicates = grid.experiments(sweep, missing.gpus() if missing.depends_on_gpus(sweep) else None)
    runs = [run for run in grid.runs(experiments, sweep.order) if _selected(run, options.only)]
    if not runs:
        hint = "hint: --dry-run without --only lists the runs"
        raise Failure(f"--only {' '.join(options.only)}: matches no run of {options.file}; {hint}", exits.USAGE)
    experiments = list({run.experiment.name: run.experiment for run in runs}.values())
    skipped = {one.name: reason for one in experiments if (reason := missing.reason(one, sweep.cluster))}
    launchable = [one for one in experiments if _launchable(one)]
    answers = dry_runs([one for one in launchable if "command" not in one.settings])
    failures = [(one, answers[one.name]) for one in experiments if isinstance(answers.get(one.name), Failure)]
    if failures:
        experiment, failure = failures[0]
        more = f" (and {len(failures) - 1} more experiments)" if len(failures) > 1 else ""
        raise Failure(f"{experiment.where}: experiment {experiment.name}: {failure}{more}", exits.BAD_CONFIG)
    root, names = options.root / sweep.name, {one.name for one in launchable}
    known = {name: answer for name, answer in answers.items() if isinstance(answer, DryRun)}
    task = Task(
        sweep=sweep,
        root=root,
        outcomes=[Outcome(run=run, folder=root / run.name) for run in runs],
        dry_runs=known,
        flags={run.name: run_flags(run) for run in runs if run.experiment.name in names},
    )
    execute.classify(task, skipped)
    return task, duplicates


def _selected(run: grid.Run, globs: list[str]) -> bool:
    names = (run.name, run.experiment.name)
    return not globs or any(fnmatchcase(name, glob) for name in names for glob in globs)


def _launchable(experiment: grid.Experiment) -> bool:
    """Whether its command line can be built here: the number of ranks is known, and the workload has its framework."""
    settings = experiment.settings
    has_framework = "command" in settings or missing.framework(experiment) is None
    return isinstance(settings["ranks_per_host"], int) and has_framework


def dry_run(task: Task, duplicates: int, as_json: bool) -> int:
    """Prints the runs with their commands. Returns the exit code."""
    name, waiting = network.cluster_name(task.sweep, task.root), task.waiting()
    words = {o.run.name: execute.command_of(task, o, name) if o.run.name in task.flags else [] for o in task.outcomes}
    if as_json:
        rows = [(o, words[o.run.name]) for o in task.outcomes]
        print(json.dumps(show.dry_run_document(task.sweep.name, task.root, rows), indent=2))
        return exits.OK
    rate = None
    for outcome in task.outcomes:
        number = f"{outcome.run.order + 1:4d}"
        reason = f"; {outcome.reason}" if outcome.reason else ""
        if outcome.state != "waiting":
            print(f"{number}  {outcome.run.name}: {show.STATES[outcome.state]}{reason}")
            continue
        for line in _network_commands(task, waiting[waiting.index(outcome) :], name, rate):
            print(f"      {shlex.join(line)}")
        rate = outcome.run.experiment.rate or rate
        print(f"{number}  {outcome.run.name}{reason}")
        print(f"      {shlex.join(without_secrets(words[outcome.run.name]))}")
    spec = task.sweep.cluster
    if spec and spec.virtual and any(outcome.run.experiment.on_cluster for outcome in waiting):
        print(f"      {shlex.join(command.down(name))}")
    if duplicates:
        hint = "hint: repeats = 2 makes each run twice"
        print(f"{duplicates} duplicate combinations left out (the rate has no effect on a single host; {hint})")
    counts = Counter(outcome.state for outcome in task.outcomes)
    totals = "".join(f", {counts[state]} {show.STATES[state]}" for state in ("kept", "skipped") if counts[state])
    print(f"{len(task.outcomes)} runs: {len(waiting)} to run{totals}; results in {task.root}")
    return exits.OK


def _network_commands(task: Task, waiting: list[Outcome], name: str, rate: str | None) -> list[Command]:
    """The commands that start the cluster and change the rate before the first of the waiting runs."""
    spec, experiment = task.sweep.cluster, waiting[0].run.experiment
    if spec is None or not experiment.on_cluster:
        return []
    commands = []
    on_cluster = [outcome for outcome in task.waiting() if outcome.run.experiment.on_cluster]
    if spec.virtual and waiting[0] is on_cluster[0]:
        commands.append(command.up(spec, name))
    if experiment.rate is not None and experiment.rate != rate:
        commands.append(command.throttle(experiment.rate, spec, name))
        if experiment.rate_bit_s:
            hosts = spec.names[: execute.most_hosts(waiting)]
            commands += command.verify(hosts, spec, name, task.sweep.off_percent)
    return commands


def run(task: Task, as_json: bool) -> int:
    """Executes the waiting runs and prints the results. Returns the exit code."""
    began_s = time.monotonic()
    dropped = sorted(name for name in os.environ if name.startswith("HVDTRAIN_"))
    if dropped:
        show.say(f"ignoring {', '.join(dropped)}; hint: use the sweep file or --set")
    children = Children(command.environment())
    with execute.exclusive(task.root) as handles, children.handle_signals():
        children.lock_handles = handles
        execute.classify(task, {o.run.experiment.name: o.reason or "" for o in task.outcomes if o.state == "skipped"})
        failure = execute.Executor(task, children).run()
    seconds = time.monotonic() - began_s
    if as_json:
        print(json.dumps(show.end_document(task.sweep.name, task.root, task.outcomes, seconds), indent=2))
    else:
        print(show.end_text(task.root, task.outcomes, seconds))
    sys.stdout.flush()
    if failure:
        raise failure
    states = {outcome.state for outcome in task.outcomes}
    if states & {"failed", "marked"}:
        return exits.FAILED
    return exits.UNREACHABLE if states == {"skipped"} else exits.OK


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure, whose message is for the user."""
    options = parser().parse_args(arguments)
    task, duplicates = prepare(options)
    return dry_run(task, duplicates, options.json) if options.dry_run else run(task, options.json)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "sweep")
