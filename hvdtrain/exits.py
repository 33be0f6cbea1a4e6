"""Exit codes, the one error type whose message is written for the user, and how a command ends with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

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


def end(main: Callable[[list[str]], int], arguments: list[str], name: str = "hvdtrain") -> NoReturn:
    """Runs a command and ends the process with its exit code; a Failure is one line on stderr after `name`."""
    try:
        code = main(arguments)
    except Failure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        code = failure.code
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = None
        code = FAILED
    except KeyboardInterrupt:
        code = SIGINT
    raise SystemExit(code)
