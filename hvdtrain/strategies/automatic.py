"""`--strategy auto`: the strategy is chosen before step 0, from measurements. `hvdtrain.plan.choice` chooses.

auto               any strategy whose effect on learning has been recorded
auto:exact         exact sums only
auto:within=0.3    only strategies whose recorded loss of final accuracy is below 0.3 points
"""

from __future__ import annotations

import dataclasses
import math

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

NAME = "auto"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What `--strategy auto` may choose."""

    exact: bool = False
    within: float | None = None
    """Points of final accuracy"""


def rule(text: str) -> Rule | None:
    """Parse a strategy string; None if it names a strategy. Raises Failure (78) for a setting that does not exist."""
    name, _, setting = text.partition(":")
    if name != NAME:
        return None
    if not setting:
        return Rule()
    if setting == "exact":
        return Rule(exact=True)
    key, _, value = setting.partition("=")
    try:
        points = float(value) if key == "within" else math.nan
    except ValueError:
        points = math.nan
    if not 0 <= points < 100:
        raise Failure(
            f"--strategy {text}: auto has no such setting; hint: auto:exact or auto:within=0.3", exits.BAD_CONFIG
        )
    return Rule(within=points)
