"""Reads and checks a sweep's TOML file.

The folder `sweeps` has documented examples, and `hvdtrain sweep --help` lists every key. An unknown key is an error,
because a misspelt key could cost a night of wrong runs. The flags of a workload are checked by its dry run.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from hvdtrain.config import workloads
from hvdtrain.config.constraints import LARGEST
from hvdtrain.lab import topology
from hvdtrain.system import exits, files, hosts
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

Launcher = Literal["launch/mpirun.sh", "launch/horovodrun.sh", "horovodrun", "horovodrun --gloo", "none"]
"""What starts the ranks of a run"""
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
    fill: Annotated[
        bool, "with virtual: during a run on one host, keep the other hosts busy with the same run (default: false)"
    ] = False
    hostfile: Annotated[str | None, "machines, one `name slots=N` per line, starting with this one"] = None
    dev: Annotated[str | None, "with hostfile: the network interface to throttle (needs sudo without a password)"] = (
        None
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Raises Failure (2, 65, 78) for a bad hostfile."""
        return self.virtual or tuple(slot.host for slot in hosts.read_hostfile(Path(self.hostfile or "")))


class Settings:
    """Keys of a grid with one value or a list of values. All other keys are flags of the workload or command."""

    workload: Annotated[str, f"what to train; `hvdtrain train` lists the workloads (default: {workloads.DEFAULT})"]
    command: Annotated[str, 'your own command instead of a workload: "python train.py", whose script imports hvdtrain']
    hosts: Annotated[Count, "number of hosts (default: 1)"]
    ranks_per_host: Annotated[
        Count | Literal["gpus"], 'ranks on each host, or "gpus": one per GPU of this machine (default: 1)'
    ]
    rate: Annotated[str, 'rate of every link: 10mbit, 1gbit ... or "unlimited" (default: unlimited on virtual hosts)']
    launcher: Annotated[
        Launcher, f"{', '.join(get_args(Launcher))} (default: {DEFAULT_LAUNCHER}); none starts a single process"
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
        Literal["as-written", "interleaved"],
        "as-written or interleaved (rounds with one run of each experiment, the default)",
    ] = "interleaved"
    off_percent: Annotated[
        Annotated[float, Meta(gt=0, le=100)],
        "largest accepted deviation of a link from its rate, in percent (default: 5)",
    ] = 5.0
    cluster: ClusterSpec | None = None
    grids: list[Grid]


def keys(table: type) -> dict[str, Any]:
    """Key -> type, with the help text as the last item of its metadata."""
    hints = get_type_hints(table, include_extras=True)
    return {key: hint for key, hint in hints.items() if get_origin(hint) is Annotated}


TOP, CLUSTER, SETTINGS, GRID = (keys(table) for table in (Sweep, ClusterSpec, Settings, Grid))


def bad(where: object, what: str) -> Failure:
    return Failure(f"{where}: {what}", exits.BAD_CONFIG)


def _checked(where: object, types: Mapping[str, Any], key: str, value: Any) -> Any:
    """The value with the type of its key. Raises Failure (78)."""
    if key not in types:
        raise bad(where, f"unknown key {key!r}{near(key, types)}; known: {', '.join(types)}")
    try:
        return msgspec.convert(value, types[key])
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at ")[0]
        hint = f"; hint: {types[key].__metadata__[-1]}" if get_origin(types[key]) is Annotated else ""
        raise bad(where, f"{key}: {problem[0].lower()}{problem[1:]}{hint}") from error


def read(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Reads a sweep file and applies `--set KEY=VALUE`.

    Raises Failure: 2 for a missing file or a bad --set, 78 with file, table and key for all other errors.
    """
    path = files.shipped(path, SWEEPS)
    try:
        raw = files.read(path, files.SETTINGS_BYTES)
        document = files.from_toml(raw)
    except OSError as error:
        hint = f"give a TOML file, or one of {', '.join(sorted(own.stem for own in SWEEPS.glob('*.toml')))}"
        raise files.refused(path, error, exits.USAGE, hint) from error
    except ValueError as error:
        raise bad(path, f"not TOML: {error}") from error
    forced = _parse_overrides(overrides)
    tables = {"cluster": dict[str, Any], "defaults": dict[str, Any], "grid": list[dict[str, Any]]}
    top = {"name": path.stem, **document, **{key: value for key, value in forced.items() if key in TOP}}
    top = {key: _checked(path, TOP | tables, key, value) for key, value in top.items()}
    cluster, defaults, grids = (top.pop(key, None) for key in tables)
    if not grids:
        raise bad(path, "no grid; hint: add a table [[grid]], for example with hosts = [1, 2]")
    # A protocol of --set also replaces the grids' own protocols.
    forced = {key: value for key, value in forced.items() if key not in TOP or key == "protocol"}
    lines = [number for number, line in enumerate(raw.splitlines(), 1) if line.lstrip().startswith(b"[[grid]]")]
    places = [f"{path}:{number}" for number in lines] if len(lines) == len(grids) else [str(path)] * len(grids)
    grids = [_grid(where, {**(defaults or {}), **grid, **forced}) for where, grid in zip(places, grids, strict=True)]
    spec = None if cluster is None else _cluster(f"{path}: [cluster]", cluster)
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


def _cluster(where: str, table: dict[str, Any]) -> ClusterSpec:
    spec = ClusterSpec(**{key: _checked(where, CLUSTER, key, value) for key, value in table.items()})
    if bool(spec.virtual) == bool(spec.hostfile):
        raise bad(where, "needs hosts; hint: give either virtual or hostfile")
    for key, owner in (("cpu_share", "virtual"), ("fill", "virtual"), ("dev", "hostfile")):
        if getattr(spec, key) and not getattr(spec, owner):
            raise bad(where, f"{key} needs {owner}")
    try:
        names = ",".join(map(hosts.check_name, spec.names))
        if spec.virtual:
            topology.from_names(
                names, cluster="sweep", user="", slots=1, cpu_share=spec.cpu_share, cpus=None, rate=None
            )
    except Failure as failure:
        raise bad(where, str(failure)) from failure
    return spec


def _grid(where: str, table: Mapping[str, Any]) -> Grid:
    """One grid with the defaults and the overrides. Raises Failure (78)."""
    from hvdtrain import strategies

    single = {key: _checked(where, GRID, key, value) for key, value in table.items() if key in GRID}
    values: dict[str, list[Any]] = {}
    for key, value in table.items():
        if key not in single:
            types = {key: SETTINGS.get(key, FlagValue)}
            values[key] = [_checked(where, types, key, one) for one in (value if isinstance(value, list) else [value])]
        if value == []:
            raise bad(where, f"{key} = []: no values")
        if "command" not in table and key in NEVER_FLAGS:
            raise bad(where, f"{key} cannot be used in a sweep; hint: {NEVER_FLAGS[key]}")
        if "command" in table and (key == "workload" or not FLAG.fullmatch(key)):
            raise bad(where, f"{key!r} is neither a flag of the command (lr) nor a variable (OMP_NUM_THREADS)")
    try:
        for command in values.get("command", []):
            program(command)
        if "strategy" in values:  # in canonical form, so that equal experiments have equal names
            values["strategy"] = [
                text if strategies.automatic.rule(text) or strategies.presets.of(text) else str(strategies.parse(text))
                for text in map(str, values["strategy"])
            ]
    except (Failure, ValueError) as error:
        raise bad(where, str(error)) from error
    zipped = [key for group in single.get("zip", []) for key in group]
    for group in single.get("zip", []):
        counts = {key: len(values.get(key, [])) for key in group}
        if len(set(counts.values())) > 1 or 0 in counts.values() or len(set(zipped)) < len(zipped):
            raise bad(where, f"zip needs the same number of values for each key, in one group: {counts}")
    return Grid(values=values, where=where, **single)


def program(text: str) -> list[str]:
    """The words of a command; python starts a script. Raises ValueError."""
    words = shlex.split(text)
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise ValueError(f"command = {text!r}: no file {script}")
    if not words:
        raise ValueError("the command is empty")
    return ["python", *words] if words[0] == script else words
