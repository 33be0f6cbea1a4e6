"""Recorded effects of strategies on learning, from docs/benchmarks. Seconds per step say nothing about them.

Steps: steps to a target accuracy relative to exact sums or to one host with the same global batch, as an interval over
seeds and tables (strategies.md, four-hosts.md), counted in whole evaluations, so a tenth either way is noise; with Adam
steps to a loss, interpolated (roofline.md, three seeds). Loss: how much lower the final accuracy was, in points
(four-hosts.md, ten seeds; Muon: four). The records are of ResNet-34 at width 0.25 on small images, those with Adam of a
small GPT: another model may learn differently. A strategy without a record is not chosen by `auto`.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdtrain.strategies import presets
from hvdtrain.strategies.spec import Spec


class Learning(NamedTuple):
    steps: tuple[float, float]
    """Least and most steps to the target, relative to exact sums"""
    loss_points: float | None = None
    """Mean loss of final accuracy; None if it was not measured"""
    exact: bool = False


EXACT = Learning((1.0, 1.0), 0.0, exact=True)
RECORDED = {  # with SGD
    "allreduce": EXACT,
    "native": EXACT,
    "hierarchical": EXACT,
    "bf16": Learning((1.0, 1.1)),  # bounded by int4, which rounds more coarsely and needed 1.07
    "int8": Learning((1.0, 1.1)),
    "powersgd:rank=4": Learning((1.0, 1.4), 0.20),
    presets.LOCAL_SGD: Learning((0.9, 1.2), 0.14),
    "local-sgd:every=4,staleness=2+powersgd:rank=12,bits=4": Learning((0.9, 1.2), 0.47),
}
MUON = {name: each for name, each in RECORDED.items() if each.exact} | {
    "powersgd:rank=16,bits=4": Learning((1.0, 1.3), 0.36)  # averaging weights needs a quarter more steps
}
ADAM = {name: each for name, each in RECORDED.items() if each.exact} | {  # of a GPT, in loss instead of accuracy
    **dict.fromkeys(("bf16", "int8", "int4"), Learning((1.0, 1.02))),  # int4's, which rounds most coarsely
    "powersgd:rank=16": Learning((1.19, 1.2)),
    "local-sgd:every=2,lr_scaling=sqrt+int2": Learning((1.0, 1.02)),
    presets.LOCAL_ADAM: Learning((1.1, 1.13)),
    "local-sgd:every=6,outer_lr=0.6,outer_momentum=0.6,staleness=1,parts=6,lr_scaling=sqrt+int2": Learning(
        (1.16, 1.17)
    ),
    "local-sgd:every=16,outer_lr=0.8,outer_momentum=0.6,staleness=1,parts=8+int2": Learning((1.35, 1.42)),
}
ACCUMULATED = {2: (1.1, 1.2), 4: (1.5, 1.7), 8: (2.2, 2.9)}
"""Batches that a script accumulates: samples to a loss relative to exact sums, as an interval (small GPT with Adam)"""
SHOWN = tuple(name for name in {**RECORDED, **MUON, **ADAM} if name not in ("allreduce", "native"))
"""The strategies that a plan shows"""


def records(optimizer: str | None) -> dict[str, Learning]:
    """Return the records with this optimizer. SGD's stand for one that is not known."""
    return {"muon": MUON, "adam": ADAM}.get(optimizer or "", RECORDED)


def candidates(optimizer: str | None) -> list[str]:
    """Return the strategies from which `--strategy auto` chooses. Exact sums come first."""
    known = records(optimizer)
    return sorted((name for name in SHOWN if name in known), key=lambda name: not known[name].exact)


def epochs_factor(batch: int, base: int, noise_scale: tuple[float, float | None]) -> tuple[float, float]:
    """Return least and most epochs to a target accuracy with this batch per step, relative to the base batch.

    `noise_scale`: see `Profile.noise_scale`. Epochs grow with 1 + batch / noise scale (McCandlish et al., 2018,
    arXiv:1812.06162), if the learning rate suits each batch.
    """
    least, most = sorted(1.0 if scale is None else (1 + batch / scale) / (1 + base / scale) for scale in noise_scale)
    return least, most


def accumulated(
    count: int, batch: int, optimizer: str | None, noise_scale: tuple[float, float | None] | None
) -> tuple[float, float] | None:
    """Return least and most samples to a target if a script accumulates `count` batches, relative to exact sums."""
    if records(optimizer) is ADAM:
        return ACCUMULATED[count]
    return epochs_factor(count * batch, batch, noise_scale) if noise_scale else None


def of(exchange: Spec, optimizer: str | None) -> Learning | None:
    """Return the record of a strategy; None if there is none."""
    return records(optimizer).get(str(exchange))
