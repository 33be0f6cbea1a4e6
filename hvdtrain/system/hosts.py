"""Lists of hosts: `-H a:2,b:2`, hostfiles and Slurm's allocation."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.system import exits, files
from hvdtrain.system.commands import calling_user
from hvdtrain.system.environment import task_counts
from hvdtrain.system.exits import Failure

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_-]{1,63})*\.?")
COUNT = r"\s+(max[_-])?slots\s*=\s*(\d{1,6})"
HOSTFILE_LINE = re.compile(
    rf"(?:(?P<user>[^\s:@]+)@)?(?P<host>[^\s:@]+)(?::(?P<colon>\d{{1,6}})|(?P<counts>(?:{COUNT})*))", re.ASCII
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters other than tab and newline."""
MOST_HOSTS = 65536
"""Limit on the expansion of a node list, so that a typing error cannot fill the memory."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """A host and the number of ranks it takes."""

    host: str
    slots: int = 1

    def __str__(self) -> str:
        return f"{self.host}:{self.slots}"


def check_name(name: str, where: str = "") -> str:
    """Return the name if it is safe on a command line. Raises Failure (2) otherwise."""
    if not NAME.fullmatch(name):
        hint = "use letters, digits, dots and dashes, as in node-1.lan"
        raise Failure(f"{where}{name!r} is not a host name; hint: {hint}", exits.USAGE)
    return name


def parse_hosts(text: str) -> list[Slots]:
    """Parse `a:2,b:2` or `a,b` (one slot each). Raises Failure (2) for bad names, counts and repeated hosts."""
    slots = []
    for part in text.split(","):
        host, colon, count = part.strip().partition(":")
        if not host or (colon and not re.fullmatch(r"0*[1-9]\d{0,5}", count, re.ASCII)):
            message = f"hosts {text!r}: {part!r} is not HOST or HOST:SLOTS"
            raise Failure(f"{message}; hint: write them as a:2,b:2", exits.USAGE)
        slots.append(Slots(check_name(host, "hosts: "), int(count or 1)))
    for slot, other in itertools.combinations(slots, 2):
        if slot.host == other.host:
            message = f"hosts {text!r}: host {slot.host} is listed twice"
            raise Failure(f"{message}; hint: give it once with all its slots", exits.USAGE)
    return slots


def read_hostfile(path: Path) -> list[Slots]:
    """Read a file with one host per line, as `a slots=2`, `a:2` or `a`; `#` starts a comment.

    As in mpirun, lines without a number that repeat a host (PBS, LSF) add a slot each, and max_slots is the number of
    slots if there is no other. Raises Failure: 2 if the file cannot be read, and 65, naming file:line, for any other
    line.
    """
    try:
        lines = files.read(path, files.SETTINGS_BYTES).decode("utf-8-sig").split("\n")
    except OSError as error:
        raise files.refused(f"hostfile {path}", error, exits.USAGE, "name another with --hostfile") from error
    except UnicodeDecodeError as error:
        message = f"hostfile {path}: not a text file; hint: name another with --hostfile"
        raise Failure(message, exits.BAD_DATA) from error
    slots: dict[str, int] = {}
    counted: set[str] = set()
    """Hosts with a line that gives their number of slots"""
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}:"
        if CONTROL.search(line.removesuffix("\r")):  # some editors show it as a line end
            message = f"{where} {line[:100]!r} contains a control character"
            raise Failure(f"{message}; hint: end each line with a newline", exits.BAD_DATA)
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = HOSTFILE_LINE.fullmatch(text)
        counts = _counts(match) if match else {}
        count = counts.get("slots", counts.get("max", 1))
        if match is None or not 1 <= count <= counts.get("max", count):
            raise Failure(f"{where} {text[:100]!r} is not `HOST slots=N`", exits.BAD_DATA)
        host, user = match["host"], match["user"]
        if not NAME.fullmatch(host):
            raise Failure(f"{where} {host[:100]!r} is not a host name", exits.BAD_DATA)
        if user not in (None, calling_user()):
            hint = f"set `User` for {host} in ~/.ssh/config, and give the host without it"
            raise Failure(f"{where} {user[:100]!r} is another user; hint: {hint}", exits.BAD_DATA)
        if counts and host in counted:
            raise Failure(f"{where} host {host} is listed twice; hint: give it once with all its slots", exits.BAD_DATA)
        counted |= {host} if counts else set()
        slots[host] = slots.get(host, 0) + count
    if not slots:
        message = f"{path}: the file lists no hosts; hint: write one per line, as in `node1 slots=2`"
        raise Failure(message, exits.BAD_DATA)
    return [Slots(host, count) for host, count in slots.items()]


def _counts(match: re.Match[str]) -> dict[str, int]:
    """Return the numbers in a line of a hostfile: `slots` and `max`, 0 for one that is given twice."""
    if match["colon"]:
        return {"slots": int(match["colon"])}
    counts: dict[str, int] = {}
    for most, number in re.findall(COUNT, match["counts"], re.ASCII):
        name = "max" if most else "slots"
        counts[name] = 0 if name in counts else int(number)
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Expand a Slurm node list (`hostlist` notation, scontrol(1)), as in `n[1-3,07],login`, to host names.

    A name may have several brackets. A range keeps the leading zeros of its start. Raises Failure (78) if the list is
    malformed or has more than MOST_HOSTS names.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\]|[\[\]])+", text):  # split at commas outside brackets
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # literal, inside, literal, inside ... literal
        brackets = [_ranges(inside, text) for inside in pieces[1::2]]
        count = math.prod(sum(len(numbers) for numbers, _ in ranges) for ranges in brackets)
        if len(names) + count > MOST_HOSTS:
            raise Failure(f"node list {text[:100]!r} has more than {MOST_HOSTS:,} hosts", exits.BAD_CONFIG)
        filled = [[f"{n:0{width}d}" for numbers, width in ranges for n in numbers] for ranges in brackets]
        for chosen in itertools.product(*filled):
            name = pieces[0] + "".join(map(operator.add, chosen, pieces[2::2]))
            if not NAME.fullmatch(name):
                raise Failure(f"node list {text[:100]!r}: {name[:100]!r} is not a host name", exits.BAD_CONFIG)
            names.append(name)
    return names


def _ranges(inside: str, whole: str) -> list[tuple[range, int]]:
    """(numbers, digits of each) for every item between the brackets."""
    ranges = []
    for item in inside.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", item, re.ASCII)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise Failure(f"node list {whole[:100]!r}: {item[:100]!r} is not a number or range", exits.BAD_CONFIG)
        ranges.append((range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])))
    return ranges


def from_slurm(environment: Mapping[str, str]) -> list[Slots] | None:
    """The hosts of the Slurm allocation that this process runs in. None outside an allocation.

    Reads SLURM_JOB_NODELIST and SLURM_TASKS_PER_NODE (sbatch(1)). Raises Failure (78) if they disagree, and for a
    heterogeneous job, where they describe only its first component.
    """
    nodelist = environment.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return None
    if (parts := environment.get("SLURM_HET_SIZE", "1")) != "1":
        message = f"this Slurm job is heterogeneous (SLURM_HET_SIZE={parts[:100]!r}): only its first part would be used"
        raise Failure(f"{message}; hint: name all hosts with -H, or submit it as one part", exits.BAD_CONFIG)
    names = expand_nodelist(nodelist)
    counts = environment.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})"
    tasks = task_counts("SLURM_TASKS_PER_NODE", counts)
    if len(tasks) != len(names):
        message = (
            f"SLURM_JOB_NODELIST={nodelist!r} names {len(names)} hosts, but SLURM_TASKS_PER_NODE={counts!r} describes "
            f"{len(tasks)}; hint: start the job with sbatch or salloc, which set both"
        )
        raise Failure(message, exits.BAD_CONFIG)
    return [Slots(name, count) for name, count in zip(names, tasks, strict=True)]


def as_argument(hosts: Sequence[Slots]) -> str:
    """Format hosts for the option `-H`."""
    return ",".join(str(slot) for slot in hosts)
