"""The rules of comparison: which runs may be compared, and their differences. Every ratio of two runs follows them.

A ratio shows the effect of more hosts, or of another strategy, only if nothing else differs. Each comparison names the
columns that must be equal, and one of the batches must be equal: the global batch (strong scaling) or the batch per
rank (weak scaling). If only one side recorded a value, the sides are assumed equal and a note says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from hvdtrain.results.columns import label
from hvdtrain.results.groups import Group, short

Kind = Literal["strong", "weak", "other"]
Count = Literal["hosts", "ranks"]
WORK = ("workload", "parameters", "data_fingerprint", "train_samples", "epochs")
MEANS = ("device", "cores", "threads", "precision")
SOFTWARE = ("framework_version", "git_commit")
NETWORK = ("network", "goodput_mbit")
SAME = (*WORK, "framework", *MEANS, *SOFTWARE, *NETWORK)
"""Must be equal to compare numbers of ranks"""
PER_HOST = (*SAME, "ranks_per_host")
"""Must be equal to compare numbers of hosts"""
DEVICES = tuple(name for name in SAME if name not in ("device", *SOFTWARE))
"""Must be equal to compare devices. Only CPUs have cores and threads, so a GPU may be compared with a CPU, and its
framework may have another version"""
MUST: dict[Count, tuple[str, ...]] = {"hosts": PER_HOST, "ranks": SAME}
BATCH: dict[Kind, str] = {"strong": "global_batch", "weak": "rank_batch"}
"""The batch that is equal in each kind of comparison. `other`: no batch is known"""
NOTHING = "Nothing to compare with"


def differing(a: Group, b: Group, names: Iterable[str]) -> list[str]:
    """The columns in which the groups differ, out of those that both have recorded."""
    values = ((name, a.value(name), b.value(name)) for name in names)
    return [name for name, one, other in values if one is not None and other is not None and one != other]


def unrecorded(a: Group, b: Group, names: Iterable[str]) -> list[str]:
    """The columns that only one of the groups has recorded. A GPU never has cores and threads."""
    skipped = {"goodput_mbit"}  # of groups that no other goodput divides
    skipped |= {"network"} if 1 in (a.key["hosts"], b.key["hosts"]) else set()
    skipped |= {"cores", "threads"} if a.key["device"] != b.key["device"] else set()
    return [name for name in names if name not in skipped and (a.value(name) is None) != (b.value(name) is None)]


def batch_kinds(a: Group, b: Group) -> list[Kind]:
    """The kinds of comparison that the batches allow; `other` for scripts that log no batch."""
    if all(group.value(column) is None for group in (a, b) for column in BATCH.values()):
        return ["other"]
    return [kind for kind, column in BATCH.items() if not differing(a, b, (column,))]


def obstacles(a: Group, b: Group, names: Sequence[str]) -> list[str]:
    """The columns that forbid a comparison: any of `names` that differ, and both batches if neither is equal."""
    return differing(a, b, names) + ([] if batch_kinds(a, b) else list(BATCH.values()))


def describe(a: Group, b: Group, names: Iterable[str]) -> str:
    """`threads per rank (2 and 1), device (cpu and gpu)`: the values of a and of b."""
    pairs = ((name, short(name, a.value(name)), short(name, b.value(name))) for name in names)
    return ", ".join(f"{label(name)} ({one} and {other})" for name, one, other in pairs)


def classes(groups: Sequence[Group], names: Sequence[str]) -> list[list[Group]]:
    """The groups in sets whose members agree in these columns, in the order of their first members."""
    sets: list[list[Group]] = []
    for group in groups:
        for members in sets:
            if not any(differing(group, other, names) for other in members):
                members.append(group)
                break
        else:
            sets.append([group])
    return sets


# --- why a group has no baseline --------------------------------------------------------------------------------------


def count_of(group: Group, count: Count) -> float:
    """Hosts or ranks; 0 if unknown."""
    hosts = group.key["hosts"] or 0
    return float(hosts if count == "hosts" else round(hosts * (group.key["ranks_per_host"] or 0)))


def many(n: float, count: Count) -> str:
    """`1 host`, `2 hosts`."""
    return f"{n:g} {count[:-1] if n == 1 else count}"


def same_rate(group: Group, other: Group) -> bool:
    """Whether `other` has the group's rate, or is a single host, which uses no link."""
    return other.key["hosts"] == 1 or other.key["rate_mbit"] == group.key["rate_mbit"]


def why_alone(group: Group, groups: Sequence[Group], count: Count) -> str:
    """Why the group is compared with none of `groups`."""
    timed = [one for one in groups if one.values("train_s")]
    others = [one for one in timed if count_of(one, count) not in (0, count_of(group, count))]
    if not others:
        wanted = many(1 if count_of(group, count) > 1 else 2, count)
        return f"{NOTHING}: only one number of {count} was timed. Missing: {wanted} like {name_of(group)}."
    nearest = min(others, key=lambda one: _distance(group, one, count))
    names, size = _all_obstacles(group, nearest, count), int(count_of(nearest, count))
    if not names:
        why = f"{many(size, count)} were timed only with other strategies or settings"
        return f"{NOTHING}: {why}. Missing: {many(size, count)} like {name_of(group)}."
    verb = "differs" if size == 1 else "differ"
    return f"{NOTHING}: {many(size, count)} ({name_of(nearest)}) {verb} in {describe(nearest, group, names)}."


def why_no_single_host(group: Group, single: Sequence[Group], same: Sequence[str]) -> str:
    """Why none of the groups on a single host is a baseline. They must agree in the columns `same`."""
    nearest = min(single, key=lambda one: len(differing(one, group, same)))
    names = differing(nearest, group, same)
    return f"{NOTHING}: one host ({name_of(nearest)}) differs in {describe(nearest, group, names)}."


def name_of(group: Group) -> str:
    return str(group.column("run")[0])


def _all_obstacles(group: Group, other: Group, count: Count) -> list[str]:
    linked = same_rate(group, other) or same_rate(other, group)
    return obstacles(group, other, MUST[count]) + ([] if linked else ["rate_mbit"])


def _distance(group: Group, other: Group, count: Count) -> tuple[float, bool, float]:
    size = abs(count_of(group, count) - count_of(other, count))
    return len(_all_obstacles(group, other, count)), other.key["strategy"] != group.key["strategy"], size
