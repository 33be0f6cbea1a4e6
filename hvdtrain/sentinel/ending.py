"""Ends a job after a fault, step by step, on one host.

A rank that waits in a collective cannot run Python, so it can only be killed. When a rank is killed, its launcher ends
the other ranks everywhere, leaves no files behind, and does not return 0. (horovodrun on Gloo may return 0 if it is
asked to end.) An `mpirun` that cannot reach one of its daemons would never end, so it gets SIGTERM; a second one within
five seconds makes it give up. A daemon (`orted`) that lost its `mpirun` to a dead link would never end either.
"""

from __future__ import annotations

import math
import os
import signal

from hvdtrain.sentinel.processes import Process
from hvdtrain.system.launchers import MPIRUN, OPEN_MPI
from hvdtrain.system.proc import children, stat, tree

TIMES: dict[str, dict[str, float]] = {
    "lost": {"ask_launcher": 0, "kill_ranks": 1.5, "insist": 2.5, "kill_launcher": 5},
    "lost, no mpirun here": {"kill_ranks": 0.3, "ask_launcher": 4, "insist": 5, "kill_launcher": 5.5},
    # The launcher notices that ranks end; a signal while it ends the job makes mpirun crash.
    "stopped": {"kill_ranks": 0.3, "ask_launcher": 8, "insist": 10, "kill_launcher": 12},
    "died": {"kill_ranks": 0.3, "ask_launcher": 8, "insist": 10, "kill_launcher": 12},
    "failed": {"kill_ranks": 3.5, "ask_launcher": 8, "insist": 10, "kill_launcher": 12},
    # Nothing else ends these ranks. Those that are not blocked in a collective have time for a checkpoint.
    "launcher": {"ask_ranks": 0, "ask_launcher": 0, "kill_ranks": 3, "insist": 3.2, "kill_launcher": 3.6},
}
"""Seconds after the fault"""
NOTIFY_S = 1.0
"""Minimum time for which the fault is sent to other hosts"""


class Ending:
    """Signals the ranks and launchers of this host at the times of TIMES."""

    def __init__(self, kind: str, ranks: list[Process], launchers: list[Process]) -> None:
        # Only these would never end. Shells, sshd, Slurm steps and the launch scripts end after them.
        lasting = [p for p in launchers if p.name.startswith((*MPIRUN, *OPEN_MPI.helpers, "horovodrun"))]
        mpirun = [p for p in launchers if p.name.startswith(MPIRUN)]
        times = TIMES["lost, no mpirun here" if kind == "lost" and not mpirun else kind]
        horovodrun = [p for p in launchers if p.name.startswith("horovodrun")]
        below = {pid for top in mpirun + horovodrun for pid in tree(top.pid)[1:]}
        helpers = [Process(pid) for pid in below - {os.getpid()}]  # ssh clients, shells
        # ssh sessions from the launcher to this host: over a dead link, sshd waits for its client for hours.
        self._sessions = [p for p in [*launchers, *(Process(stat(p.pid).parent) for p in launchers)] if _is_session(p)]
        self._all = ranks + lasting + helpers + self._sessions
        self._patience_s = times["kill_launcher"] + (3.0 if horovodrun and not mpirun else 0.0)
        self._steps = [
            (times.get("ask_ranks", math.inf), ranks, signal.SIGTERM),
            (times["ask_launcher"], mpirun or horovodrun, signal.SIGTERM),
            (times["kill_ranks"], ranks, signal.SIGKILL),
            (times["insist"], mpirun, signal.SIGTERM),
            (self._patience_s, lasting + helpers, signal.SIGKILL),
        ]

    def advance(self, elapsed_s: float) -> bool:
        """Perform the steps that are due. Returns False when nothing is left to do."""
        due = [step for step in self._steps if step[0] <= elapsed_s]
        self._steps = [step for step in self._steps if step[0] > elapsed_s]
        for _, processes, number in due:
            for process in processes:
                process.send(number)
        for process in self._sessions if elapsed_s > self._patience_s else []:
            if not children(process.pid):  # another command may share the connection
                process.kill()
        waiting = not all(process.gone() for process in self._all)
        return (waiting and elapsed_s < self._patience_s + 1) or elapsed_s < NOTIFY_S


def _is_session(process: Process) -> bool:
    """Whether this sshd serves a single connection; killing the listening one would lock everybody out."""
    return process.name.startswith("sshd") and stat(process.pid).parent > 1
