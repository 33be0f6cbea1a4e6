"""Draws the figures of docs/figures/ that show a table of the docs: the README's, and that of docs/STAGES.md.

    python tools/figures.py [FOLDER]

Nothing but the tables' figures goes in. A hollow dot is projected from a timed epoch, or what the wire alone needs, as
the table says.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from html import escape
from pathlib import Path

from hvdtrain.system import exits, files

DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclasses.dataclass(frozen=True)
class Figure:
    """Dots on one logarithmic axis of seconds."""

    page: str
    """Whose tables it shows"""
    title: str
    below: str
    number: str
    """How seconds are written: see `format`"""
    ticks: tuple[float, ...]
    groups: dict[str, tuple[str, list[tuple[str, str, str]]]]
    """Heading -> header of the table's column, rows: label, beginning of the table's row, kind of dot"""


STAGES = [
    ("one host", "one host", "one"),
    ("exact sums of gradients", "exact sums", "plain"),
    ("torch's pipelining", "torch's", "plain"),
    ("powersgd:rank=4", "`powersgd:rank=4`", "ours"),
    ("2 stages", "`--stages 2`, exact", "ours"),
    ("2 stages, eager", "`--stages 2 --stage-order eager`", "ours"),
    ("2 stages, int8", "`--stages 2 --activations int8`", "ours"),
    ("4 hosts: 2 x 2, powersgd", "`--stages 2 --strategy powersgd:rank=4`", "ours"),
]
FIGURES = {
    "time_to_accuracy.svg": Figure(
        "STRATEGIES.md",
        "Seconds until ResNet-34 reaches a test accuracy",
        "four hosts against one; median, and range of seeds; logarithmic",
        ".0f",
        (10, 20, 50, 100, 200, 500),
        {
            "10 Mbit/s, each side at its best: 0.87 on Fashion-MNIST": (
                "s to 0.87",
                [("one host", "one host", "one"), ("local-sgd+powersgd", "`local-sgd:every=4,stale", "ours")],
            ),
            "10 Mbit/s, same global batch: 0.95 on digits": (
                "s to target",
                [
                    ("one host", "one host", "one"),
                    ("plain Horovod", "plain `horovodrun", "plain"),
                    ("DDP + PyTorch's PowerSGD", "DistributedDataParallel", "plain"),
                    ("powersgd:rank=4", "`powersgd:rank=4`", "ours"),
                    ("local-sgd+powersgd", "`local-sgd:every=6,stale", "ours"),
                ],
            ),
            "100 Mbit/s, same batch": (
                "100 Mbit/s: s to target",
                [
                    ("one host", "one host", "one"),
                    ("exact sums (hierarchical)", "`hierarchical`", "plain"),
                    ("powersgd:rank=4", "`powersgd:rank=4`", "ours"),
                ],
            ),
            "1 Gbit/s, same batch": (
                "1000 Mbit/s: s to target",
                [
                    ("one host", "one host", "one"),
                    ("plain Horovod", "plain `horovodrun", "plain"),
                    ("powersgd:rank=4", "`powersgd:rank=4`", "ours"),
                ],
            ),
        },
    ),
    "stages.svg": Figure(
        "STAGES.md",
        "Seconds per step of ResNet-34, full width, 32x32",
        "two hosts, if not said; median, least and most; hollow: the wire alone",
        "#.3g",
        (0.5, 1, 2, 5, 10, 20, 50, 100),
        {f"{rate} Mbit/s": (f"{rate} Mbit/s: s per step", STAGES) for rate in (10, 100, 1000)},
    ),
}
WIDTH, LEFT, RIGHT, LINE = 480, 222, 460, 26
STYLE = """
text{font:14px system-ui,sans-serif;fill:#24292f}.h{font-weight:600}.s{font-size:12px}.g{stroke:#d0d7de}
.one{fill:#57606a;stroke:#57606a}.plain{fill:#bc4c00;stroke:#bc4c00}.ours{fill:#0969da;stroke:#0969da}
line{stroke-width:2}.g{stroke-width:1}circle{stroke-width:2}circle.projected{fill:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.g{stroke:#3d444d}.one{fill:#9198a1;stroke:#9198a1}
.plain{fill:#f0883e;stroke:#f0883e}.ours{fill:#58a6ff;stroke:#58a6ff}}
"""


def tables(page: str) -> list[list[list[str]]]:
    """Every table of a Markdown page, as rows of cells; the line below the heads is left out."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append([rows[0], *rows[2:]])
    return found


def measured(page: str, column: str, row: str) -> tuple[list[float], bool]:
    """Median and, if told, least and most, in seconds; and whether they are projected and not measured.

    `column` is a head of exactly one table of the page, `row` the beginning of exactly one of its rows.
    """
    (table,) = (each for each in tables(page) if column in each[0])
    (cells,) = (each for each in table[1:] if each[0].startswith(row))
    told = cells[table[0].index(column)].split(";")[0]
    return [float(number) for number in re.findall(r"[\d.]*\d", told)], "an epoch timed" in cells[0] or "wire" in told


def svg(figure: Figure, page: str) -> str:
    """The figure of the page's tables."""
    parts, y, ticks = [], 62, figure.ticks

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(seconds / ticks[0]) / math.log(ticks[-1] / ticks[0])

    for heading, (column, rows) in figure.groups.items():
        parts.append(f'<text class="h" x="8" y="{y}">{heading}</text>')
        for label, row, kind in rows:
            y += LINE
            (median, *spread), projected = measured(page, column, row)
            parts.append(f'<text x="16" y="{y}">{escape(label)}</text>')
            if spread:
                low, high = map(x, spread)
                parts.append(f'<line class="{kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{y - 5}" y2="{y - 5}"/>')
            at = x(median)
            dot = f"{kind} projected" if projected else kind
            parts.append(f'<circle class="{dot}" cx="{at:.1f}" cy="{y - 5}" r="5"/>')
            end = at < LEFT + (RIGHT - LEFT) * 0.7
            beside = (max(at, *map(x, spread)) if spread else at) + 10 if end else at - 10
            told = f"{median:{figure.number}} s" + (", projected" if projected else "")
            parts.append(f'<text x="{beside:.1f}" y="{y}" text-anchor="{"start" if end else "end"}">{told}</text>')
        y += LINE + 8
    bottom = y - LINE
    axis = []
    for tick in ticks:
        axis.append(f'<line class="g" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="48" y2="{bottom}"/>')
        axis.append(f'<text class="s" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    heads = [
        f'<text class="h" x="8" y="20">{figure.title}</text>',
        f'<text class="s" x="8" y="38">{figure.below}</text>',
    ]
    size = f'width="{WIDTH}" height="{bottom + 26}" viewBox="0 0 {WIDTH} {bottom + 26}"'
    lines = [f"<style>{STYLE}</style>", *heads, *axis, *parts]
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n' + "\n".join(lines) + "\n</svg>\n"


def main(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return exits.OK
    folder = Path(arguments[0]) if arguments else DOCS / "figures"
    for name, figure in FIGURES.items():
        drawn = svg(figure, (DOCS / figure.page).read_text())
        try:
            (folder / name).write_text(drawn)
        except OSError as error:
            raise files.refused(folder / name, error, exits.CANNOT_WRITE, "name another FOLDER") from error
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "figures")
