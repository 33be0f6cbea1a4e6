"""Which runs may be compared, and in what they differ: the one rule for every ratio of two runs.

A ratio tells what the runs were made to tell (more hosts, another strategy) only if nothing else differs. Each
comparison names the columns that must be equal, and a batch that must be: the global one (strong scaling) or that of a
rank (weak scaling). What one side has not recorded, as older records have not, makes no difference; it is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from hvdtrain.results import groups
from hvdtrain.results.groups import Group
from hvdtrain.results.tables import key_column, short

Kind = Literal["strong", "weak", "other"]
WORK = ("workload", "parameters", "data_fingerprint", "train_samples", "epochs")
MEANS = ("device", "cores", "threads", "precision")
SAME = (*WORK, "framework", *MEANS)
"""Between numbers of ranks"""
PER_HOST = (*SAME, "ranks_per_host")
"""Between numbers of hosts, since a host must be the same thing on both sides"""
DEVICES = tuple(name for name in SAME if name != "device")
"""Between devices: energy. Cores and threads are known of CPUs only, so a GPU may stand beside a CPU"""
CHOSEN = (*WORK, *MEANS)
"""Between two sides that the user names: strategy, framework, hosts may be what is compared"""
BATCH: dict[Kind, str] = {"strong": "global_batch", "weak": "rank_batch"}
"""What is equal in each kind of comparison; `other`: the user chose a baseline by its batch, or no batch is known"""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The baselines that a user asks for: groups that pass the test may differ in the columns that it names."""

    test: Callable[[Group], bool]
    names: frozenset[str]


def differing(a: Group, b: Group, names: Iterable[str]) -> list[str]:
    """The columns in which the groups differ, among those that both have recorded."""
    values = ((name, groups.value(a, name), groups.value(b, name)) for name in names)
    return [name for name, mine, other in values if mine is not None and other is not None and mine != other]


def unrecorded(a: Group, b: Group, names: Iterable[str]) -> list[str]:
    """The columns that one of the groups has recorded and the other has not; of another device they never are."""
    same_device = a.key["device"] == b.key["device"]
    return [
        name
        for name in names
        if (groups.value(a, name) is None) != (groups.value(b, name) is None)
        and (same_device or name not in ("cores", "threads"))
    ]


def batch_kinds(a: Group, b: Group) -> list[Kind]:
    """The comparisons that the batches allow; of scripts that told none of their batches, `other`."""
    if all(groups.value(group, column) is None for group in (a, b) for column in BATCH.values()):
        return ["other"]
    return [kind for kind, column in BATCH.items() if not differing(a, b, (column,))]


def apart(a: Group, b: Group, names: Sequence[str]) -> list[str]:
    """In which columns the groups are not alike: of `names`, and both batches if neither is equal."""
    return differing(a, b, names) + ([] if batch_kinds(a, b) else list(BATCH.values()))


def words(a: Group, b: Group, names: Iterable[str]) -> str:
    """`threads per rank (2 and 1), device (cpu and gpu)`: the values of a and of b."""
    pairs = ((name, short(name, groups.value(a, name)), short(name, groups.value(b, name))) for name in names)
    return ", ".join(f"{key_column(name).label} ({mine} and {other})" for name, mine, other in pairs)


def classes(found: Sequence[Group], names: Sequence[str]) -> list[list[Group]]:
    """The groups in sets whose members are all alike in these columns, in the order of their first members."""
    sets: list[list[Group]] = []
    for group in found:
        fitting = (one for one in sets if not any(differing(group, other, names) for other in one))
        if (one := next(fitting, None)) is None:
            sets.append([group])
        else:
            one.append(group)
    return sets
