"""Asks a workload for its dry run, with the environment variables that the launcher will set.

A dry run loads no framework. After the run, the manifest must agree with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.config.parser import flag
from hvdtrain.sweep.grid import Experiment, Run
from hvdtrain.system import cgroup, exits, proc
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

Question = tuple[str, Sequence[str], int, int]
"""Workload, flags, number of ranks, ranks per host"""
MONITORS = {"timing": "none", "energy": "power,resources"}
"""Kind of run -> value of --monitor"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a workload's dry run."""

    config: dict[str, Any]
    """All settings, including defaults"""
    plan: dict[str, Any]
    """Batch arithmetic over all ranks"""
    fingerprint: str
    """Fingerprint of the data"""


def command_flags(flags: Mapping[str, Any], defaults: Mapping[str, Any]) -> Command:
    """Converts flags to command-line words. A flag whose default is false is a switch; all others take a value.

    Raises Failure (78).
    """
    words: Command = []
    for key, value in flags.items():
        if defaults.get(key) is False:
            if not isinstance(value, bool):
                raise Failure(f"{key} = {value!r}: not true or false", exits.BAD_CONFIG)
            words += [flag(key)] if value else []
        else:
            words += [flag(key), str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def ask(questions: Sequence[Question]) -> list[dict[str, Any] | Failure]:
    """For each question, the JSON document of rank 0's dry run or the Failure that ended it.

    One process per core answers a share of the questions, so each imports the workloads only once. Raises Failure (1)
    if such a process dies.
    """
    cores = max(1, int(cgroup.process_cores()))
    shares = [questions[core::cores] for core in range(min(cores, len(questions)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        answers = list(pool.map(_ask_process, shares))
    in_order = itertools.chain.from_iterable(itertools.zip_longest(*answers))
    return [Failure(*answer) if isinstance(answer, list) else answer for answer in in_order if answer is not None]


def _ask_process(questions: Sequence[Question]) -> list[Any]:
    """Starts a process that answers the questions in order."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_COMM_"))}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same modules as here, hence also -P
    command = [sys.executable, "-P", "-c", "from hvdtrain.sweep import dry_run; dry_run.serve()"]
    done = subprocess.run(command, env=variables, input=json.dumps(questions), capture_output=True, text=True)
    try:
        answers: list[Any] = json.loads(done.stdout)
    except ValueError as error:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        names = ", ".join(sorted({workload for workload, *_ in questions}))
        raise Failure(f"a dry run of {names} ended its process: {last_line}", exits.FAILED) from error
    return answers


def serve() -> None:
    """Reads questions from stdin and prints the answers, both as JSON. Other output of a workload goes to stderr."""
    proc.end_with_parent()
    output = os.dup(1)
    os.dup2(2, 1)
    answers = [_answer(question) for question in json.load(sys.stdin)]
    with os.fdopen(output, "w") as stream:
        json.dump(answers, stream)


def _answer(question: Question) -> dict[str, Any] | tuple[str, int]:
    """The dry run's JSON document, or the message and exit code of its failure."""
    from hvdtrain.comm.lifecycle import StopSignal  # slow import, not needed by the sweep itself

    workload, flags, ranks, ranks_per_host = question
    for name, value in {"RANK": 0, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": ranks_per_host}.items():
        os.environ.pop(f"OMPI_COMM_WORLD_{name}", None)
        if ranks > 1:
            os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    output = io.StringIO()
    try:
        module = workloads.module(workload)
        sys.argv = [module.__file__, "--dry-run", "--json", *flags]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            module.main(StopSignal())
        document: dict[str, Any] = json.loads(output.getvalue())
    except Failure as failure:
        return str(failure), failure.code
    except (Exception, SystemExit) as error:
        known = exits.of_system(error) if isinstance(error, OSError) else None
        return str(known or f"{workload}: {type(error).__name__}: {error}"), known.code if known else exits.FAILED
    return document


def known_flags(workload: str) -> set[str]:
    """The flags of a workload, as keys of a sweep file."""
    return {*_defaults(workload), "config"}


@functools.cache
def _defaults(workload: str) -> dict[str, Any]:
    (answer,) = ask([(workload, (), 1, 1)])
    if isinstance(answer, Failure):
        raise answer
    return answer["config"]


def run_flags(run: Run) -> Command:
    """The flags of a run, including --monitor. Flags of a command are passed as written; its variables are omitted."""
    if "command" in run.experiment.settings:
        words: Command = []
        for key, value in run.flags.items():
            if key != "strategy" and not key.isupper() and value is not False:
                words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return words
    monitors = {"monitor": MONITORS[run.kind]} if MONITORS[run.kind] != "none" else {}
    return command_flags({**run.flags, **monitors}, _defaults(run.experiment.settings["workload"]))


def _key(experiment: Experiment) -> str:
    """The settings that a dry run depends on: neither the seed nor the rate of the links changes it."""
    settings = experiment.settings
    parts = [settings["workload"], settings["ranks_per_host"], experiment.ranks, "energy" in experiment.kinds]
    return json.dumps([*parts, {**experiment.flags, "seed": None}], sort_keys=True)


def dry_runs(experiments: Sequence[Experiment]) -> dict[str, DryRun | Failure]:
    """Name of each experiment -> its dry run. Experiments that differ only in their seed share one."""
    distinct = {_key(experiment): experiment for experiment in reversed(experiments)}
    questions = []
    for experiment in distinct.values():
        kind = "energy" if "energy" in experiment.kinds else "timing"
        flags = run_flags(Run(experiment=experiment, kind=kind, repeat=1))
        ranks_per_host = int(experiment.settings["ranks_per_host"])
        questions.append((experiment.settings["workload"], flags, experiment.ranks, ranks_per_host))
    answers = dict(zip(distinct, ask(questions) if questions else [], strict=True))
    results: dict[str, DryRun | Failure] = {}
    for experiment in experiments:
        answer = answers[_key(experiment)]
        if isinstance(answer, Failure):
            results[experiment.name] = answer
            continue
        seed = {"seed": experiment.flags["seed"]} if "seed" in experiment.flags else {}
        results[experiment.name] = DryRun(
            config={**answer["config"], **seed}, plan=answer["plan"], fingerprint=answer["data"]["fingerprint"]
        )
    return results
