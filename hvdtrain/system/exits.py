"""Exit codes, the error type whose message is written for users, and how a command ends with them."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from hvdtrain.system import install

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


class Failure(Exception):
    """An error that a user can cause and fix: one line that says what, where and how to fix it.

    Entry points print the message without a traceback and exit with `code`, one of this module's constants. The message
    may quote an untrusted file, so control characters are escaped (`\\x1b`): a terminal would obey them. Lines are
    joined, because library errors often have several.
    """

    def __init__(self, message: str, code: int = FAILED) -> None:
        lines = [line.strip() for line in message.split("\n")] if "\n" in message else [message]
        super().__init__(printable(" ".join(line for line in lines if line)))
        self.code = code


def printable(text: str) -> str:
    """Escape control characters, line ends and characters that cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def of_system(error: OSError) -> Failure | None:
    """Convert an OSError about a path to a Failure. None if the error names no path."""
    if error.filename is None:
        return None
    if isinstance(error, PermissionError):
        return Failure(f"{error.filename}: {error.strerror}; hint: ask its owner for access", NO_PERMISSION)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "free some space" if full else "check the path"
    return Failure(f"{error.filename}: {error.strerror}; hint: {hint}", IO_ERROR)


def replace_unknown_characters() -> None:
    """From now on, print ? for what the terminal cannot show: ± or the name of a class must not end a command."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def end(main: Callable[[list[str]], int], arguments: list[str], name: str = "hvdtrain") -> NoReturn:
    """Run a command and exit with its code. A Failure is printed on stderr as one line that starts with `name`.

    SIGTERM raises KeyboardInterrupt like SIGINT, so that the command removes its unfinished files.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    replace_unknown_characters()
    try:
        code = main(arguments)
    except Failure as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        code = failure.code
    except ModuleNotFoundError as error:
        if (error.name or "hvdtrain").partition(".")[0] == "hvdtrain":
            raise
        print(
            f"{name}: this command needs the package {error.name}; hint: {install.package(error.name or '')}",
            file=sys.stderr,
        )
        code = UNREACHABLE
    except BrokenPipeError:  # the reader of the output has exited
        sys.stdout = None
        code = FAILED
    except OSError as error:
        if (known := of_system(error)) is None:
            raise
        print(f"{name}: {known}", file=sys.stderr)
        code = known.code
    except KeyboardInterrupt as interrupt:
        code = 128 + next(iter(interrupt.args), signal.SIGINT)
    raise SystemExit(code)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt(number)
