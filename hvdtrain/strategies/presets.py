"""Presets: `--strategy exact`, `balanced` and `fast` stand for strategies that were measured.

Which ones depends on the optimizer. Records and tables contain the strategy instead, so that results stay comparable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Preset(NamedTuple):
    strategy: str
    time: str
    """Seconds of a step"""
    sent: str
    """Bytes of a step, relative to exact sums"""
    learning: str


class Family(NamedTuple):
    model: str
    """The model and the measure of learning"""
    presets: Mapping[str, Preset]


LOCAL_ADAM = "local-sgd:every=4,staleness=1,parts=4,lr_scaling=sqrt+int2"
LOCAL_SGD = "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4"
ADAM = {
    "exact": Preset("hierarchical", "0.42 s at 100 Mbit/s, 3.5 s at 10", "1", "steps 1"),
    "balanced": Preset("int4", "0.12 s at 100 Mbit/s, 0.62 s at 10", "1/8", "steps 1.01"),
    "fast": Preset(LOCAL_ADAM, "0.09 s at 100 and 10 Mbit/s", "1/68", "steps 1.12"),
}
SGD = {
    "exact": Preset("hierarchical", "0.94 s at 100 Mbit/s, 7.6 s at 10 (projected), 128x128", "1", "accuracy 89.51 %"),
    "balanced": Preset(
        "powersgd:rank=4", "0.21 s at 100 Mbit/s, 0.30 s at 10, 128x128", "1/75", "0.20 points lower [0.06 to 0.34]"
    ),
    "fast": Preset(LOCAL_SGD, "0.25 s at 100 Mbit/s, 0.26 s at 10, 80x80", "1/116", "0.14 points lower [0.00 to 0.28]"),
}
MUON = {
    "exact": Preset("hierarchical", "7.3 s at 10 Mbit/s (projected), 80x80", "1", "accuracy 89.58 %"),
    "balanced": Preset(
        "powersgd:rank=16,bits=4", "0.43 s at 10 Mbit/s, 80x80", "1/44", "0.36 points lower [0.27 to 0.44]"
    ),
}
MUON["fast"] = MUON["balanced"]  # averaging weights needs a quarter more steps
UNKNOWN = "adam"
"""The family that stands for an optimizer that is not known, as in scripts"""
FAMILIES = {
    "adam": Family("byte GPT of 0.67 M parameters with AdamW as a DDP script, steps to a held-out loss", ADAM),
    "sgd": Family("ResNet-34 at width 0.25, test accuracy on Fashion-MNIST at 32x32", SGD),
    "muon": Family("ResNet-34 at width 0.25, test accuracy on Fashion-MNIST at 80x80", MUON),
}
NAMES = tuple(FAMILIES[UNKNOWN].presets)


def of(text: str) -> str | None:
    """Return the preset that a strategy string names; None if it names none. Raises Failure (78) for options."""
    name = re.split("[:+]", text)[0]
    if name not in NAMES:
        return None
    if name != text:
        raise Failure(f"--strategy {text}: a preset takes no options; hint: --strategy {name}", exits.BAD_CONFIG)
    return name


def family(optimizer: type) -> Any:
    """Return the name of the optimizer with which strategies were measured that resembles a script's most."""
    return next((name for name in FAMILIES if name in {each.__name__.lower() for each in optimizer.__mro__}), UNKNOWN)


def strategy(name: str, optimizer: str | None) -> str:
    """Return the strategy of a preset with an optimizer; None: not known."""
    return FAMILIES.get(optimizer or UNKNOWN, FAMILIES[UNKNOWN]).presets[name].strategy


def named(text: str, optimizer: str | None) -> str:
    """Return the preset that stands for a canonical strategy; the strategy itself if there is none."""
    return next((name for name in NAMES if strategy(name, optimizer) == text), text)
