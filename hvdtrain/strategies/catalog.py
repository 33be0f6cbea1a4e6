"""The text of `--strategy help`, which lists all strategies, and of `--strategy help:NAME`, which explains one."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, get_type_hints

from hvdtrain.config import constraints
from hvdtrain.strategies import registry
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.spec import described, format_value, parse, timing

DEFAULT_HOSTS = 4
"""Hosts that the help assumes for a process without a launcher"""
WIDTH = 92
EXAMPLE = "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4"


def help_requested(strategy: str) -> bool:
    """Whether --strategy asks for help."""
    return strategy.partition(":")[0] == "help"


def show(strategy: str, shapes: Sequence[Shape], layout: Layout) -> None:
    """Print the help for a model with these trainable arrays. Raises Failure (78) for an unknown name."""
    hosts = layout.hosts if layout.hosts > 1 else DEFAULT_HOSTS
    layout = dataclasses.replace(layout, ranks=max(layout.ranks, hosts), hosts=hosts)
    _, _, name = strategy.partition(":")
    print("\n".join(_one(name, shapes, layout) if name else _all(shapes, layout)))


def _all(shapes: Sequence[Shape], layout: Layout) -> list[str]:
    lines = [f"MB sent per host and step with {layout.hosts} hosts, and what each strategy does:"]
    kinds = (("reducers, which sum the gradients of every step", Reducer), ("algorithms", Strategy))
    for title, kind in kinds:
        lines += ["", title]
        for name in registry.names(kind):
            sent = parse(name).cost(shapes, layout).sent_bytes / 1e6
            head = f"  {name:<13}{sent:>9.3f}  "
            purpose = _purpose(registry.lookup(name)).partition(". ")[0].removesuffix(".")
            lines += textwrap.wrap(purpose, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
            if fields := "; ".join(described(registry.lookup(name))):
                lines += textwrap.wrap(fields, WIDTH, initial_indent=" " * 26, subsequent_indent=" " * 28)
    able = [name for name in registry.names(Strategy) if registry.lookup(name).capabilities.takes_reducer]
    return [
        *lines,
        "",
        f"A reducer can follow the plus of {', '.join(able)} (default: {registry.DEFAULT_REDUCER}):",
        f"  --strategy {EXAMPLE}",
        "Details of one strategy: --strategy help:NAME. Which one to choose: docs/guides/choose-a-strategy.md",
        "Times per step on your hosts: hvdtrain plan. A choice before step 0: --strategy auto.",
    ]


def _one(name: str, shapes: Sequence[Shape], layout: Layout) -> list[str]:
    exchange = parse(name)
    component = exchange.algorithm or exchange.reducer
    assert component is not None
    cls, cost = component.cls, exchange.cost(shapes, layout)
    lines = [f"{exchange}: {_purpose(cls)}", ""]
    hints, docs = get_type_hints(cls.Settings), constraints.field_docs(cls.Settings)
    for field in dataclasses.fields(cls.Settings):
        default = f"default {format_value(field.default)}" if format_value(field.default) else "optional"
        lines.append(f"  {field.name}={constraints.kind(field, hints[field.name])}, {default}")
        lines += [f"      {line}" for line in textwrap.wrap(" ".join(docs[field.name].split()), WIDTH)]
    if not dataclasses.fields(cls.Settings):
        lines.append("  no settings")
    numbers = f"; {cost.numbers / 1e6:.3g} million numbers rounded, selected or multiplied" if cost.numbers else ""
    plus = "+powersgd:rank=4" if exchange.algorithm and exchange.reducer else ""
    return [
        *lines,
        "",
        f"cost of a step of this model for each of {layout.hosts} hosts: {cost.sent_bytes / 1e6:.3f} MB"
        f"{timing(cost)}{numbers}",
        f"example: --strategy {component.name}{_example(cls)}{plus}",
    ]


def _purpose(cls: Any) -> str:
    """Return the first paragraph of the class's module docstring."""
    return " ".join((sys.modules[cls.__module__].__doc__ or "").partition("\n\n")[0].split())


def _example(cls: Any) -> str:
    values = {field.name: field.metadata.get("example") for field in dataclasses.fields(cls.Settings)}
    words = [f"{name}={format_value(value)}" for name, value in values.items() if value is not None]
    return ":" + ",".join(words) if words else ""
