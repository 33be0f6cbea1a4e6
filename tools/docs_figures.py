#!/usr/bin/env python3
"""Draws the figures of the documentation, each in a light and a dark variant, from the pages' tables and records.

Colours and encoding are the same as in `hvdtrain results plot`. Diagrams without numbers (decision, architecture) are
drawn by hand: edit the light variant, which gives the dark one.

python tools/docs_figures.py            # writes docs/figures/*-light.svg and *-dark.svg
python tools/docs_figures.py --check    # exit code 1 if a figure is stale
"""

from __future__ import annotations

import html
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.results.figures import style
from hvdtrain.results.figures.style import BLUE, GREEN, INK, PAPER, SOFT, VERMILION

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH = 480
"""Units of every figure. Text of 15 units is still readable when a phone shows the figure at 400 pixels"""
BAND = "#f3f5f7"
DARK = {INK: "#e4e7ea", SOFT: "#9aa4ae", style.GRID: "#3a424b", PAPER: "#15191e", BAND: "#1e242b", BLUE: style.SKY}
"""Light -> dark colour"""
FONT = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table in a page whose heading line starts with `| {first}`."""
    lines = iter((DOCS / page).read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {first} |") and next(lines).startswith("|"):
            body = itertools.takewhile(lambda row: row.startswith("|"), lines)
            return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]
    raise SystemExit(f"{page}: no table that starts with {first!r}")


def numbers(cell: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", cell)]


def canvas(height: int, title: str, note: str = "") -> tuple[Figure, Any]:
    """A figure with its title, a note below, and axes over all of it whose units are those of the page, y downwards."""
    figure = Figure((WIDTH / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(16, 30, title, size=17, weight="bold")
    axes.text(16, height - 8, note, size=13, color=SOFT)
    return figure, axes


def hero() -> Figure:
    found = {row[0]: numbers(row[-1]) for row in rows("benchmarks/roofline.md", "ResNet-34")}
    figure, axes = canvas(318, "Seconds to 0.88 accuracy, 10 Mbit/s links", "dots: six seeds, the bar is their median")
    bars = {
        "one host": ("one host", SOFT),
        "DDP": ("four hosts, DDP", VERMILION),
        "torchft's DiLoCo, every 16, 4 parts, 3 steps": ("four hosts, torchft's DiLoCo, best by hand", VERMILION),
        "hvdtrain, `powersgd:rank=16,bits=4`": ("four hosts, hvdtrain", BLUE),
    }
    scale, most = 285 / 130, 130.0
    for top, (method, (label, color)) in zip(itertools.count(52, 64), bars.items(), strict=False):
        seconds = statistics.median(found[method])
        too_long = seconds > most
        axes.text(16, top + 14, label)
        axes.barh(top + 34, min(seconds, most) * scale, 24, 16, color=color)
        if too_long:
            axes.plot((271, 281), (top + 50, top + 18), color=PAPER, linewidth=5)
        else:
            ends = [16 + each * scale for each in found[method]]
            axes.plot(ends, [top + 34] * len(ends), "o", color=INK, markersize=9, markeredgecolor=PAPER)
        axes.text(16 + min(max(found[method]), most) * scale + 14, top + 40, f"{seconds:.0f} s", weight="bold")
    return figure


def timeline() -> Figure:
    record = json.loads((DOCS / "figures" / "timeline.json").read_text())["steps"]
    figure, axes = canvas(262, "10 seconds of training at 10 Mbit/s, four hosts")
    names = {"allreduce": "plain all-reduce", "powersgd:rank=4": "powersgd:rank=4"}
    for top, (strategy, steps) in zip(itertools.count(48, 58), record.items(), strict=False):
        timed = steps[3:]  # three warm-up steps
        seconds = itertools.accumulate(itertools.chain.from_iterable(timed), initial=0.0)
        edges = [16 + 44.8 * min(each, 10.0) for each in seconds]
        lengths = [max(end - start - 0.8, 0.0) for start, end in itertools.pairwise(edges)]
        axes.barh(top + 32, 448, 24, 16, color=BAND)
        axes.barh(top + 32, lengths, 24, edges[:-1], color=[BLUE, VERMILION] * len(timed), linewidth=0)
        name, typical = names.get(strategy, "local-sgd with powersgd"), statistics.median(map(sum, timed))
        axes.text(16, top + 14, f"{name}: {typical:.2g} s per step")
    for x, color, what in ((16, BLUE, "computing"), (130, VERMILION, "waiting for the network")):
        axes.barh(239, 14, 14, x, color=color)
        axes.text(x + 20, 244, what, size=14)
    return figure


def stages() -> Figure:
    found = {row[0]: row[2:5] for row in rows("guides/large-models.md", "strategy")}
    shown = {
        "exact sums (`hierarchical`)": ("exact sums", VERMILION),
        "`torch.distributed.pipelining` on Gloo": ("torch's pipelining", VERMILION),
        "`powersgd:rank=4`": ("powersgd:rank=4", BLUE),
        "`--stages 2`, exact": ("two stages", GREEN),
    }
    figure, axes = canvas(528, "Speed-up of two hosts over one")
    for column, (top, rate) in enumerate(zip((48, 204, 360), ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s"), strict=True)):
        axes.text(16, top + 16, rate, weight="bold", color=SOFT)
        for y, (row, (label, color)) in zip(itertools.count(top + 38, 30), shown.items(), strict=False):
            gain = numbers(found["one host"][column])[0] / numbers(found[row][column])[0]
            axes.text(212, y + 5, label, size=14, ha="right")
            axes.barh(y, 120 * gain, 18, 220, color=color)
            axes.text(226 + 120 * gain, y + 5, f"{gain:.2g}x", size=14, weight="bold")
    return figure


def curves(
    title: str,
    note: str,
    ticks: Mapping[float, str],
    drawn: Mapping[str, Sequence[tuple[float, float]]],
    down: Sequence[int],
) -> tuple[Figure, Any]:
    """Curves with a logarithmic y axis: label -> points. The label is next to the last point, `down` units below it."""
    figure, _ = canvas(330, title, note)
    axes = figure.add_axes((0.125, 0.15, 0.64, 0.7))
    for color, below, (label, points) in zip((VERMILION, GREEN, BLUE), down, drawn.items(), strict=True):
        axes.plot(*zip(*points, strict=True), "o-", color=color, linewidth=2.5, markersize=9, markeredgecolor=PAPER)
        axes.annotate(
            label, points[-1], (10, -below), textcoords="offset points", va="center", color=color, weight="bold"
        )
    style.log_scale(axes, "y")
    axes.minorticks_off()
    axes.grid(axis="x", visible=False)
    axes.tick_params(labelsize=14, labelcolor=SOFT, length=0, pad=7)
    axes.set_xticks([*ticks], ticks.values())
    return figure, axes


def bandwidth() -> Figure:
    found = [(row[0], float(row[1]), numbers(row[3])[0]) for row in rows("benchmarks/strategies.md", "rate (Mbit/s)")]
    drawn = {}
    for rate, name in (("10", "10 Mbit/s"), ("100", "100 Mbit/s"), ("1000", "1 Gbit/s")):
        points = [(hosts, seconds) for other, hosts, seconds in found if other in ("-", rate)]
        drawn[f"{name}\n{points[-1][1]:.3g} s"] = points
    ticks = {1.0: "1 host", 2.0: "2 hosts", 4.0: "4 hosts"}
    note = "logarithmic; means of three seeds"
    figure, axes = curves("Seconds of an epoch, exact sums (Horovod)", note, ticks, drawn, (0, 0, 0))
    axes.set_ylim(bottom=1)
    return figure


def solar() -> Figure:
    found = [(row[0], numbers(row[1])[0], numbers(row[2])[0]) for row in rows("workloads/solar.md", "net")]
    drawn = {
        f"{layers} layer{'s' * (layers > 1)}": [(size, ms) for net, size, ms in found if net.startswith(f"p{layers}")]
        for layers in (1, 2, 3)
    }
    ticks = {1e4: "10,000", 1e5: "100,000", 1e6: "1 million"}
    note = "both logarithmic; medians, batch 1,000, two cores"
    figure, axes = curves("Milliseconds per step over parameters", note, ticks, drawn, (20, -14, 16))
    axes.set_xscale("log")
    axes.set_xticks([*ticks], ticks.values())
    axes.minorticks_off()
    return figure


def roofline() -> Figure:
    found = {row[0]: [numbers(cell)[:1] for cell in row[1:]] for row in rows("benchmarks/roofline.md", "speed-up")}
    rhos = [rho for (rho,) in found.pop("rho")]
    gains = {"DDP": [found["DDP"]], "by hand": [], "hvdtrain": []}
    for name, cells in found.items():
        gains["hvdtrain" if name.startswith("hvdtrain") else "by hand"].append(cells)
    drawn = {
        name: [(rho, max(itertools.chain(*cells))) for rho, *cells in zip(rhos, *methods, strict=True)]
        for name, methods in gains.items()
    }
    note = "at rho = steps of one host that an fp32 all-reduce takes"
    ticks = {rho: f"{rho:g}" for rho in rhos}
    figure, axes = curves("Speed-up to equal loss, the best methods", note, ticks, drawn, (0, 0, 0))
    axes.axhline(1, color=SOFT, linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xticks([*ticks], ticks.values())
    axes.minorticks_off()
    return figure


def session() -> str:
    """A session as it appears on a terminal; a reader who prefers no motion sees the whole of it at once."""
    lines = (DOCS / "figures" / "session.txt").read_text().splitlines()
    seconds = itertools.accumulate(1.2 if line.startswith("$") else 0.25 for line in lines)
    texts = "\n".join(
        f'<text x="12" y="{30 + 15 * place}" fill="{INK if line.startswith("$") else SOFT}" '
        f'style="animation-delay:{at:.2f}s">{html.escape(line)}</text>'
        for place, (line, at) in enumerate(zip(lines, seconds, strict=True))
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {40 + 15 * len(lines)}" role="img">
<rect width="100%" height="100%" fill="{PAPER}"/>
<style>text{{font:11px ui-monospace,DejaVu Sans Mono,monospace;white-space:pre}}
@media (prefers-reduced-motion:no-preference){{
text{{opacity:0;animation:a .01s forwards}}@keyframes a{{to{{opacity:1}}}}}}</style>
{texts}
</svg>
"""


def by_hand(name: str) -> Callable[[], str]:
    return lambda: (DOCS / "figures" / f"{name}-light.svg").read_text()


FIGURES: dict[str, Callable[[], Figure | str]] = {
    **{each.__name__: each for each in (hero, timeline, stages, bandwidth, solar, roofline, session)},
    **{name: by_hand(name) for name in ("decision", "architecture")},
}


def variants(draw: Callable[[], Figure | str]) -> dict[str, str]:
    """Theme -> SVG."""
    with style.settings({"font.size": 15}):
        drawn = draw()
        svg = drawn if isinstance(drawn, str) else style.encode(drawn, "svg", letters="none").decode()
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", svg, count=1)  # as wide as the page
    svg = re.sub(r"'DejaVu Sans', sans-serif", FONT, svg)
    return {"light": svg, "dark": re.sub("|".join(DARK), lambda match: DARK[match[0]], svg)}


def main() -> int:
    made = {f"{name}-{theme}.svg": svg for name, draw in FIGURES.items() for theme, svg in variants(draw).items()}
    paths = {DOCS / "figures" / name: svg for name, svg in made.items()}
    stale = {path: svg for path, svg in paths.items() if not path.exists() or path.read_text() != svg}
    for path, svg in stale.items():
        if "--check" in sys.argv:
            print(f"docs/figures/{path.name} is stale; hint: run python tools/docs_figures.py", file=sys.stderr)
        else:
            path.write_text(svg)
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
