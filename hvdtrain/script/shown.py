"""What a script's records show of its command line, and of the numbers that it tells."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from hvdtrain import measures, records
from hvdtrain.measures import Score

SECRET = re.compile(r"(?i)(token(?!s|i[sz])|secret|passw|credential|api[-_]?key)")  # not --max-tokens, --tokenizer
HIDDEN = "***"
SHARES = {"accuracy", "acc", "f1", "precision", "recall", "auc"}
"""Scores that are shares of 1, if they are told so"""
LOWER = re.compile(r"loss|err|mae|mse|mape|perplexity|wer|cer|fid")
"""Names of scores that are better when lower"""


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


def number(name: str, value: Any) -> float:
    """A told number. Raises ValueError for what is none, or has no name."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"log({name}=...) takes a number, not {value!r:.60}") from error
    bare = re.sub("^(train|val|validation|test)_", "", name)
    if bare not in ("loss", "epoch", "samples") and not measures.NAME.fullmatch(bare):
        raise ValueError(f"log({name}=...): a score's name is of lower-case letters, digits and _, and not 'score'")
    if name in ("epoch", "samples") and not (number >= 0 and number.is_integer()):
        raise ValueError(f"log({name}={value!r:.60}) takes a whole number of 0 or more")
    return number


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def score(name: str, value: float) -> Score:
    """What a score of this name is, as far as its name and first value show."""
    if name in SHARES and 0 <= value <= 1:
        return Score(label=name, least=0.0, most=1.0)
    return Score(label=name, higher_is_better=not LOWER.search(name))


def words(summary: records.Summary) -> str:
    """A run's end in a line."""
    where = f"run folder {summary.run_dir}: {summary.steps} steps"
    exchange = summary.step_shares.get("exchange")
    return where if exchange is None else f"{where}, {exchange:.0%} of a step waiting for the exchange"
