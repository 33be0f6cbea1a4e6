"""Numbers in the environment variables that launchers and batch systems set."""

from __future__ import annotations

import re

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

MOST_TASKS = 1 << 20
"""Ranks of a job; a mistyped number must not fill the memory"""


def number(name: str, value: str, hint: str, *, least: int = 0, most: int = MOST_TASKS) -> int:
    """The whole number that the variable `name` holds. Raises Failure (78), whose message ends in `hint`."""
    if not re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII) or not least <= int(value) <= most:
        what = f"{name}={value[:40]!r} is not a whole number from {least} to {most}"
        raise Failure(f"{what}; hint: {hint}", exits.BAD_CONFIG)
    return int(value)


def task_counts(name: str, value: str) -> list[int]:
    """Tasks on each node in Slurm's notation (srun(1)): `2(x3),1` means 2 on each of three nodes, 1 on the fourth.

    Raises Failure (78).
    """
    counts: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"([1-9]\d{0,5})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if match is None or len(counts) + int(match[2] or 1) > MOST_TASKS:
            raise Failure(f"{name}={value[:100]!r} is not a list of tasks per node, as 2(x3),1", exits.BAD_CONFIG)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
