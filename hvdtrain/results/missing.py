"""What a group of runs lacks to be compared: in what the nearest other group differs, and the command that makes the
missing run.

The command is made of the manifest, or of the sweep's record, of a run that is there: its own flags, on as many of its
hosts, with the threads that it had.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hvdtrain import records
from hvdtrain.config import workloads
from hvdtrain.results import alike, load
from hvdtrain.results.alike import Chosen
from hvdtrain.results.groups import Group
from hvdtrain.results.runs import numbers
from hvdtrain.results.scaling import MUST, Count, count_of, many, same_rate
from hvdtrain.results.tables import short
from hvdtrain.system.exits import Failure, printable

OWN = ("--run-dir", "--threads")
"""Flags with a value that a run on other hosts does not take over; its threads are told anew"""
CHANGED = {name: f"--{name}" for name in ("threads", "precision", "device", "epochs")}
CHANGED |= {"global_batch": "--global-batch-size"}
"""Column -> the flag that makes one run like another in it"""
SWITCHES = ("--resume", "--json")
OTHER_HOST = "SECOND_HOST"
HEAD = "Nothing to compare with"


def text(group: Group, found: Sequence[Group], count: Count = "hosts", chosen: Chosen | None = None) -> str:
    """Why the group is compared with none of `found` (if chosen: of the baselines among them), and the run to make."""
    if chosen:
        nearest = min((one for one in found if chosen.test(one)), key=lambda one: _distance(group, one, count))
        names = [name for name in _apart(group, nearest, count) if name not in chosen.names]
        why = f"differs in {alike.words(nearest, group, names)}" if names else "stands alone"
        return f"{HEAD}: the baseline ({_name(nearest)}) {why}."
    mine = int(count_of(group, count))
    timed = [one for one in found if one.values("train_s")]
    others = [one for one in timed if count_of(one, count) not in (0, mine)]
    if not others:
        n = 1 if mine > 1 else 2
        return f"{HEAD}: only one number of {count} was timed. {_lacking(group, count, n)}"
    nearest = min(others, key=lambda one: _distance(group, one, count))
    names, size = _apart(group, nearest, count), int(count_of(nearest, count))
    if not names:
        why = f"{many(size, count)} were timed with another strategy or setting only"
        return f"{HEAD}: {why}. {_lacking(group, count, size)}"
    small, large = sorted((group, nearest), key=lambda one: count_of(one, count))
    why = f"{many(size, count)} ({_name(nearest)}) differ{'s' * (size == 1)} in {alike.words(nearest, group, names)}"
    least = count_of(small, count)
    if any(count_of(one, count) == least and not _apart(one, large, count) for one in timed):
        return f"{HEAD}: {why}."
    return f"{HEAD}: {why}. {_lacking(large, count, int(least))}"


def alone(group: Group, found: Sequence[Group], same: Sequence[str]) -> str:
    """Why the group is compared with none of `found`, one host each, which must be alike in the columns `same`, and
    the run on one host to make."""
    near = min(found, key=lambda one: len(alike.differing(one, group, same)))
    why = f"one host ({_name(near)}) differs in {alike.words(near, group, alike.differing(near, group, same))}"
    batch = short("global_batch", group.key["global_batch"]) if "arguments" not in group.settings else None
    return f"{HEAD}: {why}. {_lacking(group, 'hosts', 1, {CHANGED['global_batch']: str(batch)} if batch else None)}"


def again(group: Group, like: Group, names: Sequence[str]) -> str | None:
    """The command that repeats the group's first run with what `like` has in these columns; None if no flag does it."""
    columns = [name for name in names if name != "rank_batch"]  # it follows from the global one
    if not set(columns) <= set(CHANGED) or "arguments" in group.settings:  # a script has none of our flags
        return None
    flags = {CHANGED[name]: str(short(name, like.key[name])) for name in columns}
    return command(group_run(group), "hosts", int(group.key["hosts"] or 1), flags)


def _apart(group: Group, other: Group, count: Count) -> list[str]:
    linked = same_rate(group, other) or same_rate(other, group)
    return alike.apart(group, other, MUST[count]) + ([] if linked else ["rate_mbit"])


def _distance(group: Group, other: Group, count: Count) -> tuple[Any, ...]:
    size = abs(count_of(group, count) - count_of(other, count))
    return len(_apart(group, other, count)), other.key["strategy"] != group.key["strategy"], size


def _name(group: Group) -> str:
    return str(group.column("run")[0])


def _lacking(like: Group, count: Count, n: int, flags: dict[str, str] | None = None) -> str:
    what = f"Missing: {many(n, count)} like {_name(like)}"
    try:
        return f"{what}:\n    {command(group_run(like), count, n, flags)}"
    except Failure:  # its records have been moved or changed since they were read
        return f"{what}."


def group_run(group: Group) -> str:
    """The folder of the group's first run."""
    return str(min(zip(group.values("started_utc"), group.values("run_dir"), strict=True))[1])


def command(run_dir: str, count: Count, n: int, flags: dict[str, str] | None = None) -> str:
    """The command line that repeats a run on n hosts, or with n ranks, with these flags changed.

    Raises Failure for a run that cannot be read.
    """
    manifest, point = load.manifest(run_dir), load.point(run_dir)
    known = manifest.hosts
    per_host = max(1, -(-len(manifest.ranks) // max(1, len(known))))
    if count == "ranks":
        hosts = known[: -(-n // per_host)]
        slots = [f"{host}:{-(-n // len(hosts))}" for host in hosts]
        start = ["launch/mpirun.sh", "-np", str(n), "-H", ",".join(slots)]
    else:
        hosts = [*known, *[OTHER_HOST] * (n - len(known))][:n]
        start = ["launch/mpirun.sh", "-H", ",".join(f"{host}:{per_host}" for host in hosts)]
    if len(manifest.ranks) == n == 1:
        start = []
    if point and "exec" in point.command:  # in a virtual cluster, which the sweep has taken down
        cores = manifest.ranks[0].get("cores")
        share = ["--cpu-share", f"{cores:g}"] if cores else []
        up = ["sudo", "tools/cluster.sh", "up", "--hosts", ",".join(hosts), *share]
        start = [*up, "&&", "tools/cluster.sh", "exec", hosts[0], "--", *start]
    given = (threads(manifest) if "epochs" in manifest.config else {}) | (flags or {})
    replaced = {*OWN, *given, *(("--batch-size",) if "--global-batch-size" in given else ())}
    words = [*start, *program(manifest, replaced), *(word for pair in given.items() for word in pair)]
    return printable(" ".join(word if word == "&&" else shlex.quote(word) for word in words))


def program(manifest: records.Manifest, replaced: Collection[str] = ("--run-dir",)) -> list[str]:
    """What each rank ran, without the flags (with a value) that are `replaced`, and without those of one start."""
    argv = manifest.argv[1:]
    own = argv if "epochs" not in manifest.config else _flags(argv, replaced)  # a script's flags are its own
    return ["python", *workloads.program(manifest.workload, manifest.argv), *own]


def _flags(argv: Sequence[str], left_out: Collection[str]) -> Iterator[str]:
    skip = False
    for word in map(str, argv):
        if not skip and word.partition("=")[0] not in (*left_out, *SWITCHES):
            yield word
        skip = not skip and word in left_out


def threads(manifest: records.Manifest) -> dict[str, str]:
    """The flag that gives ranks the threads that they had, where they had the same."""
    given = set(numbers(rank.get("threads") for rank in manifest.ranks))
    return {"--threads": f"{given.pop():g}"} if len(given) == 1 else {}
