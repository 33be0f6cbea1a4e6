"""Runs the child processes of a sweep, and ends them if the sweep is stopped.

Each child has its own process group, so Ctrl-C reaches only the sweep. The sweep then ends the job, restores the links
and removes its cluster. If the sweep itself is killed, the kernel sends SIGTERM to the job. A job on virtual hosts that
has changed its user (sudo, setpriv) does not receive that signal and runs until those hosts are removed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

from hvdtrain.launch import supervise
from hvdtrain.system import exits, proc
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

POLL_S = 0.1
SECOND_TERM_S = 1.0
"""Delay before the second SIGTERM, which makes our launchers end the ranks without a checkpoint. A sweep repeats the
run, so it needs no checkpoint."""
KILL_S = 15.0
"""Delay before the rest of a job is killed"""


class Stopped(Exception):
    """A signal stopped the sweep. The running command has been ended."""


class Timeout(Exception):
    """A job exceeded its time limit and has been ended."""


class Children:
    """Runs commands in one environment. A signal ends the current command."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.signal: signal.Signals | None = None
        """The signal that stopped the sweep"""
        self.lock_handles: tuple[int, ...] = ()
        """File descriptors of locks. Jobs inherit them, so the locks last until the last job has ended"""

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """While active, SIGINT, SIGTERM and SIGHUP only set `self.signal`."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def sleep(self, seconds: float) -> None:
        """Raises Stopped."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(POLL_S, left))

    def check(self) -> None:
        """Raises Stopped if a signal has arrived."""
        if self.signal is not None:
            raise Stopped

    def job(self, command: Command, log: IO[bytes], timeout_s: float | None) -> int:
        """Runs a job with its output in `log`, and returns its exit code. Raises Stopped, Timeout, Failure (69)."""
        self.check()
        child = self._start(command, log)
        until = time.monotonic() + timeout_s if timeout_s is not None else None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_S)
            late = until is not None and time.monotonic() > until
            if self.signal is not None or late:
                end(child)
                raise Timeout if late else Stopped

    @contextlib.contextmanager
    def background(self, commands: Sequence[Command]) -> Iterator[None]:
        """Runs commands without output while the block runs, then ends them. Raises Failure (69)."""
        with contextlib.ExitStack() as stack:
            for command in commands:
                stack.callback(end, self._start(command, subprocess.DEVNULL))
            yield

    def _start(self, command: Command, output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "pass_fds": self.lock_handles}
        return _start(command, self.environment, **options, preexec_fn=proc.end_with_parent)

    def output(self, command: Command) -> tuple[int, str, str]:
        """Runs a short command: exit code, standard output, standard error. Raises Stopped, Failure (69)."""
        self.check()
        pipe = subprocess.PIPE
        child = _start(command, self.environment, stdout=pipe, stderr=pipe, text=True)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = child.communicate(timeout=POLL_S)
                return child.returncode, out, err
            if self.signal is not None:
                end(child)
                raise Stopped


def run_uninterrupted(command: Command, environment: Mapping[str, str]) -> None:
    """Runs a command that must not be interrupted: up, down, clear. Raises Failure with its message and exit code."""
    child = _start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, err = child.communicate()
    if child.returncode:
        message = error_message(err) or f"`{shlex.join(command)}`: exit code {child.returncode}"
        raise Failure(message, child.returncode)


def _start(command: Command, environment: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a command without input in its own process group. Raises Failure (69)."""
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, process_group=0, **options)
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}", exits.UNREACHABLE) from error


def error_message(stderr: str) -> str:
    """The last two lines of a command's errors on one line, without the command's name."""
    lines = [line.removeprefix("hvdtrain: ").removeprefix("throttle: ") for line in stderr.strip().splitlines()]
    return "; ".join(lines[-2:])


def end(child: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Sends SIGTERM twice, then kills what remains on this host."""
    for wait_s in (SECOND_TERM_S, KILL_S):
        _signal(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
            return
    supervise.end(child.pid)
    _signal(child.pid, signal.SIGKILL)
    child.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # the child is sudo, which belongs to root and forwards the signal
        subprocess.run(["sudo", "-n", "kill", f"-{number.value}", str(pid)], capture_output=True, check=False)
