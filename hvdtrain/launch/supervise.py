"""Supervise mpirun or horovodrun: a signal leads to a checkpoint, and no process outlives its job.

After SIGTERM or SIGINT Open MPI's mpirun gives its ranks about one second and exits with 1. It forwards SIGUSR1 without
a deadline and exits with the ranks' own code (mpirun(1), "Signal Propagation"). horovodrun on MPI becomes a shell
around mpirun. The launcher therefore translates every signal to SIGUSR1 for mpirun. On Gloo it sends SIGUSR1 to the
ranks on this machine, which inform all other ranks at the end of the step. The ranks save a checkpoint, and the job
exits with 75.

A second process, the keeper, waits on a pipe for the end of the launcher. If the launcher is killed, the keeper stops
the job. The job's stderr passes through the keeper, which finally repeats a rank's error message below the messages
that mpirun or horovodrun prints after it.
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
from typing import NoReturn

from hvdtrain.launch.stopping import StopRequests
from hvdtrain.system import exits, ssh
from hvdtrain.system.commands import Command, succeeds
from hvdtrain.system.launchers import HELPERS, MPIRUN, REMOTE_SHELLS, STARTERS
from hvdtrain.system.proc import catches, ended, stat, strings, tree

ORPHAN_S = 5.0
"""How long mpirun may run after its last rank here has ended, before the launcher checks the other hosts."""
ANSWER_S = 3.0
REPEAT_S = 5.0
"""Interval of SIGUSR1. A signal that arrives while ranks start is lost, and a further one does no harm."""
POLL_S, FIRST_POLL_S, FIRST_S = 2.0, 0.5, 10.0
"""Interval of checks of the job's processes; shorter interval; seconds at the start with the shorter interval.

The shorter interval also applies while the job stops.
"""
TAIL_BYTES = 1 << 14
"""End of stderr that is kept: the ranks' last lines and their launcher's messages after them."""
OURS = re.compile(rb"^hvdtrain: (.*)$", re.MULTILINE)
TAG = re.compile(rb"\[[\d,]+\]<stderr>:")
"""Prefix that horovodrun adds to a line, and mpirun's --tag-output to each part of one."""
SECOND_HAND = b"lost contact with another rank"
TERM_S = 3.0
"""Time between SIGTERM and SIGKILL."""


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_rank(pid: int) -> bool:
    """Whether this process is a rank of horovodrun on Gloo."""
    return any(word.startswith("HOROVOD_RANK=") for word in strings(pid, "environ"))


def starters(root: int) -> list[int]:
    """The mpirun processes among a process and its descendants."""
    return [pid for pid in tree(root) if stat(pid).name.startswith(MPIRUN) and not ended(pid)]


def ask_to_stop(root: int) -> None:
    """Send SIGUSR1 to mpirun. Without one, to what was started if it handles it, else to the ranks on this machine."""
    ranks = [pid for pid in tree(root) if is_rank(pid) and not is_rank(stat(pid).parent)]
    receivers = [root] if catches(root, signal.SIGUSR1) else ranks
    signal_all(starters(root) or receivers, signal.SIGUSR1)


def end(root: int) -> None:
    """End a job immediately: SIGTERM to its launcher, then SIGKILL to the remaining processes on this machine."""
    pids = set(tree(root))
    signal_all(starters(root) or [root], signal.SIGTERM)
    deadline = time.monotonic() + TERM_S
    while time.monotonic() < deadline and not all(map(ended, pids)):
        time.sleep(0.1)
        pids |= set(tree(root))
    signal_all((pid for pid in pids if not ended(pid)), signal.SIGKILL)


def lost_host(names: Sequence[str]) -> str | None:
    """The first host that does not answer at its ssh port, or to ssh if that goes through a proxy. None if all do.

    A refused connection is an answer.
    """
    for name in names:
        try:
            if endpoint := ssh.endpoint(name):
                socket.create_connection(endpoint, timeout=ANSWER_S).close()
            elif not succeeds(ssh.command(name, ["true"])):
                return name
        except ConnectionRefusedError:
            continue
        except OSError:
            return name
    return None


class Job:
    """A running mpirun or horovodrun."""

    def __init__(
        self,
        command: Command,
        environment: Mapping[str, str],
        grace_s: float,
        *,
        lost: Callable[[], str | None] = lambda: None,
        passes_code: bool = True,
    ) -> None:
        self.lost = lost
        """Returns a host that does not answer, if there is one."""
        self.passes_code = passes_code
        """Whether the child exits with its ranks' exit code. horovodrun on Gloo always exits with 1 after a failure."""
        self.stop = StopRequests(grace_s, [signal.SIGTERM])
        self.stop_sent_at: float | None = None
        self.ranks_seen = False
        self.ranks_gone_since: float | None = None
        self.keeper, self.line, stderr = start_keeper(grace_s)
        # In its own process group, so that Ctrl-C reaches only this process.
        self.child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=stderr, process_group=0
        )
        os.close(stderr)
        os.write(self.line, f"{self.child.pid}\n".encode())

    def wait(self) -> int:
        """Wait until the job has ended. Returns its exit code."""
        began = time.monotonic()
        while not self._ended(FIRST_POLL_S if self.stop.received or time.monotonic() < began + FIRST_S else POLL_S):
            now, stop = time.monotonic(), self.stop
            if stop.received and (self.stop_sent_at is None or now - self.stop_sent_at > REPEAT_S):
                if self.stop_sent_at is None:
                    _say("stopping: the ranks save a checkpoint (a second SIGTERM or Ctrl-C ends them immediately)")
                ask_to_stop(self.child.pid)
                self.stop_sent_at = now
            if now > stop.deadline:
                return self._end_now("ending the ranks without a checkpoint", 128 + stop.received[-1])
            if self._outlived() and (host := self.lost()):
                message = f"host {host} does not answer, and the ranks here have ended: ending the job"
                return self._end_now(message, exits.RESUMABLE if self.stop.received else exits.FAILED)
        code = self.child.wait()
        self._dismiss_keeper(b"failed" if code else b"done")
        code = 128 - code if code < 0 else code
        if self.stop.received and code in (128 + signal.SIGUSR1, 128 + signal.SIGTERM):
            return 128 + self.stop.received[0]  # the ranks had nothing to save yet
        if self.stop.received and code == exits.FAILED and not self.passes_code:
            return exits.RESUMABLE
        if not self.stop.received and code >= 128:  # a rank was killed or mpirun failed; mpirun has printed which
            return exits.FAILED
        return code

    def _ended(self, patience_s: float) -> bool:
        """Wait for the child's end, a signal or the timeout. Returns whether the child has ended."""
        if self.child.poll() is None and select.select([self.stop.woken], [], [], patience_s)[0]:
            os.read(self.stop.woken, 4096)
        return self.child.poll() is not None

    def _outlived(self) -> bool:
        """Whether mpirun has outlived the ranks on this machine. It may wait for a host that does not answer."""
        launchers = starters(self.child.pid)
        if not launchers:
            return False
        others = (*STARTERS, *HELPERS, *REMOTE_SHELLS)
        if any(not stat(pid).name.startswith(others) and not ended(pid) for top in launchers for pid in tree(top)):
            self.ranks_seen, self.ranks_gone_since = True, None
        elif self.ranks_seen and self.ranks_gone_since is None:
            self.ranks_gone_since = time.monotonic()
        return self.ranks_gone_since is not None and time.monotonic() - self.ranks_gone_since > ORPHAN_S

    def _end_now(self, message: str, code: int) -> int:
        _say(message)
        end(self.child.pid)
        self.child.wait()
        self._dismiss_keeper(b"done")
        return code

    def _dismiss_keeper(self, outcome: bytes) -> None:
        os.write(self.line, outcome)
        os.close(self.line)
        os.waitpid(self.keeper, 0)


def start_keeper(grace_s: float) -> tuple[int, int, int]:
    """Start the keeper. Returns its process id, the pipe to it, and the pipe for the job's stderr."""
    (listen, line), (source, stderr) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(line)
        os.close(stderr)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        keep(listen, StderrRelay(source), grace_s)
    os.close(listen)
    os.close(source)
    return pid, line, stderr


class StderrRelay:
    """Copies a pipe to this process's stderr and keeps the end of the text."""

    def __init__(self, source: int) -> None:
        self._source: int | None = source
        self._tail = b""

    def wait(self, patience_s: float | None, *others: int) -> list[int]:
        """Wait until the pipe or one of `others` is readable, or for the timeout, and copy the pipe's data.

        Returns the readable descriptors.
        """
        sources = [*others, *([] if self._source is None else [self._source])]
        ready = select.select(sources, [], [], patience_s)[0]
        if self._source is not None and self._source in ready:
            self._copy(self._source)
        return ready

    def _copy(self, source: int) -> None:
        data = os.read(source, 1 << 16)
        if not data:
            self._source = None
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        while data:
            try:
                data = data[os.write(2, data) :]
            except OSError:  # stderr has no reader any more
                return

    def reason(self) -> str | None:
        """hvdtrain's line that says why a rank ended. None if there is none, or if it is the last line anyway."""
        tail = TAG.sub(b"", self._tail)
        lines = list(OURS.finditer(tail))
        first_hand = [line for line in lines if SECOND_HAND not in line[0]]
        line = next(reversed(first_hand or lines), None)
        if line is None or not tail[line.end() :].strip():
            return None
        return line[1].decode(errors="replace")


def keep(listen: int, stderr: StderrRelay, grace_s: float) -> NoReturn:
    """Run the keeper: read the job's process id, then wait for the outcome, or for the end of the pipe without one."""
    message, more = b"", True
    while more:
        if listen in stderr.wait(None, listen):
            more = bool(data := os.read(listen, 64))
            message += data
    root, _, outcome = message.decode().partition("\n")
    if root and not outcome:
        _say("the launcher was killed: stopping its job")
        ask_to_stop(int(root))
        deadline = time.monotonic() + grace_s
        while not ended(int(root)) and time.monotonic() < deadline:
            stderr.wait(0.2)
        if not ended(int(root)):
            end(int(root))
    while stderr.wait(0):
        pass
    if outcome == "failed" and (reason := stderr.reason()):
        _say(reason)
    os._exit(0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"hvdtrain: {text}\n".encode())
