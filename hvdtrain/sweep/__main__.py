"""The command line of the sweep runner: `hvdtrain sweep FILE.toml`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hvdtrain.sweep import command, file, gpus, grid
from hvdtrain.sweep.dry_run import dry_run, run_flags
from hvdtrain.sweep.execute import STATES, Executor, Outcome, Task, exclusive, say
from hvdtrain.sweep.folder import tail
from hvdtrain.sweep.process import Children
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secret_values, without_secrets

SCHEMA = "hvdtrain/sweep/1"

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


def prepare(options: argparse.Namespace) -> Task:
    """Expands the file into runs.

    Every workload checks its settings here, so errors appear before the first run. Raises Failure (2, 65, 78).
    """
    sweep = file.read(options.file, options.set)
    experiments = grid.experiments(sweep, gpus.count() if gpus.decide_ranks(sweep) else None)
    globs = options.only or ["*"]
    runs = [
        run
        for run in grid.runs(experiments, sweep.order)
        if any(fnmatchcase(name, glob) for name in (run.name, run.experiment.name) for glob in globs)
    ]
    if not runs:
        hint = "hint: --dry-run without --only lists the runs"
        raise Failure(f"--only {' '.join(options.only)}: matches no run of {options.file}; {hint}", exits.USAGE)
    task = Task(sweep=sweep, root=options.root / sweep.name, outcomes=[])
    for run in runs:
        experiment, known = run.experiment, isinstance(run.experiment.settings["ranks_per_host"], int)
        try:
            flags = run_flags(run) if known else None
            answer = dry_run(experiment) if known and "command" not in experiment.settings else None
            reason = gpus.missing(experiment)
        except Failure as failure:
            code = exits.BAD_CONFIG if failure.code == exits.USAGE else failure.code
            raise Failure(f"{experiment.where}: {failure}", code) from failure
        state = "skipped" if reason else "waiting"
        place = task.root / run.name
        task.outcomes.append(Outcome(run=run, folder=place, flags=flags, dry_run=answer, state=state, reason=reason))
    task.classify()
    return task


def show_commands(task: Task) -> None:
    """Prints the runs with their commands."""
    spec, name, rate, running = task.sweep.cluster, task.cluster, None, False
    for outcome in task.outcomes:
        run, experiment = outcome.run, outcome.run.experiment
        if outcome.state == "waiting" and spec:
            commands = [] if running or not spec.virtual else [command.up(spec, name)]
            running = running or bool(spec.virtual)
            if experiment.rate not in (None, rate):
                commands.append(command.throttle(str(experiment.rate), spec, name))
                commands += command.verify(spec, name, task.sweep.off_percent) if experiment.rate_bit_s else []
                rate = experiment.rate
            print(*(f"      {shlex.join(words)}\n" for words in commands), sep="", end="")
        state = "" if outcome.state == "waiting" else f": {STATES[outcome.state]}"
        print(f"{run.order + 1:4d}  {run.name}{state}{f'; {outcome.reason}' if outcome.reason else ''}")
        if outcome.state == "waiting":
            print(f"      {shlex.join(without_secrets(task.command_of(outcome)))}")
    if running:
        print(f"      {shlex.join(command.down(name))}")
    print(_counts(task))


def _counts(task: Task) -> str:
    counts = Counter(outcome.state for outcome in task.outcomes)
    totals = ", ".join(f"{counts[state]} {text}" for state, text in STATES.items() if counts[state])
    return f"{len(task.outcomes)} runs: {totals}; records in {task.root}"


def document(task: Task) -> dict[str, Any]:
    """The runs of a sweep, planned or ended."""
    counts = Counter(outcome.state for outcome in task.outcomes)
    runs = [
        {
            "order": outcome.run.order,
            "experiment": outcome.run.experiment.name,
            "kind": outcome.run.kind,
            "repeat": outcome.run.repeat,
            "state": outcome.state,
            "reason": outcome.reason,
            "run_dir": str(outcome.folder),
            "seconds": outcome.seconds,
            "log": str(outcome.log) if outcome.log else None,
            "settings": without_secret_values(outcome.run.experiment.settings),
            "command": without_secrets(task.command_of(outcome)),
        }
        for outcome in task.outcomes
    ]
    about = {"schema": SCHEMA, "sweep": task.sweep.name, "root": str(task.root)}
    return {**about, "counts": {state: counts[state] for state in STATES}, "runs": runs}


def run(task: Task) -> Failure | None:
    """Executes the waiting runs. Returns the Failure that stopped the sweep, or None."""
    dropped = sorted(name for name in os.environ if name.startswith("HVDTRAIN_"))
    if dropped:
        say(f"ignoring {', '.join(dropped)}; hint: use the sweep file or --set")
    children = Children(command.environment())
    with exclusive(task.root) as lock, children.handle_signals():
        children.lock = (lock,)
        task.classify()  # again: another sweep may have ended in between
        return Executor(task, children).run()


def show_results(task: Task) -> None:
    """Prints failures in full, marked and skipped runs, and counts."""
    for outcome in task.outcomes:
        if outcome.state in ("failed", "marked"):
            print(f"{STATES[outcome.state]}: {outcome.run.name}: {outcome.reason}")
        if outcome.log and outcome.state == "failed":
            print(*(f"    {line}" for line in [*tail(outcome.log), f"log: {outcome.log}"]), sep="\n")
    for reason, count in Counter(outcome.reason for outcome in task.outcomes if outcome.state == "skipped").items():
        print(f"skipped: {reason} ({count} runs)")
    if any(outcome.state == "marked" for outcome in task.outcomes):
        print("hint: run the same command to repeat marked runs; --set off_percent=10 tolerates 10 %")
    print(_counts(task))


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure, whose message is for the user."""
    options = parser().parse_args(arguments)
    task = prepare(options)
    failure = None if options.dry_run else run(task)
    if options.json:
        print(json.dumps(document(task), indent=2))
    elif options.dry_run:
        show_commands(task)
    else:
        show_results(task)
    sys.stdout.flush()
    if failure:
        raise failure
    states = {outcome.state for outcome in task.outcomes}
    if options.dry_run or not states & {"failed", "marked"}:
        return exits.UNREACHABLE if states == {"skipped"} and not options.dry_run else exits.OK
    return exits.FAILED


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "sweep")
