"""Reads and checks a sweep's TOML file.

launch/sweeps/ has documented examples; `hvdtrain sweep --help` lists every key. An unknown key is an error that names
its line: a misspelt key that was ignored would cost a night of wrong runs.
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
WHEN_OFF = ("mark", "refuse")
LAUNCHERS = ("launch/mpirun.sh", "launch/horovodrun.sh", "horovodrun", "horovodrun --gloo", "none")
PLACES = ("machine", "cluster")
ALL_GPUS = "gpus"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# key -> (meaning, types)
NUMBER = (int, float)
TOP: dict[str, tuple[str, Any]] = {
    "name": ("folder under the root that the runs go to (default: the file's name)", str),
    "protocol": ("what each point is run for: T timing, E energy (sensors on), as in E,5T,E (default: T)", str),
    "cooldown_s": ("seconds of rest before every run but the first (default: 0)", NUMBER),
    "order": ("as-written, interleaved (a run of each point in turn) or random (default: interleaved)", str),
    "order_seed": ("seed of order = random (default: 0)", int),
    "off_percent": ("how far a link may be off its rate, in percent (default: 5)", NUMBER),
    "when_off": (
        "over a link that is off: mark the run and repeat it next time, or refuse it (default: mark)",
        str,
    ),
    "timeout_s": ("a run that takes longer is ended and counts as failed (default: no end)", NUMBER),
}
OWN: dict[str, tuple[str, Any]] = {
    "workload": (f"what to train, as `hvdtrain train` lists it (default: {workloads.DEFAULT})", str),
    "command": ('in place of it your own: "python train.py --lr 0.1", whose script imports hvdtrain', str),
    "hosts": ("how many of the cluster's hosts take part (default: 1)", int),
    "ranks_per_host": ('ranks on each of them, or "gpus": one per GPU of this machine (default: 1)', (int, str)),
    "rate": ('of every link: 10mbit, 1gbit ..., or "unlimited" (default: unlimited; not changed where not ours)', str),
    "launcher": (f"{', '.join(LAUNCHERS)} (default: {LAUNCHERS[0]}); none: one process by itself", str),
    "on": ("machine: ranks on this machine; cluster: on [cluster] (default: cluster, if there is one)", str),
    "repeats": ("how often the whole protocol is run (default: 1)", int),
}
GRID_ONLY: dict[str, tuple[str, Any]] = {
    "label": ("a name for the points of this grid, in front of theirs", str),
    "protocol": ("as above, for this grid", str),
    "zip": ('lists of keys whose values go together: [["hosts", "global_batch_size"]]', list),
}
CLUSTER: dict[str, tuple[str, Any]] = {
    "virtual": ("names of virtual hosts, brought up for the sweep and taken down after it", list),
    "cpu_share": ("with virtual: cores each host may use, e.g. 0.5 (default: all)", NUMBER),
    "cpus": ("with virtual: cores the hosts may run on, e.g. 0-1 (default: all)", str),
    "fill": ("with virtual: beside a run on one host each other host does the same by itself (default: false)", bool),
    "existing": ("name of a virtual cluster that is up and stays up", str),
    "hostfile": ("machines, one `name slots=N` per line, the one this runs on first", str),
    "dev": ("with hostfile: their network interface, for the throttle (it needs sudo -n there)", str),
}
NEVER_FLAGS = {
    "run_dir": "the sweep chooses each run's folder (--root)",
    "resume": "a point that was interrupted is run anew",
    "json": "results are read from the records",
    "dry_run": "use hvdtrain sweep --dry-run",
    "debug": "",
    "monitor": "protocol says which runs have sensors on: E",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The hosts of a sweep; exactly one of virtual, existing and hostfile."""

    virtual: tuple[str, ...] = ()
    cpu_share: float | None = None
    cpus: str | None = None
    fill: bool = False
    """One host is measured among busy ones, since a virtual host that has the machine to itself is faster"""
    existing: str | None = None
    hostfile: str | None = None
    dev: str | None = None
    machines: tuple[str, ...] = ()
    """The names in the hostfile"""

    @property
    def size(self) -> int | None:
        """Number of hosts; None for an existing cluster, whose size is not known before it is read."""
        return None if self.existing else len(self.virtual or self.machines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """One [[grid]]: every key with its list of values, in the order written, defaults included."""

    values: dict[str, list[Any]]
    zips: list[list[str]]
    label: str | None
    protocol: str | None
    repeats: int
    where: str
    """For messages: the file and the line it begins at"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep file's content, checked."""

    path: Path
    name: str
    protocol: str = "T"
    cooldown_s: float = 0.0
    order: str = "interleaved"
    order_seed: int = 0
    off_percent: float = 5.0
    when_off: str = "mark"
    timeout_s: float | None = None
    cluster: ClusterSpec | None = None
    grids: list[Grid]


class _Text:
    """The file's text, in which error messages look up the line of a key."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()

    def starts(self, header: str) -> list[int]:
        """Line numbers, from 1, of a table's headers."""
        pattern = re.compile(rf"\s*{re.escape(header)}\s*(#.*)?")
        return [number for number, line in enumerate(self.lines, start=1) if pattern.fullmatch(line)]

    def at(self, key: str, start: int = 0) -> str:
        """`file:line` of a key in the table that begins at line `start` (0: before the first table)."""
        pattern = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
        for number, line in enumerate(self.lines[start:], start=start + 1):
            if re.match(r"\s*\[[\[\w]", line) and not pattern.match(line):
                break
            if pattern.match(line):
                return f"{self.path}:{number}"
        return f"{self.path}:{start}" if start else str(self.path)


def _bad(where: str, what: str) -> Failure:
    return Failure(f"{where}: {what}", exits.BAD_CONFIG)


def _typed(where: str, key: str, value: Any, kinds: Any) -> None:
    accepted = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, int) and abs(value) > LARGEST:  # first: Python does not print a number of 5,000 digits
        raise _bad(where, f"{key}: give a whole number of at most {LARGEST:,}")
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in accepted)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        told = {
            int: "a whole number",
            float: "a number",
            str: "a text in quotes",
            list: "a list",
            bool: "true or false",
        }
        wanted = "a number" if kinds == NUMBER else " or ".join(told[kind] for kind in accepted)
        raise _bad(where, f"{key} = {value!r}: give {wanted}")


def _known(where: str, key: str, known: Mapping[str, Any], of: str) -> None:
    if key not in known:
        raise _bad(where, f"unknown key {key!r} {of}; known: {', '.join(known)}")


def read(path: Path, overrides: Sequence[str] = (), flags: Callable[[str], set[str]] | None = None) -> Sweep:
    """The sweep that a file asks for, with `--set KEY=VALUE` applied.

    `flags` tells the flags of a workload (`preview.flags`). Raises Failure: 2 if there is no such file, and for
    a bad --set, 78 with file, line and key for everything that is refused in it.
    """
    try:
        raw = files.read(path, files.SETTINGS_BYTES)
        document = files.from_toml(raw)
    except OSError as error:
        raise files.refused(path, error, exits.USAGE, "see launch/sweeps/ for examples") from error
    except ValueError as error:
        raise _bad(str(path), f"not TOML: {error}") from error
    text = _Text(path, raw.decode("utf-8-sig"))
    tables = document.pop("grid", [])
    cluster = document.pop("cluster", None)
    defaults = document.pop("defaults", {})
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise _bad(str(path), "no grid; add at least one table [[grid]], e.g. with hosts = [1, 2]")
    for table, name in ((cluster, "cluster"), (defaults, "defaults")):
        if table is not None and not isinstance(table, dict):
            raise _bad(text.at(name), f"{name} is a table: write [{name}] on a line of its own")
    forced = _overrides(overrides)
    top = document | {key: value for key, value in forced.items() if key in TOP}
    for key, value in top.items():
        _known(text.at(key), key, {**TOP, "cluster": "", "defaults": "", "grid": ""}, "at the top of the file")
        _typed(text.at(key), key, value, TOP[key][1])
    spec = None if cluster is None else _cluster(text, cluster)
    starts = text.starts("[[grid]]")
    grids = []
    for number, table in enumerate(tables):
        start = starts[number] if number < len(starts) else 0
        grids.append(_grid(text, start, table, defaults, forced, flags))
    for key in forced:
        if key not in TOP and not any(key in grid.values or key in (*GRID_ONLY, "repeats") for grid in grids):
            raise Failure(f"--set {key}: no grid takes it", exits.USAGE)
    made = {"name": path.stem, **top}
    if not NAME.fullmatch(made["name"]):
        raise _bad(text.at("name"), f"name = {made['name']!r}: letters, digits, dots and dashes, it becomes a folder")
    sweep = Sweep(path=path, cluster=spec, grids=grids, **made)
    _check(text, sweep)
    return sweep


def _check(text: _Text, sweep: Sweep) -> None:
    for key, known in (("order", ORDERS), ("when_off", WHEN_OFF)):
        if getattr(sweep, key) not in known:
            raise _bad(text.at(key), f"{key} = {getattr(sweep, key)!r}: give one of {', '.join(known)}")
    if sweep.cooldown_s < 0:
        raise _bad(text.at("cooldown_s"), f"cooldown_s = {sweep.cooldown_s:g}: give 0 or more")
    if not 0 < sweep.off_percent <= 100:
        raise _bad(text.at("off_percent"), f"off_percent = {sweep.off_percent:g}: give more than 0, at most 100")
    if sweep.timeout_s is not None and sweep.timeout_s <= 0:
        raise _bad(text.at("timeout_s"), f"timeout_s = {sweep.timeout_s:g}: give seconds, or leave it out")


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    """The settings of `--set KEY=VALUE`; a value that is not TOML is a string."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key):
            raise Failure(f"--set {word}: expected KEY=VALUE, as in --set epochs=1", exits.USAGE)
        try:
            found[key] = files.from_toml(f"value = {value}".encode())["value"]
        except ValueError:
            found[key] = value
    return found


def _cluster(text: _Text, table: dict[str, Any]) -> ClusterSpec:
    start = next(iter(text.starts("[cluster]")), 0)
    for key, value in table.items():
        _known(text.at(key, start), key, CLUSTER, "in [cluster]")
        _typed(text.at(key, start), key, value, CLUSTER[key][1])
    where = text.at("cluster", start) if not start else f"{text.path}:{start}"
    kinds = [key for key in ("virtual", "existing", "hostfile") if key in table]
    if len(kinds) != 1:
        raise _bad(
            where, f"[cluster] names {' and '.join(kinds) or 'no hosts'}: give one of virtual, existing, hostfile"
        )
    for key, owner in (("cpu_share", "virtual"), ("cpus", "virtual"), ("fill", "virtual"), ("dev", "hostfile")):
        if key in table and owner not in table:
            raise _bad(text.at(key, start), f"{key} goes with {owner}, not with {kinds[0]}")
    names = tuple(map(str, table.get("virtual", [])))
    try:
        if "virtual" in table:
            every = ",".join(map(hosts.check_name, names))
            share, cpus = table.get("cpu_share"), table.get("cpus")
            topology.from_names(every, cluster="sweep", user="", slots=1, cpu_share=share, cpus=cpus, rate=None)
        machines = hosts.read_hostfile(Path(table["hostfile"])) if "hostfile" in table else []
    except Failure as failure:
        raise _bad(text.at(kinds[0], start), str(failure)) from failure
    return ClusterSpec(**{**table, "virtual": names, "machines": tuple(slot.host for slot in machines)})


def _grid(
    text: _Text,
    start: int,
    table: dict[str, Any],
    defaults: dict[str, Any],
    forced: Mapping[str, Any],
    flags: Callable[[str], set[str]] | None,
) -> Grid:
    begins = next(iter(text.starts("[defaults]")), 0)

    def place(key: str) -> str:
        return f"--set {key}" if key in forced else text.at(key, start if key in table else begins)

    forced = {key: value for key, value in forced.items() if key not in TOP or key == "protocol"}
    merged = {**defaults, **table, **forced}
    for key in ("label", "zip"):
        if key in defaults:
            raise _bad(place(key), f"{key} belongs in a [[grid]], not in [defaults]")
    values: dict[str, list[Any]] = {}
    for key, value in merged.items():
        if key in GRID_ONLY or key == "repeats":
            kinds = (GRID_ONLY | OWN)[key][1]
            _typed(place(key), key, value, kinds)
            continue
        several = value if isinstance(value, list) else [value]
        if not several:
            raise _bad(place(key), f"{key} = []: give at least one value")
        for one in several:
            _typed(place(key), key, one, OWN[key][1] if key in OWN else (str, int, float, bool))
        values[key] = several
    _exchanges(values, place)
    if "command" in values:
        _check_command(values, place)
    elif flags is not None:
        _check_flags(values, flags, place)
    repeats = merged.get("repeats", 1)
    if repeats < 1:
        raise _bad(place("repeats"), f"repeats = {repeats}: give 1 or more")
    label = merged.get("label")
    if label is not None and not NAME.fullmatch(label):
        raise _bad(place("label"), f"label = {label!r}: letters, digits, dots and dashes, it becomes part of a folder")
    zips = _zips(merged.get("zip", []), values, forced, place)
    where = f"{text.path}:{start}" if start else str(text.path)
    return Grid(values=values, zips=zips, label=label, protocol=merged.get("protocol"), repeats=repeats, where=where)


def _exchanges(values: dict[str, list[Any]], place: Any) -> None:
    """Makes strategies canonical, so that one point has one name. Raises Failure (78)."""
    from hvdtrain import strategies

    named = values.get("strategy", [])
    try:
        values |= {"strategy": [str(strategies.parse(str(one))) for one in named]} if named else {}
    except Failure as failure:
        raise _bad(place("strategy"), str(failure)) from failure


def _check_command(values: Mapping[str, list[Any]], place: Any) -> None:
    """Raises Failure (78) for a command that cannot be started, and for a key that is no flag or variable of one."""
    if "workload" in values:
        raise _bad(place("command"), "command and workload are both given: give one of them")
    for text in values["command"]:
        try:
            program(text)
        except ValueError as error:
            raise _bad(place("command"), f"command = {text!r}: {error}") from error
    for key in values:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key):
            raise _bad(place(key), f"{key!r} is neither a flag of the command (lr) nor a variable (OMP_NUM_THREADS)")


def program(text: str) -> list[str]:
    """The words of a command; a script is started by python. Raises ValueError."""
    words = shlex.split(text)
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise ValueError(f"there is no {script} here")
    if not words:
        raise ValueError("it is empty")
    return ["python", *words] if words[0] == script else words


def _check_flags(values: Mapping[str, list[Any]], flags: Callable[[str], set[str]], place: Any) -> None:
    """Raises Failure (78) for a key that is neither the sweep's own nor a flag of every workload of the grid."""
    for workload in values.get("workload", [workloads.DEFAULT]):
        if workload not in (names := workloads.known()):
            raise _bad(place("workload"), f"unknown workload {workload!r}; known: {', '.join(sorted(names))}")
        taken = sorted(flags(workload) - set(NEVER_FLAGS))
        for key in values:
            if key in NEVER_FLAGS:
                raise _bad(place(key), f"{key} is not for a sweep: {NEVER_FLAGS[key]}".removesuffix(": "))
            own = {**OWN, **GRID_ONLY}
            _known(place(key), key, own | dict.fromkeys(taken), "in a grid")


def _zips(asked: Any, values: Mapping[str, list[Any]], forced: Mapping[str, Any], place: Any) -> list[list[str]]:
    """The groups of keys whose values are paired, checked."""
    seen: set[str] = set()
    for group in asked:
        if not isinstance(group, list) or len(group) < 2 or not all(isinstance(key, str) for key in group):
            raise _bad(place("zip"), f'zip = {asked!r}: give lists of keys, as in [["hosts", "batch_size"]]')
        for key in group:
            if key in forced:
                raise Failure(f"--set {key}: it is zipped with others in the file; change it there", exits.USAGE)
            if key not in values:
                raise _bad(place("zip"), f"zip names {key!r}, which has no values here")
            if key in seen:
                raise _bad(place("zip"), f"zip names {key!r} twice")
            seen.add(key)
        lengths = {key: len(values[key]) for key in group}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{key} has {count}" for key, count in lengths.items())
            raise _bad(place("zip"), f"zipped keys need equally many values: {told}")
    return [list(group) for group in asked]
