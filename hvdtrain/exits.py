"""Exit codes, and the one error type whose message is written for the user."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
BAD_DATA = 65
UNREACHABLE = 69
CANNOT_WRITE = 73
IO_ERROR = 74
RESUMABLE = 75
NO_PERMISSION = 77
BAD_CONFIG = 78
SIGINT = 130


class Failure(Exception):
    """Something a user can cause and mend: one line that says what, where and how to fix it.

    Entry points print the message without a traceback and end with `code` (one of this module's constants).
    """

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
