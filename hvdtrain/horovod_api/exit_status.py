"""Finds out in an `atexit` function whether this interpreter ends normally.

CPython handles SystemExit before it calls `atexit` functions and keeps neither the exception nor its status. So
`raise SystemExit(1)` looks like the end of the file. Two observations distinguish the cases:

- CPython reads the status from the attribute `SystemExit.code` when no Python frame is left.
- The outermost frame still exists and shows whether its last instruction was a return.

Any other end counts as a failure.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import sys
import threading
from typing import Any, NoReturn

_UNKNOWN = object()
_status: Any = _UNKNOWN
"""The status of the SystemExit that ended the main thread"""
_thread: str | None = None
"""Name of the first thread that ended with an exception"""
_outermost: Any = None
"""The main thread's outermost frame"""


def watch() -> None:
    """Starts to observe the interpreter. Must be called once only."""
    global _outermost
    _outermost = sys._current_frames()[threading.main_thread().ident or 0]
    while _outermost.f_back is not None:
        _outermost = _outermost.f_back

    stored, exit_ = SystemExit.__dict__["code"], sys.exit

    def code(error: SystemExit) -> Any:
        global _status
        status = stored.__get__(error)
        if sys._getframe().f_back is None:
            _status = status
        return status

    gc.get_referents(SystemExit.__dict__)[0]["code"] = property(code, stored.__set__, stored.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    # Before Python 3.12, the exception that C's sys.exit raises has no code.
    for names in (vars(sys), vars(sys.modules["__main__"])):
        names.update({name: _exit for name, value in names.items() if value is exit_})

    hook = threading.excepthook

    def thread_ended(ended: threading.ExceptHookArgs) -> None:
        global _thread
        if not issubclass(ended.exc_type, SystemExit):  # a normal end of the thread
            _thread = _thread or (ended.thread.name if ended.thread else "without a name")
        hook(ended)

    threading.excepthook = thread_ended


def failure() -> str | None:
    """The reason why the script did not end normally, or None. For use in an `atexit` function."""
    if _thread is not None:
        return f"an exception ended the thread {_thread}"
    if _status is not _UNKNOWN:
        shown = f"status {_status}" if isinstance(_status, int) else "a message"
        return None if _normal(_status) else f"the script exited with {shown}"
    last = dis.opname[_outermost.f_code.co_code[_outermost.f_lasti]]
    return None if last.startswith("RETURN") else "an exception ended the script"


def handled_failure() -> str | None:
    """The exception that the running script is handling, as a reason for a failure; None without one."""
    error = sys.exc_info()[1]
    normal = error is None or (isinstance(error, SystemExit) and _normal(error.code))
    return None if normal else f"{type(error).__name__} ended the script"


def _normal(status: Any) -> bool:
    return status is None or (isinstance(status, int) and status == 0)


def _exit(status: Any = None) -> NoReturn:
    raise SystemExit(status)
