"""Whether this interpreter ends normally: what an `atexit` function cannot see by itself.

CPython handles SystemExit before it calls `atexit` functions and keeps neither the exception nor its status, so
`raise SystemExit(1)` looks like the end of the file there. Two observations tell them apart. CPython reads the status
from the attribute `SystemExit.code`, which reports it here if no Python frame is left. The outermost frame, which
outlives its code, shows whether its last instruction was a return. An end that neither explains counts as a failure.
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
"""The first thread that an exception ended"""
_outermost: Any = None
"""The main thread's outermost frame"""


def watch() -> None:
    """Begins to observe; once in a process."""
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
    for names in (
        vars(sys),
        vars(sys.modules["__main__"]),
    ):  # before Python 3.12 the C function's exception has no code
        names.update({name: _exit for name, value in names.items() if value is exit_})

    hook = threading.excepthook

    def thread_ended(ended: threading.ExceptHookArgs) -> None:
        global _thread
        if not issubclass(ended.exc_type, SystemExit):  # which ends the thread only, normally
            _thread = _thread or (ended.thread.name if ended.thread else "without a name")
        hook(ended)

    threading.excepthook = thread_ended


def failure() -> str | None:
    """Why the script did not end normally, None if it did; for an `atexit` function."""
    if _thread is not None:
        return f"an exception ended the thread {_thread}"
    if _status is not _UNKNOWN:
        shown = f"status {_status}" if isinstance(_status, int) else "a message"
        return None if _normal(_status) else f"the script exited with {shown}"
    last = dis.opname[_outermost.f_code.co_code[_outermost.f_lasti]]
    return None if last.startswith("RETURN") else "an exception ended the script"


def handling() -> str | None:
    """Why the script is about to end, where it is still running and handles an exception; None if it does not."""
    error = sys.exc_info()[1]
    normal = error is None or (isinstance(error, SystemExit) and _normal(error.code))
    return None if normal else f"{type(error).__name__} ended the script"


def _normal(status: Any) -> bool:
    return status is None or (isinstance(status, int) and status == 0)


def _exit(status: Any = None) -> NoReturn:
    raise SystemExit(status)
