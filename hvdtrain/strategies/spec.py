"""The strategy string: a preset, or for example `local-sgd:every=6,staleness=1+powersgd:rank=12,bits=4`.

    ALGORITHM[:KEY=VALUE,...][+REDUCER[:KEY=VALUE,...]], or a reducer alone, which sums the gradients of every step

The string needs no quotes in a shell. Settings, their checks and their help come from the `Settings` of each class. The
canonical string contains only the settings that differ from their defaults, in the order of their fields, and omits the
default reducer. Manifests, checkpoints, results and sweeps store the canonical string.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config import constraints
from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies import automatic, presets, registry
from hvdtrain.strategies.algorithms.synchronous import Synchronous
from hvdtrain.strategies.base import Capabilities, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class Component:
    """An algorithm or a reducer with its settings."""

    name: str
    cls: Any
    settings: Any

    def __str__(self) -> str:
        values = [(field, getattr(self.settings, field.name)) for field in dataclasses.fields(self.settings)]
        words = [f"{field.name}={format_value(value)}" for field, value in values if value != field.default]
        return self.name + (":" + ",".join(words) if words else "")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A resolved strategy: the algorithm, its reducer and their settings. `str` returns the canonical string."""

    algorithm: Component | None
    """None if --strategy names a reducer alone"""
    reducer: Component | None

    def __str__(self) -> str:
        components = [self.algorithm, self.reducer]
        if self.algorithm and self.reducer == component(registry.DEFAULT_REDUCER):
            components.remove(self.reducer)
        return "+".join(str(each) for each in components if each)

    @property
    def strategy(self) -> type[Strategy]:
        """The class of the algorithm; for a reducer alone, the class that runs it."""
        return self.algorithm.cls if self.algorithm else Synchronous

    @property
    def settings(self) -> Any:
        """The settings of the algorithm, if there is one."""
        return self.algorithm.settings if self.algorithm else None

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """The capabilities of the algorithm together with its reducer."""
        own = self.strategy.capabilities
        if self.reducer is None:
            return own
        reducer: type[Reducer] = self.reducer.cls
        return dataclasses.replace(own, has_residual=own.has_residual or bool(reducer.residual_key))

    def cost(self, shapes: Sequence[Shape], layout: Layout, *, buckets: bool = True) -> Cost:
        """Return the cost of an exchange for each host, for a model with these trainable arrays.

        `buckets`: whether the replica reports gradients during backward. Pipelines and micro-batches do not.
        """

        def reducer_cost(parts: Sequence[Sequence[int]]) -> list[Cost]:
            assert self.reducer is not None
            if not buckets or not self.reducer.cls.supports_buckets:
                parts = [range(len(shapes))]
            return self.reducer.cls.bucket_costs(shapes, parts, layout.hosts, self.reducer.settings)

        return self.strategy.cost(shapes, layout, self.settings, reducer_cost)

    def fact(self, shapes: Sequence[Shape], layout: Layout, *, buckets: bool = True) -> str:
        """Describe the strategy and its cost in one line."""
        if layout.hosts == 1 and self.reducer:
            return f"{self}: all ranks are on one host, nothing is compressed"
        cost = self.cost(shapes, layout, buckets=buckets)
        sender = "host" if layout.hosts > 1 else "rank"
        return f"{self}: {cost.sent_bytes / 1e6:.2f} MB sent per {sender} and step{timing(cost)}"

    def facts(self, *, buckets: bool) -> dict[str, Any]:
        """Return what manifests record about the exchange, which holds for every model and layout."""
        cost = self.cost([(64, 64)] * 8, Layout(ranks=2, hosts=2), buckets=buckets)
        return {"overlaps_with": cost.overlaps_with, "exact": cost.exact}

    def check(self, config: TrainConfig) -> None:
        """Raise Failure (78) for a config that the strategy cannot be combined with."""
        if config.precision == "fp16" and self.capabilities.has_residual:
            raise Failure(
                f"--precision fp16 cannot be combined with --strategy {self}: loss scaling produces infinite gradients "
                "and scales each step differently, so nothing can be kept between steps; hint: --precision bf16",
                exits.BAD_CONFIG,
            )
        if config.backend != "tcp" and self.capabilities.backend != "tcp":
            raise Failure(
                f"--backend {config.backend} is for strategies on hvdtrain's TCP backend, and --strategy {self} uses "
                f"another; hint: --strategy {registry.DEFAULT_REDUCER}",
                exits.BAD_CONFIG,
            )
        if config.shares is not None and self.capabilities.backend != "tcp":
            raise Failure(
                f"--shares needs hvdtrain's TCP backend, and --strategy {self} uses another; hint: --strategy "
                f"{registry.DEFAULT_REDUCER}",
                exits.BAD_CONFIG,
            )
        try:
            self.strategy.check(self.settings, config)
        except Failure as failure:
            raise error(self, str(failure)) from None

    def make(self, config: TrainConfig, world: Communicator, shapes: Sequence[Shape]) -> Strategy:
        """Make the strategy for the ranks of `world` and a model with these trainable arrays."""
        reducer = self.reducer.cls(shapes, self.reducer.settings) if self.reducer else None
        return self.strategy(world, shapes, config, self.settings, reducer)


def timing(cost: Cost) -> str:
    """Describe the latencies and the overlap of an exchange: ` in 6 latencies, overlapping with backward`."""
    if not cost.phases:
        return ""
    overlap = f", overlapping with {cost.overlaps_with}" if cost.overlaps_with else ""
    return f" in {cost.hops:g} network latencies{overlap}"


def parse(text: str, optimizer: str | None = None) -> Spec:
    """Resolve a strategy string. Raises Failure (78), which lists the valid names or settings.

    `optimizer`: decides what a preset stands for; None: not known.
    """
    if automatic.rule(text):
        raise error(text, f"auto is not possible here; hint: name a strategy: {', '.join(presets.NAMES)}")
    if preset := presets.of(text):
        text = presets.strategy(preset, optimizer)
    words = text.split("+")
    first = _component(text, words[0], [*registry.names(Strategy), *registry.names(Reducer)], "strategy")
    if len(words) > 2:
        raise error(text, "more than one reducer; hint: ALGORITHM+REDUCER")
    if issubclass(first.cls, Reducer):
        if len(words) > 1:
            raise error(text, f"{first.name} is a reducer; hint: use it alone or after the plus of an algorithm")
        return Spec(None, first)
    if not first.cls.capabilities.takes_reducer:
        if len(words) > 1:
            able = [name for name in registry.names(Strategy) if registry.lookup(name).capabilities.takes_reducer]
            raise error(text, f"{first.name} takes no reducer; hint: these do: {', '.join(able)}")
        return Spec(first, None)
    reducer = (words[1:] or [registry.DEFAULT_REDUCER])[0]
    return Spec(first, _component(text, reducer, registry.names(Reducer), "reducer"))


def canonical(text: str) -> str:
    """Return the canonical form of a strategy string, or the text itself if its strategy is not installed."""
    try:
        return str(parse(text))
    except Failure:
        return text


def component(name: str, settings: str = "") -> Component:
    """Resolve a known name and the settings after its colon. Raises Failure (78)."""
    cls = registry.lookup(name)
    fields = {field.name: field for field in dataclasses.fields(cls.Settings)}
    hints = get_type_hints(cls.Settings)
    values: dict[str, Any] = {}
    for word in settings.split(",") if settings else ():
        key, _, value = word.partition("=")
        if key not in fields:
            known = "; ".join(described(cls)) or "none"
            _bad(f"no setting {key!r} of {name}{near(key, fields)}; its settings: {known}")
        if key in values:
            _bad(f"{key} of {name} is given twice")
        try:
            values[key] = read(hints[key], value)
        except ValueError:
            _bad(f"{key} of {name} is {value!r}; hint: {constraints.wanted(fields[key], hints[key])}")
    return Component(name, cls, cls.Settings(**values))


def described(cls: Any) -> list[str]:
    """Describe the settings of a class: `rank (whole number >= 1, default 2)`."""
    hints = get_type_hints(cls.Settings)
    return [
        f"{field.name} ({constraints.kind(field, hints[field.name])}, default {format_value(field.default) or 'none'})"
        for field in dataclasses.fields(cls.Settings)
    ]


def format_value(value: Any) -> str:
    """Format a value for the strategy string."""
    if isinstance(value, float):
        short = f"{value:g}"
        return (short if float(short) == value else repr(value)).replace("e+", "e")  # a plus separates the reducer
    return str(value)


def read(hint: Any, text: str) -> Any:
    """Parse a value of a type. Raises ValueError."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        for choice in choices:
            if str(choice) == text:
                return choice
        raise ValueError(text)
    if hint not in (int, float, str):
        raise TypeError(f"a setting of type {hint} cannot be parsed")
    return hint(text)


def error(exchange: Spec | str, reason: str) -> Failure:
    return Failure(f"--strategy {exchange}: {reason}", exits.BAD_CONFIG)


def _bad(reason: str) -> NoReturn:
    raise Failure(reason, exits.BAD_CONFIG)


def _component(text: str, word: str, known: Sequence[str], kind: str) -> Component:
    """Resolve one of the `known` names with its settings; failures quote the whole string."""
    name, _, settings = word.partition(":")
    if name not in known:
        others = f"; hint: try a preset: {', '.join([*presets.NAMES, automatic.NAME])}" if kind == "strategy" else ""
        suggested = near(name, [*known, *presets.NAMES] if others else known)
        raise error(text, f"unknown {kind} {name!r}{suggested} (known: {', '.join(known)}){others}")
    try:
        return component(name, settings)
    except Failure as failure:
        raise error(text, str(failure)) from None
