"""Finds out in an `atexit` function whether this script ends normally.

Python sets `sys.last_value` for an uncaught exception. `sys.exit`, `exit` and `quit` are wrapped, and note their
status. One that the script raises itself as a SystemExit, or gives to a `sys.exit` imported by name, is not seen.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

_status: Any = None
"""The last status that the main thread gave to `sys.exit`, `exit` or `quit`"""
_thread: str | None = None
"""Name of the first thread that ended with an exception"""


def watch() -> None:
    """Starts to observe the interpreter. Must be called once only."""
    for owner, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        if hasattr(owner, name):  # python -S has only sys.exit
            setattr(owner, name, _noting(getattr(owner, name)))
    hook = threading.excepthook

    def thread_ended(ended: threading.ExceptHookArgs) -> None:
        global _thread
        if not issubclass(ended.exc_type, SystemExit):  # a normal end of the thread
            _thread = _thread or (ended.thread.name if ended.thread else "without a name")
        hook(ended)

    threading.excepthook = thread_ended


def _noting(leave: Callable[..., Any]) -> Callable[..., Any]:
    """`sys.exit`, `exit` or `quit`, which notes the status."""

    @functools.wraps(leave, updated=())
    def noting(status: Any = None) -> Any:
        global _status
        if threading.current_thread() is threading.main_thread():
            _status = status
        return leave(status)

    return noting


def failure() -> str | None:
    """The reason why the script did not end normally, or None. For use in an `atexit` function."""
    if _thread is not None:
        return f"an exception ended the thread {_thread}"
    if hasattr(sys, "last_value"):
        return "an exception ended the script"
    shown = f"status {_status}" if isinstance(_status, int) else "a message"
    return None if _normal(_status) else f"the script exited with {shown}"


def handled_failure() -> str | None:
    """The exception that the running script is handling, as a reason for a failure; None without one."""
    error = sys.exc_info()[1]
    normal = error is None or (isinstance(error, SystemExit) and _normal(error.code))
    return None if normal else f"{type(error).__name__} ended the script"


def _normal(status: Any) -> bool:
    return status is None or (isinstance(status, int) and status == 0)
