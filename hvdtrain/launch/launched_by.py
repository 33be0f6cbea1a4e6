"""What the launch scripts tell the ranks of themselves: for the run's manifest, and for the advice how to go on."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.launch.tuning import Setting

VARIABLE = "HVDTRAIN_LAUNCHED_WITH"
LONGEST_BYTES = 1 << 16


def to_environment(launcher: str, settings: Sequence[Setting]) -> dict[str, str]:
    """The variable for the ranks: how to type the launcher with its hosts, and each setting with its reason."""
    about = {"launcher": launcher, "settings": [dataclasses.asdict(one) for one in settings]}
    return {VARIABLE: json.dumps(about, separators=(",", ":"))}


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """In a rank: what was told; nothing if no launch script of ours started it."""
    text = environment.get(VARIABLE, "")
    try:
        about = json.loads(text) if len(text) <= LONGEST_BYTES else None
    except (ValueError, RecursionError):
        about = None
    return about if isinstance(about, dict) and isinstance(about.get("launcher"), str) else {}
