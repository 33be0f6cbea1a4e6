"""The command line of the sweep runner: `hvdtrain sweep FILE.toml`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

from hvdtrain.observe.progress import duration
from hvdtrain.sweep import command, execute, file, lacking, network, plan, preview, show
from hvdtrain.sweep.estimate import FORMULA, Estimator
from hvdtrain.sweep.execute import Task
from hvdtrain.sweep.network import cluster_name
from hvdtrain.sweep.preview import Preview
from hvdtrain.sweep.process import Children
from hvdtrain.sweep.show import Outcome
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secrets

PURPOSE = """Runs a grid of experiments that a TOML file describes, point by point: sets the rate of the links,
measures it, launches, checks the record. What is done is not done again: the same command goes on after a stop.

examples:
  hvdtrain sweep launch/sweeps/quick.toml --dry-run
  hvdtrain sweep launch/sweeps/quick.toml && hvdtrain results scaling results/quick
  hvdtrain sweep launch/sweeps/bandwidth_digits.toml --only '*allreduce*' --set seed=1
  hvdtrain sweep launch/sweeps/cruz2021_devices.toml --set data=fish
"""


SECTIONS = {
    "at the top of the file": file.TOP,
    "[cluster]: one of virtual, existing, hostfile; without it all runs on this machine": file.CLUSTER,
    "[[grid]], any number of them; [defaults] for all of them: a value, or a list of values to go through": file.OWN,
    "[[grid]] only": file.GRID_ONLY,
}
REST = """Every other key of a grid is a flag of the workload: batch_size = [16, 32] is --batch-size 16, then 32.
Of a command: lr = 0.1 is --lr 0.1, OMP_NUM_THREADS = 1 a variable, strategy is HVDTRAIN_STRATEGY.

Exit codes: 0 all runs that this machine can do are done; 1 a run failed (twice), was refused or marked; 2 usage;
69 nothing could be run here; 73, 74 nothing can be written; 75 stopped, call it again; 78 bad file."""


def keys() -> str:
    """The manual of the file, for --help."""
    lines = []
    for title, known in SECTIONS.items():
        lines += [f"{title}:", *(f"  {key:<16}{about}" for key, (about, _) in known.items())]
    return "\n".join([*lines, REST])


def parser() -> Parser:
    top = Parser(prog="hvdtrain sweep", description=PURPOSE, epilog=keys())
    add = top.add_argument
    add("file", metavar="FILE.toml", type=Path, help="the sweep; launch/sweeps/ has some")
    add("--root", type=Path, default=Path("results"), metavar="DIR", help="where its folder goes (results)")
    add("--dry-run", action="store_true", help="list runs, commands and how long they take; run nothing")
    add("--only", action="append", default=[], metavar="GLOB", help="only runs whose name fits (repeatable)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="in place of the file's value(s)")
    add("--json", action="store_true", help="one JSON document on stdout")
    return top


def prepare(asked: argparse.Namespace) -> tuple[Task, int]:
    """The task, and how many combinations were dropped because they are the same run as another.

    Every workload checks its settings here, so that an error appears before the first run and not after hours. Raises
    Failure (2, 69, 78).
    """
    file.read(asked.file, asked.set)  # before the workloads are asked for their flags, which takes seconds
    sweep = file.read(asked.file, asked.set, preview.flags)
    found, merged = plan.points(sweep, lacking.gpus() if lacking.asks_for_gpus(sweep) else None)
    runs = [run for run in plan.runs(found, sweep.order, sweep.order_seed) if _chosen(run, asked.only)]
    if not runs:
        raise Failure(f"--only {' '.join(asked.only)}: no run of {asked.file} fits; --dry-run lists them", exits.USAGE)
    points = list({run.point.name: run.point for run in runs}.values())
    reasons = {point.name: why for point in points if (why := lacking.reason(point, sweep.cluster))}
    known = [point for point in points if _is_known(point)]
    told = preview.previews([point for point in known if "command" not in point.settings])
    bad = [(point, told[point.name]) for point in points if isinstance(told.get(point.name), Failure)]
    if bad:
        more = f" (and {len(bad) - 1} more points)" if len(bad) > 1 else ""
        raise Failure(f"{bad[0][0].where}: point {bad[0][0].name}: {bad[0][1]}{more}", exits.BAD_CONFIG)
    previews = {name: one for name, one in told.items() if isinstance(one, Preview)}
    root, names = asked.root / sweep.name, {point.name for point in known}
    estimator = Estimator(previews, sweep.cluster)
    estimator.read(asked.root)
    task = Task(
        sweep=sweep,
        root=root,
        outcomes=[Outcome(run=run, folder=root / run.name) for run in runs],
        previews=previews,
        estimator=estimator,
        flags={run.name: preview.typed_flags(run) for run in runs if run.point.name in names},
    )
    execute.classify(task, reasons)
    return task, merged


def _chosen(run: plan.Run, globs: list[str]) -> bool:
    return not globs or any(fnmatchcase(run.name, one) or fnmatchcase(run.point.name, one) for one in globs)


def _is_known(point: plan.Point) -> bool:
    """Whether its number of ranks is known, and its workload, which a command has none of, can make a dry run here."""
    settings = point.settings
    return isinstance(settings["ranks_per_host"], int) and ("command" in settings or lacking.framework(point) is None)


def dry_run(task: Task, merged: int, as_json: bool) -> int:
    """Prints the runs, their commands and durations; returns the exit code."""
    name, spec = cluster_name(task.sweep, task.root), task.sweep.cluster
    words = {o.run.name: execute.command_of(task, o, name) if o.run.name in task.flags else [] for o in task.outcomes}
    waiting = task.waiting()
    left_s = task.left_s(waiting)
    if as_json:
        rows = [(o, words[o.run.name], task.estimator.of(o.run)) for o in task.outcomes]
        print(json.dumps(show.plan_document(task.sweep.name, task.root, rows, left_s), indent=2))
        return exits.OK
    rate, up, guessed = None, False, False
    for outcome in task.outcomes:
        point = outcome.run.point
        if outcome.state != "waiting":
            print(f"{outcome.run.order + 1:4d}  {outcome.run.name}: {show.STATES[outcome.state]}", end="")
            print(f": {outcome.reason}" if outcome.reason else "")
            continue
        if point.on_cluster and spec:
            if spec.virtual and not up:
                print(f"      {shlex.join(command.up(spec, name))}")
            up = True
            if point.rate is not None and point.rate != rate:
                rate = point.rate
                print(f"      {shlex.join(command.throttle(rate, spec, name))}")
                most = network.hosts(spec, name, execute.most_hosts(waiting[waiting.index(outcome) :]))
                for words_ in command.verify(most, spec, name, task.sweep.off_percent) if point.rate_bit_s else []:
                    print(f"      {shlex.join(words_)}")
        estimate = task.estimator.of(outcome.run)
        guessed = guessed or estimate.basis == "guess"
        takes = "duration unknown" if estimate.seconds is None else f"{duration(estimate.seconds)} ({estimate.basis})"
        print(
            f"{outcome.run.order + 1:4d}  {outcome.run.name}: {takes}{f'; {outcome.reason}' if outcome.reason else ''}"
        )
        print(f"      {shlex.join(without_secrets(words[outcome.run.name]))}")
    if up and spec and spec.virtual:
        print(f"      {shlex.join(command.down(name))}")
    counts = f"{len(task.outcomes)} runs: {len(waiting)} to do"
    for state in ("kept", "lacking"):
        number = sum(outcome.state == state for outcome in task.outcomes)
        counts += f", {number} {show.STATES[state]}" if number else ""
    if merged:
        why = "(one host has no link, so it is the same at all rates; repeats = 2 makes each run twice)"
        print(f"{merged} combinations are the same run as another and are left out {why}")
    if guessed:
        print(FORMULA)
    print(counts + f"; {duration(left_s) if left_s is not None else 'unknown time'} to go, into {task.root}")
    return exits.OK


def run(task: Task, as_json: bool) -> int:
    """Executes the waiting runs and prints the outcome; returns the exit code."""
    began = time.monotonic()
    dropped = sorted(name for name in os.environ if name.startswith("HVDTRAIN_"))
    if dropped:
        show.say(f"{', '.join(dropped)}: not passed on; a sweep's settings are its file's, or --set")
    children = Children(command.environment())
    with execute.alone(task.root) as handles, children.listening():
        children.kept_open = handles
        execute.classify(task, {o.run.point.name: o.reason or "" for o in task.outcomes if o.state == "lacking"})
        with show.Display(len(task.waiting())) as display:
            children.tick = display.tick
            stopped = execute.Executor(task, children, display).run()
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps(show.end_document(task.sweep.name, task.root, task.outcomes, seconds), indent=2))
    else:
        print(show.end_text(task.root, task.outcomes, seconds))
    sys.stdout.flush()
    if stopped:
        raise stopped
    states = {outcome.state for outcome in task.outcomes}
    if states & {"failed", "refused", "marked"}:
        return exits.FAILED
    return exits.UNREACHABLE if states == {"lacking"} else exits.OK


def main(arguments: list[str]) -> int:
    """Returns the exit code; raises Failure, whose message is for the user."""
    asked = parser().parse_args(arguments)
    task, merged = prepare(asked)
    return dry_run(task, merged, asked.json) if asked.dry_run else run(task, asked.json)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "sweep")
