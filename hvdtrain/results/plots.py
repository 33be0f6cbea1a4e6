"""The figures that people expect of a scaling study, by name: `hvdtrain results plot KIND ... -o FILE.svg|png|pdf`.

Each is drawn from the data frame of runs, with the arithmetic of the tables. Naming the kinds loads nothing heavy;
matplotlib comes with the first figure drawn. Equal runs give equal files, to the byte.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hvdtrain.results.load import Loaded

FORMATS = ("svg", "png", "pdf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may set of a figure."""

    count: Literal["hosts", "ranks"] = "hosts"
    """Efficiency per host or per rank: hosts or ranks"""
    runs: tuple[str, ...] = ()
    """Names of the runs that `power` and `resources` show; none: they choose"""
    target: float = 0.95
    """Accuracy of `strategies`, a fraction of 1"""
    columns: int = 2
    """Most panels beside each other; 1 on a phone"""


# Figure -> what it is for, and the module and the function of hvdtrain.results.figures that draw it.
KINDS = {
    "strategies": ("time to an accuracy, all strategies on one axis", "strategies", "to_target"),
    "time": ("training time against hosts, one curve per rate (Lucero 2022's figure)", "scaling", "time"),
    "speedup": ("speed-up over one host, with the ideal line", "scaling", "speedup"),
    "efficiency": ("efficiency as a map of hosts and rates", "scaling", "efficiency"),
    "phases": ("data, compute, exchange per step; train, validation, test, checkpoints per run", "work", "phases"),
    "layers": ("time per step against parameters, a curve per number of layers", "sizes", "layers"),
    "wire": ("bytes on the wire against the least that an allreduce can send", "work", "wire"),
    "accuracy": ("accuracy after each epoch against epochs", "training", "by_epoch"),
    "accuracy-time": ("accuracy after each epoch against time", "training", "by_time"),
    "crossover": ("time of a training step and of inference against parameters, by device", "devices", "crossover"),
    "power": ("power of each device against time", "machines", "power"),
    "resources": ("CPU, RAM, GPU and network use of each host against time", "machines", "resources"),
}


def draw(kind: str, loaded: Loaded, options: Options | None = None) -> Figure:
    """The figure `kind`, a key of KINDS. Raises Failure (2) for another name, Failure (65) saying what is lacking."""
    if kind not in KINDS:
        raise Failure(f"no figure {kind!r}; there are {', '.join(KINDS)}", exits.USAGE)
    from hvdtrain.results.figures import style

    _, name, function = KINDS[kind]
    module = importlib.import_module(f"hvdtrain.results.figures.{name}")
    with style.settings():
        figure: Figure = getattr(module, function)(loaded, options or Options())
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as the ending of `path` says. Raises Failure (2, 73)."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise Failure(f"-o {path}: give a name that ends in .{', .'.join(FORMATS)}", exits.USAGE)
    from hvdtrain.results.figures import style

    write(path, style.encode(figure, ending))


def write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all. Raises Failure (73)."""
    files.put(Path(os.path.realpath(path)), content, "give a folder that exists and may be written")
