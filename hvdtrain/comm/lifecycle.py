"""How a rank starts and ends: signals, the exit code, and the last line that it prints."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from hvdtrain.comm.errors import lost_peer, reason
from hvdtrain.comm.launch_env import LaunchEnv, launch_env, separate_programs
from hvdtrain.sentinel.rank import Sentinel
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

PEER_PATIENCE_S = 2.0
"""A rank that lost a peer, or failed and is not rank 0, prints only if the launcher has not ended it by then"""

_sentinel: Sentinel | None = None


def report_to(sentinel: Sentinel) -> None:
    """From now on, report a failure of this process to this sentinel."""
    global _sentinel
    _sentinel = sentinel


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a request to stop after the current step.

    Before `resumable` is set there is nothing to save, and a signal ends the process with 128 + its number. A second
    SIGINT always does.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.resumable = False
        self.peer_lost = False
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._arrived) for number in numbers}

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        repeated = number == signal.SIGINT and self.requested is signal.SIGINT
        if self.peer_lost or repeated or not self.resumable:
            os._exit(128 + number)
        self.requested = signal.Signals(number)

    def restore(self) -> None:
        """Reinstall the signal handlers that this object replaced."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def run(program: Callable[[StopSignal], int], *, debug: bool) -> None:
    """Run a rank's program and end the process so that the whole job ends, with the cause as its last output.

    A Failure is printed as one line, once per job; any other exception as a traceback followed by one line. After an
    error the process ends at once, without disconnecting: a rank that waited in its exit handlers would block its
    peers for ever. A rank that only lost a peer prints nothing unless its launcher leaves it alive.
    """
    exits.replace_unknown_characters()
    _check_launch()
    stop = StopSignal()
    try:
        code = program(stop)
        sys.stdout.flush()
    except Exception as error:
        stop.peer_lost = True
        code = _report(error, debug)
    _end(code)


def guard(*, debug: bool) -> None:
    """From now on, an uncaught exception in a user's script ends the whole job as in `run`.

    In a single process this holds only for a Failure; other exceptions print Python's usual traceback.
    """
    _check_launch()

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        handled = isinstance(error, Failure) or launch_env().launcher != "alone"
        if handled and isinstance(error, Exception):
            sys.stderr = sys.__stderr__  # torch.distributed's hook calls this hook and captures its output
            _end(_report(error, debug, _script_line(trace)))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = on_uncaught


def at_exit(function: Callable[..., object], *arguments: object) -> None:
    """Call it when this process ends normally, also a rank that multiprocessing has forked, whose end skips atexit."""
    if multiprocessing.parent_process() is None:
        atexit.register(function, *arguments)
    else:
        multiprocessing.util.Finalize(None, function, arguments, exitpriority=0)


def fail(failure: Failure) -> NoReturn:
    """End this process, and so the job, with a Failure. For code whose exceptions arrive as others, as in a graph."""
    _end(_report(failure, debug=False))


def _check_launch() -> None:
    """Exit if the environment does not describe a rank of one job."""
    try:
        launch_env()
        problem, code = separate_programs(), exits.USAGE
    except Failure as failure:
        problem, code = (str(failure), True), failure.code
    if problem:
        message, prints = problem
        if prints:
            print(f"hvdtrain: {message}", file=sys.stderr, flush=True)
        raise SystemExit(code)


def _script_line(trace: TracebackType | None) -> str:
    """The last line of the user's script in a traceback, as "script.py:12: "; empty if there is none."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
    return f"{Path(script).name}:{lines[-1]}: " if script and lines else ""


def _report(error: Exception, debug: bool, script_line: str = "") -> int:
    """Print what ended this rank and return the exit code."""
    environment, debug = launch_env(), debug or os.environ.get("HVDTRAIN_DEBUG", "").lower() == "true"
    if isinstance(error, OSError) and not debug:
        error = exits.of_system(error) or error
    if isinstance(error, Failure):
        if debug:
            traceback.print_exception(error)
        if environment.rank:
            time.sleep(PEER_PATIENCE_S)
        print(f"hvdtrain: {_prefix(environment)}{script_line}{error}", file=sys.stderr, flush=True)
        return error.code
    if isinstance(error, BrokenPipeError) and environment.launcher == "alone":  # `--strategy help | head`
        sys.stdout = None
    elif lost_peer(error):
        time.sleep(PEER_PATIENCE_S)
        print(
            f"hvdtrain: {_prefix(environment)}lost contact with another rank: {reason(error)}",
            file=sys.stderr,
            flush=True,
        )
    else:
        trace = "".join(traceback.format_exception(error))
        first_line = exits.printable(str(error).partition("\n")[0])
        sys.stderr.write(f"{trace}hvdtrain: {_prefix(environment)}failed: {type(error).__name__}: {first_line}\n")
        sys.stderr.flush()
    return exits.FAILED


def _end(code: int) -> NoReturn:
    """End this process. After an error, end the job through the sentinel."""
    if code and launch_env().launcher != "alone":
        if _sentinel is not None and code != exits.RESUMABLE:
            _sentinel.report_failed()
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _prefix(environment: LaunchEnv) -> str:
    return f"rank {environment.rank} on {socket.gethostname()}: " if environment.rank else ""
