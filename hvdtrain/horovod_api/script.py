"""Facts for a script's run folder: the folder's name, the seed on the command line, and the logged numbers."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.records import metrics
from hvdtrain.records.metrics import Score

SHARES = {"accuracy", "acc", "f1", "precision", "recall", "auc"}
"""Names of scores between 0 and 1, unless the first value says otherwise (percent)"""
LOWER = re.compile(r"loss|err|mae|mse|mape|perplexity|wer|cer|fid")
"""Names of scores that are better when lower"""


def new_folder(folder: str | None, *, restarted: bool) -> str | None:
    """The name of the run folder. A script that is restarted, also by torchrun, gets `folder`-2, -3 ..."""
    restarted |= os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not folder or not restarted:
        return folder or None
    names = itertools.chain([folder], (f"{folder.rstrip('/')}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not Path(name, "manifest.json").exists())


def seed_and_rest(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The value of --seed, and the other arguments. Repeats of an experiment differ only in their seed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seed", nargs="?")
    options, rest = parser.parse_known_args(argv[1:])
    return int(options.seed) if options.seed and options.seed.isdecimal() else None, rest


def number(name: str, value: Any) -> float:
    """A logged value as a float. Raises ValueError if the value or its name is invalid."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"log({name}=...) takes a number, not {value!r:.60}") from error
    bare = re.sub("^(train|val|validation|test)_", "", name)
    if bare not in ("loss", "epoch", "samples") and not metrics.NAME.fullmatch(bare):
        raise ValueError(f"log({name}=...): names of scores have lower-case letters, digits and _, and are not 'score'")
    if name in ("epoch", "samples") and not (number >= 0 and number.is_integer()):
        raise ValueError(f"log({name}={value!r:.60}) takes a whole number >= 0")
    return number


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def score(name: str, value: float) -> Score:
    """The bounds and direction of a score, guessed from its name and first value."""
    if name in SHARES and 0 <= value <= 1:
        return Score(label=name, least=0.0, most=1.0)
    return Score(label=name, higher_is_better=not LOWER.search(name))
