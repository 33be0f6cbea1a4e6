"""The argument parser of all commands except training, and suggestions for misspelt words."""

from __future__ import annotations

import argparse
import difflib
import re
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


class Parser(argparse.ArgumentParser):
    """Help starts with the purpose. An error is a one-line Failure (2) with a suggestion for the misspelt word."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

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
        return formatter.format_help()

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
