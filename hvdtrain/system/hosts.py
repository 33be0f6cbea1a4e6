"""Lists of hosts: `-H a:2,b:2`, hostfiles, and what Slurm says of its allocation."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.system import exits, files
from hvdtrain.system.environment import task_counts
from hvdtrain.system.exits import Failure

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\.?")
HOSTFILE_LINE = re.compile(
    r"(?P<host>[^\s:]+)(?::(?P<colon>\d{1,6})|\s+slots\s*=\s*(?P<slots>\d{1,6})(\s+max[_-]slots\s*=\s*\d+)?)?",
    re.ASCII,
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters but tab and newline"""
MOST_HOSTS = 65536
"""In a node list: a slip of the keyboard must not fill the memory"""


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
        if not host or (colon and not re.fullmatch(r"0*[1-9]\d{0,5}", count, re.ASCII)):
            raise Failure(f"hosts {text!r}: {part!r} is not HOST or HOST:SLOTS, as in a:2,b:2", exits.USAGE)
        found.append(Slots(check_name(host, "hosts: "), int(count or 1)))
    return _distinct(found, f"hosts {text!r}")


def read_hostfile(path: Path) -> list[Slots]:
    """The hosts of a file: one per line as `a slots=2`, `a:2` or `a`; `#` starts a comment.

    Raises Failure (2) if the file cannot be read and (65), naming file:line, for a line that is none of these.
    """
    try:
        lines = files.read(path, files.SETTINGS_BYTES).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise files.refused(f"hostfile {path}", error, exits.USAGE, "name another with --hostfile") from error
    except UnicodeDecodeError as error:
        what = f"hostfile {path}: not a text file; name another with --hostfile"
        raise Failure(what, exits.BAD_DATA) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if CONTROL.search(line.removesuffix("\r")):  # an editor may show it as the end of a line
            what = f"{path}:{number}: {line[:100]!r} holds a control character"
            raise Failure(f"{what}; hint: end each line with a newline", exits.BAD_DATA)
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = HOSTFILE_LINE.fullmatch(text)
        count = int(match["colon"] or match["slots"] or 1) if match else 0
        if match is None or count < 1:
            raise Failure(f"{path}:{number}: {text[:100]!r} is not `HOST slots=N`", exits.BAD_DATA)
        if not NAME.fullmatch(match["host"]):
            raise Failure(f"{path}:{number}: {match['host'][:100]!r} is no host name", exits.BAD_DATA)
        found.append(Slots(match["host"], count))
    if not found:
        raise Failure(f"{path}: no hosts in it; one per line, e.g. `node1 slots=2`", exits.BAD_DATA)
    return _distinct(found, str(path), exits.BAD_DATA)


def _distinct(found: list[Slots], where: str, code: int = exits.USAGE) -> list[Slots]:
    seen: set[str] = set()
    for slot in found:
        if slot.host in seen:
            raise Failure(f"{where}: host {slot.host} is listed twice; give it once with all its slots", code)
        seen.add(slot.host)
    return found


def expand_nodelist(text: str) -> list[str]:
    """Host names of a Slurm node list (`hostlist` notation, scontrol(1)): `n[1-3,07],login` and several brackets.

    A range keeps the leading zeros of its start. Raises Failure (78) if it cannot be read or has over MOST_HOSTS names.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\]|[\[\]])+", text):  # parted at commas outside brackets
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # literal, inside, literal, inside ... literal
        brackets = [_ranges(inside, text) for inside in pieces[1::2]]
        count = math.prod(sum(len(numbers) for numbers, _ in ranges) for ranges in brackets)
        if len(names) + count > MOST_HOSTS:
            raise Failure(f"node list {text[:100]!r}: more than {MOST_HOSTS:,} hosts", exits.BAD_CONFIG)
        filled = [[f"{n:0{width}d}" for numbers, width in ranges for n in numbers] for ranges in brackets]
        for chosen in itertools.product(*filled):
            name = pieces[0] + "".join(map(operator.add, chosen, pieces[2::2]))
            if not NAME.fullmatch(name):
                raise Failure(f"node list {text[:100]!r}: {name[:100]!r} is no host name", exits.BAD_CONFIG)
            names.append(name)
    return names


def _ranges(inside: str, whole: str) -> list[tuple[range, int]]:
    """The numbers between brackets, and with how many digits each is written."""
    found = []
    for item in inside.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", item, re.ASCII)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise Failure(f"node list {whole[:100]!r}: {item[:100]!r} is no number or range", exits.BAD_CONFIG)
        found.append((range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])))
    return found


def from_slurm(environment: Mapping[str, str]) -> list[Slots] | None:
    """The hosts of the Slurm allocation this process runs in, None outside one.

    Reads SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE (`2(x3),1`, sbatch(1)). Raises Failure (78) if they do not fit,
    and for a heterogeneous job: they are those of its first component alone.
    """
    nodelist = environment.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return None
    if (parts := environment.get("SLURM_HET_SIZE", "1")) != "1":
        what = f"a heterogeneous Slurm job (SLURM_HET_SIZE={parts[:100]!r}): only its first part would be used"
        raise Failure(f"{what}; name all hosts with -H, or submit it as one part", exits.BAD_CONFIG)
    names = expand_nodelist(nodelist)
    counts = environment.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})"
    tasks = task_counts("SLURM_TASKS_PER_NODE", counts)
    if len(tasks) != len(names):
        raise Failure(
            f"SLURM_JOB_NODELIST={nodelist!r} names {len(names)} hosts, SLURM_TASKS_PER_NODE={counts!r} {len(tasks)}; "
            "start it with sbatch or salloc, which set both",
            exits.BAD_CONFIG,
        )
    return [Slots(name, count) for name, count in zip(names, tasks, strict=True)]


def as_argument(hosts: Sequence[Slots]) -> str:
    """The hosts as `-H` takes them."""
    return ",".join(str(slot) for slot in hosts)
