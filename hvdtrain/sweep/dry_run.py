"""Asks a workload for its dry run, which checks the settings of an experiment without loading a framework.

After the run, the manifest must agree with it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.config.parser import flag
from hvdtrain.sweep.grid import Experiment, Run
from hvdtrain.system import exits
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

MONITORS = {"timing": "none", "energy": "power,resources"}
"""Kind of run -> value of --monitor"""


@functools.cache
def ask(workload: str, flags: tuple[str, ...], ranks: int, ranks_per_host: int) -> dict[str, Any]:
    """The JSON document of rank 0's dry run, with the variables that a launcher sets. Raises Failure."""
    from hvdtrain.comm.lifecycle import StopSignal  # slow import, not needed by the sweep itself

    places = {"RANK": 0, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": ranks_per_host}
    argv, variables, output = sys.argv, dict(os.environ), io.StringIO()
    for name in [name for name in variables if name.startswith(("HVDTRAIN_", "OMPI_COMM_"))]:
        del os.environ[name]
    if ranks > 1:
        os.environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in places.items()})
    stop = StopSignal()
    try:
        if workload not in workloads.known():
            known = ", ".join(sorted(workloads.known()))
            raise Failure(f"unknown workload {workload!r}; hint: choose from {known}", exits.BAD_CONFIG)
        module = workloads.module(workload)
        sys.argv = [str(module.__file__), "--dry-run", "--json", *flags]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            module.main(stop)
        document: dict[str, Any] = json.loads(output.getvalue())
        return document
    except Failure:
        raise
    except (Exception, SystemExit) as error:
        known_error = exits.of_system(error) if isinstance(error, OSError) else None
        raise known_error or Failure(f"{workload}: {type(error).__name__}: {error}", exits.FAILED) from error
    finally:
        stop.restore()
        sys.argv = argv
        os.environ.clear()
        os.environ.update(variables)


def run_flags(run: Run) -> Command:
    """The flags of a run, including --monitor. Raises Failure, also if the workload's dry run fails.

    A flag of a workload whose default is false is a switch; all others take a value. Flags of a command are passed as
    written; its variables are omitted.
    """
    words: Command = []
    if "command" in run.experiment.settings:
        for key, value in run.flags.items():
            if key != "strategy" and not key.isupper() and value is not False:
                words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return words
    defaults = ask(run.experiment.settings["workload"], (), 1, 1)["config"]
    monitors = {"monitor": MONITORS[run.kind]} if MONITORS[run.kind] != "none" else {}
    for key, value in {**run.flags, **monitors}.items():
        if defaults.get(key) is not False:
            words += [flag(key), str(value).lower() if isinstance(value, bool) else str(value)]
        elif not isinstance(value, bool):
            raise Failure(f"{key} = {value!r}: not true or false", exits.BAD_CONFIG)
        else:
            words += [flag(key)] if value else []
    return words


def dry_run(experiment: Experiment) -> dict[str, Any]:
    """The dry run of an experiment of a workload, without the seed, which changes nothing else. Raises Failure."""
    settings = {key: value for key, value in experiment.settings.items() if key != "seed"}
    kind = "energy" if "energy" in experiment.kinds else "timing"
    seedless = Experiment(settings=settings, kinds=experiment.kinds, where=experiment.where)
    flags = run_flags(Run(experiment=seedless, kind=kind, repeat=1))
    return ask(settings["workload"], tuple(flags), experiment.ranks, int(settings["ranks_per_host"]))
