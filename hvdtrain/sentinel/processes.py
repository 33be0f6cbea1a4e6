"""The processes that a sentinel watches: whether they still run, whether they are stopped, and what started them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import PurePath

from hvdtrain.system import proc
from hvdtrain.system.launchers import HELPERS, STARTERS

DAEMONS = (*STARTERS, *HELPERS, "sshd")
"""Prefixes of the programs that start ranks and end with them, such as orterun_wrapper or sshd-session"""
SHELLS = ("sh", "bash", "dash")
HARMLESS = (signal.SIGCHLD, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGWINCH, signal.SIGCONT)
"""Signals that do not ask a process to end. A script may handle them; PyTorch's DataLoader handles SIGCHLD"""


class Process:
    """One process, identified by its start time too, because its number may be reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = proc.stat(pid).started
        self.name = _name(pid)
        # Readable once the process has ended. Kernels before 5.3 and conda's Python have none.
        self.pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(pid)

    def state(self) -> str:
        """One letter: R, S or D if running, T if stopped, t if held by a debugger, X if ended. A zombie has ended."""
        now = proc.stat(self.pid)
        return "X" if now.started != self._started or now.state in "XZ" else now.state

    def gone(self) -> bool:
        return self.state() == "X"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if not self.gone():
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process, even if it is stopped."""
        self.send(signal.SIGKILL)


def launchers(pid: int) -> list[Process]:
    """The processes that rank `pid` depends on: from its parent up to the program that started the job on this host.

    Above the first known launcher, only processes that merely wrap it count (`sh -c mpirun ...`, which horovodrun
    becomes). A user's shell or ssh session may end while the job continues, and so may hvdtrain's own launcher, which
    asks the job for a checkpoint first. Without a known launcher, only the parent counts.
    """
    chain: list[Process] = []
    known = False
    above = proc.stat(pid).parent
    while above > 1:
        process = Process(above)
        if process.gone():  # another user's, hidden by /proc (hidepid)
            break
        if known and (process.name.startswith("sshd") or not _starts_ranks(process)):
            break
        chain.append(process)
        if _starts_ranks(process):
            known = True
            if process.name.startswith("sshd"):
                break
        above = proc.stat(above).parent
    return chain if known else chain[:1]


def _starts_ranks(process: Process) -> bool:
    """Whether this is a launcher, or a shell that runs only a launcher."""
    if process.name.startswith(DAEMONS):
        return True
    words = proc.strings(process.pid, "cmdline")
    if len(words) > 2 and PurePath(words[0]).name in SHELLS and words[1] == "-c":
        command = words[2].split()
        return bool(command) and PurePath(command[0]).name in DAEMONS
    return False


def _name(pid: int) -> str:
    """The name of the program. For a script with a `#!` line, the script's name; otherwise argument 0."""
    name, words = proc.stat(pid).name, proc.strings(pid, "cmdline")
    # sshd overwrites argument 0 with its state: "sshd: root@notty"
    return name if not words or name.startswith(("sshd", "horovodrun")) else PurePath(words[0].rstrip(":")).name
