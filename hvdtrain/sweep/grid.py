"""Expands grids into runs: all combinations of settings without duplicates, in an order that is robust to drift."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.config.parser import SHIPPED
from hvdtrain.sweep.file import ALL_GPUS, DEFAULT_LAUNCHER, SETTINGS, Grid, Sweep, program
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate, show_rate

UNLIMITED = "unlimited"
MAX_RUNS = 10_000
"""Per sweep. So many runs take weeks, but can still be listed at once"""
KINDS = {"T": "timing", "E": "energy"}
NOT_FLAGS = {*SETTINGS, "cluster", "label", "config_sha256"}
"""Settings that are not flags of the workload or command"""
SHORT = {"seed": "s", "batch_size": "b", "global_batch_size": "gb", "epochs": "e", "width": "w"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One combination of settings. Different settings are different experiments."""

    settings: dict[str, Any]
    kinds: tuple[str, ...]
    """The kind of each of its runs in order: timing or energy"""
    where: str
    """File and line of its grid, for messages"""

    @property
    def name(self) -> str:
        """A readable name that ends in a checksum of all settings. The names of run folders begin with it."""
        settings = self.settings
        parts = [settings.get("label"), settings["workload"], settings.get("framework"), settings.get("strategy")]
        parts += [f"{settings['hosts']}x{settings['ranks_per_host']}", settings.get("rate")]
        parts += [f"{short}{settings[key]}" for key, short in SHORT.items() if key in settings]
        readable = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(str(part) for part in parts if part is not None))
        return f"{readable[:100]}-{checksum(settings)}"

    @property
    def flags(self) -> dict[str, Any]:
        """Settings that are flags of the workload or command."""
        return {key: value for key, value in self.settings.items() if key not in NOT_FLAGS}

    @property
    def hosts(self) -> int:
        return int(self.settings["hosts"])

    @property
    def ranks(self) -> int:
        """Ranks on all hosts. Raises ValueError if `ranks_per_host` is "gpus" and the number of GPUs is unknown."""
        return self.hosts * int(self.settings["ranks_per_host"])

    @property
    def on_cluster(self) -> bool:
        return bool(self.settings["on"] == "cluster")

    @property
    def rate(self) -> str | None:
        """A rate such as 10mbit, or unlimited. None if the sweep sets no rate or there is only one host."""
        return self.settings["rate"]

    @property
    def rate_bit_s(self) -> int | None:
        return None if self.rate in (None, UNLIMITED) else parse_rate(str(self.rate))

    @property
    def without_seed(self) -> str:
        """All settings except the seed, as JSON."""
        return json.dumps({key: value for key, value in self.settings.items() if key != "seed"}, sort_keys=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One launch of an experiment."""

    experiment: Experiment
    kind: str
    repeat: int
    """Counts from 1 within an experiment and kind"""
    order: int = 0

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of the workload. Timing runs omit the options of monitors."""
        energy = self.kind == KINDS["E"]
        return {key: value for key, value in self.experiment.flags.items() if energy or not key.startswith("monitor_")}

    @property
    def name(self) -> str:
        """Name of its folder in the sweep's folder."""
        return f"{self.experiment.name}-{self.kind}-r{self.repeat}"


def checksum(settings: dict[str, Any]) -> str:
    """Six hexadecimal digits that do not depend on the order of the keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]


def parse_protocol(text: str, where: str = "") -> tuple[str, ...]:
    """Converts `E,5T,E` to kinds of run. Raises Failure (78) with a message that starts with `where`."""
    kinds: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{0,9})([ET])\s*", part, re.ASCII)
        if match is None or match[1] == "0":
            hint = "hint: use T, E, or a count before them, as in E,5T,E"
            raise Failure(f"{where}protocol {text!r}: {part!r} is neither T nor E; {hint}", exits.BAD_CONFIG)
        if len(kinds) + int(match[1] or 1) > MAX_RUNS:
            raise Failure(f"{where}protocol {text[:100]!r}: more than {MAX_RUNS:,} runs", exits.BAD_CONFIG)
        kinds += [KINDS[match[2]]] * int(match[1] or 1)
    return tuple(kinds)


def axes(grid: Grid) -> list[list[str]]:
    """The grid's keys in the order of the file. Zipped keys form one group."""
    group_of = {key: group for group in grid.zip for key in group}
    return [list(group) for group in dict.fromkeys(tuple(group_of.get(key, [key])) for key in grid.values)]


def combinations(grid: Grid) -> Iterator[dict[str, Any]]:
    """Yields every combination of a grid's values. The last key varies fastest; zipped keys vary together."""
    rows = [
        [dict(zip(group, row, strict=True)) for row in zip(*(grid.values[key] for key in group), strict=True)]
        for group in axes(grid)
    ]
    for choice in itertools.product(*rows):
        yield {key: value for part in choice for key, value in part.items()}


def _check_size(sweep: Sweep, grid: Grid, values: dict[str, Any]) -> None:
    """Raises Failure (78) if the hosts and ranks do not fit the cluster and the launcher."""
    on, hosts, per_host, launcher = (values[key] for key in ("on", "hosts", "ranks_per_host", "launcher"))
    if on == "cluster" and sweep.cluster is None:
        raise _bad(grid, 'on = "cluster", but the file has no [cluster]')
    available = len(sweep.cluster.names) if on == "cluster" and sweep.cluster else 1
    if hosts > available:
        limit = "without [cluster] there is only this machine" if on == "machine" else f"[cluster] has {available}"
        raise _bad(grid, f"hosts = {hosts}: {limit}")
    if launcher == "none" and (hosts, per_host) != (1, 1):
        raise _bad(grid, f'launcher = "none" starts one process, not {hosts} x {per_host}')


def complete(sweep: Sweep, grid: Grid, combination: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    """Adds defaults to a combination and removes settings without effect. Raises Failure (78)."""
    on = "cluster" if sweep.cluster else "machine"
    values = {"on": on, "hosts": 1, "ranks_per_host": 1, "launcher": DEFAULT_LAUNCHER, **combination}
    _check_size(sweep, grid, values)
    on, hosts, per_host = values["on"], values["hosts"], values["ranks_per_host"]
    if per_host == ALL_GPUS and gpus and gpus > 1:
        per_host = gpus
    rate = _rate(sweep, grid, values.get("rate"), on)
    settings = {"workload": values.get("workload", workloads.DEFAULT), "hosts": hosts, "ranks_per_host": per_host}
    if "command" in values:
        settings |= {"workload": _script_name(values["command"]), "command": values["command"]}
    # A single host has no link, so the rate has no effect.
    settings |= {"rate": rate if hosts > 1 else None, "launcher": values["launcher"], "on": on}
    if grid.label:
        settings["label"] = grid.label
    if on == "cluster" and sweep.cluster:
        settings["cluster"] = _cluster_settings(sweep, hosts)
    keys = sorted(combination, key=lambda key: key != "config")  # flags after --config override the file
    settings |= {key: combination[key] for key in keys if key not in SETTINGS}
    if "config" in settings and "command" not in settings:
        settings["config"], settings["config_sha256"] = _settings(grid, str(settings["config"]))
    return settings


def _cluster_settings(sweep: Sweep, hosts: int) -> dict[str, Any]:
    """The properties of the cluster that may affect a run on so many hosts."""
    cluster = sweep.cluster
    assert cluster is not None
    keys = ("virtual", "cpu_share", "cpus", "hostfile", "dev")
    settings = {key: getattr(cluster, key) for key in keys if getattr(cluster, key)}
    if cluster.virtual:
        settings["virtual"] = list(cluster.virtual[:hosts])
    if cluster.fill and hosts == 1:
        settings["fill"] = len(cluster.virtual) - 1
    return settings


def _script_name(command: str) -> str:
    """The name of a command's script, used as the name of its workload."""
    words = program(command)
    return Path(next((word for word in words if word.endswith(".py")), words[0])).stem


def _bad(grid: Grid, what: str) -> Failure:
    return Failure(f"{grid.where}: {what}", exits.BAD_CONFIG)


def _rate(sweep: Sweep, grid: Grid, text: str | None, on: str) -> str | None:
    """The rate in canonical spelling. Raises Failure (78) if it is malformed or cannot be set on these hosts."""
    if text is None:
        return UNLIMITED if on == "cluster" and sweep.cluster and sweep.cluster.virtual else None
    try:
        rate = UNLIMITED if text == UNLIMITED else show_rate(parse_rate(text))
    except Failure as failure:
        raise _bad(grid, f"rate: {failure}") from failure
    if on == "cluster" and sweep.cluster and sweep.cluster.hostfile and not sweep.cluster.dev:
        hint = 'hint: name it in [cluster], as in dev = "eth1", or remove the rate'
        raise _bad(grid, f'rate = "{text}": the network interface to throttle is unknown; {hint}')
    return rate


def _settings(grid: Grid, name: str) -> tuple[str, str]:
    """Path and checksum of a --config file, which may be the name of a study."""
    path = files.shipped(name, SHIPPED)
    try:
        return str(path), hashlib.sha256(files.read(path, files.SETTINGS_BYTES)).hexdigest()[:12]
    except OSError as error:
        raise _bad(grid, f"config = {name!r}: {error.strerror}") from error


def experiments(sweep: Sweep, gpus: int | None = None) -> tuple[list[Experiment], int]:
    """Returns the sweep's experiments without duplicates, and the number of duplicates.

    `gpus` is the number of GPUs of this machine, if known. Raises Failure (78).
    """
    by_settings: dict[str, Experiment] = {}
    duplicates = requested = 0
    for grid in sweep.grids:
        where = grid.where if grid.protocol else str(sweep.path)
        kinds = parse_protocol(grid.protocol or sweep.protocol, f"{where}: ")
        requested += len(kinds) * grid.repeats * math.prod(len(grid.values[group[0]]) for group in axes(grid))
        if requested > MAX_RUNS:
            raise _bad(grid, f"{requested:,} runs including this grid; a sweep has at most {MAX_RUNS:,}")
        kinds *= grid.repeats
        for combination in combinations(grid):
            settings = complete(sweep, grid, combination, gpus)
            key = json.dumps(settings, sort_keys=True)
            duplicates += key in by_settings
            existing = by_settings.setdefault(key, Experiment(settings=settings, kinds=kinds, where=grid.where))
            longer, shorter = sorted((existing.kinds, kinds), key=len, reverse=True)
            extra = Counter(shorter) - Counter(longer)
            by_settings[key] = dataclasses.replace(existing, kinds=longer + tuple(extra.elements()))
    if len({experiment.name for experiment in by_settings.values()}) < len(by_settings):  # equal 24-bit checksums
        hint = "hint: give one of their grids a label"
        raise Failure(f"{sweep.path}: two experiments have the same name; {hint}", exits.BAD_CONFIG)
    return list(by_settings.values()), duplicates


def runs(experiments: Sequence[Experiment], order: str = "as-written") -> list[Run]:
    """Returns all runs in order.

    as-written: experiment by experiment. random: shuffled, always in the same way. interleaved: rounds with one run of
    every experiment (one seed of it), grouped by rate. Every other round is reversed, so that a steady drift of the
    machine affects all experiments equally.
    """
    repeats: Counter[tuple[str, str]] = Counter()
    by_position: dict[tuple[int, int], Run] = {}
    for index, experiment in enumerate(experiments):
        for position, kind in enumerate(experiment.kinds):
            repeats[experiment.name, kind] += 1
            run = Run(experiment=experiment, kind=kind, repeat=repeats[experiment.name, kind])
            by_position[position, index] = run
    ordered = list(by_position.values())
    if order == "random":
        random.Random(0).shuffle(ordered)
    elif order == "interleaved":
        ordered = _interleave([by_position[key] for key in sorted(by_position)])
    return [dataclasses.replace(run, order=number) for number, run in enumerate(ordered)]


def _interleave(runs: list[Run]) -> list[Run]:
    """`runs` has the first run of each experiment, then the second ones, and so on."""
    rates = list(dict.fromkeys(run.experiment.rate for run in runs))
    count: Counter[str] = Counter()
    rounds: dict[int, list[Run]] = {}
    for run in runs:
        key = run.experiment.without_seed
        rounds.setdefault(count[key], []).append(run)
        count[key] += 1
    ordered: list[Run] = []
    for number, members in rounds.items():
        members.sort(key=lambda run: rates.index(run.experiment.rate))  # stable: keeps the file's order within a rate
        ordered += members[::-1] if number % 2 else members
    return ordered
