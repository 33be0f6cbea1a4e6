"""The figures of `hvdtrain results plot`, by name. Each draws the numbers of a table.

Importing this package loads nothing heavy; matplotlib is loaded with the first figure. The same runs give the same
file, to the byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hvdtrain.results.read.frame import Loaded

FORMATS = ("svg", "png", "pdf")


# Figure, in the order of the report -> heading, explanation, and the function of panels.py that draws it.
KINDS = {
    "time": (
        "Training time over hosts",
        "Seconds of the training phase. In a rising curve, more hosts make training slower at that rate. A single host "
        "uses no link, so it is the first point of every curve.",
        "time",
    ),
    "accuracy-time": (
        "Accuracy over time",
        "Validation accuracy after each epoch, mean over the repeats, over seconds of training, validation and "
        "checkpoints. The curve furthest to the left is best.",
        "accuracy",
    ),
}


def draw(kind: str, loaded: Loaded) -> Figure:
    """The figure `kind`, a key of KINDS. Raises Failure (65) if data are missing."""
    from hvdtrain.results.figures import panels, style

    with style.settings():
        figure: Figure = getattr(panels, KINDS[kind][-1])(loaded)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes the figure in the format of the path's ending. Raises Failure (2, 73)."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise Failure(f"-o {path}: unknown format; hint: use a name that ends in .{', .'.join(FORMATS)}", exits.USAGE)
    from hvdtrain.results import export
    from hvdtrain.results.figures import style

    export.write(path, style.encode(figure, ending))
