"""What `--strategy help` prints: every strategy, what it does, and what it sends."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Sequence

from hvdtrain import strategies
from hvdtrain.config import TrainConfig
from hvdtrain.strategies.payload import Layout, Shape

USUAL_HOSTS = 4
"""Shown for a process that no launcher has given hosts"""
WIDTH = 92


def show(config: TrainConfig, shapes: Sequence[Shape], layout: Layout) -> None:
    """Prints the table for a model of these trainable arrays; settings such as --rank are those of `config`."""
    hosts = layout.hosts if layout.hosts > 1 else USUAL_HOSTS
    layout = Layout(ranks=max(layout.ranks, hosts), hosts=hosts)
    lines = [f"MB sent per host and step, on average, over {hosts} hosts, and what each strategy does:"]
    for title, names in (
        ("gradients are summed in every step", strategies.REDUCERS),
        ("or they are exchanged otherwise", strategies.SCHEDULES),
    ):
        lines += ["", title]
        for name in names:
            one = dataclasses.replace(config, strategy=name)
            schedule, reducer = strategies.lookup(one)
            sent = schedule.bytes_per_step(shapes, layout, one, reducer) / 1e6
            head = f"  {name:<13}{sent:>9.3f}  "
            prose = _first_sentence(sys.modules[(strategies.REDUCERS.get(name) or schedule).__module__].__doc__ or "")
            lines += textwrap.wrap(prose, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    lines += [
        "",
        f"local-sgd, delayed and hybrid send by --inner (here {config.inner}). Which to take: docs/STRATEGIES.md",
    ]
    print("\n".join(lines))


def _first_sentence(prose: str) -> str:
    return " ".join(prose.partition("\n\n")[0].split()).removesuffix(".")
