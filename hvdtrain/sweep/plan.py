"""Makes runs of grids: all combinations without duplicates, in an order that keeps drift from looking like a result."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.sweep.file import ALL_GPUS, LAUNCHERS, OWN, PLACES, Grid, Sweep, program
from hvdtrain.system import exits, files
from hvdtrain.system.commands import CHECKOUT
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate, show_rate

UNLIMITED = "unlimited"
MOST_RUNS = 10_000
"""Per sweep; so many take weeks, and can still be planned at once"""
KINDS = {"T": "timing", "E": "energy"}
FIXED = {*OWN, "cluster", "label", "config_sha256"}
"""Settings that are no flags of the workload or command"""
SHORT = {"seed": "s", "batch_size": "b", "global_batch_size": "gb", "epochs": "e", "width": "w"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One place in the grid. Equal settings are one point, and any other setting makes another point."""

    settings: dict[str, Any]
    kinds: tuple[str, ...]
    """The kind of each of its runs, in order: timing or energy"""
    where: str
    """The grid it comes from, for messages"""

    @property
    def name(self) -> str:
        """Readable, ending in a checksum of all settings; the folders of the point's runs begin with it."""
        asked = self.settings
        parts = [asked.get("label"), asked["workload"], asked.get("framework"), asked.get("strategy")]
        parts += [f"{asked['hosts']}x{asked['ranks_per_host']}", asked.get("rate")]
        parts += [f"{short}{asked[key]}" for key, short in SHORT.items() if key in asked]
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(str(part) for part in parts if part is not None))
        return f"{readable[:100]}-{checksum(asked)}"

    @property
    def flags(self) -> dict[str, Any]:
        """Settings that are flags of the workload."""
        return {key: value for key, value in self.settings.items() if key not in FIXED}

    @property
    def hosts(self) -> int:
        return int(self.settings["hosts"])

    @property
    def ranks(self) -> int:
        """Over all hosts. Raises ValueError while `ranks_per_host` is "gpus", which needs the number of GPUs."""
        return self.hosts * int(self.settings["ranks_per_host"])

    @property
    def on_cluster(self) -> bool:
        return bool(self.settings["on"] == "cluster")

    @property
    def rate(self) -> str | None:
        """10mbit, say, or unlimited; None: the sweep does not set it, or a single host has no link."""
        return self.settings["rate"]

    @property
    def rate_bit_s(self) -> int | None:
        return None if self.rate in (None, UNLIMITED) else parse_rate(str(self.rate))

    @property
    def cell(self) -> str:
        """All settings but the seed, as JSON: equal for points that differ in their seed only."""
        return json.dumps({**self.settings, "seed": None}, sort_keys=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One launch."""

    point: Point
    kind: str
    repeat: int
    """From 1, among the runs of that point and kind"""
    order: int = 0

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of the workload; those of monitors only where the run has monitors."""
        energy = self.kind == KINDS["E"]
        return {key: value for key, value in self.point.flags.items() if energy or not key.startswith("monitor_")}

    @property
    def name(self) -> str:
        """Name of its folder in the sweep's folder."""
        return f"{self.point.name}-{self.kind}-r{self.repeat}"


def checksum(settings: dict[str, Any]) -> str:
    """Six hex digits of the settings; the order of keys does not count."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]


def protocol(text: str, where: str = "") -> tuple[str, ...]:
    """`E,5T,E` as kinds of run. Raises Failure (78), its message after `where`."""
    kinds: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{0,9})([ET])\s*", part, re.ASCII)
        if match is None or match[1] == "0":
            what = f"{where}protocol {text!r}: {part!r} is neither T nor E nor a number of them, as in E,5T,E"
            raise Failure(what, exits.BAD_CONFIG)
        if len(kinds) + int(match[1] or 1) > MOST_RUNS:
            raise Failure(f"{where}protocol {text[:100]!r}: more than {MOST_RUNS:,} runs", exits.BAD_CONFIG)
        kinds += [KINDS[match[2]]] * int(match[1] or 1)
    return tuple(kinds)


def axes(grid: Grid) -> list[list[str]]:
    """The grid's keys in the order written, in groups: zipped keys are one group."""
    leader = {key: group for group in grid.zips for key in group}
    return [list(group) for group in dict.fromkeys(tuple(leader.get(key, [key])) for key in grid.values)]


def combinations(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every combination of a grid's values, the last key varying fastest; the values of zipped keys are paired."""
    rows = [
        [dict(zip(group, row, strict=True)) for row in zip(*(grid.values[key] for key in group), strict=True)]
        for group in axes(grid)
    ]
    for choice in itertools.product(*rows):
        yield {key: value for part in choice for key, value in part.items()}


def settled(sweep: Sweep, grid: Grid, asked: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    """A combination with defaults filled in and without settings that have no effect. Raises Failure (78)."""
    on = asked.get("on", "cluster" if sweep.cluster else "machine")
    hosts, per_host = asked.get("hosts", 1), asked.get("ranks_per_host", 1)
    launcher = asked.get("launcher", LAUNCHERS[0])
    for key, value, known in (("on", on, PLACES), ("launcher", launcher, LAUNCHERS)):
        if value not in known:
            raise _bad(grid, f"{key} = {value!r}: give one of {', '.join(known)}")
    if on == "cluster" and sweep.cluster is None:
        raise _bad(grid, 'on = "cluster", but the file has no [cluster]')
    most = 1 if on == "machine" else sweep.cluster.size if sweep.cluster else None
    if hosts < 1 or (most is not None and hosts > most):
        place = "this machine is one" if on == "machine" else f"[cluster] has {most}"
        raise _bad(grid, f"hosts = {hosts}: {place}")
    if isinstance(per_host, str):
        if per_host != ALL_GPUS:
            raise _bad(grid, f'ranks_per_host = {per_host!r}: give a number, or "{ALL_GPUS}"')
        per_host = gpus if gpus and gpus > 1 else per_host
    elif per_host < 1:
        raise _bad(grid, f"ranks_per_host = {per_host}: give 1 or more")
    if launcher == "none" and (hosts, per_host) != (1, 1):
        raise _bad(grid, f'launcher = "none" starts one process, not {hosts} x {per_host}')
    rate = _rate(sweep, grid, asked.get("rate"), on)
    settings = {"workload": asked.get("workload", workloads.DEFAULT), "hosts": hosts, "ranks_per_host": per_host}
    if "command" in asked:
        settings |= {"workload": _called(asked["command"]), "command": asked["command"]}
    # A single host has no link, so its run is the same at every rate.
    settings |= {"rate": rate if hosts > 1 else None, "launcher": launcher, "on": on}
    if grid.label:
        settings["label"] = grid.label
    if on == "cluster" and sweep.cluster:
        about = sweep.cluster
        kept = ("virtual", "cpu_share", "cpus", "existing", "hostfile", "dev")
        facts = {key: getattr(about, key) for key in kept if getattr(about, key)}
        if about.virtual:
            facts["virtual"] = list(about.virtual[:hosts])
        if about.fill and hosts == 1:
            facts["fill"] = len(about.virtual) - 1
        settings["cluster"] = facts
    named = sorted(asked, key=lambda key: key != "config")  # the keys behind a file win over it
    settings |= {key: asked[key] for key in named if key not in OWN}
    if "config" in settings and "command" not in settings:
        settings["config"], settings["config_sha256"] = _preset(grid, str(settings["config"]))
    return settings


def _called(command: str) -> str:
    """The name of a command's runs: its script's."""
    words = program(command)
    return Path(next((word for word in words if word.endswith(".py")), words[0])).stem


def _bad(grid: Grid, what: str) -> Failure:
    return Failure(f"{grid.where}: {what}", exits.BAD_CONFIG)


def _rate(sweep: Sweep, grid: Grid, asked: str | None, on: str) -> str | None:
    """The rate in canonical spelling. Raises Failure (78) if it is malformed or cannot be set on these hosts."""
    if asked is None:
        return UNLIMITED if on == "cluster" and sweep.cluster and sweep.cluster.virtual else None
    try:
        rate = UNLIMITED if asked == UNLIMITED else show_rate(parse_rate(asked))
    except Failure as failure:
        raise _bad(grid, f"rate: {failure}") from failure
    if on == "cluster" and sweep.cluster and sweep.cluster.hostfile and not sweep.cluster.dev:
        raise _bad(grid, f'rate = "{asked}": say whose in [cluster], e.g. dev = "eth1" (or leave the rate out)')
    return rate


def _preset(grid: Grid, named: str) -> tuple[str, str]:
    """Path, from here or the checkout's root, and checksum of a --config file: other contents are other settings."""
    path = Path(named) if os.path.lexists(named) else CHECKOUT / named
    try:
        return str(path), hashlib.sha256(files.read(path, files.SETTINGS_BYTES)).hexdigest()[:12]
    except OSError as error:
        raise _bad(grid, f"config = {named!r}: {error.strerror}") from error


def points(sweep: Sweep, gpus: int | None = None) -> tuple[list[Point], int]:
    """The sweep's points without duplicates, and the number of duplicates dropped.

    `gpus`: number of GPUs of this machine, if known. Raises Failure (78).
    """
    found: dict[str, Point] = {}
    merged = asked_for = 0
    for grid in sweep.grids:
        where = grid.where if grid.protocol else str(sweep.path)
        kinds = protocol(grid.protocol or sweep.protocol, f"{where}: ")
        asked_for += len(kinds) * grid.repeats * math.prod(len(grid.values[group[0]]) for group in axes(grid))
        if asked_for > MOST_RUNS:
            raise _bad(grid, f"{asked_for:,} runs up to here; a sweep has at most {MOST_RUNS:,}")
        kinds *= grid.repeats
        for asked in combinations(grid):
            point = Point(settings=settled(sweep, grid, asked, gpus), kinds=kinds, where=grid.where)
            key = json.dumps(point.settings, sort_keys=True)
            merged += key in found
            known = found.setdefault(key, point)
            longer, other = sorted((known.kinds, kinds), key=len, reverse=True)
            lacking = Counter(other) - Counter(longer)
            found[key] = dataclasses.replace(known, kinds=longer + tuple(lacking.elements()))
    if len({point.name for point in found.values()}) < len(found):  # it ends in a checksum of 24 bits
        raise Failure(f"{sweep.path}: two points have one name; give one of their grids a label", exits.BAD_CONFIG)
    return list(found.values()), merged


def runs(found: Sequence[Point], order: str = "as-written", seed: int = 0) -> list[Run]:
    """All runs of the points, in order.

    as-written: point after point. interleaved: in each turn one run of every cell (a cell: points that differ in their
    seed only), grouped by rate; every other turn backwards, so that a steady drift affects all alike. random: shuffled.
    """
    numbered: Counter[tuple[str, str]] = Counter()
    every: dict[tuple[int, int], Run] = {}
    for index, point in enumerate(found):
        for place, kind in enumerate(point.kinds):
            numbered[point.name, kind] += 1
            every[place, index] = Run(point=point, kind=kind, repeat=numbered[point.name, kind])
    chosen = list(every.values())
    if order == "random":
        random.Random(seed).shuffle(chosen)
    elif order == "interleaved":
        chosen = _interleaved([every[key] for key in sorted(every)])
    return [dataclasses.replace(run, order=number) for number, run in enumerate(chosen)]


def _interleaved(runs: list[Run]) -> list[Run]:
    """`runs`: the first of each point, then the second ones ..."""
    rates = list(dict.fromkeys(run.point.rate for run in runs))
    made: Counter[str] = Counter()
    turns: dict[int, list[Run]] = {}
    for run in runs:
        turns.setdefault(made[run.point.cell], []).append(run)
        made[run.point.cell] += 1
    chosen: list[Run] = []
    for turn, inside in turns.items():
        inside.sort(key=lambda run: rates.index(run.point.rate))  # stable: as written within a rate
        chosen += inside[::-1] if turn % 2 else inside
    return chosen
