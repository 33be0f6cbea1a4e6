"""Ranks that start at once, as forks of a process that has already imported a framework.

    forks.py MODULE ...

Imports the modules. A line on stdin is a job of `conftest.launch`: ranks, Python's arguments, the environment, folder,
files for stdout and stderr, and the longest time, as JSON. The answer is a line with the job's exit code. As under
torchrun, a rank that fails ends the others. They end like other processes, with their exit handlers.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 10.0
"""Time for the other ranks to end before they are killed"""


def become(job: Mapping[str, Any], rank: int) -> None:
    """Make this process a rank, up to its program."""
    os.setpgid(0, 0)
    for number, name, how in ((0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)):
        os.dup2(os.open(name, how | os.O_APPEND), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in ((0, "r"), (1, "w"), (2, "w")))
    os.environ.clear()
    os.environ.update(job["variables"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(job["folder"])


def run(words: list[str]) -> None:
    """Do what `python WORDS` does."""
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        del words[:2]
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], ""
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def ended(ranks: Sequence[int], limit_s: float) -> int:
    """Wait for the ranks, and return the exit code of the first one that has failed, or 0."""
    left, code, deadline = {*ranks}, 0, time.monotonic() + limit_s
    while left:
        for pid in [*left]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                left.remove(pid)
                if status and not code:
                    code, deadline = os.waitstatus_to_exitcode(status), time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            code = code or 124
            for pid in left:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)
    return code


def served() -> list[str]:
    """Start jobs until stdin ends. Returns only in ranks, with the words of their program."""
    for line in iter(sys.stdin.readline, ""):
        job, ranks = json.loads(line), list[int]()
        for rank in range(job["ranks"]):
            pid = os.fork()
            if not pid:
                become(job, rank)
                return list(job["arguments"])
            ranks.append(pid)
        print(ended(ranks, job["limit_s"]), flush=True)
    sys.exit()


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    run(served())
