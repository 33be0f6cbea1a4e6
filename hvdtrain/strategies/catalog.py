"""`hvdtrain strategies [NAME]`, which lists the presets and all strategies, or explains one.

`--strategy help[:NAME]` is the same, with the bytes of a workload's own model.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, get_type_hints

from hvdtrain.config import constraints
from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.strategies import presets, registry
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.spec import described, format_value, parse, timing
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser

PURPOSE = """List the presets of --strategy, with what each stands for and cost, and all strategies; or explain one.

The MB are those of ResNet-34 at width 0.25. With --strategy help a workload prints the same for its own model.

examples:
  hvdtrain strategies
  hvdtrain strategies powersgd
  python -m hvdtrain.captioning --strategy help
"""
DEFAULT_HOSTS = 4
"""Hosts that the help assumes for a process without a launcher"""
WIDTH = 92
EXAMPLE = "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4"


def parser() -> Parser:
    top = Parser(prog="hvdtrain strategies", description=PURPOSE)
    top.add_argument("name", metavar="NAME", nargs="?", default="", help="a strategy, a reducer or a preset")
    top.add_argument("--json", action="store_true", help="print one JSON document about all of them")
    return top


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    shapes = list(parameters(ResNetSpec(channels=1, classes=10, width=0.25)).values())
    layout = Layout(ranks=1, hosts=1)
    if options.json:
        print(json.dumps(as_json(shapes, _several(layout))))
    else:
        show(f"help:{options.name}", shapes, layout)
    return exits.OK


def help_requested(strategy: str) -> bool:
    """Whether --strategy asks for help."""
    return strategy.partition(":")[0] == "help"


def show(strategy: str, shapes: Sequence[Shape], layout: Layout) -> None:
    """Print the help for a model with these trainable arrays. Raises Failure (78) for an unknown name."""
    layout = _several(layout)
    _, _, name = strategy.partition(":")
    one = (
        functools.partial(_presets, [name]) if name in presets.NAMES else functools.partial(_one, name, shapes, layout)
    )
    print("\n".join(one() if name else _all(shapes, layout)))


def _several(layout: Layout) -> Layout:
    """The hosts of the launcher; without one, DEFAULT_HOSTS."""
    hosts = layout.hosts if layout.hosts > 1 else DEFAULT_HOSTS
    return dataclasses.replace(layout, ranks=max(layout.ranks, hosts), hosts=hosts)


def _presets(names: Sequence[str]) -> list[str]:
    """The strategies of presets with each optimizer, and their measured costs."""
    lines = [
        "presets: the time of a step, its bytes (exact sums: 1) and what was learned, on four hosts of half a core"
    ]
    for optimizer, family in presets.FAMILIES.items():
        others = ", and optimizers that are not known, as in scripts" if optimizer == presets.UNKNOWN else ""
        lines += ["", f"with --optimizer {optimizer}{others}", f"  measured: {family.model}"]
        for name in names:
            preset = family.presets[name]
            lines += [f"  {name:<13}{preset.strategy}", f"{'':15}{preset.time}; bytes {preset.sent}; {preset.learning}"]
    return lines


def as_json(shapes: Sequence[Shape], layout: Layout) -> dict[str, Any]:
    """All presets and strategies as one document."""
    return {
        "schema": "hvdtrain/strategies/1",
        "presets": {
            optimizer: {"model": model, "presets": {name: preset._asdict() for name, preset in known.items()}}
            for optimizer, (model, known) in presets.FAMILIES.items()
        },
        "hosts": layout.hosts,
        "strategies": [
            {
                "name": name,
                "kind": kind,
                "sent_bytes": parse(name).cost(shapes, layout).sent_bytes,
                "purpose": _purpose(registry.lookup(name)),
                "settings": described(registry.lookup(name)),
            }
            for kind, base in (("reducer", Reducer), ("algorithm", Strategy))
            for name in registry.names(base)
        ],
    }


def _all(shapes: Sequence[Shape], layout: Layout) -> list[str]:
    lines = [*_presets(presets.NAMES), ""]
    lines += [f"MB sent per host and step with {layout.hosts} hosts, and what each strategy does:"]
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
        "Details of one strategy: hvdtrain strategies NAME. Which one to choose: docs/guides/choose-a-strategy.md",
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
