"""The command `hvdtrain watch`: a live view of a run, from the records in its folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvdtrain import records
from hvdtrain.observe.progress import duration, on_terminal
from hvdtrain.results import RESULTS, scores
from hvdtrain.results.read import folders, steps, values
from hvdtrain.results.read.run import metrics_file
from hvdtrain.results.read.steps import RECENT, RankMetrics
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
PARTS = ("compute_s", "exchange_s", "data_s")
HOST = (
    "cpu_percent",
    "cores",
    "ram_used_bytes",
    "ranks_rss_bytes",
    "sent_mbit",
    "received_mbit",
    "gpu_percent",
    "power_w",
)
COLUMNS = ("CPU %", "cores", "RAM GB", "ranks GB", "sent Mbit/s", "recv Mbit/s", "GPU %", "W")
"""How the values of HOST are headed"""
Frame = dict[str, Any]


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
    epoch, step: done. loss: of the last step. Other losses and scores: after the last epoch. Times of a step: mean over
    the last RECENT steps and the ranks. samples_per_s: over all ranks, of these steps, or of a complete run. eta_s:
    training and validation that is left. hosts: the latest sample of each monitor. Raises Failure (65, 74, 77).
    """
    complete = folders.exists(folder / "COMPLETE")  # read before the summary, which is written earlier
    manifest = records.read_document(folder / "manifest.json", records.Manifest)
    primary, declared = scores.row(manifest.metric, str(folder / "manifest.json"))
    name, first = primary.get("primary_metric", ""), metrics_file(folder)
    score, run = declared.get(name), RankMetrics(steps.Sums(), steps.Restarts())
    if folders.exists(first):
        run = steps.read(first, lambda line: None, declared)
    others = [path for path in sorted(folder.glob("metrics/rank*.jsonl")) if path != first]
    since = run.view.step if run.view else 0
    timed = [
        [step for step in each if not step.warmup and step.step >= since]
        for each in (run.recent, *map(_recent, others))
    ]
    timed = [each for each in timed if each]
    data_s, compute_s, exchange_s = (
        values.mean(values.mean(getattr(step, part) for step in each) for each in timed)
        for part in ("data_s", "compute_s", "communication_s")
    )
    step_s = math.fsum(each or 0.0 for each in (data_s, compute_s, exchange_s)) if timed else None
    held, summary, epochs = locks.held(folder), run.summary, [each.epoch for each in run.epochs]
    last = epochs[-1] if epochs else None
    state = "unknown" if held is None else "running" if held else "stopped"
    all_steps, all_epochs = values.number(manifest.plan.get("steps")), values.number(manifest.config.get("epochs"))
    left_s = None
    if all_steps is not None and step_s is not None and summary is None and state != "stopped":
        validation_s = max(0.0, (all_epochs or 0) - len(epochs)) * (last.validation_s if last else 0.0)
        left_s = max(0.0, all_steps - run.done) * step_s + validation_s
    validated = [each.validation_scores[name] for each in epochs if name in each.validation_scores]
    strategy = run.choices[-1].strategy if run.choices else manifest.config.get("strategy")
    return {
        "run_dir": str(folder),
        "workload": printable(manifest.workload),
        "framework": values.text(manifest.config.get("framework")),
        "strategy": values.text(strategy),
        "ranks": summary.ranks if summary else run.view.ranks if run.view else len(manifest.ranks),
        "hosts": _hosts(folder, manifest),
        "members": _members(run.view) if run.view else None,
        "state": "complete" if complete and summary else state,
        "updated_unix_s": _written_s([first, *others]),
        "step": run.done,
        "steps": None if all_steps is None else int(all_steps),
        "epoch": len(epochs),
        "epochs": None if all_epochs is None else int(all_epochs),
        "eta_s": left_s,
        "loss": run.recent[-1].loss if run.recent else None,
        "train_loss": last.train_loss if last else None,
        "validation_loss": last.validation_loss if last else None,
        "metric": printable(score.label) if score else None,
        "unit": printable(score.unit) if score else None,
        "train_score": last.train_scores.get(name) if last else None,
        "validation_score": last.validation_scores.get(name) if last else None,
        "best_validation_score": max(validated, key=score.merit) if score and validated else None,
        "test_score": summary.test_scores.get(name) if summary else None,
        "samples_per_s": summary.samples_per_s if summary else _samples_per_s(manifest, run, timed, step_s),
        "step_s": step_s,
        "data_s": data_s,
        "compute_s": compute_s,
        "exchange_s": exchange_s,
    }


def _recent(path: Path) -> Sequence[records.Step]:
    """The last steps of another rank."""
    found = deque[records.Step]()
    with contextlib.suppress(OSError):
        for record in records.backwards(path):
            if not isinstance(record, records.Step) or (found and record.step >= found[0].step):
                break
            found.appendleft(record)
            if len(found) == RECENT:
                break
    return found


def _samples_per_s(
    manifest: records.Manifest, run: RankMetrics, timed: Sequence[Sequence[records.Step]], step_s: float | None
) -> float | None:
    batch = run.view.global_batch if run.view else values.number(manifest.plan.get("global_batch"))
    if batch is not None:
        return batch / step_s if step_s else None
    if len(timed) < len(manifest.ranks):
        return None
    rates = list[float]()  # of a script, whose batch only its steps contain
    for each in timed:
        samples = _sum(step.samples for step in each)
        seconds = math.fsum((step.data_s or 0.0) + step.compute_s + (step.communication_s or 0.0) for step in each)
        rates += [samples / seconds] if samples is not None and seconds else []
    return math.fsum(rates) if len(rates) == len(timed) > 0 else None


def _members(view: records.View) -> str:
    """The present members of an elastic job whose hosts have changed, since when, and why."""
    return printable(f"{', '.join(dict.fromkeys(view.members))} since step {view.step}: {view.reason}")


def _hosts(folder: Path, manifest: records.Manifest) -> list[dict[str, Any]]:
    """The run's hosts in the order of their ranks, each with the values of HOST."""
    measured = {}
    for path in sorted(folder.glob("monitors/*.jsonl")):
        with contextlib.suppress(OSError):
            sensors = next((each for each in records.read(path) if isinstance(each, records.Sensors)), None)
            sample = next((each for each in records.backwards(path) if isinstance(each, records.Sample)), None)
            if sensors:
                measured[sensors.host] = _host(sensors, sample)
    nothing = dict.fromkeys(("unix_s", *HOST))
    names = dict.fromkeys([*manifest.hosts, *measured])
    return [{"host": printable(name), **nothing, **measured.get(name, {})} for name in names]


def _host(sensors: records.Sensors, sample: records.Sample | None) -> dict[str, Any]:
    known = {key: values.number(sensors.resources.get(key)) for key in ("cores", "ram_bytes")}
    if sample is None or not sample.seconds:
        return known
    sent, received = (_sum(nic.get(f"{way}_bytes") for nic in sample.nics) for way in ("sent", "received"))
    mbit_per_byte = 8e-6 / sample.seconds
    return known | {
        "unix_s": sample.unix_s,
        "cpu_percent": sample.cpu_percent,
        "ram_used_bytes": sample.ram_used_bytes,
        "ranks_rss_bytes": _sum(rank.get("rss_bytes") for rank in sample.ranks),
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
    what = f"{frame['workload']}, {frame['framework'] or 'no framework'}, {frame['strategy'] or 'no strategy'}"
    where = _count(frame["ranks"], "rank") + ("" if frame["members"] else f" on {_count(len(frame['hosts']), 'host')}")
    colour = {"stopped": "red", "complete": "green"}.get(frame["state"], "")
    parts: list[RenderableType] = [
        Text(printable(frame["run_dir"]), style="bold", overflow="ellipsis", no_wrap=True),
        Text(f"{what}, {where}"),
        *([Text(f"now on {frame['members']}", style="yellow")] if frame["members"] else []),
        Text(_state(frame), style=colour),
        "",
    ]
    if frame["steps"]:
        whole = min(width, WIDTH)
        filled = int(min(1, frame["step"] / frame["steps"]) * whole)
        parts.append(Text("━" * filled, style="green") + Text("─" * (whole - filled)))
    parts += [Text(_progress(frame)), "", *map(Text, _learned(frame)), *map(Text, _time(frame)), ""]
    if any(host["unix_s"] is not None for host in frame["hosts"]):
        parts.append(_table(frame["hosts"]))
    else:
        parts.append(Text("hosts: not measured (train with --monitor resources)"))
    return Group(*parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _state(frame: Frame) -> str:
    if frame["state"] == "complete":
        return "complete"
    age = "no records yet"
    if frame["updated_unix_s"] is not None:
        age = f"last record {duration(max(0.0, time.time() - frame['updated_unix_s']))} ago"
    return {"running": "running, ", "stopped": "stopped before its end, ", "unknown": ""}[frame["state"]] + age


def _progress(frame: Frame) -> str:
    parts = [f"step {frame['step']:,}" + (f" of {frame['steps']:,}" if frame["steps"] is not None else "")]
    if frame["epochs"] is not None or frame["epoch"]:
        parts.append(
            f"epoch {frame['epoch']}" + (f" of {frame['epochs']}" if frame["epochs"] is not None else "") + " done"
        )
    if frame["eta_s"] is not None:
        parts.append(f"about {duration(frame['eta_s'])} left")
    return ", ".join(parts)


def _learned(frame: Frame) -> list[str]:
    """A line for the losses and one for the primary metric."""
    losses = {"step": frame["loss"], "train": frame["train_loss"], "validation": frame["validation_loss"]}
    kinds = {
        "train": "train_score",
        "validation": "validation_score",
        "best": "best_validation_score",
        "test": "test_score",
    }
    lines = {"loss": losses}
    if frame["metric"]:
        lines[f"{frame['metric']} {frame['unit']}".strip()] = {kind: frame[name] for kind, name in kinds.items()}
    known = {name: {part: value for part, value in parts.items() if value is not None} for name, parts in lines.items()}
    return [
        f"{name:<10} {', '.join(f'{part} {value:.4f}' for part, value in parts.items())}"
        for name, parts in known.items()
        if parts
    ]


def _time(frame: Frame) -> list[str]:
    """The speed, and the parts of a step."""
    lines, over = [], "whole run" if frame["state"] == "complete" else f"last {RECENT} steps"
    if frame["samples_per_s"] is not None:
        lines.append(f"{'speed':<10} {_short(frame['samples_per_s'])} samples/s ({over})")
    if step_s := frame["step_s"]:
        known = {name.removesuffix("_s"): frame[name] for name in PARTS if frame[name] is not None}
        parts = [f"{name} {_short(1e3 * s)} ({s / step_s:.0%})" for name, s in known.items()]
        lines.append(f"{'step ms':<10} {_short(1e3 * step_s)}: {', '.join(parts)}")
    return lines


def _short(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def _table(hosts: Sequence[dict[str, Any]]) -> Table:
    """A row for each host. Columns that no host has measured are left out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("host", overflow="ellipsis", no_wrap=True)
    names = [name for name in HOST if any(host[name] is not None for host in hosts)]
    for name in names:
        table.add_column(COLUMNS[HOST.index(name)], justify="right", no_wrap=True)
    for host in hosts:
        table.add_row(Text(host["host"]), *(_cell(name, host[name]) for name in names))
    return table


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if name == "cores" else f"{value * (1e-9 if name.endswith('_bytes') else 1):,.1f}"
