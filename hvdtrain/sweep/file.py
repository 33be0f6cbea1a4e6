"""Reads and checks a sweep's TOML file.

launch/sweeps/ has documented examples, and `hvdtrain sweep --help` lists every key. Errors name the line of the key.
An unknown key is an error, because a misspelt key could cost a night of wrong runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import workloads
from hvdtrain.config.constraints import LARGEST
from hvdtrain.lab import topology
from hvdtrain.system import exits, files, hosts
from hvdtrain.system.exits import Failure

ORDERS = ("as-written", "interleaved", "random")
LAUNCHERS = ("launch/mpirun.sh", "launch/horovodrun.sh", "horovodrun", "horovodrun --gloo", "none")
TARGETS = ("machine", "cluster")
ALL_GPUS = "gpus"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

# key -> (help, types)
NUMBER = (int, float)
TOP: dict[str, tuple[str, Any]] = {
    "name": ("name of the results folder (default: the file's name)", str),
    "protocol": ("runs of each experiment, as in E,5T,E: T timing, E energy with power sensors (default: T)", str),
    "cooldown_s": ("seconds of rest before every run except the first (default: 0)", NUMBER),
    "order": ("as-written, interleaved (rounds with one run of each experiment) or random (default: interleaved)", str),
    "off_percent": ("largest accepted deviation of a link from its rate, in percent (default: 5)", NUMBER),
    "timeout_s": ("time limit of a run; a run that exceeds it has failed (default: none)", NUMBER),
}
OWN: dict[str, tuple[str, Any]] = {
    "workload": (f"what to train; `hvdtrain train` lists the workloads (default: {workloads.DEFAULT})", str),
    "command": ('your own command instead of a workload: "python train.py", whose script imports hvdtrain', str),
    "hosts": ("number of hosts (default: 1)", int),
    "ranks_per_host": ('ranks on each host, or "gpus": one per GPU of this machine (default: 1)', (int, str)),
    "rate": ('rate of every link: 10mbit, 1gbit ... or "unlimited" (default: unlimited on virtual hosts)', str),
    "launcher": (f"{', '.join(LAUNCHERS)} (default: {LAUNCHERS[0]}); none starts a single process", str),
    "on": ("machine (this machine) or cluster (the hosts of [cluster], the default if it exists)", str),
    "repeats": ("how often to repeat the protocol (default: 1)", int),
}
GRID_ONLY: dict[str, tuple[str, Any]] = {
    "label": ("prefix of the names of this grid's experiments", str),
    "protocol": ("overrides the protocol of the file", str),
    "zip": ('lists of keys whose values vary together: [["hosts", "global_batch_size"]]', list),
}
CLUSTER: dict[str, tuple[str, Any]] = {
    "virtual": ("names of virtual hosts, which exist only during the sweep", list),
    "cpu_share": ("with virtual: CPU cores per host, e.g. 0.5 (default: no limit)", NUMBER),
    "cpus": ("with virtual: the cores that the hosts may use, e.g. 0-1 (default: all)", str),
    "fill": (
        "with virtual: during a run on one host, keep the other hosts busy with the same run (default: false)",
        bool,
    ),
    "existing": ("name of a running virtual cluster", str),
    "hostfile": ("machines, one `name slots=N` per line, starting with this one", str),
    "dev": ("with hostfile: the network interface to throttle (needs sudo without a password)", str),
}
NEVER_FLAGS = {
    "run_dir": "the sweep chooses the run folders; use --root",
    "resume": "the sweep restarts interrupted runs",
    "json": "the records contain the results",
    "dry_run": "use hvdtrain sweep --dry-run",
    "debug": "run the workload by itself to debug it",
    "monitor": 'use protocol = "E" for runs with sensors',
}
REMOVED = {
    "when_off": "a run over a link that is off its rate is always marked and repeated by the next sweep",
    "order_seed": 'order = "random" always uses the same order',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The hosts of a sweep. Exactly one of virtual, existing and hostfile is set."""

    virtual: tuple[str, ...] = ()
    cpu_share: float | None = None
    cpus: str | None = None
    fill: bool = False
    """Keep the other hosts busy during a run on one host; a virtual host that has the machine to itself is faster"""
    existing: str | None = None
    hostfile: str | None = None
    dev: str | None = None
    machines: tuple[str, ...] = ()
    """The names in the hostfile"""

    @property
    def size(self) -> int | None:
        """Number of hosts; None for an existing cluster, whose description has not been read."""
        return None if self.existing else len(self.virtual or self.machines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """One [[grid]] with the defaults: a list of values for each key, in the order of the file."""

    values: dict[str, list[Any]]
    zips: list[list[str]]
    label: str | None
    protocol: str | None
    repeats: int
    where: str
    """File and line, for messages"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The checked content of a sweep file."""

    path: Path
    name: str
    protocol: str = "T"
    cooldown_s: float = 0.0
    order: str = "interleaved"
    off_percent: float = 5.0
    timeout_s: float | None = None
    cluster: ClusterSpec | None = None
    grids: list[Grid]


class _Text:
    """The text of the file, in which error messages find the line of a key."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def starts(self, header: str) -> list[int]:
        """Line numbers of a table's headers, counted from 1."""
        pattern = re.compile(rf"\s*{re.escape(header)}\s*(#.*)?")
        return [number for number, line in enumerate(self.lines, start=1) if pattern.fullmatch(line)]

    def at(self, key: str, start: int = 0) -> str:
        """`file:line` of a key in the table whose header is in line `start` (0: before the first table)."""
        pattern = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
        for number, line in enumerate(self.lines[start:], start=start + 1):
            if re.match(r"\s*\[[\[\w]", line) and not pattern.match(line):
                break
            if pattern.match(line):
                return f"{self.path}:{number}"
        return f"{self.path}:{start}" if start else str(self.path)


def _bad(where: str, what: str) -> Failure:
    return Failure(f"{where}: {what}", exits.BAD_CONFIG)


def _check_type(where: str, key: str, value: Any, types: Any) -> None:
    accepted = types if isinstance(types, tuple) else (types,)
    if isinstance(value, int) and abs(value) > LARGEST:  # first, because Python cannot print 5,000 digits
        raise _bad(where, f"{key}: larger than {LARGEST:,}")
    wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in accepted)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        names = {int: "a whole number", str: "text in quotes", list: "a list", bool: "true or false"}
        expected = "a number" if types in (NUMBER, float) else " or ".join(names.get(t, "a number") for t in accepted)
        raise _bad(where, f"{key} = {value!r}: not {expected}")


def _check_key(where: str, key: str, known: Mapping[str, Any], table: str) -> None:
    if key in REMOVED:
        raise _bad(where, f"{key} was removed: {REMOVED[key]}")
    if key not in known:
        raise _bad(where, f"unknown key {key!r} {table}; known: {', '.join(known)}")


def read(path: Path, overrides: Sequence[str] = (), flags: Callable[[str], set[str]] | None = None) -> Sweep:
    """Reads a sweep file and applies `--set KEY=VALUE`.

    `flags` returns the flags of a workload (`dry_run.known_flags`). Raises Failure: 2 for a missing file or a bad
    --set, 78 with file, line and key for all other errors.
    """
    try:
        raw = files.read(path, files.SETTINGS_BYTES)
        document = files.from_toml(raw)
    except OSError as error:
        raise files.refused(path, error, exits.USAGE, "hint: see launch/sweeps/ for examples") from error
    except ValueError as error:
        raise _bad(str(path), f"not TOML: {error}") from error
    text = _Text(path, raw.decode("utf-8-sig"))
    tables = document.pop("grid", [])
    cluster = document.pop("cluster", None)
    defaults = document.pop("defaults", {})
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise _bad(str(path), "no grid; hint: add a table [[grid]], for example with hosts = [1, 2]")
    for table, name in ((cluster, "cluster"), (defaults, "defaults")):
        if table is not None and not isinstance(table, dict):
            raise _bad(text.at(name), f"{name} is not a table; hint: write [{name}] on a line of its own")
    forced = _parse_overrides(overrides)
    top = document | {key: value for key, value in forced.items() if key in TOP}
    for key, value in top.items():
        _check_key(text.at(key), key, {**TOP, "cluster": "", "defaults": "", "grid": ""}, "at the top of the file")
        _check_type(text.at(key), key, value, TOP[key][1])
    spec = None if cluster is None else _cluster(text, cluster)
    starts = text.starts("[[grid]]")
    grids = []
    for number, table in enumerate(tables):
        start = starts[number] if number < len(starts) else 0
        grids.append(_grid(text, start, table, defaults, forced, flags))
    for key in forced:
        if key not in TOP and not any(key in grid.values or key in (*GRID_ONLY, "repeats") for grid in grids):
            raise Failure(f"--set {key}: no grid has this key", exits.USAGE)
    fields = {"name": path.stem, **top}
    if not NAME.fullmatch(fields["name"]):
        raise _bad(text.at("name"), f"name = {fields['name']!r}: only letters, digits, dots and dashes are allowed")
    sweep = Sweep(path=path, cluster=spec, grids=grids, **fields)
    _check_ranges(text, sweep)
    return sweep


def _check_ranges(text: _Text, sweep: Sweep) -> None:
    if sweep.order not in ORDERS:
        raise _bad(text.at("order"), f"order = {sweep.order!r}: unknown; hint: use one of {', '.join(ORDERS)}")
    if sweep.cooldown_s < 0:
        raise _bad(text.at("cooldown_s"), f"cooldown_s = {sweep.cooldown_s:g}: less than 0")
    if not 0 < sweep.off_percent <= 100:
        raise _bad(text.at("off_percent"), f"off_percent = {sweep.off_percent:g}: not between 0 and 100")
    if sweep.timeout_s is not None and sweep.timeout_s <= 0:
        raise _bad(text.at("timeout_s"), f"timeout_s = {sweep.timeout_s:g}: not above 0")


def _parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The settings of `--set KEY=VALUE`. A value that is not TOML is a string."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not FLAG.fullmatch(key):
            raise Failure(f"--set {word}: not KEY=VALUE, as in --set epochs=1", exits.USAGE)
        try:
            settings[key] = files.from_toml(f"value = {value}".encode())["value"]
        except ValueError:
            settings[key] = value
    return settings


def _cluster(text: _Text, table: dict[str, Any]) -> ClusterSpec:
    start = next(iter(text.starts("[cluster]")), 0)
    for key, value in table.items():
        _check_key(text.at(key, start), key, CLUSTER, "in [cluster]")
        _check_type(text.at(key, start), key, value, CLUSTER[key][1])
    where = text.at("cluster", start) if not start else f"{text.path}:{start}"
    kinds = [key for key in ("virtual", "existing", "hostfile") if key in table]
    if len(kinds) != 1:
        given = " and ".join(kinds) or "no hosts"
        raise _bad(where, f"[cluster] has {given}; hint: use one of virtual, existing, hostfile")
    for key, owner in (("cpu_share", "virtual"), ("cpus", "virtual"), ("fill", "virtual"), ("dev", "hostfile")):
        if key in table and owner not in table:
            raise _bad(text.at(key, start), f"{key} needs {owner} and cannot be combined with {kinds[0]}")
    names = tuple(map(str, table.get("virtual", [])))
    try:
        if "virtual" in table:
            checked = ",".join(map(hosts.check_name, names))
            share, cpus = table.get("cpu_share"), table.get("cpus")
            topology.from_names(checked, cluster="sweep", user="", slots=1, cpu_share=share, cpus=cpus, rate=None)
        slots = hosts.read_hostfile(Path(table["hostfile"])) if "hostfile" in table else []
    except Failure as failure:
        raise _bad(text.at(kinds[0], start), str(failure)) from failure
    return ClusterSpec(**{**table, "virtual": names, "machines": tuple(slot.host for slot in slots)})


def _grid(
    text: _Text,
    start: int,
    table: dict[str, Any],
    defaults: dict[str, Any],
    forced: Mapping[str, Any],
    flags: Callable[[str], set[str]] | None,
) -> Grid:
    defaults_start = next(iter(text.starts("[defaults]")), 0)

    def where(key: str) -> str:
        return f"--set {key}" if key in forced else text.at(key, start if key in table else defaults_start)

    forced = {key: value for key, value in forced.items() if key not in TOP or key == "protocol"}
    merged = {**defaults, **table, **forced}
    for key in ("label", "zip"):
        if key in defaults:
            raise _bad(where(key), f"{key} belongs in a [[grid]], not in [defaults]")
    values: dict[str, list[Any]] = {}
    for key, value in merged.items():
        if key in GRID_ONLY or key == "repeats":
            _check_type(where(key), key, value, (GRID_ONLY | OWN)[key][1])
            continue
        values[key] = value if isinstance(value, list) else [value]
        if not values[key]:
            raise _bad(where(key), f"{key} = []: no values")
        for one in values[key]:
            _check_type(where(key), key, one, OWN[key][1] if key in OWN else (str, int, float, bool))
    _normalize_strategies(values, where)
    if "command" in values:
        _check_command(values, where)
    elif flags is not None:
        _check_flags(values, flags, where)
    repeats, label = merged.get("repeats", 1), merged.get("label")
    if repeats < 1:
        raise _bad(where("repeats"), f"repeats = {repeats}: less than 1")
    if label is not None and not NAME.fullmatch(label):
        raise _bad(where("label"), f"label = {label!r}: only letters, digits, dots and dashes are allowed")
    zips = _zips(merged.get("zip", []), values, forced, where)
    line = f"{text.path}:{start}" if start else str(text.path)
    return Grid(values=values, zips=zips, label=label, protocol=merged.get("protocol"), repeats=repeats, where=line)


def _normalize_strategies(values: dict[str, list[Any]], where: Callable[[str], str]) -> None:
    """Rewrites strategies in canonical form, so that equal experiments have equal names. Raises Failure (78)."""
    from hvdtrain import strategies

    if "strategy" in values:
        try:
            values["strategy"] = [str(strategies.parse(str(text))) for text in values["strategy"]]
        except Failure as failure:
            raise _bad(where("strategy"), str(failure)) from failure


def _check_command(values: Mapping[str, list[Any]], where: Callable[[str], str]) -> None:
    """Raises Failure (78) for a command that cannot start, and for keys that are not flags or variables."""
    if "workload" in values:
        raise _bad(where("command"), "command cannot be combined with workload")
    for text in values["command"]:
        try:
            program(text)
        except ValueError as error:
            raise _bad(where("command"), f"command = {text!r}: {error}") from error
    for key in values:
        if not FLAG.fullmatch(key):
            raise _bad(where(key), f"{key!r} is neither a flag of the command (lr) nor a variable (OMP_NUM_THREADS)")


def program(text: str) -> list[str]:
    """The words of a command; python starts a script. Raises ValueError."""
    words = shlex.split(text)
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise ValueError(f"no file {script}")
    if not words:
        raise ValueError("the command is empty")
    return ["python", *words] if words[0] == script else words


def _check_flags(
    values: Mapping[str, list[Any]], flags: Callable[[str], set[str]], where: Callable[[str], str]
) -> None:
    """Raises Failure (78) for a key that is neither the sweep's own nor a flag of every workload of the grid."""
    for workload in values.get("workload", [workloads.DEFAULT]):
        if workload not in (names := workloads.known()):
            raise _bad(where("workload"), f"unknown workload {workload!r}; known: {', '.join(sorted(names))}")
        accepted = sorted(flags(workload) - set(NEVER_FLAGS))
        for key in values:
            if key in NEVER_FLAGS:
                raise _bad(where(key), f"{key} cannot be used in a sweep; hint: {NEVER_FLAGS[key]}")
            _check_key(where(key), key, {**OWN, **GRID_ONLY, **dict.fromkeys(accepted)}, "in a grid")


def _zips(
    groups: Any, values: Mapping[str, list[Any]], forced: Mapping[str, Any], where: Callable[[str], str]
) -> list[list[str]]:
    """The checked groups of keys whose values vary together."""
    seen: set[str] = set()
    for group in groups:
        if not isinstance(group, list) or len(group) < 2 or not all(isinstance(key, str) for key in group):
            raise _bad(where("zip"), f'zip = {groups!r}: not lists of keys, as in [["hosts", "batch_size"]]')
        for key in group:
            if key in forced:
                raise Failure(f"--set {key}: the file zips it with other keys; hint: edit the file", exits.USAGE)
            if key not in values:
                raise _bad(where("zip"), f"zip names {key!r}, which has no values in this grid")
            if key in seen:
                raise _bad(where("zip"), f"zip names {key!r} twice")
            seen.add(key)
        lengths = {key: len(values[key]) for key in group}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} has {count}" for key, count in lengths.items())
            raise _bad(where("zip"), f"zipped keys need the same number of values: {counts}")
    return [list(group) for group in groups]
