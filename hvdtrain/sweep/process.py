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
from typing import IO

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


class Children:
    """Runs commands in one environment. A signal ends the current job."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.stopped = False
        self.lock: tuple[int, ...] = ()
        """The descriptor of the lock. Jobs inherit it, so the lock lasts until the last job has ended"""

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator[None]:
        """While active, SIGINT, SIGTERM and SIGHUP only set `stopped`."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def sleep(self, seconds: float) -> None:
        """Raises Stopped."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(POLL_S, left))

    def check(self) -> None:
        """Raises Stopped if a signal has arrived."""
        if self.stopped:
            raise Stopped

    def job(self, command: Command, log: IO[bytes]) -> int:
        """Runs a job with its output in `log`, and returns its exit code. Raises Stopped, Failure (69)."""
        with self._running(command, log) as child:
            while (code := child.poll()) is None:
                self.sleep(POLL_S)
            return code

    @contextlib.contextmanager
    def background(self, commands: Sequence[Command]) -> Iterator[None]:
        """Runs commands without output while the block runs, then ends them. Raises Failure (69)."""
        with contextlib.ExitStack() as stack:
            for command in commands:
                stack.enter_context(self._running(command, subprocess.DEVNULL))
            yield

    @contextlib.contextmanager
    def _running(self, command: Command, output: int | IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        """A child that ends with the block. Raises Failure (69)."""
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                pass_fds=self.lock,
                process_group=0,
                preexec_fn=proc.end_with_parent,
            )
        except OSError as error:
            raise Failure(f"{command[0]}: {error.strerror}", exits.UNREACHABLE) from error
        try:
            yield child
        finally:
            if child.poll() is None:
                end(child)


def run_uninterrupted(command: Command, environment: Mapping[str, str], *, verdict: bool = False) -> str:
    """Runs a short command that must not be interrupted: up, down, clear, verify. Returns its standard output.

    Raises Failure with its message and exit code; with `verdict` only if it prints nothing, and 69 if it cannot start.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, process_group=0
        )
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}", exits.UNREACHABLE) from error
    if done.returncode and not (verdict and done.stdout):
        lines = [line.removeprefix("hvdtrain: ").removeprefix("throttle: ") for line in done.stderr.splitlines()]
        message = "; ".join(lines[-2:]) or f"`{shlex.join(command)}`: exit code {done.returncode}"
        raise Failure(message, done.returncode)
    return done.stdout


def end(child: subprocess.Popen[bytes]) -> None:
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
