"""The width of the terminal, and lines that are not wider."""

from __future__ import annotations

import os
import shutil

UNKNOWN = 100
"""Characters in a line if there is no terminal"""


def terminal_width() -> int:
    """Columns of the terminal, also if the output goes through a pipe; COLUMNS overrides it."""
    known = [os.get_terminal_size(stream).columns for stream in (1, 2, 0) if os.isatty(stream)]
    return shutil.get_terminal_size((next(filter(None, known), UNKNOWN), 50)).columns


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a text, the later ones indented. A word is broken only if it is longer than a line."""
    from rich import get_console
    from rich.text import Text

    lines = Text(text).wrap(get_console(), max(1, width - len(indent)), overflow="fold")
    return [f"{indent if place else ''}{line.plain.rstrip()}" for place, line in enumerate(lines) if line]
