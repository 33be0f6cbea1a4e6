"""Asks a workload for its dry run, with the environment variables that the launcher will set.

A dry run loads no framework. After the run, the manifest must agree with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.config.parser import flag
from hvdtrain.sweep.grid import Experiment, Run
from hvdtrain.system import exits
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


def ask(question: Question) -> dict[str, Any] | Failure:
    """Return the JSON document of rank 0's dry run, or the Failure that ended it."""
    from hvdtrain.comm.lifecycle import StopSignal  # slow import, not needed by the sweep itself

    workload, flags, ranks, ranks_per_host = question
    places = {"RANK": 0, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": ranks_per_host}
    argv, variables, output = sys.argv, dict(os.environ), io.StringIO()
    for name in [name for name in variables if name.startswith(("HVDTRAIN_", "OMPI_COMM_"))]:
        del os.environ[name]
    if ranks > 1:
        os.environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in places.items()})
    stop = StopSignal()
    try:
        module = workloads.module(workload)
        sys.argv = [str(module.__file__), "--dry-run", "--json", *flags]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            module.main(stop)
        document: dict[str, Any] = json.loads(output.getvalue())
    except Failure as failure:
        return failure
    except (Exception, SystemExit) as error:
        known = exits.of_system(error) if isinstance(error, OSError) else None
        return known or Failure(f"{workload}: {type(error).__name__}: {error}", exits.FAILED)
    finally:
        stop.restore()
        sys.argv = argv
        os.environ.clear()
        os.environ.update(variables)
    return document


def known_flags(workload: str) -> set[str]:
    """The flags of a workload, as keys of a sweep file."""
    return {*_defaults(workload), "config"}


@functools.cache
def _defaults(workload: str) -> dict[str, Any]:
    answer = ask((workload, (), 1, 1))
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
    answers = dict(zip(distinct, map(ask, questions), strict=True))
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
