"""What a script's records show of its command line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

SECRET = re.compile(r"(?i)(token|secret|passw|credential|api[-_]?key)")
HIDDEN = "***"


def arguments(argv: Sequence[str]) -> tuple[list[str], int | None]:
    """The command line with `***` for what may be secret, and the seed that it gives."""
    words, seed, hide = [], None, False
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, value = word.partition("=")
        if hide or (equals and SECRET.search(name)):
            words.append(f"{name}={HIDDEN}" if equals and not hide else HIDDEN)
        else:
            words.append(word)
        hide = word.startswith("-") and not equals and bool(SECRET.search(word))
        given = value if name == "--seed" else word if before == "--seed" else ""
        seed = int(given) if given.isdigit() else seed
    return words, seed


def apart(argv: Sequence[str]) -> list[str]:
    """The arguments that tell experiments apart: repeats differ in their seed."""
    kept = []
    for before, word in itertools.pairwise(argv):
        if word != "--seed" and before != "--seed" and not word.startswith("--seed="):
            kept.append(word)
    return kept
