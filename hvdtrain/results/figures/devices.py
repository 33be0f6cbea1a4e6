"""Time of a training step and of inference against the number of parameters, a line per device."""

from __future__ import annotations

import itertools

from matplotlib.figure import Figure

from hvdtrain.results import devices
from hvdtrain.results.figures import panels, style
from hvdtrain.results.load import Loaded
from hvdtrain.results.plots import Options
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


def crossover(loaded: Loaded, options: Options) -> Figure:
    """The numbers of `hvdtrain results inference`, a panel for each. Raises Failure (65) without runs that timed it."""
    found = devices.timed(loaded)
    if not found:
        told = "no inference: needs complete runs of models of several sizes, trained with --inference 2,64,512,1024"
        raise Failure(told, exits.BAD_DATA)
    names = devices.measures(found)
    several = len({each.alike for each in found}) > 1
    curves = {
        (*each.alike, each.group.key["device"]): f"{each.group.key['framework']} on {each.group.key['device']}"
        + (f", {panels.batch('weak', each.group.key['rank_batch'])}" if several else "")
        for each in found
    }
    figure, axes = style.grid(len(names), columns=options.columns)
    for axis, name in zip(axes, names, strict=True):
        for index, (curve, label) in enumerate(curves.items()):
            runs = [each for each in found if (*each.alike, each.group.key["device"]) == curve and name in each.seconds]
            if runs:
                sizes, times = zip(*((e.group.key["parameters"], e.seconds[name]) for e in runs), strict=True)
                axis.errorbar(
                    sizes,
                    [1e3 * each.mean for each in times],
                    yerr=[[1e3 * end for end in ends] for ends in style.bars(times)],
                    label=label,
                    **style.line(index),
                    **style.marker(index),
                )
        style.title(axis, name)
        style.log_scale(axis, "y")
        style.log_scale(axis, "x")
        axis.set_xlabel("parameters")
    for axis in style.first_column(axes):
        axis.set_ylabel("time (ms)")
    lines = itertools.islice(devices.crossovers(found), 1)
    counts = [each.group.n for each in found]
    style.legend(figure, axes, "; ".join([style.repeats(counts), *lines]))
    return figure
