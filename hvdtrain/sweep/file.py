"""Reads and checks a sweep's TOML file.

The folder `sweeps` has documented examples, and `hvdtrain sweep --help` lists every key. Errors name
the line of the key. An unknown key is an error, because a misspelt key could cost a night of wrong runs.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hvdtrain.config import workloads
from hvdtrain.config.constraints import LARGEST
from hvdtrain.lab import topology
from hvdtrain.system import exits, files, hosts
from hvdtrain.system.exits import Failure

Launcher = Literal["launch/mpirun.sh", "launch/horovodrun.sh", "horovodrun", "horovodrun --gloo", "none"]
LAUNCHERS: dict[Launcher, tuple[str, ...]] = {
    "launch/mpirun.sh": ("mpirun",),
    "launch/horovodrun.sh": ("horovodrun", "mpirun"),
    "horovodrun": ("horovodrun",),
    "horovodrun --gloo": ("horovodrun",),
    "none": (),
}
"""What starts the ranks of a run, and the programs that it needs"""
DEFAULT_LAUNCHER = "launch/mpirun.sh"
SWEEPS = Path(__file__).with_name("sweeps")
"""hvdtrain's own sweeps, which can be given by name"""
ALL_GPUS = "gpus"
FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=1e18)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
FlagValue = bool | str | Annotated[int, Meta(ge=-LARGEST, le=LARGEST)] | Finite

NEVER_FLAGS = {
    "run_dir": "the sweep chooses the run folders; use --root",
    "resume": "the sweep restarts interrupted runs",
    "json": "the records contain the results",
    "dry_run": "use hvdtrain sweep --dry-run",
    "debug": "run the workload by itself to debug it",
    "monitor": 'use protocol = "E" for runs with sensors',
}


# The annotated attributes of these classes are the keys of the file, with their types and help texts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The hosts of a sweep. Either virtual or hostfile is set."""

    virtual: Annotated[tuple[str, ...], "names of virtual hosts, which exist only during the sweep"] = ()
    cpu_share: Annotated[Positive | None, "with virtual: CPU cores per host, e.g. 0.5 (default: no limit)"] = None
    cpus: Annotated[str | None, "with virtual: the cores that the hosts may use, e.g. 0-1 (default: all)"] = None
    fill: Annotated[
        bool, "with virtual: during a run on one host, keep the other hosts busy with the same run (default: false)"
    ] = False
    hostfile: Annotated[str | None, "machines, one `name slots=N` per line, starting with this one"] = None
    dev: Annotated[str | None, "with hostfile: the network interface to throttle (needs sudo without a password)"] = (
        None
    )
    machines: tuple[str, ...] = ()
    """The names in the hostfile"""

    @property
    def names(self) -> tuple[str, ...]:
        return self.virtual or self.machines


class Settings:
    """Keys of a grid with one value or a list of values. All other keys are flags of the workload or command."""

    workload: Annotated[str, f"what to train; `hvdtrain train` lists the workloads (default: {workloads.DEFAULT})"]
    command: Annotated[str, 'your own command instead of a workload: "python train.py", whose script imports hvdtrain']
    hosts: Annotated[Count, "number of hosts (default: 1)"]
    ranks_per_host: Annotated[
        Count | Literal["gpus"], 'ranks on each host, or "gpus": one per GPU of this machine (default: 1)'
    ]
    rate: Annotated[str, 'rate of every link: 10mbit, 1gbit ... or "unlimited" (default: unlimited on virtual hosts)']
    launcher: Annotated[Launcher, f"{', '.join(LAUNCHERS)} (default: {DEFAULT_LAUNCHER}); none starts a single process"]
    on: Annotated[
        Literal["machine", "cluster"],
        "machine (this machine) or cluster (the hosts of [cluster], the default if it exists)",
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """One [[grid]] with the defaults."""

    values: dict[str, list[Any]]
    """The list of values of each setting and flag, in the order of the file"""
    repeats: Annotated[Count, "how often to repeat the protocol (default: 1)"] = 1
    protocol: Annotated[str | None, "overrides the protocol of the file"] = None
    label: Annotated[Name | None, "prefix of the names of this grid's experiments"] = None
    zip: Annotated[
        list[Annotated[list[str], Meta(min_length=2)]],
        'lists of keys whose values vary together: [["hosts", "global_batch_size"]]',
    ] = dataclasses.field(default_factory=list)
    where: str
    """File and line, for messages"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The checked content of a sweep file."""

    path: Path
    name: Annotated[Name, "name of the results folder (default: the file's name)"]
    protocol: Annotated[
        str, "runs of each experiment, as in E,5T,E: T timing, E energy with power sensors (default: T)"
    ] = "T"
    cooldown_s: Annotated[
        Annotated[float, Meta(ge=0, le=1e18)], "seconds of rest before every run except the first (default: 0)"
    ] = 0.0
    order: Annotated[
        Literal["as-written", "interleaved", "random"],
        "as-written, interleaved (rounds with one run of each experiment) or random (default: interleaved)",
    ] = "interleaved"
    off_percent: Annotated[
        Annotated[float, Meta(gt=0, le=100)],
        "largest accepted deviation of a link from its rate, in percent (default: 5)",
    ] = 5.0
    timeout_s: Annotated[Positive | None, "time limit of a run; a run that exceeds it has failed (default: none)"] = (
        None
    )
    cluster: ClusterSpec | None = None
    grids: list[Grid]


def keys(table: type) -> dict[str, Any]:
    """Key -> type, with the help text as the last item of its metadata."""
    hints = get_type_hints(table, include_extras=True)
    return {key: hint for key, hint in hints.items() if get_origin(hint) is Annotated}


TOP, CLUSTER, SETTINGS, GRID = (keys(table) for table in (Sweep, ClusterSpec, Settings, Grid))


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


def _checked(where: str, key: str, value: Any, types: Any) -> Any:
    """The value with the type of its key. Raises Failure (78)."""
    try:
        return msgspec.convert(value, types)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at ")[0]
        hint = f"; hint: {types.__metadata__[-1]}" if get_origin(types) is Annotated else ""
        raise _bad(where, f"{key}: {problem[0].lower()}{problem[1:]}{hint}") from error


def _check_key(where: str, key: str, known: Mapping[str, Any], table: str) -> None:
    if key not in known:
        raise _bad(where, f"unknown key {key!r} {table}; known: {', '.join(known)}")


def read(path: Path, overrides: Sequence[str] = (), flags: Callable[[str], set[str]] | None = None) -> Sweep:
    """Reads a sweep file and applies `--set KEY=VALUE`.

    `flags` returns the flags of a workload (`dry_run.known_flags`). Raises Failure: 2 for a missing file or a bad
    --set, 78 with file, line and key for all other errors.
    """
    path = files.shipped(path, SWEEPS)
    try:
        raw = files.read(path, files.SETTINGS_BYTES)
        document = files.from_toml(raw)
    except OSError as error:
        hint = f"give a TOML file, or one of {', '.join(sorted(own.stem for own in SWEEPS.glob('*.toml')))}"
        raise files.refused(path, error, exits.USAGE, hint) from error
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
    top = {"name": path.stem, **document, **{key: value for key, value in forced.items() if key in TOP}}
    for key in top:
        _check_key(text.at(key), key, {**TOP, "cluster": "", "defaults": "", "grid": ""}, "at the top of the file")
        top[key] = _checked(text.at(key), key, top[key], TOP[key])
    spec = None if cluster is None else _cluster(text, cluster)
    starts = text.starts("[[grid]]")
    grids = []
    for number, table in enumerate(tables):
        start = starts[number] if number < len(starts) else 0
        grids.append(_grid(text, start, table, defaults, forced, flags))
    for key in forced:
        if key not in TOP and not any(key in grid.values or key in GRID for grid in grids):
            raise Failure(f"--set {key}: no grid has this key", exits.USAGE)
    return Sweep(path=path, cluster=spec, grids=grids, **top)


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
    for key in table:
        _check_key(text.at(key, start), key, CLUSTER, "in [cluster]")
        table[key] = _checked(text.at(key, start), key, table[key], CLUSTER[key])
    where = text.at("cluster", start) if not start else f"{text.path}:{start}"
    kinds = [key for key in ("virtual", "hostfile") if key in table]
    if len(kinds) != 1:
        given = " and ".join(kinds) or "no hosts"
        raise _bad(where, f"[cluster] has {given}; hint: use virtual or hostfile")
    for key, owner in (("cpu_share", "virtual"), ("cpus", "virtual"), ("fill", "virtual"), ("dev", "hostfile")):
        if key in table and owner not in table:
            raise _bad(text.at(key, start), f"{key} needs {owner} and cannot be combined with {kinds[0]}")
    try:
        if "virtual" in table:
            checked = ",".join(map(hosts.check_name, table["virtual"]))
            share, cpus = table.get("cpu_share"), table.get("cpus")
            topology.from_names(checked, cluster="sweep", user="", slots=1, cpu_share=share, cpus=cpus, rate=None)
        slots = hosts.read_hostfile(Path(table["hostfile"])) if "hostfile" in table else []
    except Failure as failure:
        raise _bad(text.at(kinds[0], start), str(failure)) from failure
    return ClusterSpec(**table, machines=tuple(slot.host for slot in slots))


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
    single: dict[str, Any] = {}
    for key, value in merged.items():
        if key in GRID:
            single[key] = _checked(where(key), key, value, GRID[key])
            continue
        listed = value if isinstance(value, list) else [value]
        if not listed:
            raise _bad(where(key), f"{key} = []: no values")
        values[key] = [_checked(where(key), key, one, SETTINGS.get(key, FlagValue)) for one in listed]
    _normalize_strategies(values, where)
    if "command" in values:
        _check_command(values, where)
    elif flags is not None:
        _check_flags(values, flags, where)
    _check_zips(single.get("zip", []), values, forced, where)
    return Grid(values=values, where=f"{text.path}:{start}" if start else str(text.path), **single)


def _normalize_strategies(values: dict[str, list[Any]], where: Callable[[str], str]) -> None:
    """Rewrites strategies in canonical form, so that equal experiments have equal names. Raises Failure (78)."""
    from hvdtrain import strategies

    if "strategy" in values:
        try:
            values["strategy"] = [
                text if strategies.automatic.rule(text) or strategies.presets.of(text) else str(strategies.parse(text))
                for text in map(str, values["strategy"])
            ]
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
            _check_key(where(key), key, {**SETTINGS, **GRID, **dict.fromkeys(accepted)}, "in a grid")


def _check_zips(
    groups: list[list[str]],
    values: Mapping[str, list[Any]],
    forced: Mapping[str, Any],
    where: Callable[[str], str],
) -> None:
    """Raises Failure (2, 78) for keys that cannot vary together."""
    seen: set[str] = set()
    for group in groups:
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
