"""One string names an exchange: `local-sgd:every=6,staleness=1+powersgd:rank=12,bits=4`.

    schedule[:key=value,...][+reducer[:key=value,...]]    or a reducer alone, which sums the gradients of every step

It needs no quotes in a shell. Settings, their checks and their help come from each class's `Settings`. The canonical
string has the settings that differ from the default only, in the order of their fields, and no reducer that is the
default one: manifests, checkpoints, results and sweeps hold that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config import constraints
from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies import registry
from hvdtrain.strategies.algorithms.overlapped import Overlapped
from hvdtrain.strategies.algorithms.synchronous import Synchronous
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class Part:
    """A schedule or a reducer, and what is set of it."""

    name: str
    cls: Any
    settings: Any

    def __str__(self) -> str:
        given = [(field, getattr(self.settings, field.name)) for field in dataclasses.fields(self.settings)]
        words = [f"{field.name}={spelt(value)}" for field, value in given if value != field.default]
        return self.name + (":" + ",".join(words) if words else "")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a --strategy string means; `str` gives the canonical one."""

    schedule: Part | None
    """None: the reducer alone"""
    reducer: Part | None

    def __str__(self) -> str:
        parts = [self.schedule, self.reducer]
        if self.schedule and self.reducer == part(registry.DEFAULT_REDUCER):
            parts.remove(self.reducer)
        return "+".join(str(each) for each in parts if each)

    @property
    def strategy(self) -> type[Strategy]:
        if self.schedule:
            return self.schedule.cls
        return Overlapped if self.reducer and self.reducer.cls.divisible else Synchronous

    @property
    def settings(self) -> Any:
        return self.schedule.settings if self.schedule else None

    @property
    def rung(self) -> int:
        """See `Strategy.rung`."""
        return max(self.strategy.rung, self.reducer.cls.rung if self.reducer else -1)

    @property
    def remembers(self) -> bool:
        """Whether something of a step is kept for a later one, where infinite gradients would stay for ever."""
        return self.strategy.remembers or (self.reducer is not None and bool(self.reducer.cls.remembers))

    def cost(self, shapes: Sequence[Shape], layout: Layout, *, in_parts: bool = True) -> Cost:
        """Of a training step of a model of these trainable arrays, for each host. `in_parts`: whether the replica tells
        gradients during backward (see `Strategy.parts`), as those of whole models do."""
        held = self.reducer
        round_ = held.cls.cost(shapes, layout.hosts, held.settings) if held else None
        if self.schedule is None and not in_parts:
            return Synchronous.cost(shapes, layout, self.settings, round_)
        return self.strategy.cost(shapes, layout, self.settings, round_)

    def fact(self, shapes: Sequence[Shape], layout: Layout, *, in_parts: bool = True) -> str:
        """The strategy and what it costs, for people."""
        if layout.hosts == 1 and self.reducer:
            return f"{self}: all ranks are on one host, nothing is compressed"
        cost = self.cost(shapes, layout, in_parts=in_parts)
        where = "per host and step" if layout.hosts > 1 else "per rank and step"
        behind = f", behind {cost.behind}" if cost.behind and layout.ranks > 1 else ""
        return f"{self}: {cost.sent_bytes / 1e6:.2f} MB sent {where} in {cost.rounds:g} rounds{behind}"

    def facts(self, *, in_parts: bool) -> dict[str, Any]:
        """What of the cost holds for every model and layout, for the records: overlaps_with and exact."""
        cost = self.cost([(1,)], Layout(ranks=2, hosts=2), in_parts=in_parts)
        return {"overlaps_with": cost.behind, "exact": cost.exact}

    def shares(self, ranks: int) -> tuple[float, ...] | None:
        """Of each rank in a step; None: equal ones, or still to be measured. Raises Failure (78) if they are not one
        for each of so many ranks."""
        given: tuple[float, ...] = self.settings.shares if self.strategy.divides else ()
        if given and len(given) != ranks:
            raise refusal(self, f"{len(given)} shares for {ranks} ranks; give one for each, in order of ranks")
        return given or None

    def check(self, config: TrainConfig) -> None:
        """Raises Failure (78) for a config that this does not go with."""
        if config.precision == "fp16" and self.remembers:
            raise Failure(
                f"--precision fp16 does not go with --strategy {self}: its loss scaling makes infinite gradients, and "
                "scales each step differently, so nothing can be kept from step to step; take --precision bf16",
                exits.BAD_CONFIG,
            )
        if config.horovod_timeline and self.strategy.backend != "horovod":
            what = f"--horovod-timeline: Horovod does not run with --strategy {self}; try --profile"
            raise Failure(what, exits.BAD_CONFIG)
        try:
            self.strategy.check(self.settings, config)
        except Failure as failure:
            raise refusal(self, str(failure)) from None

    def make(self, config: TrainConfig, world: Communicator, shapes: Sequence[Shape]) -> Strategy:
        """The strategy in this world."""
        held = self.reducer.cls(shapes, self.reducer.settings) if self.reducer else None
        return self.strategy(world, shapes, config, self.settings, held)


def parse(text: str) -> Exchange:
    """What the string means. Raises Failure (78), with what is known in place of what is not."""
    words = text.split("+")
    first = _part(text, words[0], [*registry.names(Strategy), *registry.names(Reducer)], "strategy")
    if len(words) > 2:
        raise refusal(text, "one reducer goes behind a schedule, as in SCHEDULE+REDUCER")
    if issubclass(first.cls, Reducer):
        if len(words) > 1:
            raise refusal(text, f"{first.name} is a reducer, which stands alone or behind the plus of a schedule")
        return Exchange(None, first)
    if not first.cls.holds_reducer:
        if len(words) > 1:
            holders = [name for name in registry.names(Strategy) if registry.found(name).holds_reducer]
            raise refusal(text, f"{first.name} takes no reducer behind a plus; these do: {', '.join(holders)}")
        return Exchange(first, None)
    return Exchange(
        first, _part(text, (words[1:] or [registry.DEFAULT_REDUCER])[0], registry.names(Reducer), "reducer")
    )


def canonical(text: str) -> str:
    """The canonical form of a strategy string; the text itself if it names a strategy that is not installed."""
    try:
        return str(parse(text))
    except Failure:
        return text


def resumable(text: str) -> str:
    """The canonical form without the settings that a resumed run may change."""
    try:
        exchange = parse(text)
    except Failure:
        return text
    if exchange.schedule is None:
        return str(exchange)
    settings = exchange.schedule.settings
    defaults = {field.name: field.default for field in dataclasses.fields(settings) if field.metadata.get("may_change")}
    schedule = dataclasses.replace(exchange.schedule, settings=dataclasses.replace(settings, **defaults))
    return str(dataclasses.replace(exchange, schedule=schedule))


def part(name: str, given: str = "") -> Part:
    """A name of the table and the settings behind its colon. Raises Failure (78)."""
    cls = registry.found(name)
    fields = {field.name: field for field in dataclasses.fields(cls.Settings)}
    hints = get_type_hints(cls.Settings)
    values: dict[str, Any] = {}
    for word in given.split(",") if given else ():
        key, _, value = word.partition("=")
        if key not in fields:
            known = "; ".join(described(cls)) or "nothing to set"
            _bad(f"no setting {key!r} of {name}{near(key, fields)}; it has: {known}")
        if key in values:
            _bad(f"{key} of {name} is given twice")
        try:
            values[key] = read(hints[key], value)
        except ValueError:
            _bad(f"{key} of {name} is {value!r}: {constraints.wanted(fields[key], hints[key])}")
    return Part(name, cls, cls.Settings(**values))


def described(cls: Any) -> list[str]:
    """The settings of a class: `rank (whole number >= 1, default 2)`."""
    hints = get_type_hints(cls.Settings)
    return [
        f"{field.name} ({constraints.kind(field, hints[field.name])}, default {spelt(field.default) or 'none'})"
        for field in dataclasses.fields(cls.Settings)
    ]


def spelt(value: Any) -> str:
    """As it stands in the string."""
    if isinstance(value, tuple):
        return ":".join(map(spelt, value))
    if isinstance(value, float):
        short = f"{value:g}"
        return (short if float(short) == value else repr(value)).replace("e+", "e")  # a plus stands before a reducer
    return str(value)


def read(hint: Any, text: str) -> Any:
    """The value of a type that a text spells. Raises ValueError."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        for choice in choices:
            if str(choice) == text:
                return choice
        raise ValueError(text)
    if origin is tuple:
        return tuple(read(choices[0], word) for word in text.split(":"))
    if hint not in (int, float, str):
        raise TypeError(f"a setting of type {hint} cannot be spelt")
    return hint(text)


def refusal(exchange: Exchange | str, why: str) -> Failure:
    return Failure(f"--strategy {exchange}: {why}", exits.BAD_CONFIG)


def _bad(why: str) -> NoReturn:
    raise Failure(why, exits.BAD_CONFIG)


def _part(text: str, word: str, known: Sequence[str], what: str) -> Part:
    """`part`, of the names known; its Failure names the whole string."""
    name, _, given = word.partition(":")
    if name not in known:
        told = f"unknown {what} {name!r}{near(name, known)}; known: {', '.join(known)} (see --strategy help)"
        raise refusal(text, told)
    try:
        return part(name, given)
    except Failure as failure:
        raise refusal(text, str(failure)) from None
