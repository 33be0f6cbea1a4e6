"""The command `hvdtrain watch`: a live view of a run, from the records in its folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvdtrain import records
from hvdtrain.observe.progress import duration, on_terminal
from hvdtrain.results import RESULTS, scores
from hvdtrain.results.read import folders, steps, values
from hvdtrain.results.read.run import metrics_file
from hvdtrain.results.read.steps import RankMetrics
from hvdtrain.system import exits, locks
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
MOST_READING = 0.1
"""Largest share of the time that is spent on reading"""
WIDTH = 80
"""Columns of a frame that is not shown on a terminal"""
HOST = {
    "cpu_percent": "CPU %",
    "ram_used_bytes": "RAM GB",
    "sent_mbit": "sent Mbit/s",
    "received_mbit": "recv Mbit/s",
    "gpu_percent": "GPU %",
    "power_w": "W",
}
"""Columns of the table of hosts: field and heading"""
Frame = dict[str, Any]
R = TypeVar("R", bound=records.Record)


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
    return max(runs, key=lambda run: _written_s([run / "manifest.json", metrics_file(run)]) or 0.0)


def _written_s(paths: Iterable[Path]) -> float | None:
    """When one of the files was last written, by the clock of their file system; None if there is none."""
    times = []
    for path in paths:
        with contextlib.suppress(OSError):  # not there yet, or not ours to see
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure with a message for the user."""
    options = parser().parse_args(arguments)
    run = newest(folders.find_run(options.run))
    frame = read(run)
    if options.json:
        print(json.dumps({"schema": records.SCHEMA, **frame}, indent=2, allow_nan=False))
    elif not on_terminal(sys.stdout):
        console = Console(width=WIDTH, force_terminal=False, color_system=None, legacy_windows=False)
        console.print(shown(frame, console.width))
    else:
        console = Console(no_color=True if os.environ.get("NO_COLOR") else None)
        with Live(console=console, auto_refresh=False) as live:
            live.update(shown(frame, console.width), refresh=True)
            while frame["state"] not in ("complete", "stopped"):
                began = time.monotonic()
                frame = read(run)
                live.update(shown(frame, console.width), refresh=True)
                time.sleep(max(PERIOD_S, (time.monotonic() - began) / MOST_READING))
    return exits.OK


# --- the state of the run ---------------------------------------------------------------------------------------------


def read(folder: Path) -> Frame:
    """The state of a run that may still train, as --json prints it; None for what the records do not contain.

    state: running, complete, stopped (its process on this host ended before that), or unknown (it runs elsewhere).
    epoch, step: done. loss: of the last step. Other losses and scores: after the last epoch. Times of a step: mean of
    rank 0 over its last steps. samples_per_s: over all ranks, of these steps, or of a complete run. eta_s:
    training and validation that is left. hosts: the latest sample of each monitor. Raises Failure (65, 74, 77).
    """
    complete = folders.exists(folder / "COMPLETE")  # read before the summary, which is written earlier
    manifest = records.read_document(folder / "manifest.json", records.Manifest)
    primary, declared = scores.row(manifest.metric, str(folder / "manifest.json"))
    name, path = primary.get("primary_metric", ""), metrics_file(folder)
    score, run = declared.get(name), RankMetrics(steps.Sums(), steps.Restarts())
    if folders.exists(path):
        run = steps.read(path, lambda line: None, declared)
    view, summary, epochs, held = run.view, run.summary, [each.epoch for each in run.epochs], locks.held(folder)
    timed = [step for step in run.recent if not step.warmup and step.step >= (view.step if view else 0)]
    data_s, compute_s, exchange_s = (
        values.mean(getattr(step, part) for step in timed) for part in ("data_s", "compute_s", "communication_s")
    )
    step_s = math.fsum(each or 0.0 for each in (data_s, compute_s, exchange_s)) if timed else None
    state = "unknown" if held is None else "running" if held else "stopped"
    last = epochs[-1] if epochs else None
    all_steps, all_epochs = values.number(manifest.plan.get("steps")), values.number(manifest.config.get("epochs"))
    left_s = None
    if all_steps is not None and step_s is not None and summary is None and state != "stopped":
        validation_s = max(0.0, (all_epochs or 0) - len(epochs)) * (last.validation_s if last else 0.0)
        left_s = max(0.0, all_steps - run.done) * step_s + validation_s
    batch = view.global_batch if view else values.number(manifest.plan.get("global_batch")) or _samples(folder)
    strategy = run.choices[-1].strategy if run.choices else manifest.config.get("strategy")
    members = f"{', '.join(dict.fromkeys(view.members))} since step {view.step}: {view.reason}" if view else ""
    return {
        "run_dir": str(folder),
        "workload": printable(manifest.workload),
        "framework": values.text(manifest.config.get("framework")),
        "strategy": values.text(strategy),
        "ranks": summary.ranks if summary else view.ranks if view else len(manifest.ranks),
        "hosts": _hosts(folder, manifest),
        "members": printable(members) or None,
        "state": "complete" if complete and summary else state,
        "updated_unix_s": _written_s([path]),
        "step": run.done,
        "steps": None if all_steps is None else int(all_steps),
        "epoch": len(epochs),
        "epochs": None if all_epochs is None else int(all_epochs),
        "eta_s": left_s,
        "loss": run.recent[-1].loss if run.recent else None,
        "train_loss": last.train_loss if last else None,
        "validation_loss": last.validation_loss if last else None,
        "metric": printable(f"{score.label} {score.unit}".strip()) if score else None,
        "train_score": last.train_scores.get(name) if last else None,
        "validation_score": last.validation_scores.get(name) if last else None,
        "test_score": summary.test_scores.get(name) if summary else None,
        "samples_per_s": summary.samples_per_s if summary else batch / step_s if batch and step_s else None,
        "step_s": step_s,
        "data_s": data_s,
        "compute_s": compute_s,
        "exchange_s": exchange_s,
    }


def _samples(folder: Path) -> float | None:
    """Samples of the last step of all ranks of a script, whose batch only its steps contain."""
    last = (_latest(path, records.Step) for path in folder.glob("metrics/rank*.jsonl"))
    return _sum(step.samples if step else None for step in last)


def _latest(path: Path, kind: type[R]) -> R | None:
    with contextlib.suppress(OSError):
        return next((each for each in records.backwards(path) if isinstance(each, kind)), None)
    return None


def _hosts(folder: Path, manifest: records.Manifest) -> list[dict[str, Any]]:
    """The run's hosts in the order of their ranks, each with the values of HOST."""
    measured = {}
    for path in sorted(folder.glob("monitors/*.jsonl")):
        sensors = next((each for each in records.read(path) if isinstance(each, records.Sensors)), None)
        sample = _latest(path, records.Sample)
        if sensors and sample and sample.seconds:
            measured[sensors.host] = _host(sample)
    nothing = dict.fromkeys(("unix_s", *HOST))
    return [
        {"host": printable(name), **nothing, **measured.get(name, {})}
        for name in dict.fromkeys([*manifest.hosts, *measured])
    ]


def _host(sample: records.Sample) -> dict[str, Any]:
    sent, received = (_sum(nic.get(f"{way}_bytes") for nic in sample.nics) for way in ("sent", "received"))
    mbit_per_byte = 8e-6 / sample.seconds
    return {
        "unix_s": sample.unix_s,
        "cpu_percent": sample.cpu_percent,
        "ram_used_bytes": sample.ram_used_bytes,
        "sent_mbit": None if sent is None else sent * mbit_per_byte,
        "received_mbit": None if received is None else received * mbit_per_byte,
        "gpu_percent": values.mean(values.numbers(gpu.get("utilisation_percent") for gpu in sample.gpus)),
        "power_w": math.fsum(sample.energy_j.values()) / sample.seconds if sample.energy_j else None,
    }


def _sum(parts: Iterable[Any]) -> float | None:
    known = values.numbers(parts)
    return math.fsum(known) if known else None


# --- its view ---------------------------------------------------------------------------------------------------------


def shown(frame: Frame, width: int) -> RenderableType:
    """The frame as text for a terminal of this width."""
    lines = [f"{frame['workload']}, {frame['framework']}, {frame['strategy']}, {frame['ranks']} ranks"]
    if frame["members"]:
        lines.append(f"now on {frame['members']}")
    state: str = frame["state"].replace("stopped", "stopped before its end")
    if frame["state"] != "complete" and frame["updated_unix_s"] is not None:
        state += f", last record {duration(max(0.0, time.time() - frame['updated_unix_s']))} ago"
    progress = (
        f"step {frame['step']:,} of {frame['steps'] or '?'}, epoch {frame['epoch']} of {frame['epochs'] or '?'} done"
    )
    if frame["eta_s"] is not None:
        progress += f", about {duration(frame['eta_s'])} left"
    lines += [state, progress, ""]
    losses = {"step": "loss", "train": "train_loss", "validation": "validation_loss"}
    found = {"train": "train_score", "validation": "validation_score", "test": "test_score"}
    for heading, kinds in (("loss", losses), (frame["metric"], found)):
        if known := [f"{kind} {frame[name]:.4f}" for kind, name in kinds.items() if frame[name] is not None]:
            lines.append(f"{heading:<10} {', '.join(known)}")
    if frame["samples_per_s"] is not None:
        lines.append(f"{'speed':<10} {frame['samples_per_s']:,.1f} samples/s")
    if step_s := frame["step_s"]:
        parts = {part: frame[f"{part}_s"] for part in ("compute", "exchange", "data")}
        times = [f"{part} {1e3 * s:,.1f} ({s / step_s:.0%})" for part, s in parts.items() if s is not None]
        lines.append(f"{'step ms':<10} {1e3 * step_s:,.1f}: {', '.join(times)}")
    title = Text(printable(frame["run_dir"]), style="bold", overflow="ellipsis", no_wrap=True)
    bar = ProgressBar(
        total=frame["steps"] or 1, completed=frame["step"] if frame["steps"] else 0, width=min(width, WIDTH)
    )
    return Group(title, bar, *map(Text, lines), "", _table(frame["hosts"]))


def _table(hosts: Iterable[Frame]) -> Table | Text:
    """A row for each host. Columns that no host has measured are left out."""
    measured = {name: heading for name, heading in HOST.items() if any(host[name] is not None for host in hosts)}
    if not measured:
        return Text("hosts: not measured (train with --monitor resources)")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("host", overflow="ellipsis", no_wrap=True)
    for heading in measured.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for host in hosts:
        cells = (
            host[name] if host[name] is None else host[name] * (1e-9 if "bytes" in name else 1) for name in measured
        )
        table.add_row(Text(host["host"]), *("-" if cell is None else f"{cell:,.1f}" for cell in cells))
    return table
