"""Asks a workload for the dry run of a run, with the variables that the launcher will set.

A dry run loads no framework. The run's manifest must agree with it afterwards.
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
from hvdtrain.sweep import process
from hvdtrain.sweep.plan import Point, Run
from hvdtrain.system import cgroup, exits
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

Question = tuple[str, Sequence[str], int, int]
"""A workload, its flags, the ranks of the job, and of a host"""
MONITORS = {"timing": "none", "energy": "power,resources"}
"""Kind of run -> its --monitor"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preview:
    """A workload's dry run."""

    config: dict[str, Any]
    """Every setting, defaults included"""
    plan: dict[str, Any]
    """The batch arithmetic for all ranks"""
    parameters: int
    sent_bytes: float
    """Per host and step, to the other hosts"""
    pixels: int | None
    """Of one image; None if the data are not images"""
    fingerprint: str
    """Of the data"""


def words(flags: Mapping[str, Any], defaults: Mapping[str, Any]) -> Command:
    """Flags as words of a command line. A flag whose default is false is a switch; the others take a value.
    Raises Failure (78)."""
    typed: Command = []
    for key, value in flags.items():
        if defaults.get(key) is False:
            if not isinstance(value, bool):
                raise Failure(f"{key} = {value!r}: give true or false", exits.BAD_CONFIG)
            typed += [flag(key)] if value else []
        else:
            typed += [flag(key), str(value).lower() if isinstance(value, bool) else str(value)]
    return typed


def ask(questions: Sequence[Question]) -> list[dict[str, Any] | Failure]:
    """Of each question the JSON document of the dry run of rank 0, or the Failure that it ends with.

    One process per core answers its share of them, one after the other, so that it imports what workloads need once.
    Raises Failure (1) if one of these processes dies.
    """
    cores = max(1, int(cgroup.process_cores()))
    shares = [questions[core::cores] for core in range(min(cores, len(questions)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        found = list(pool.map(_asked, shares))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*found))
    return [Failure(*answer) if isinstance(answer, list) else answer for answer in turns if answer is not None]


def _asked(share: Sequence[Question]) -> list[Any]:
    """The answers, in order, of a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_COMM_"))}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # what is imported here, and nothing else: -P
    command = [sys.executable, "-P", "-c", "from hvdtrain.sweep import preview; preview.serve()"]
    done = subprocess.run(command, env=kept, input=json.dumps(share), capture_output=True, text=True)
    try:
        answers: list[Any] = json.loads(done.stdout)
    except ValueError as error:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        names = ", ".join(sorted({workload for workload, *_ in share}))
        raise Failure(f"a dry run of {names} ended its process: {said}", exits.FAILED) from error
    return answers


def serve() -> None:
    """Prints the answers to the questions on stdin, both JSON; what a workload prints besides goes to stderr."""
    process.end_with_parent()
    told = os.dup(1)
    os.dup2(2, 1)
    answers = [_answer(question) for question in json.load(sys.stdin)]
    with os.fdopen(told, "w") as stream:
        json.dump(answers, stream)


def _answer(question: Question) -> dict[str, Any] | tuple[str, int]:
    """The dry run's JSON document, or the message and the exit code that it ends with."""
    from hvdtrain.comm.lifecycle import StopSignal  # and much else, which the sweep itself does not need

    workload, typed, ranks, local = question
    place = {"RANK": 0, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": local}
    for name, value in place.items():
        os.environ.pop(f"OMPI_COMM_WORLD_{name}", None)
        if ranks > 1:
            os.environ[f"OMPI_COMM_WORLD_{name}"] = str(value)
    written = io.StringIO()
    try:
        module = workloads.module(workload)
        sys.argv = [module.__file__, "--dry-run", "--json", *typed]
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(io.StringIO()):
            module.main(StopSignal())
        document: dict[str, Any] = json.loads(written.getvalue())
    except Failure as failure:
        return str(failure), failure.code
    except (Exception, SystemExit) as error:
        told = exits.of_system(error) if isinstance(error, OSError) else None
        return str(told or f"{workload}: {type(error).__name__}: {error}"), told.code if told else exits.FAILED
    return document


def flags(workload: str) -> set[str]:
    """The flags of a workload as keys."""
    return {*_defaults(workload), "config"}


@functools.cache
def _defaults(workload: str) -> dict[str, Any]:
    (found,) = ask([(workload, (), 1, 1)])
    if isinstance(found, Failure):
        raise found
    return found["config"]


def typed_flags(run: Run) -> Command:
    """With those that switch its monitors on. Those of a command are as they are written, without a dry run; its
    variables are none."""
    if "command" in run.point.settings:
        own = {key: value for key, value in run.flags.items() if key != "strategy" and not key.isupper()}
        given = {key: value for key, value in own.items() if value is not False}
        return [word for key, value in given.items() for word in (f"--{key}", *([] if value is True else [str(value)]))]
    monitors = {"monitor": MONITORS[run.kind]} if MONITORS[run.kind] != "none" else {}
    return words({**run.flags, **monitors}, _defaults(run.point.settings["workload"]))


def _preview(document: dict[str, Any]) -> Preview:
    height, width, *_ = document["data"].get("image_shape") or (None, None)
    return Preview(
        config=document["config"],
        plan=document["plan"],
        parameters=document["model"]["parameters"],
        sent_bytes=document["cost"]["sent_bytes"],
        pixels=height and height * width,
        fingerprint=document["data"]["fingerprint"],
    )


def _question(point: Point) -> str:
    """What a preview depends on; the rate of a link, for one, is unknown to the workload."""
    told = [point.settings["workload"], point.settings["ranks_per_host"], point.ranks, "energy" in point.kinds]
    return json.dumps([*told, {**point.flags, "seed": None}], sort_keys=True)


def previews(points: Sequence[Point]) -> dict[str, Preview | Failure]:
    """Name of the point -> its preview. Points whose workload is told the same, but for the seed, share one dry run."""
    cells = {_question(point): point for point in reversed(points)}
    questions = []
    for point in cells.values():
        kind = "energy" if "energy" in point.kinds else "timing"
        typed = typed_flags(Run(point=point, kind=kind, repeat=1))
        questions.append((point.settings["workload"], typed, point.ranks, int(point.settings["ranks_per_host"])))
    answers = ask(questions) if questions else []
    found = {
        question: answer if isinstance(answer, Failure) else _preview(answer)
        for question, answer in zip(cells, answers, strict=True)
    }
    result: dict[str, Preview | Failure] = {}
    for point in points:
        known = found[_question(point)]
        if isinstance(known, Preview) and "seed" in point.flags:
            known = dataclasses.replace(known, config={**known.config, "seed": point.flags["seed"]})
        result[point.name] = known
    return result
