"""Stays the parent of mpirun or horovodrun, so that a signal becomes a checkpoint and nothing outlives its job.

Open MPI's mpirun gives its ranks about a second after SIGTERM or SIGINT and ends with 1; SIGUSR1 it hands on with no
deadline, and ends with the ranks' own code (mpirun(1), "Signal Propagation"). horovodrun on MPI turns into a shell
around mpirun. So a signal to the launcher becomes SIGUSR1 to mpirun (or, on Gloo, to the ranks that run here: what one
rank is told, all hear at the end of the step), the ranks save a checkpoint, and the job ends with 75.

A second process, the keeper, waits at a pipe for the end of the launcher: if that is killed, the keeper stops the job
in its place. The job's stderr passes through it, so that it can print a rank's reason again, below what mpirun or
horovodrun prints after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from hvdtrain.system import exits
from hvdtrain.system.commands import Command, run
from hvdtrain.system.exits import Failure
from hvdtrain.system.proc import children, ended, stat, strings, tree

STARTERS = ("mpirun", "orterun", "orterun_wrapper", "mpiexec")  # the wheel's mpirun is a wrapper
REMOTE_SHELLS = ("ssh", "rsh", "srun", "orted")
ORPHAN_S = 5.0
"""How long mpirun may go on after the last of its ranks here has ended, before its other hosts are asked for"""
ANSWER_S = 3.0
REPEAT_S = 5.0
"""Between two SIGUSR1: what arrives while ranks are being started is lost, and one more does no harm"""
LOOK_S, LOOK_AT_FIRST_S, FIRST_S = 2.0, 0.5, 10.0
"""Between two looks at what runs here. In the first seconds, and when the job is to stop, more often."""
TAIL_BYTES = 1 << 14
"""Of stderr: the ranks' last lines, and what their launcher prints after them"""
OURS = re.compile(rb"^hvdtrain: (.*)$", re.MULTILINE)
TAG = re.compile(rb"\[[\d,]+\]<stderr>:")
"""What horovodrun puts before a line, and mpirun's --tag-output before each part of it"""
SECOND_HAND = b"lost contact with another rank"
LAST_WORDS_S = 3.0
"""Between SIGTERM and SIGKILL"""


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_rank(pid: int) -> bool:
    """Whether horovodrun on Gloo gave this process a rank."""
    return any(word.startswith("HOROVOD_RANK=") for word in strings(pid, "environ"))


def starters(root: int) -> list[int]:
    """The mpiruns among a process and all below it."""
    return [pid for pid in tree(root) if stat(pid).name in STARTERS and not ended(pid)]


def ask_to_stop(root: int) -> None:
    """SIGUSR1 to mpirun, or to the ranks on this machine if there is none."""
    told = starters(root) or [pid for pid in tree(root) if is_rank(pid) and not is_rank(stat(pid).parent)]
    signal_all(told, signal.SIGUSR1)


def end(root: int) -> None:
    """Ends a job now: SIGTERM to what started it, then SIGKILL to all that is left of it here."""
    found = set(tree(root))
    signal_all(starters(root) or [root], signal.SIGTERM)
    deadline = time.monotonic() + LAST_WORDS_S
    while time.monotonic() < deadline and not all(map(ended, found)):
        time.sleep(0.1)
        found |= set(tree(root))
    signal_all((pid for pid in found if not ended(pid)), signal.SIGKILL)


def lost_host(names: Sequence[str]) -> str | None:
    """The first host that does not even refuse a connection, None if all answer."""
    for name in names:
        try:
            socket.create_connection(_door(name), timeout=ANSWER_S).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return name
    return None


def _door(name: str) -> tuple[str, int]:
    """Where ssh would connect to."""
    with contextlib.suppress(Failure):
        settings = dict(line.partition(" ")[::2] for line in run(["ssh", "-G", name]).splitlines())
        return settings["hostname"], int(settings["port"])
    return name, 22


class Job:
    """A launcher's child, from its start to its end."""

    def __init__(
        self,
        command: Command,
        environment: Mapping[str, str],
        grace_s: float,
        *,
        lost: Callable[[], str | None] = lambda: None,
        tells_code: bool = True,
    ) -> None:
        self.grace_s = grace_s
        self.lost = lost
        """Says which host does not answer, if any"""
        self.tells_code = tells_code
        """Whether the launcher ends with its ranks' exit code; horovodrun on Gloo ends with 1 whatever theirs is"""
        self.asked: list[signal.Signals] = []
        self.deadline: float | None = None
        self.told_at = 0.0
        self.ranks_seen = False
        self.ranks_gone_since: float | None = None
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Can be read when a signal has come, SIGCHLD included"""
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._arrived)
        self.keeper, self.line, stderr = start_keeper(grace_s)
        # A group of its own: Ctrl-C reaches this process alone, which knows what to make of it.
        self.child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=stderr, process_group=0
        )
        os.close(stderr)
        os.write(self.line, f"{self.child.pid}\n".encode())

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        # SIGUSR1 may be Slurm's notice of the SIGTERM to come, which then gives the grace that it gives alone.
        again = number != signal.SIGUSR1 and any(before != signal.SIGUSR1 for before in self.asked)
        self.asked.append(signal.Signals(number))
        if number == signal.SIGTERM and self.deadline is None:
            self.deadline = time.monotonic() + self.grace_s
        if again:
            self.deadline = 0.0
        elif len(self.asked) == 1:
            _say("stopping: the ranks are asked for a checkpoint (a second SIGTERM or Ctrl-C ends them now)")

    def wait(self) -> int:
        """Until the job has ended; its exit code."""
        began = time.monotonic()
        while not self._ended(LOOK_AT_FIRST_S if self.asked or time.monotonic() < began + FIRST_S else LOOK_S):
            if self.asked and time.monotonic() - self.told_at > REPEAT_S:
                ask_to_stop(self.child.pid)
                self.told_at = time.monotonic()
            if self.deadline is not None and time.monotonic() > self.deadline:
                return self._end_now("the ranks were given no more time", 128 + self.asked[-1])
            if self._outlived() and (host := self.lost()):
                what = f"host {host} does not answer, and the ranks here have ended: ending the job"
                return self._end_now(what, exits.RESUMABLE if self.asked else exits.FAILED)
        code = self.child.wait()
        self._dismiss_keeper(b"failed" if code else b"done")
        code = 128 - code if code < 0 else code
        if self.asked and code == 128 + signal.SIGUSR1:
            return 128 + self.asked[0]  # told before they had anything to save
        if self.asked and code == exits.FAILED and not self.tells_code:
            return exits.RESUMABLE
        if not self.asked and code >= 128:  # a rank that was killed, mpirun's own trouble: it says which
            return exits.FAILED
        return code

    def _ended(self, patience_s: float) -> bool:
        """Waits until the child has ended, a signal has come, or this long; whether it has ended."""
        if self.child.poll() is None and select.select([self.woken], [], [], patience_s)[0]:
            os.read(self.woken, 4096)
        return self.child.poll() is not None

    def _outlived(self) -> bool:
        """Whether mpirun has outlived the ranks on this machine: it may wait for a host that does not answer."""
        here = starters(self.child.pid)
        if not here:
            return False
        others = (*REMOTE_SHELLS, *STARTERS)
        if any(stat(pid).name not in others and not ended(pid) for top in here for pid in children(top)):
            self.ranks_seen, self.ranks_gone_since = True, None
        elif self.ranks_seen and self.ranks_gone_since is None:
            self.ranks_gone_since = time.monotonic()
        return self.ranks_gone_since is not None and time.monotonic() - self.ranks_gone_since > ORPHAN_S

    def _end_now(self, why: str, code: int) -> int:
        _say(why)
        end(self.child.pid)
        self.child.wait()
        self._dismiss_keeper(b"done")
        return code

    def _dismiss_keeper(self, how: bytes) -> None:
        os.write(self.line, how)
        os.close(self.line)
        os.waitpid(self.keeper, 0)


def start_keeper(grace_s: float) -> tuple[int, int, int]:
    """(the keeper's process, the pipe to it, the pipe for the job's stderr)."""
    (listen, speak), (source, stderr) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(speak)
        os.close(stderr)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        keep(listen, Passage(source), grace_s)
    os.close(listen)
    os.close(source)
    return pid, speak, stderr


class Passage:
    """From a pipe to this process's stderr."""

    def __init__(self, source: int) -> None:
        self._source: int | None = source
        self._tail = b""

    def wait(self, patience_s: float | None, *others: int) -> list[int]:
        """Waits until something can be passed on, which it does, or one of the others can be read, or for so long. What
        could be read."""
        sources = [*others, *([] if self._source is None else [self._source])]
        ready = select.select(sources, [], [], patience_s)[0]
        if self._source is not None and self._source in ready:
            self._pass_on(self._source)
        return ready

    def _pass_on(self, source: int) -> None:
        data = os.read(source, 1 << 16)
        if not data:
            self._source = None
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        while data:
            try:
                data = data[os.write(2, data) :]
            except OSError:  # nobody reads it any more
                return

    def reason(self) -> str | None:
        """The line of ours that says why a rank ended; None if there is none, or nothing stands below it."""
        tail = TAG.sub(b"", self._tail)
        lines = list(OURS.finditer(tail))
        first_hand = [line for line in lines if SECOND_HAND not in line[0]]
        line = next(reversed(first_hand or lines), None)
        if line is None or not tail[line.end() :].strip():
            return None
        return line[1].decode(errors="replace")


def keep(listen: int, stderr: Passage, grace_s: float) -> NoReturn:
    """The keeper: reads the job's process number, then waits for a word, or for the pipe's end without it."""
    told, more = b"", True
    while more:
        if listen in stderr.wait(None, listen):
            more = bool(data := os.read(listen, 64))
            told += data
    root, _, word = told.decode().partition("\n")
    if root and not word:
        _say("the launcher was killed: stopping its job")
        ask_to_stop(int(root))
        deadline = time.monotonic() + grace_s
        while not ended(int(root)) and time.monotonic() < deadline:
            stderr.wait(0.2)
        if not ended(int(root)):
            end(int(root))
    while stderr.wait(0):
        pass
    if word == "failed" and (reason := stderr.reason()):
        _say(reason)
    os._exit(0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"hvdtrain: {text}\n".encode())
