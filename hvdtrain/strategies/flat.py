"""The flags that one string replaced: what they read as today, in records of then and for those who still type them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hvdtrain.strategies import registry
from hvdtrain.strategies.spec import parse
from hvdtrain.system.exits import Failure

RENAMED = {"local_start": "start", "ddp_hook": "hook"}
FLAT = (
    *("inner", "rank", "bits", "density", "every", "local_start", "outer_lr", "outer_momentum", "staleness"),
    *("servers", "shares", "ddp_hook"),
)
"""Settings of earlier configs, as keys"""


def translated(config: Mapping[str, Any]) -> str:
    """The canonical string of a config of today or of then; as it stands there if nobody knows its strategy.

    Of a flat one only what its strategy and its reducer have is taken, and what is None or lacking is the default.
    """
    name = str(config["strategy"])
    try:
        if not any(key in config for key in FLAT):
            return str(parse(name))
        words = [_with_settings(name, config)]
        if getattr(registry.found(name), "holds_reducer", False) and config.get("inner"):
            words.append(_with_settings(str(config["inner"]), config))
        return str(parse("+".join(words)))
    except (Failure, KeyError):
        return name


def _with_settings(name: str, config: Mapping[str, Any]) -> str:
    given = {RENAMED.get(key, key): config[key] for key in FLAT if config.get(key) is not None}
    fields = [field.name for field in dataclasses.fields(registry.found(name).Settings)]
    words = [f"{key}={str(given[key]).replace(',', ':')}" for key in fields if key in given]
    return name + (":" + ",".join(words) if words else "")


def lasting(config: Mapping[str, Any]) -> str:
    """`translated`, of what no other start may change; the ranks' shares of a step are no part of that."""
    try:
        exchange = parse(translated(config))
    except Failure:
        return str(config["strategy"])
    if exchange.schedule is None:
        return str(exchange)
    settings = exchange.schedule.settings
    first = {field.name: field.default for field in dataclasses.fields(settings) if field.metadata.get("may_change")}
    schedule = dataclasses.replace(exchange.schedule, settings=dataclasses.replace(settings, **first))
    return str(dataclasses.replace(exchange, schedule=schedule))


def refuse(given: Mapping[str, Any], asked: str, how: Mapping[str, str], code: int) -> None:
    """Raises Failure if there are flat settings in `given`: names each as it was given (`how`) and what to give now in
    place of all. `asked`: the strategy they stand beside."""
    flat = {key: given[key] for key in FLAT if key in given}
    if not flat:
        return
    takers = [_with_settings(name, flat) for name in (*registry.SCHEDULES, *registry.REDUCERS)]
    takers = [each for each in takers if ":" in each]
    if flat.keys() == {"inner"}:
        takers = [f"{name}+{flat['inner']}" for name, cls in registry.SCHEDULES.items() if cls.holds_reducer]
    if (new := translated({"strategy": asked, **flat})) != asked:
        takers = [new]
    words = " ".join(how[key] for key in flat)
    instead = " or ".join(f"--strategy {each}" for each in takers)
    raise Failure(f"{words}: the strategy's settings stand in its name now; give {instead}", code)
