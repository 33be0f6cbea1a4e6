"""What `--strategy help` prints: every strategy, what it does and what it sends; `help:NAME` tells all about one."""

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
from hvdtrain.strategies.spec import described, parse, spelt

USUAL_HOSTS = 4
"""Shown for a process that no launcher has given hosts"""
WIDTH = 92


def asked(strategy: str) -> bool:
    """Whether --strategy asks for help."""
    return strategy.partition(":")[0] == "help"


def show(strategy: str, shapes: Sequence[Shape], layout: Layout) -> None:
    """Prints help for a model of these trainable arrays. Raises Failure (78) for help about a name nobody knows."""
    hosts = layout.hosts if layout.hosts > 1 else USUAL_HOSTS
    layout = dataclasses.replace(layout, ranks=max(layout.ranks, hosts), hosts=hosts)
    _, _, name = strategy.partition(":")
    print("\n".join(_one(name, shapes, layout) if name else _all(shapes, layout)))


def _all(shapes: Sequence[Shape], layout: Layout) -> list[str]:
    lines = [f"MB sent per host and step, on average, over {layout.hosts} hosts, and what each strategy does:"]
    for title, kind in (("gradients are summed in every step", Reducer), ("or they are exchanged otherwise", Strategy)):
        lines += ["", title]
        for name in registry.names(kind):
            sent = parse(name).cost(shapes, layout).sent_bytes / 1e6
            head = f"  {name:<13}{sent:>9.3f}  "
            purpose = _purpose(registry.found(name)).partition(". ")[0].removesuffix(".")
            lines += textwrap.wrap(purpose, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
            if fields := "; ".join(described(registry.found(name))):
                lines += textwrap.wrap(fields, WIDTH, initial_indent=" " * 26, subsequent_indent=" " * 28)
    holders = [name for name in registry.names(Strategy) if registry.found(name).holds_reducer]
    return [
        *lines,
        "",
        f"{', '.join(holders)} send by the reducer behind a plus (default: {registry.DEFAULT_REDUCER}):",
        f"  --strategy {registry.RUNGS[-1][0]}",
        "About one of them: --strategy help:NAME. Which to take: docs/STRATEGIES.md",
    ]


def _one(name: str, shapes: Sequence[Shape], layout: Layout) -> list[str]:
    exchange = parse(name)
    part = exchange.schedule or exchange.reducer
    assert part is not None
    cls, cost = part.cls, exchange.cost(shapes, layout)
    lines = [f"{exchange}: {_purpose(cls)}", ""]
    hints, docs = get_type_hints(cls.Settings), constraints.field_docs(cls.Settings)
    for field in dataclasses.fields(cls.Settings):
        default = f"default {spelt(field.default)}" if spelt(field.default) else "optional"
        lines.append(f"  {field.name}={constraints.kind(field, hints[field.name])}, {default}")
        lines += [f"      {line}" for line in textwrap.wrap(" ".join(docs[field.name].split()), WIDTH)]
    if not dataclasses.fields(cls.Settings):
        lines.append("  nothing to set")
    work = f", {cost.work / 1e6:.3g} million numbers rounded, selected or multiplied" if cost.work else ""
    behind = f", behind {cost.behind}" if cost.behind else ""
    plus = f"+{registry.RUNGS[1][0]}" if exchange.schedule and exchange.reducer else ""
    return [
        *lines,
        "",
        f"a step of this model, over {layout.hosts} hosts, costs each {cost.sent_bytes / 1e6:.3f} MB in "
        f"{cost.rounds:g} rounds{behind}{work}",
        f"example: --strategy {part.name}{_example(cls)}{plus}",
    ]


def _purpose(cls: Any) -> str:
    """The first paragraph of its module."""
    return " ".join((sys.modules[cls.__module__].__doc__ or "").partition("\n\n")[0].split())


def _example(cls: Any) -> str:
    shown = {field.name: field.metadata.get("example") for field in dataclasses.fields(cls.Settings)}
    words = [f"{name}={spelt(value)}" for name, value in shown.items() if value is not None]
    return ":" + ",".join(words) if words else ""
