"""How a job is ended after a fault, step by step, on one host.

A rank that waits in a collective cannot run Python, so it can only be killed. A launcher whose rank was killed ends the
others everywhere, leaves no files and returns no 0 (horovodrun on Gloo that is asked to end may return 0). `mpirun`
that cannot reach one of its daemons waits for ever, so it is asked; a second SIGTERM within five seconds makes it give
up. A daemon (`orted`) that lost its `mpirun` to a dead link waits too.
"""

from __future__ import annotations

import os
import signal

from hvdtrain.cluster.processes import children, stat, tree
from hvdtrain.sentinel.processes import MPIRUN, Process

NEVER = float("inf")


class Times:
    """Seconds after the fault."""

    def __init__(
        self, *, ask_ranks: float = NEVER, ask_launcher: float, kill_ranks: float, insist: float, kill_launcher: float
    ) -> None:
        self.ask_ranks, self.ask_launcher, self.kill_ranks = ask_ranks, ask_launcher, kill_ranks
        self.insist, self.kill_launcher = insist, kill_launcher


TIMES = {
    "lost": Times(ask_launcher=0, kill_ranks=1.5, insist=2.5, kill_launcher=5),
    "lost, no mpirun here": Times(kill_ranks=0.3, ask_launcher=4, insist=5, kill_launcher=5.5),
    # The launcher sees the ends of ranks itself; a signal while it ends the job makes mpirun crash.
    "stopped": Times(kill_ranks=0.3, ask_launcher=8, insist=10, kill_launcher=12),
    "died": Times(kill_ranks=0.3, ask_launcher=8, insist=10, kill_launcher=12),
    "failed": Times(kill_ranks=3.5, ask_launcher=8, insist=10, kill_launcher=12),
    # Nobody else ends these ranks; those not stuck in a collective have time for a checkpoint.
    "launcher": Times(ask_ranks=0, ask_launcher=0, kill_ranks=3, insist=3.2, kill_launcher=3.6),
}
SPREAD_S = 1.0
"""So long at least the other hosts are told"""


class Ending:
    def __init__(self, kind: str, ranks: list[Process], launchers: list[Process]) -> None:
        self._ranks = ranks
        # What would wait for ever. Shells, sshd, a Slurm step and our launch scripts end by themselves after these.
        self._launchers = [p for p in launchers if p.name.startswith((*MPIRUN, "orted", "prted", "horovodrun"))]
        self._mpirun = [p for p in launchers if p.name.startswith(MPIRUN)]
        self._times = TIMES["lost, no mpirun here" if kind == "lost" and not self._mpirun else kind]
        self._horovodrun = [p for p in launchers if p.name.startswith("horovodrun")]
        below = {pid for top in self._mpirun + self._horovodrun for pid in tree(top.pid)[1:]}
        self._helpers = [Process(pid) for pid in below - {os.getpid()}]  # ssh clients, shells
        # The ssh sessions that the launcher opened to this host: over a dead link they wait for their client for hours.
        self._sessions = [p for p in [*launchers, *(Process(stat(p.pid).parent) for p in launchers)] if _is_session(p)]
        self._done: set[str] = set()

    def go_on(self, elapsed_s: float) -> bool:
        """Does what is due; False when nothing is left to do."""
        times = self._times
        askable = self._mpirun or self._horovodrun
        if self._due("ask_ranks", elapsed_s, times.ask_ranks):
            for process in self._ranks:
                process.send(signal.SIGTERM)
        if self._due("ask_launcher", elapsed_s, times.ask_launcher):
            for process in askable:
                process.send(signal.SIGTERM)
        if self._due("kill_ranks", elapsed_s, times.kill_ranks):
            for process in self._ranks:
                process.kill()
        if self._due("insist", elapsed_s, times.insist):
            for process in self._mpirun:
                process.send(signal.SIGTERM)
        patience_s = times.kill_launcher + (3.0 if self._horovodrun and not self._mpirun else 0.0)
        if self._due("kill_launcher", elapsed_s, patience_s):
            for process in self._launchers + self._helpers:
                process.kill()
        for process in self._sessions if elapsed_s > patience_s else []:
            if not children(process.pid):  # another command may share the connection
                process.kill()
        waiting = not all(p.gone() for p in self._ranks + self._launchers + self._helpers + self._sessions)
        return (waiting and elapsed_s < patience_s + 1) or elapsed_s < SPREAD_S

    def _due(self, step: str, elapsed_s: float, at_s: float) -> bool:
        if step in self._done or elapsed_s < at_s:
            return False
        self._done.add(step)
        return True


def _is_session(process: Process) -> bool:
    """Whether this sshd serves one connection; killing the one that listens would lock everybody out."""
    return process.name.startswith("sshd") and stat(process.pid).parent > 1
