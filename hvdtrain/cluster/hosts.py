"""Lists of hosts: `-H a:2,b:2`, hostfiles, and what Slurm says of its allocation."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain import exits
from hvdtrain.exits import Failure

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HOSTFILE_LINE = re.compile(
    r"(?P<host>\S+?)(?::(?P<colon>\d+)|\s+slots\s*=\s*(?P<slots>\d+)(\s+max[_-]slots\s*=\s*\d+)?)?"
)


@dataclasses.dataclass(frozen=True)
class Slots:
    """A host and how many ranks it takes."""

    host: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.host}:{self.slots}"


def check_name(name: str, where: str = "") -> str:
    """The name, if it is one that may stand on a command line. Raises Failure (2)."""
    if not NAME.fullmatch(name):
        raise Failure(
            f"{where}{name!r} is no host name: use letters, digits, dots and dashes, e.g. node-1.lan", exits.USAGE
        )
    return name


def parse_hosts(text: str) -> list[Slots]:
    """`a:2,b:2` or `a,b` (one slot each), in order. Raises Failure (2) for bad names, counts and repeated hosts."""
    found = []
    for part in text.split(","):
        host, colon, count = part.strip().partition(":")
        if not host or (colon and not (count.isdigit() and int(count) > 0)):
            raise Failure(f"hosts {text!r}: {part!r} is not HOST or HOST:SLOTS, as in a:2,b:2", exits.USAGE)
        found.append(Slots(check_name(host, "hosts: "), int(count or 1)))
    return _distinct(found, f"hosts {text!r}")


def read_hostfile(path: Path) -> list[Slots]:
    """The hosts of a file: one per line as `a slots=2`, `a:2` or `a`; `#` starts a comment.

    Raises Failure (69) if the file cannot be read and (65), naming file:line, for a line that is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise Failure(f"hostfile {path}: {reason}; name another with --hostfile", exits.UNREACHABLE) from error
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = HOSTFILE_LINE.fullmatch(text)
        count = int(match["colon"] or match["slots"] or 1) if match else 0
        if match is None or count < 1:
            raise Failure(f"{path}:{number}: {text!r} is not `HOST slots=N`", exits.BAD_DATA)
        if not NAME.fullmatch(match["host"]):
            raise Failure(f"{path}:{number}: {match['host']!r} is no host name", exits.BAD_DATA)
        found.append(Slots(match["host"], count))
    if not found:
        raise Failure(f"{path}: no hosts in it; one per line, e.g. `node1 slots=2`", exits.BAD_DATA)
    return _distinct(found, str(path), exits.BAD_DATA)


def _distinct(found: list[Slots], where: str, code: int = exits.USAGE) -> list[Slots]:
    names = [slot.host for slot in found]
    for name in names:
        if names.count(name) > 1:
            raise Failure(f"{where}: host {name} is listed twice; give it once with all its slots", code)
    return found


def expand_nodelist(text: str) -> list[str]:
    """Host names of a Slurm node list (`hostlist` notation, scontrol(1)): `n[1-3,07],login` and several brackets.

    A range keeps the leading zeros of its start. Raises Failure (78) if it cannot be read.
    """
    names: list[str] = []
    for part in _split_outside_brackets(text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # literal, inside, literal, inside ... literal
        choices = [[piece] if i % 2 == 0 else list(_numbers(piece, text)) for i, piece in enumerate(pieces)]
        for combination in itertools.product(*choices):
            name = "".join(combination)
            if not NAME.fullmatch(name):
                raise Failure(f"node list {text!r}: {name!r} is no host name", exits.BAD_CONFIG)
            names.append(name)
    return names


def _split_outside_brackets(text: str) -> list[str]:
    return re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\]|[\[\]])+", text)


def _numbers(inside: str, whole: str) -> Iterator[str]:
    for item in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise Failure(f"node list {whole!r}: {item!r} is no number or range", exits.BAD_CONFIG)
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{len(match[1])}d}"


def from_slurm(environment: Mapping[str, str]) -> list[Slots] | None:
    """The hosts of the Slurm allocation this process runs in, None outside one.

    Reads SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE (`2(x3),1`, sbatch(1)). Raises Failure (78) if they do not fit.
    """
    nodelist = environment.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return None
    names = expand_nodelist(nodelist)
    tasks: list[int] = []
    counts = environment.get("SLURM_TASKS_PER_NODE") or "1" + f"(x{len(names)})"
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise Failure(f"SLURM_TASKS_PER_NODE={counts!r} cannot be read; expected e.g. 2(x3),1", exits.BAD_CONFIG)
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) != len(names):
        raise Failure(
            f"SLURM_JOB_NODELIST={nodelist!r} names {len(names)} hosts, SLURM_TASKS_PER_NODE={counts!r} {len(tasks)}; "
            "start it with sbatch or salloc, which set both",
            exits.BAD_CONFIG,
        )
    return [Slots(name, count) for name, count in zip(names, tasks, strict=True)]


def as_argument(hosts: Sequence[Slots]) -> str:
    """As `-H` takes them."""
    return ",".join(str(slot) for slot in hosts)
