#!/usr/bin/env python3
"""Draws the figures of the documentation, each in a light and a dark variant, from the pages' tables and records.

python tools/docs_figures.py            # writes docs/figures/*-light.svg and *-dark.svg
python tools/docs_figures.py --check    # exit code 1 if a figure is stale
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH = 480
"""Units of every figure. Text of 15 units is still readable when a phone shows the figure at 400 pixels"""
THEMES = {
    "light": {"text": "#1b1f24", "muted": "#57606a", "grid": "#d0d7de", "paper": "#ffffff", "box": "#f3f6f9"},
    "dark": {"text": "#e6edf3", "muted": "#9aa4af", "grid": "#3d444d", "paper": "#161b22", "box": "#212830"},
}
# distinguishable for colour-blind readers (Okabe and Ito), and legible on both papers
BLUE, ORANGE, GRAY, GREEN = "#3b82c4", "#d9822b", "#8b949e", "#2a9d78"


class Svg:
    """A drawing with a title and a description for readers who cannot see it."""

    def __init__(self, theme: str, height: int, title: str, description: str) -> None:
        self.color = THEMES[theme]
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">',
            f"<title>{html.escape(title)}</title>",
            f"<desc>{html.escape(description)}</desc>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="{self.color["paper"]}"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 15,
        fill: str = "text",
        at: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.lines.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{at}"{weight} '
            f'fill="{self.color.get(fill, fill)}">{html.escape(text)}</text>'
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        outline: str = "none",
        dash: str = "",
        rx: float = 3,
    ) -> None:
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="{rx:g}" '
            f'fill="{self.color.get(fill, fill)}" '
            f'stroke="{self.color.get(outline, outline)}" stroke-dasharray="{dash}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = "grid", width: float = 1) -> None:
        self.lines.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{self.color.get(stroke, stroke)}" stroke-width="{width:g}"/>'
        )

    def dot(self, x: float, y: float, fill: str, radius: float = 4.5) -> None:
        self.lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" stroke="{self.color["paper"]}"/>'
        )

    def arrow(self, x: float, y1: float, y2: float) -> None:
        self.line(x, y1, x, y2 - 6, "muted", 2)
        self.lines.append(
            f'<path d="M{x - 5:g} {y2 - 8:g} L{x + 5:g} {y2 - 8:g} L{x:g} {y2:g} Z" fill="{self.color["muted"]}"/>'
        )

    def done(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table in a page whose heading line starts with `| {first}`."""
    lines = iter((DOCS / page).read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {first} |") and next(lines).startswith("|"):
            found: list[list[str]] = []
            for row in lines:
                if not row.startswith("|"):
                    return found
                found.append([cell.strip() for cell in row.strip("|").split("|")])
    raise SystemExit(f"{page}: no table that starts with {first!r}")


def numbers(cell: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", cell)]


def hero(theme: str) -> str:
    cells = {row[0]: numbers(row[4]) for row in rows("benchmarks/four-hosts.md", "10 Mbit/s")}
    one, ours, ddp, plain, *_ = cells.values()
    svg = Svg(
        theme, 318, "Seconds until ResNet-34 reaches an accuracy of 0.87 over 10 Mbit/s links",
        f"One host {one[0]:g} s. Four hosts: plain Horovod about {plain[0]:g} s, projected; DDP with PowerSGD "
        f"{ddp[0]:g} s; hvdtrain {ours[0]:g} s.",
    )  # fmt: skip
    svg.text(16, 30, "Seconds to 0.87 accuracy, 10 Mbit/s links", size=18, bold=True)
    right, most = 285.0, 130.0
    bars: list[tuple[str, float, str, list[float], str]] = [
        ("one host", one[0], GRAY, one, f"{one[0]:g} s"),
        ("four hosts, plain Horovod", plain[0], ORANGE, [], f"{plain[0]:,.0f} s, projected"),
        ("four hosts, DDP with PowerSGD", ddp[0], ORANGE, ddp, f"{ddp[0]:g} s"),
        ("four hosts, hvdtrain", ours[0], BLUE, ours, f"{ours[0]:g} s"),
    ]
    for place, (label, value, color, seeds, shown) in enumerate(bars):
        top = 52 + 64 * place
        svg.text(16, top + 14, label)
        end = min(value, most) / most * right
        svg.rect(16, top + 22, end, 24, color, dash="4 3" if not seeds else "", outline="paper")
        if value > most:
            svg.line(271, top + 50, 281, top + 18, "paper", 5)
        for seed in seeds:
            svg.dot(16 + seed / most * right, top + 34, svg.color["text"])
        svg.text(30 + max([end, *(seed / most * right for seed in seeds)]), top + 40, shown, bold=True)
    svg.text(16, 310, "dots: least, median and most of ten seeds; DDP: one seed", size=13, fill="muted")
    return svg.done()


def timeline(theme: str) -> str:
    record = json.loads((DOCS / "figures" / "timeline.json").read_text())["steps"]
    svg = Svg(
        theme, 262, "Where the time of rank 0 goes in 10 seconds, four hosts at 10 Mbit/s",
        "Plain all-reduce waits for the network for most of each step. PowerSGD and local SGD mostly compute.",
    )  # fmt: skip
    svg.text(16, 30, "10 seconds of training at 10 Mbit/s, four hosts", size=17, bold=True)
    names = {"allreduce": "plain all-reduce", "powersgd:rank=4": "powersgd:rank=4"}
    span, left, right = 10.0, 16.0, 448.0
    for place, (strategy, steps) in enumerate(record.items()):
        top = 48 + 58 * place
        at, typical = 0.0, statistics.median(map(sum, steps[3:]))
        svg.rect(left, top + 20, right, 24, "box", rx=0)
        for compute, wait in steps[3:]:  # three warm-up steps
            for length, color in ((compute, BLUE), (wait, ORANGE)):
                shown = min(length, span - at)
                if shown > 0:
                    svg.rect(left + at / span * right, top + 20, max(shown / span * right - 0.8, 0.4), 24, color, rx=0)
                at += length
        svg.text(
            left,
            top + 14,
            f"{names.get(strategy, 'local-sgd with powersgd')}: {typical:.2g} s per step",
        )
    svg.rect(16, 232, 14, 14, BLUE)
    svg.text(36, 244, "computing", size=14)
    svg.rect(130, 232, 14, 14, ORANGE)
    svg.text(150, 244, "waiting for the network", size=14)
    return svg.done()


def decision(theme: str) -> str:
    svg = Svg(
        theme, 430, "Which strategy to use",
        "Ratio of network time to computation: under 0.1 allreduce; up to 1 hierarchical, bf16 or int8; "
        "up to 10 powersgd:rank=4; above 10 local-sgd with powersgd. If the model does not fit: stages.",
    )  # fmt: skip

    def box(y: float, condition: str, strategy: str, note: str, color: str) -> None:
        svg.text(132, y + 30, condition, at="end", bold=True)
        svg.rect(148, y, 316, 50, "box", outline=color)
        svg.text(160, y + 21, strategy, bold=True)
        svg.text(160, y + 41, note, size=14, fill="muted")

    svg.text(16, 30, "Time on the network / computation of a step", size=17, bold=True)
    svg.text(16, 54, "all gradients, as plain Horovod would send them", size=14, fill="muted")
    box(74, "under 0.1", "allreduce or native", "nothing to gain", GRAY)
    box(140, "0.1 to 1", "hierarchical, bf16 or int8", "exact, or 1/4 of the bytes", GREEN)
    box(206, "1 to 10", "powersgd:rank=4", "compressed, overlaps with backward", BLUE)
    box(272, "over 10", "local-sgd with powersgd", "weights averaged every 2 or 4 steps", BLUE)
    svg.line(16, 340, 464, 340)
    svg.text(16, 376, "no room in")
    svg.text(16, 396, "one host")
    box(358, "", "--stages 2", "sends activations, not gradients", ORANGE)
    return svg.done()


def architecture(theme: str) -> str:
    svg = Svg(
        theme, 568, "Architecture of hvdtrain",
        "Launchers start ranks. In each rank a workload gives options, data, model and strategy to the training loop, "
        "which uses a framework; its gradients pass a strategy and a backend to the network. Records feed the results.",
    )  # fmt: skip
    svg.text(16, 30, "From a command to a table", size=18, bold=True)

    def box(x: float, y: float, width: float, name: str, note: str, color: str) -> None:
        svg.rect(x, y, width, 52, "box", outline=color)
        svg.text(x + 12, y + 22, name, bold=True)
        svg.text(x + 12, y + 42, note, size=13, fill="muted")

    svg.rect(8, 112, 330, 326, "none", outline="grid", dash="5 4")
    svg.text(330, 430, "in every rank", size=13, fill="muted", at="end")
    left = [
        (48, "launch/", "mpirun, horovodrun, torchrun, srun", GRAY),
        (122, "workloads", "options, data, model, metric", BLUE),
        (196, "training/ and frameworks/", "the step loop; PyTorch or TensorFlow", BLUE),
        (270, "strategies/", "what to send, and when", BLUE),
        (344, "comm/", "Horovod, DDP, MWMS or TCP", BLUE),
        (454, "records/", "manifest, steps, checkpoints", GREEN),
    ]
    for place, (y, name, note, color) in enumerate(left):
        box(20, y, 306, name, note, color)
        if place < len(left) - 1:
            svg.arrow(173, y + 52, left[place + 1][0])
    box(354, 48, 118, "sweep/", "many runs", GRAY)
    box(354, 122, 118, "lab/", "virtual hosts", GRAY)
    box(354, 196, 118, "doctor/", "checks hosts", GRAY)
    box(354, 270, 118, "sentinel/", "ends stuck jobs", GRAY)
    box(354, 344, 118, "monitors/", "power, use", GRAY)
    box(354, 454, 118, "results/", "tables, report", GREEN)
    svg.line(326, 480, 348, 480, "muted", 2)
    svg.text(16, 546, "Dependencies point downwards; lint-imports checks them.", size=13, fill="muted")
    return svg.done()


def panels(
    theme: str, title: str, description: str, bars: dict[str, dict[str, tuple[float, str]]], unit: str, most: float
) -> str:
    """Horizontal bars in one panel for each key of `bars`: label -> (value, color)."""
    count = sum(len(panel) for panel in bars.values())
    svg = Svg(theme, 60 + 36 * len(bars) + 30 * count, title, description)
    svg.text(16, 30, title, size=18, bold=True)
    top = 48.0
    for name, panel in bars.items():
        svg.text(16, top + 16, name, bold=True, fill="muted")
        top += 26
        for label, (value, color) in panel.items():
            svg.text(212, top + 16, label, size=14, at="end")
            svg.rect(220, top + 3, max(value / most * 180, 1), 18, color)
            svg.text(
                226 + value / most * 180,
                top + 17,
                f"{value:.2g}{unit}" if value < 10 else f"{value:.0f}{unit}",
                size=14,
                bold=True,
            )
            top += 30
        top += 10
    return svg.done()


def stages(theme: str) -> str:
    found = rows("guides/large-models.md", "strategy")
    shown = {
        "exact sums (`hierarchical`)": ("exact sums", ORANGE),
        "`torch.distributed.pipelining` on Gloo": ("torch's pipelining", ORANGE),
        "`--stages 2`, exact": ("two stages", GREEN),
        "`powersgd:rank=4`": ("powersgd:rank=4", BLUE),
    }
    one = next(row for row in found if row[0] == "one host")
    bars = {
        rate: {
            shown[row[0]][0]: (numbers(one[column])[0] / numbers(row[column])[0], shown[row[0]][1])
            for row in found
            if row[0] in shown
        }
        for column, rate in ((2, "10 Mbit/s"), (3, "100 Mbit/s"), (4, "1 Gbit/s"))
    }
    return panels(
        theme, "Speed-up of two hosts over one", "Steps per second of two hosts over one host, for four strategies.",
        bars, "x", 1.5,
    )  # fmt: skip


def bandwidth(theme: str) -> str:
    found = rows("benchmarks/horovod-and-ddp.md", "rate (Mbit/s)")
    svg = Svg(
        theme, 330, "Seconds of an epoch over hosts, plain Horovod",
        "At 10 and 100 Mbit/s two and four hosts take longer than one; at 1 Gbit/s less.",
    )  # fmt: skip
    svg.text(16, 30, "Seconds of an epoch, exact sums (Horovod)", size=18, bold=True)
    left, bottom, width, height = 60.0, 286.0, 300.0, 220.0

    def place(hosts: float, seconds: float) -> tuple[float, float]:
        return left + (hosts - 1) / 3 * width, bottom - math.log10(seconds) / 2.2 * height

    for tick in (1, 10, 100):
        y = place(1, tick)[1]
        svg.line(left, y, left + width, y)
        svg.text(left - 8, y + 5, str(tick), size=14, fill="muted", at="end")
    for hosts in (1, 2, 4):
        svg.text(
            place(hosts, 1)[0], bottom + 22, f"{hosts} host{'s' * (hosts > 1)}", size=14, fill="muted", at="middle"
        )
    one = numbers(found[0][3])[0]
    for rate, color, label in (("10", ORANGE, "10 Mbit/s"), ("100", GREEN, "100 Mbit/s"), ("1000", BLUE, "1 Gbit/s")):
        points = [(1.0, one), *((float(row[1]), numbers(row[3])[0]) for row in found if row[0] == rate)]
        for start, end in itertools.pairwise(points):
            svg.line(*place(*start), *place(*end), color, 2.5)
        for point in points:
            svg.dot(*place(*point), color)
        x, y = place(*points[-1])
        svg.text(x + 10, y - 3, label, bold=True, fill=color)
        svg.text(x + 10, y + 15, f"{points[-1][1]:.3g} s", size=14)
    svg.text(16, 322, "logarithmic; means of three seeds", size=13, fill="muted")
    return svg.done()


def solar(theme: str) -> str:
    found = rows("workloads/solar.md", "net")
    svg = Svg(
        theme, 330, "Milliseconds per step over parameters, by number of hidden layers",
        "Time follows the number of parameters; one wide layer takes longer than two or three with as many parameters.",
    )  # fmt: skip
    svg.text(16, 30, "Milliseconds per step over parameters", size=18, bold=True)
    left, bottom, width, height = 60.0, 280.0, 330.0, 220.0

    def place(parameters: float, ms: float) -> tuple[float, float]:
        return left + (math.log10(parameters) - 3.3) / 3 * width, bottom - (math.log10(ms) + 0.1) / 2 * height

    for tick in (1, 10):
        svg.line(left, place(2e3, tick)[1], left + width, place(2e3, tick)[1])
        svg.text(left - 8, place(2e3, tick)[1] + 5, str(tick), size=14, fill="muted", at="end")
    for parameters, label in ((1e4, "10 thousand"), (1e5, "100 thousand"), (1e6, "1 million")):
        svg.text(place(parameters, 1)[0], bottom + 22, label, size=14, fill="muted", at="middle")
    for layers, color, label in (("p1", ORANGE, "1 layer"), ("p2", GREEN, "2 layers"), ("p3", BLUE, "3 layers")):
        points = [place(numbers(row[1])[0], numbers(row[2])[0]) for row in found if row[0].startswith(layers)]
        for start, end in itertools.pairwise(points):
            svg.line(*start, *end, color, 2.5)
        for point in points:
            svg.dot(*point, color)
        x, y = points[-1]
        svg.text(x + 8, y + {"p1": 22, "p2": -12, "p3": 20}[layers], label, bold=True, fill=color)
    svg.text(16, 322, "both logarithmic; medians, batch 1,000, two cores", size=13, fill="muted")
    return svg.done()


def session(theme: str) -> str:
    """A session as it appears on a terminal; a reader who prefers no motion sees the whole of it at once."""
    lines = (DOCS / "figures" / "session.txt").read_text().splitlines()
    svg = Svg(
        theme, 40 + 15 * len(lines), "A terminal: two virtual hosts, a slow link, PowerSGD, and the table of the runs",
        "The commands of the tutorial about a slow network with their shortened output.",
    )  # fmt: skip
    svg.lines.append(
        "<style>text{font-family:ui-monospace,DejaVu Sans Mono,monospace;white-space:pre}"
        "@media (prefers-reduced-motion:no-preference){"
        "text{opacity:0;animation:a .01s forwards}@keyframes a{to{opacity:1}}}"
        "</style>"
    )
    seconds = 0.0
    for place, line in enumerate(lines):
        seconds += 1.2 if line.startswith("$") else 0.25
        color = svg.color["text" if line.startswith("$") else "muted"]
        svg.lines.append(
            f'<text x="12" y="{30 + 15 * place}" font-size="11" fill="{color}" style="animation-delay:{seconds:.2f}s">'
            f"{html.escape(line)}</text>"
        )
    return svg.done()


FIGURES: dict[str, Callable[[str], str]] = {
    each.__name__: each for each in (hero, timeline, decision, architecture, stages, bandwidth, solar, session)
}


def main() -> int:
    stale = []
    for name, draw in FIGURES.items():
        for theme in THEMES:
            path, text = DOCS / "figures" / f"{name}-{theme}.svg", draw(theme)
            if not path.exists() or path.read_text() != text:
                stale.append(path.name)
                if "--check" not in sys.argv:
                    path.write_text(text)
    if "--check" not in sys.argv:
        return 0
    for figure in stale:
        print(f"docs/figures/{figure} is stale; hint: run python tools/docs_figures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
