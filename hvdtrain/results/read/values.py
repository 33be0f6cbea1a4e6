"""Values of records without a schema: config, plan and ranks of a manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hvdtrain.system.exits import printable


def number(value: Any) -> float | None:
    """The value as a finite number; None if it is not one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None


def numbers(values: Iterable[Any]) -> list[float]:
    return [known for value in values if (known := number(value)) is not None]


def mean(values: Iterable[Any]) -> float | None:
    """None if there is no value, or any value is not a number."""
    given = list(values)
    known = numbers(given)
    return math.fsum(known) / len(known) if known and len(known) == len(given) else None


def text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None
