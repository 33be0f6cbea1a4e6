"""Where a script's records lie, and what they show of its command line and of the numbers that it tells."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.records import metrics
from hvdtrain.records.metrics import Score

SHARES = {"accuracy", "acc", "f1", "precision", "recall", "auc"}
"""Scores that are shares of 1, if they are told so"""
LOWER = re.compile(r"loss|err|mae|mse|mape|perplexity|wer|cer|fid")
"""Names of scores that are better when lower"""


def free(folder: str | None, *, again: bool) -> str | None:
    """The run folder that is asked for. A script that starts `again`, or that torchrun starts again, is a run of its
    own beside the earlier ones: in `folder`-2, -3, ..."""
    again |= os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not folder or not again:
        return folder or None
    names = itertools.chain([folder], (f"{folder.rstrip('/')}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not Path(name, "manifest.json").exists())


def seed_and_rest(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The seed that a command line gives, and its other arguments, which tell experiments apart: repeats differ in
    their seed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seed", nargs="?")
    given, rest = parser.parse_known_args(argv[1:])
    return int(given.seed) if given.seed and given.seed.isdecimal() else None, rest


def number(name: str, value: Any) -> float:
    """A told number. Raises ValueError for what is none, or has no name."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"log({name}=...) takes a number, not {value!r:.60}") from error
    bare = re.sub("^(train|val|validation|test)_", "", name)
    if bare not in ("loss", "epoch", "samples") and not metrics.NAME.fullmatch(bare):
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
