"""The processes that a sentinel watches: is it still the one we knew, is it stopped, what started it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import PurePath

from hvdtrain.system import proc

DAEMONS = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "horovodrun", "srun", "slurmstepd", "sshd")
"""Programs that start ranks and end with them. A name may go on: orterun_wrapper, sshd-session"""
MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
SHELLS = ("sh", "bash", "dash")
CHATTER = (signal.SIGCHLD, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGWINCH, signal.SIGCONT)
"""Signals that ask nobody to end: a script may handle them, as PyTorch's DataLoader does SIGCHLD"""


class Process:
    """One process, told from a later one with the same number by the time it started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = proc.stat(pid).started
        self.name = _name(pid)
        # Readable once the process has ended. Kernels before 5.3 and conda's Python have none: the ticks must do.
        self.ended: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.ended = os.pidfd_open(pid)

    def state(self) -> str:
        """One letter: R, S, D running, T stopped, t held by a debugger; X if it has ended (a zombie has)."""
        now = proc.stat(self.pid)
        return "X" if now.started != self._started or now.state in "XZ" else now.state

    def gone(self) -> bool:
        return self.state() == "X"

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if not self.gone():
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it for sure, a stopped one too."""
        self.send(signal.SIGKILL)


def launchers(pid: int) -> list[Process]:
    """The processes that rank `pid` hangs on: from its parent up to the program that started the job here.

    Above the first that is known to start ranks only those count that merely wrap it (`sh -c mpirun ...`, which
    horovodrun becomes): a user's shell or ssh session may end while the job goes on, and so may our own launcher, whose
    keeper asks the job for a checkpoint first. Where none is known, the parent alone counts.
    """
    chain: list[Process] = []
    found = False
    above = proc.stat(pid).parent
    while above > 1:
        process = Process(above)
        if process.gone():  # another user's, which /proc may hide (hidepid): nobody can watch it
            break
        if found and (process.name.startswith("sshd") or not _starts_ranks(process)):
            break
        chain.append(process)
        if _starts_ranks(process):
            found = True
            if process.name.startswith("sshd"):
                break
        above = proc.stat(above).parent
    return chain if found else chain[:1]


def _starts_ranks(process: Process) -> bool:
    """Whether this is a launcher, or a shell or Python that runs nothing but one."""
    if process.name.startswith(DAEMONS):
        return True
    words = proc.strings(process.pid, "cmdline")
    if len(words) > 2 and PurePath(words[0]).name in SHELLS and words[1] == "-c":
        command = words[2].split()
        return bool(command) and PurePath(command[0]).name in DAEMONS
    return False


def _name(pid: int) -> str:
    """The program: its script for an interpreter that runs one by its first line, else argument 0."""
    name, words = proc.stat(pid).name, proc.strings(pid, "cmdline")
    # sshd writes its state over argument 0: "sshd: root@notty"
    return name if not words or name.startswith(("sshd", "horovodrun")) else PurePath(words[0].rstrip(":")).name
