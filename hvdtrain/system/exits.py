"""Exit codes, the one error type whose message is written for the user, and how a command ends with them."""

from __future__ import annotations

import errno
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
    """An error that a user can cause and fix: one line that says what, where and how to fix it.

    Entry points print the message without a traceback and end with `code` (one of this module's constants). Control
    characters are escaped as \\x1b, say, because the message may quote anybody's file and a terminal would obey them.
    Lines are joined, because the errors of libraries often have several.
    """

    def __init__(self, message: str, code: int = FAILED) -> None:
        lines = [line.strip() for line in message.split("\n")] if "\n" in message else [message]
        super().__init__(printable(" ".join(line for line in lines if line)))
        self.code = code


def printable(text: str) -> str:
    """The text with control characters, line ends and what cannot be encoded as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def of_system(error: OSError) -> Failure | None:
    """An OSError about a path as a Failure; None if the error names no path."""
    if error.filename is None:
        return None
    if isinstance(error, PermissionError):
        return Failure(f"{error.filename}: {error.strerror}; ask its owner for access", NO_PERMISSION)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "make room" if full else "check the path"
    return Failure(f"{error.filename}: {error.strerror}; {hint}", IO_ERROR)


def end(main: Callable[[list[str]], int], arguments: list[str], name: str = "hvdtrain") -> NoReturn:
    """Runs a command and ends the process with its exit code; a Failure is one line on stderr after `name`."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show ± is no reason to fail
    try:
        code = main(arguments)
    except Failure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        code = failure.code
    except ModuleNotFoundError as error:  # as after `make demo`, which installs no plots and tables
        if (error.name or "hvdtrain").partition(".")[0] == "hvdtrain":
            raise
        print(f"{name}: this command needs the package {error.name}: run `make setup`", file=sys.stderr)
        code = UNREACHABLE
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = None
        code = FAILED
    except OSError as error:
        if (told := of_system(error)) is None:
            raise
        print(f"{name}: {told}", file=sys.stderr)
        code = told.code
    except KeyboardInterrupt:
        code = SIGINT
    raise SystemExit(code)
