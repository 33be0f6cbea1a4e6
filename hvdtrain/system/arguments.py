"""The argument parser of all commands except training, and suggestions for misspelt words."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from hvdtrain.system.exits import USAGE, Failure


def near(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean --json?` if one of `known` resembles `word`, else an empty string."""
    choices = list(known)
    if word.startswith("-"):
        word = word.partition("=")[0]
    if word == "--format" and word not in choices and "--json" in choices:
        return ", did you mean --json?"
    longer = [choice for choice in choices if len(word) > 2 and choice.startswith(word)]  # an abbreviation
    matches = longer or difflib.get_close_matches(word, choices, 1)
    return f", did you mean {matches[0]}?" if matches else ""


TABLE_ROW = re.compile(r"( +\S.*?  +)([^\s#].*)")
"""A name and its meaning, or a command and its comment after a #, which is not wrapped"""


def fitted(text: str) -> str:
    """The text in the terminal's width: paragraphs, and the last column of tables. Commands and options stay whole."""
    width = max(60, shutil.get_terminal_size().columns)
    lines: list[str] = []
    for indented, group in itertools.groupby(text.split("\n"), lambda line: line.startswith(" ") or not line):
        block = list(group)
        if not indented and max(map(len, block)) > width:
            block = textwrap.wrap(" ".join(block), width, break_long_words=False, break_on_hyphens=False)
        for line in block:
            row = TABLE_ROW.fullmatch(line) if len(line) > width else None
            if row and len(row[1]) <= width - 20:
                line = textwrap.fill(row[2], width, initial_indent=row[1], subsequent_indent=" " * len(row[1]))
            lines.append(line)
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Help starts with the purpose. An error is a one-line Failure (2) with a suggestion for the misspelt word."""

    def __init__(self, **settings: Any) -> None:
        # Launchers look for whole names, such as --run-dir, in a command line.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return fitted(formatter.format_help())

    def flags(self) -> Iterator[str]:
        """Option strings of this parser and its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    yield from one.flags()

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            message += near(unknown[1], self.flags())
        elif wrong := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message):
            # Python 3.14 writes the choices without quotes.
            message += near(wrong[1], [word.strip(" '") for word in wrong[2].split(",")])
        raise Failure(f"{message} (see {self.prog} --help)", USAGE)
