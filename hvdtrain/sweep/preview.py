"""Asks a workload for the dry run of a run, with the variables that the launcher will set.

A dry run loads no framework and takes a third of a second. The run's manifest must agree with it afterwards.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import exits
from hvdtrain.cluster.commands import Command
from hvdtrain.config import flag
from hvdtrain.exits import Failure
from hvdtrain.sweep.plan import Point, Run

PATIENCE_S = 120.0
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
    """Flags as words of a command line. A flag whose default is false is a switch; the others take a value."""
    typed: Command = []
    for key, value in flags.items():
        if defaults.get(key) is False:
            typed += [flag(key)] if value else []
        else:
            typed += [flag(key), str(value).lower() if isinstance(value, bool) else str(value)]
    return typed


def ask(workload: str, typed: Sequence[str], ranks: int = 1, local: int = 1) -> dict[str, Any]:
    """The dry run's JSON document, for rank 0 of `ranks`, `local` per host. Raises the workload's own Failure."""
    command = [sys.executable, "-m", "hvdtrain.cli", "train", workload, "--dry-run", "--json", *typed]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_COMM_"))}
    package = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [kept.get("PYTHONPATH")])])
    place = {"RANK": 0, "SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": local}
    kept |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()} if ranks > 1 else {}
    try:
        done = subprocess.run(
            command, env=kept, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL, check=False
        )
        document: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"a dry run of {workload} gave no answer in {PATIENCE_S:g} s", exits.FAILED) from error
    except ValueError as error:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Failure(said.removeprefix("hvdtrain: "), done.returncode or exits.FAILED) from error
    return document


def flags(workload: str) -> set[str]:
    """The flags of a workload as keys."""
    return {*_defaults(workload), "config"}


@functools.cache
def _defaults(workload: str) -> dict[str, Any]:
    found: dict[str, Any] = ask(workload, [])["config"]
    return found


def monitors(kind: str) -> Command:
    """Flags that switch on the monitors of this kind of run."""
    return ["--monitor", MONITORS[kind]] if MONITORS[kind] != "none" else []


def typed_flags(run: Run) -> Command:
    """Those of a command are as they are written, without a dry run; its variables are none."""
    if "command" in run.point.settings:
        own = {key: value for key, value in run.flags.items() if key != "strategy" and not key.isupper()}
        given = {key: value for key, value in own.items() if value is not False}
        return [word for key, value in given.items() for word in (f"--{key}", *([] if value is True else [str(value)]))]
    return words(run.flags, _defaults(run.point.settings["workload"]))


def preview(point: Point) -> Preview:
    """The dry run of a point. Raises the Failure with which the workload refuses its settings."""
    kind = "energy" if "energy" in point.kinds else "timing"
    typed = typed_flags(Run(point=point, kind=kind, repeat=1)) + monitors(kind)
    document = ask(point.settings["workload"], typed, point.ranks, int(point.settings["ranks_per_host"]))
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
    cells: dict[str, Point] = {}
    for point in points:
        cells.setdefault(_question(point), point)

    def one(point: Point) -> Preview | Failure:
        try:
            return preview(point)
        except Failure as failure:
            return failure

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(cells, pool.map(one, cells.values()), strict=True))
    result: dict[str, Preview | Failure] = {}
    for point in points:
        known = found[_question(point)]
        if isinstance(known, Preview) and "seed" in point.flags:
            known = dataclasses.replace(known, config={**known.config, "seed": point.flags["seed"]})
        result[point.name] = known
    return result
