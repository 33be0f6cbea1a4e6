"""Runs the child processes of a sweep, and ends them when the sweep is stopped.

Each child has a process group of its own, so that Ctrl-C reaches the sweep alone, which then ends the job, clears the
throttle and takes its cluster down. If the sweep itself is killed, the kernel sends the job SIGTERM; but not to one on
virtual hosts that has changed its user (sudo, setpriv), which goes on until those hosts are taken down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from hvdtrain.launch import supervise
from hvdtrain.system import exits
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

POLL_S = 0.1
SECOND_S = 1.0
"""Before the second SIGTERM, at which our launchers end the ranks without a checkpoint; the run will be repeated"""
LAST_S = 15.0
"""Before the rest of a job is killed"""
PR_SET_PDEATHSIG = 1  # prctl(2)


class Stopped(Exception):
    """A signal stopped the sweep; the command that ran has been ended."""


class Timeout(Exception):
    """A job exceeded its time limit and has been ended."""


class Children:
    """Runs commands in one environment; a signal ends the current one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.tick: Callable[[], None] = lambda: None
        """Called while something is waited for"""
        self.asked: signal.Signals | None = None
        self.kept_open: tuple[int, ...] = ()
        """File descriptors of locks; jobs inherit them, so that the locks hold until the last job has ended"""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it SIGINT, SIGTERM and SIGHUP only set `asked`."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._arrived) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number)

    def rest(self, seconds: float) -> None:
        """Sleeps. Raises Stopped."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            self.tick()
            time.sleep(min(POLL_S, left))

    def check(self) -> None:
        """Raises Stopped if a signal has arrived."""
        if self.asked is not None:
            raise Stopped

    def job(self, command: Command, log: IO[bytes], timeout_s: float | None) -> int:
        """Runs a job to its end, output into `log`; returns its exit code. Raises Stopped, Timeout, Failure (69)."""
        self.check()
        child = self._started(command, log)
        until = time.monotonic() + timeout_s if timeout_s is not None else None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_S)
            self.tick()
            late = until is not None and time.monotonic() > until
            if self.asked is not None or late:
                end(child)
                raise Timeout if late else Stopped

    @contextlib.contextmanager
    def beside(self, commands: Sequence[Command]) -> Iterator[None]:
        """Within it, these commands run, their output thrown away; at its end they are ended. Raises Failure (69)."""
        with contextlib.ExitStack() as stack:
            for command in commands:
                stack.callback(end, self._started(command, subprocess.DEVNULL))
            yield

    def _started(self, command: Command, output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        how = {"stdout": output, "stderr": subprocess.STDOUT, "pass_fds": self.kept_open}
        return _start(command, self.environment, **how, preexec_fn=end_with_parent)

    def said(self, command: Command) -> tuple[int, str, str]:
        """Runs a short command: its exit code, standard output and standard error. Raises Stopped, Failure (69)."""
        self.check()
        pipe = subprocess.PIPE
        child = _start(command, self.environment, stdout=pipe, stderr=pipe, text=True)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = child.communicate(timeout=POLL_S)
                return child.returncode, out, err
            self.tick()
            if self.asked is not None:
                end(child)
                raise Stopped


def whole(command: Command, environment: Mapping[str, str]) -> None:
    """Runs a command that must not be interrupted (up, down, clear). Raises Failure with its message and exit code."""
    child = _start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, err = child.communicate()
    if child.returncode:
        raise Failure(told(err) or f"`{shlex.join(command)}`: exit code {child.returncode}", child.returncode)


def _start(command: Command, environment: Mapping[str, str], **how: Any) -> subprocess.Popen[Any]:
    """Starts it without input, in a process group of its own. Raises Failure (69)."""
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0, **how)
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}", exits.UNREACHABLE) from error


def told(stderr: str) -> str:
    """The last two lines of a command's errors, joined, without its name in front."""
    lines = [line.removeprefix("hvdtrain: ").removeprefix("throttle: ") for line in stderr.strip().splitlines()]
    return "; ".join(lines[-2:])


def end(child: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Sends SIGTERM, again after a second, and kills what is left on this host after LAST_S."""
    for patience_s in (SECOND_S, LAST_S):
        _signal(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
            return
    supervise.end(child.pid)
    _signal(child.pid, signal.SIGKILL)
    child.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # the child is sudo, owned by root; it forwards the signal
        subprocess.run(["sudo", "-n", "kill", f"-{number.value}", str(pid)], capture_output=True, check=False)


def end_with_parent() -> None:
    """From here on SIGTERM ends this process when its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
