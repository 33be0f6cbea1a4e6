"""The look of all figures (colours, markers, sizes, axes), and their encoding into reproducible bytes.

Colour-blind readers can distinguish the colours, which are Okabe and Ito's ("Color universal design", 2008). Each has
its own marker, line style or hatch, so that a figure is also legible in grey. The user's matplotlib settings have no
effect, and pyplot with its global state is not used.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

INK, SOFT, GRID, PAPER = "#1b1f24", "#5c6670", "#d8dce1", "#ffffff"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "X", "P")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

STYLE = Path(__file__).with_name("figures.mplstyle")
WIDE = 10.0
"""Values that differ by more than this factor get a logarithmic scale"""

WIDTH_IN = 6.7
"""The text width of an A4 page, so that a figure needs no scaling"""

# Metadata that differ between calls or machines are left out of the file.
UNDATED: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@contextmanager
def settings(extra: Any = None) -> Iterator[None]:
    """Uses our matplotlib settings inside the block."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(matplotlib.rc_params_from_file(STYLE, use_default_template=False))
        matplotlib.rcParams.update(extra or {})
        yield


def encode(figure: Figure, kind: str, *, letters: str = "path") -> bytes:
    """The figure as a file of `kind` (a key of UNDATED). Equal figures give equal bytes.

    `letters` of an SVG: "path" draws them, so that they look the same everywhere; "none" keeps them as text that
    readers can select and search.
    """
    stream = io.BytesIO()
    with settings({"svg.hashsalt": "hvdtrain", "svg.fonttype": letters}):
        figure.savefig(stream, format=kind, metadata=UNDATED[kind])
    return stream.getvalue()


def line(index: int) -> dict[str, Any]:
    """Colour and style of the index-th line. The first thirty differ."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}


def marker(index: int) -> dict[str, Any]:
    """The index-th marker. The first seven differ."""
    return {"marker": MARKERS[index % len(MARKERS)], "markeredgecolor": PAPER, "markeredgewidth": 0.5}


def bars(values: Sequence[Any]) -> list[list[float]]:
    """Lengths of the error bars below and above each Statistic or Interval."""
    spans = [one.span or (one.mean, one.mean) for one in values]
    below = [one.mean - low for one, (low, _) in zip(values, spans, strict=True)]
    return [below, [high - one.mean for one, (_, high) in zip(values, spans, strict=True)]]


def grid(panels: int, **shared: Any) -> tuple[Figure, list[Any]]:
    """A figure with `panels` axes, at most two next to each other, and its axes in reading order."""
    across = min(panels, 2)
    rows = -(-panels // across)
    width = WIDTH_IN if across > 1 else 0.7 * WIDTH_IN
    figure = Figure((width, 2.5 * rows + 0.75), layout="constrained")
    axes = figure.subplots(rows, across, squeeze=False, **shared)
    flat = list(axes.flat)
    for spare in flat[panels:]:
        spare.remove()
    for above in range(panels - across, panels - (panels % across or across)):
        flat[above].tick_params(labelbottom=True)  # no panel is below it
    return figure, flat[:panels]


def is_first(axis: Any) -> bool:
    """Whether the axis is at the left edge of the figure."""
    return bool(axis.get_subplotspec().is_first_col())


def wrapped(text: str, letters: int) -> str:
    """The text in lines of at most `letters` letters, split at spaces, commas and plus signs if possible."""
    lines = [""]
    for part in re.findall(rf"\n|[^\s,+]{{1,{letters}}}[ ,+]*|[ ,+]+", text):
        if part == "\n" or (lines[-1] and len(lines[-1] + part.rstrip()) > letters):
            lines.append("")
        lines[-1] += part.strip("\n")
    return "\n".join(line.rstrip() for line in lines)


def title(axis: Any, text: str) -> None:
    """Sets a panel's title, wrapped to its width."""
    across = axis.get_subplotspec().get_gridspec().ncols
    axis.set_title(wrapped(text, int((72 * axis.figure.get_figwidth() - 50) / across / 6.4)))


def legend(figure: Figure, axes: Sequence[Any], title: str) -> None:
    """One legend below the figure for all axes, with each label once."""
    handles: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    width = 40 + 4.6 * max(map(len, handles), default=0)
    across = max(1, min(len(handles), int(72 * figure.get_figwidth() / width)))
    title = wrapped(title, int(72 * figure.get_figwidth() / 4.6))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across, title=title)


def log_scale(axis: Any, which: str) -> None:
    """A logarithmic x or y axis with plain numbers, also between the powers of ten if there is room."""
    axis.set(**{f"{which}scale": "log"})
    scale, most = (axis.xaxis, 200) if which == "x" else (axis.yaxis, 1e4)

    def between(value: float, _: Any) -> str:
        least, greatest = scale.get_view_interval()
        return f"{value:g}" if greatest < most * least else ""

    scale.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(FuncFormatter(between))
    axis.grid(which="minor", axis=which, linewidth=0.3)


def repeats(counts: Sequence[int], what: str = "bars") -> str:
    """`bars: 95 % interval of the mean, n = 3`: the meaning of the error bars."""
    least, most = min(counts), max(counts)
    runs = f"n = {least}" if least == most else f"n = {least} to {most}"
    if most < 2:
        return f"{runs}: no spread"
    words = "both values" if most == 2 else "95 % interval of the mean"
    return f"{what}: {words}{'; both values if n = 2' if 2 in counts and most > 2 else ''}, {runs}"
