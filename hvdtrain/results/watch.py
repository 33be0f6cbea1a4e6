"""The command `hvdtrain watch`: a live view of a run, from the records in its folder."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvdtrain.observe.progress import duration, on_terminal
from hvdtrain.results import RESULTS
from hvdtrain.results.live import WINDOW, Frame, Host, LiveRun
from hvdtrain.results.read import folders
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure, printable

PURPOSE = """Watch a run in the terminal: loss, scores, speed, where the time of a step goes, and its hosts.

It reads the run's folder and needs no connection to the ranks, so the run may be on another host that shares the
folder. It ends with the run. A run that has ended, a pipe and --json get a single frame.

examples:
  hvdtrain watch                                 the run below results/ that was written last
  hvdtrain watch 20260301T101500Z-resnet-3f2a1c
  hvdtrain watch results/sweep --json
"""
PERIOD_S = 1.0
WIDTH = 80
"""Columns of a frame that is not shown on a terminal"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain watch", description=PURPOSE)
    words = "its folder, its name, or the start of its name; of a folder of runs, the one written last"
    top.add_argument("run", nargs="?", type=Path, default=RESULTS, metavar="RUN", help=f"{words} (default: results/)")
    top.add_argument("--json", action="store_true", help="print one frame as a JSON document")
    return top


def newest(root: Path) -> Path:
    """The run at or below `root` whose records were written last. Raises Failure (2, 65)."""
    runs = list(folders.find([root], [])) if root != RESULTS or folders.exists(root) else []
    if not runs:
        hint = "start one with `python -m hvdtrain.resnet --epochs 1`, or name a folder of runs"
        raise Failure(f"no runs in {root}; hint: {hint}", exits.BAD_DATA)
    return max(runs, key=_written_s)


def _written_s(run: Path) -> float:
    times = [0.0]
    for path in (run / "manifest.json", run / "metrics" / "rank0000.jsonl"):
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # not there yet, or not ours to see
            continue
    return max(times)


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure with a message for the user."""
    options = parser().parse_args(arguments)
    run = LiveRun(newest(folders.find_run(options.run)))
    frame = run.frame()
    if options.json:
        print(json.dumps(frame.as_json(), indent=2, allow_nan=False))
    elif not on_terminal(sys.stdout):
        console = Console(width=WIDTH, force_terminal=False, color_system=None, legacy_windows=False)
        console.print(shown(frame, console.width))
    else:
        console = Console(no_color=True if os.environ.get("NO_COLOR") else None)
        with Live(console=console, auto_refresh=False) as live:
            live.update(shown(frame, console.width), refresh=True)
            while frame.state not in ("complete", "stopped"):
                time.sleep(PERIOD_S)
                frame = run.frame()
                live.update(shown(frame, console.width), refresh=True)
    return exits.OK


# --- one frame --------------------------------------------------------------------------------------------------------


def shown(frame: Frame, width: int) -> RenderableType:
    """The frame as text for a terminal of this width."""
    what = f"{frame.workload}, {frame.framework or 'no framework'}, {frame.strategy or 'no strategy'}"
    where = _count(frame.ranks, "rank") + ("" if frame.members else f" on {_count(len(frame.hosts), 'host')}")
    members = [Text(f"now on {frame.members}", style="yellow")] if frame.members else []
    parts: list[RenderableType] = [
        Text(printable(frame.run_dir), style="bold", overflow="ellipsis", no_wrap=True),
        Text(f"{what}, {where}"),
        *members,
        Text(_state(frame), style={"stopped": "red", "complete": "green"}.get(frame.state, "")),
        "",
    ]
    if frame.steps is not None and frame.steps > 0:
        filled = min(1, frame.step / frame.steps) * min(width, WIDTH)
        parts.append(Text("━" * int(filled), style="green") + Text("─" * (min(width, WIDTH) - int(filled))))
    parts += [Text(_progress(frame)), "", *map(Text, _learned(frame)), *map(Text, _time(frame)), ""]
    if any(host.unix_s is not None for host in frame.hosts):
        parts.append(_hosts(frame.hosts))
    else:
        parts.append(Text("hosts: not measured (train with --monitor resources)"))
    return Group(*parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _state(frame: Frame) -> str:
    if frame.state == "complete":
        return "complete"
    age = "no records yet"
    if frame.updated_unix_s is not None:
        age = f"last record {duration(max(0.0, time.time() - frame.updated_unix_s))} ago"
    words = {"running": "running, ", "stopped": "stopped before its end, ", "unknown": ""}
    return words[frame.state] + age


def _progress(frame: Frame) -> str:
    parts = [f"step {frame.step:,}" + (f" of {frame.steps:,}" if frame.steps is not None else "")]
    if frame.epochs is not None or frame.epoch:
        parts.append(f"epoch {frame.epoch}" + (f" of {frame.epochs}" if frame.epochs is not None else "") + " done")
    if frame.eta_s is not None:
        parts.append(f"about {duration(frame.eta_s)} left")
    return ", ".join(parts)


def _learned(frame: Frame) -> list[str]:
    """A line for the losses and one for the primary metric."""
    losses = {"step": frame.loss, "train": frame.train_loss, "validation": frame.validation_loss}
    scores = {"train": frame.train_score, "validation": frame.validation_score}
    scores |= {"best": frame.best_validation_score, "test": frame.test_score}
    lines = {"loss": losses, **({f"{frame.metric} {frame.unit}".strip(): scores} if frame.metric else {})}
    return [
        f"{name:<10} {', '.join(f'{part} {value:.4f}' for part, value in parts.items() if value is not None)}"
        for name, parts in lines.items()
        if any(value is not None for value in parts.values())
    ]


def _time(frame: Frame) -> list[str]:
    """The speed, and the parts of a step."""
    lines, over = [], "whole run" if frame.state == "complete" else f"last {WINDOW} steps"
    if frame.samples_per_s is not None:
        lines.append(f"{'speed':<10} {_short(frame.samples_per_s)} samples/s ({over})")
    if frame.step_s:
        parts = {"compute": frame.compute_s, "exchange": frame.exchange_s, "data": frame.data_s}
        known = [f"{name} {_short(1e3 * s)} ({s / frame.step_s:.0%})" for name, s in parts.items() if s is not None]
        lines.append(f"{'step ms':<10} {_short(1e3 * frame.step_s)}: {', '.join(known)}")
    return lines


def _short(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def _hosts(hosts: Sequence[Host]) -> Table:
    """A row for each host. Columns that no host has measured are left out."""
    columns: dict[str, Callable[[Host], str]] = {
        "CPU %": lambda host: _text(host.cpu_percent),
        "cores": lambda host: "-" if host.cores is None else f"{host.cores:g}",
        "RAM GB": lambda host: _text(host.ram_used_bytes, 1e-9),
        "ranks GB": lambda host: _text(host.ranks_rss_bytes, 1e-9),
        "sent Mbit/s": lambda host: _text(host.sent_mbit),
        "recv Mbit/s": lambda host: _text(host.received_mbit),
        "GPU %": lambda host: _text(host.gpu_percent),
        "W": lambda host: _text(host.power_w),
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("host", overflow="ellipsis", no_wrap=True)
    cells = {name: [cell(host) for host in hosts] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if set(column) != {"-"}}
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for host, *row in zip(hosts, *cells.values(), strict=True):
        table.add_row(Text(host.host), *row)
    return table


def _text(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:,.1f}"
