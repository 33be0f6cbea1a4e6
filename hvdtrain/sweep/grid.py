"""Expands grids into runs: all combinations of settings without duplicates, in an order that is robust to drift."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.config.parser import SHIPPED
from hvdtrain.sweep.file import ALL_GPUS, DEFAULT_LAUNCHER, SETTINGS, ClusterSpec, Grid, Sweep, bad, program
from hvdtrain.system import files
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate, show_rate

UNLIMITED = "unlimited"
MAX_RUNS = 10_000
"""Per sweep. They would take weeks, but can still be listed at once"""
KINDS = {"T": "timing", "E": "energy"}
NOT_FLAGS = {*SETTINGS, "on", "cluster", "label", "config_sha256"}
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
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()  # in any order of keys
        return f"{readable[:100]}-{digest[:6]}"

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
    def rate(self) -> str | None:
        """A rate such as 10mbit, or unlimited. None if the sweep sets no rate or there is only one host."""
        return self.settings["rate"]

    @property
    def rate_bit_s(self) -> int | None:
        return None if self.rate in (None, UNLIMITED) else parse_rate(str(self.rate))


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


def parse_protocol(text: str, where: str) -> tuple[str, ...]:
    """Converts `E,5T,E` to kinds of run. Raises Failure (78) with a message that starts with `where`."""
    parts = [re.fullmatch(r"\s*([1-9]\d{0,3})?([ET])\s*", part, re.ASCII) for part in text.split(",")]
    known = [(KINDS[part[2]], int(part[1] or 1)) for part in parts if part]
    if len(known) < len(parts) or sum(count for _, count in known) > MAX_RUNS:
        raise bad(where, f"protocol {text[:100]!r}; hint: use T, E, or a count before them, as in E,5T,E")
    return tuple(kind for kind, count in known for _ in range(count))


def combinations(grid: Grid) -> Iterator[dict[str, Any]]:
    """Yields every combination of a grid's values. The last key varies fastest; zipped keys vary together."""
    group_of = {key: group for group in grid.zip for key in group}
    groups = dict.fromkeys(tuple(group_of.get(key, [key])) for key in grid.values)
    rows = [[*zip(*(grid.values[key] for key in group), strict=True)] for group in groups]
    for choice in itertools.product(*rows):
        yield dict(zip(itertools.chain(*groups), itertools.chain(*choice), strict=True))


def complete(sweep: Sweep, grid: Grid, combination: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    """Adds defaults to a combination and removes settings without effect. Raises Failure (78)."""
    cluster = sweep.cluster
    values = {"hosts": 1, "ranks_per_host": 1, "launcher": DEFAULT_LAUNCHER, **combination}
    hosts, per_host, launcher = values["hosts"], values["ranks_per_host"], values["launcher"]
    if hosts > (available := len(cluster.names) if cluster else 1):
        raise bad(
            grid.where, f"hosts = {hosts}: {f'[cluster] has {available}' if cluster else 'there is no [cluster]'}"
        )
    if launcher == "none" and (hosts, per_host) != (1, 1):
        raise bad(grid.where, f'launcher = "none" starts one process, not {hosts} x {per_host}')
    if per_host == ALL_GPUS and gpus and gpus > 1:
        per_host = gpus
    rate = _rate(cluster, grid, values.get("rate"))
    settings = {"workload": values.get("workload", workloads.DEFAULT), "hosts": hosts, "ranks_per_host": per_host}
    if "command" in values:
        settings |= {"workload": _script_name(values["command"]), "command": values["command"]}
    # A single host has no link, so the rate has no effect.
    settings |= {"rate": rate if hosts > 1 else None, "launcher": launcher, "on": "cluster" if cluster else "machine"}
    if grid.label:
        settings["label"] = grid.label
    if cluster:
        settings["cluster"] = _cluster_settings(cluster, hosts)
    keys = sorted(combination, key=lambda key: key != "config")  # flags after --config override the file
    settings |= {key: combination[key] for key in keys if key not in SETTINGS}
    if "config" in settings and "command" not in settings:
        path = files.shipped(str(settings["config"]), SHIPPED)  # it may be the name of a study
        try:
            digest = hashlib.sha256(files.read(path, files.SETTINGS_BYTES)).hexdigest()[:12]
        except OSError as error:
            raise bad(grid.where, f"config = {str(path)!r}: {error.strerror}") from error
        settings |= {"config": str(path), "config_sha256": digest}
    return settings


def _cluster_settings(cluster: ClusterSpec, hosts: int) -> dict[str, Any]:
    """The properties of the cluster that may affect a run on this number of hosts."""
    keys = ("virtual", "cpu_share", "hostfile", "dev")
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


def _rate(cluster: ClusterSpec | None, grid: Grid, text: str | None) -> str | None:
    """The rate in canonical spelling. Raises Failure (78) if it is malformed or cannot be set on these hosts."""
    if text is None:
        return UNLIMITED if cluster and cluster.virtual else None
    try:
        rate = UNLIMITED if text == UNLIMITED else show_rate(parse_rate(text))
    except Failure as failure:
        raise bad(grid.where, f"rate: {failure}") from failure
    if cluster and cluster.hostfile and not cluster.dev:
        hint = 'hint: name it in [cluster], as in dev = "eth1", or remove the rate'
        raise bad(grid.where, f'rate = "{text}": the network interface to throttle is unknown; {hint}')
    return rate


def experiments(sweep: Sweep, gpus: int | None = None) -> list[Experiment]:
    """The sweep's experiments without duplicates. `gpus`: number of GPUs of this machine, if known. Raises Failure
    (78)."""
    by_settings: dict[str, Experiment] = {}
    requested = 0
    for grid in sweep.grids:
        protocol = parse_protocol(grid.protocol or sweep.protocol, grid.where)
        for combination in combinations(grid):
            requested += len(protocol) * grid.repeats
            if requested > MAX_RUNS:
                raise bad(grid.where, f"more than {MAX_RUNS:,} runs including this grid")
            settings, kinds = complete(sweep, grid, combination, gpus), protocol * grid.repeats
            key = json.dumps(settings, sort_keys=True)
            existing = by_settings.setdefault(key, Experiment(settings=settings, kinds=kinds, where=grid.where))
            longer, shorter = sorted((existing.kinds, kinds), key=len, reverse=True)
            extra = Counter(shorter) - Counter(longer)
            by_settings[key] = dataclasses.replace(existing, kinds=longer + tuple(extra.elements()))
    if len({experiment.name for experiment in by_settings.values()}) < len(by_settings):  # equal 24-bit checksums
        raise bad(sweep.path, "two experiments have the same name; hint: give one of their grids a label")
    return list(by_settings.values())


def runs(experiments: Sequence[Experiment], order: str = "as-written") -> list[Run]:
    """Returns all runs in order.

    as-written: experiment by experiment. interleaved: rounds with one run of every experiment (one seed of it), grouped
    by rate. Every other round is reversed, so that a steady drift of the machine affects all experiments equally.
    """
    repeats: Counter[tuple[str, str]] = Counter()
    own: list[list[Run]] = []
    for experiment in experiments:
        own.append([])
        for kind in experiment.kinds:
            repeats[experiment.name, kind] += 1
            own[-1].append(Run(experiment=experiment, kind=kind, repeat=repeats[experiment.name, kind]))
    ordered = [run for each in own for run in each]
    if order == "interleaved":
        ordered = _interleave([run for turn in itertools.zip_longest(*own) for run in turn if run])
    return [dataclasses.replace(run, order=number) for number, run in enumerate(ordered)]


def _interleave(runs: list[Run]) -> list[Run]:
    """`runs` has the first run of each experiment, then the second ones, and so on."""
    rates = list(dict.fromkeys(run.experiment.rate for run in runs))
    count: Counter[str] = Counter()
    rounds: dict[int, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.experiment.settings.items() if key != "seed"}
        key = json.dumps(settings, sort_keys=True)
        rounds.setdefault(count[key], []).append(run)
        count[key] += 1
    ordered: list[Run] = []
    for number, members in rounds.items():
        members.sort(key=lambda run: rates.index(run.experiment.rate))  # stable: keeps the file's order within a rate
        ordered += members[::-1] if number % 2 else members
    return ordered
