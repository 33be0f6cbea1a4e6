"""Pass facts about the launcher to its ranks, for the run's manifest and for messages that say how to resume."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.launch.tuning import Setting

VARIABLE = "HVDTRAIN_LAUNCHED_WITH"
LONGEST_BYTES = 1 << 16


def to_environment(launcher: str, settings: Sequence[Setting], ranks: int, hosts: int) -> dict[str, str]:
    """The variable for the ranks: the launcher's command line, each setting with its reason, and how many ranks and
    hosts it starts."""
    chosen = [dataclasses.asdict(one) for one in settings]
    document = {"launcher": launcher, "settings": chosen, "ranks": ranks, "hosts": hosts}
    return {VARIABLE: json.dumps(document, separators=(",", ":"))}


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The launcher's facts, read by a rank. Empty if no hvdtrain launcher started it."""
    text = environment.get(VARIABLE, "")
    try:
        document = json.loads(text) if len(text) <= LONGEST_BYTES else None
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) and isinstance(document.get("launcher"), str) else {}
