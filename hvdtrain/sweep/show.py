"""Prints the planned runs of a sweep, its progress and its results."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hvdtrain.observe.progress import duration, on_terminal, started_bar, wrapped
from hvdtrain.sweep.estimate import Estimate
from hvdtrain.sweep.grid import Run
from hvdtrain.system.redaction import without_secret_values, without_secrets

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

SCHEMA = "hvdtrain/sweep/1"
STATES = {
    "done": "done",
    "marked": "marked",
    "kept": "done before",
    "failed": "FAILED",
    "skipped": "skipped",
    "waiting": "not run",
}
BAR_INTERVAL_S, LINE_INTERVAL_S = 0.5, 60.0


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """The state of a run in a sweep."""

    run: Run
    state: str = "waiting"
    """A key of STATES"""
    reason: str | None = None
    folder: Path
    seconds: float | None = None
    marked: str | None = None
    """Why a link was off its rate"""
    log: Path | None = None
    lines: Sequence[str] = ()
    """The last lines of the log of a failed run"""


def say(text: str) -> None:
    """Prints one line on stderr. Ignores a closed stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"sweep: {text}", file=sys.stderr, flush=True)


class Display:
    """Progress on stderr: a bar on a terminal, otherwise a line per minute and at the start and end of each run."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._name, self._began_s, self._next_s = "", time.monotonic(), 0.0
        self._remaining_s: float | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self._total and on_terminal():
            self._bar, self._task = started_bar("", self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, name: str, remaining_s: float | None) -> None:
        """A run starts. `remaining_s`: expected seconds of this run and all later ones."""
        self._name, self._began_s, self._remaining_s = name, time.monotonic(), remaining_s
        self._schedule(self._began_s)
        self._draw(0)

    def tick(self) -> None:
        now_s = time.monotonic()
        if self._name and now_s >= self._next_s:
            self._schedule(now_s)
            self._draw(now_s - self._began_s)

    def _schedule(self, now_s: float) -> None:
        self._next_s = now_s + (BAR_INTERVAL_S if self._bar else LINE_INTERVAL_S)

    def end(self, text: str, count: int = 1) -> None:
        """Prints a permanent line. `count` runs have ended."""
        self._done += count
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(f"sweep: {text}", markup=False, highlight=False, soft_wrap=True)
            self._draw(time.monotonic() - self._began_s)

    def _draw(self, elapsed_s: float) -> None:
        elapsed = f", {duration(elapsed_s)}" if elapsed_s else ""
        eta = "" if self._remaining_s is None else f", ETA {duration(max(0.0, self._remaining_s - elapsed_s))}"
        text = f"{min(self._done + 1, self._total)}/{self._total} {self._name}{elapsed}{eta}"
        if self._bar is None:
            say(text)
            return
        with contextlib.suppress(OSError):
            text = wrapped(text, self._bar.console.width)
            self._bar.update(self._task, completed=self._done, text=text, refresh=True)


def dry_run_document(
    name: str, root: Path, rows: Iterable[tuple[Outcome, Sequence[str], Estimate]], seconds: float | None
) -> dict[str, Any]:
    """The dry run as one JSON document."""
    runs = [
        {
            **_run_document(outcome),
            "command": without_secrets(words),
            "estimate_s": estimate.seconds,
            "estimate_basis": estimate.basis,
        }
        for outcome, words, estimate in rows
    ]
    estimate_s = None if seconds is None else round(seconds, 1)
    return {"schema": SCHEMA, "sweep": name, "root": str(root), "estimate_s": estimate_s, "runs": runs}


def end_document(name: str, root: Path, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The results as one JSON document."""
    counts = Counter(outcome.state for outcome in outcomes)
    totals = {"counts": {state: counts.get(state, 0) for state in STATES}, "seconds": round(seconds, 1)}
    runs = [_run_document(outcome) for outcome in outcomes]
    return {"schema": SCHEMA, "sweep": name, "root": str(root), **totals, "runs": runs}


def _run_document(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    return {
        "order": run.order,
        "experiment": run.experiment.name,
        "kind": run.kind,
        "repeat": run.repeat,
        "state": outcome.state,
        "reason": outcome.reason,
        "marked": outcome.marked,
        "run_dir": str(outcome.folder),
        "seconds": outcome.seconds,
        "log": str(outcome.log) if outcome.log else None,
        "settings": without_secret_values(run.experiment.settings),
    }


def end_text(root: Path, outcomes: Sequence[Outcome], seconds: float) -> str:
    """The results as text: failures in full, everything else as counts."""
    lines = []
    for outcome in outcomes:
        if outcome.state == "failed":
            lines.append(f"{STATES[outcome.state]}: {outcome.run.name}: {outcome.reason}")
            lines += [f"    {line}" for line in outcome.lines]
            lines += [f"    log: {outcome.log}"] if outcome.log else []
    for reason, count in Counter(outcome.reason for outcome in outcomes if outcome.state == "skipped").items():
        lines.append(f"skipped: {reason} ({count} runs)")
    marked = [outcome for outcome in outcomes if outcome.state == "marked"]
    lines += [f"marked: {outcome.run.name}: {outcome.marked}" for outcome in marked]
    if marked:
        lines.append("hint: run the same command to repeat marked runs; --set off_percent=10 tolerates 10 %")
    counts = Counter(outcome.state for outcome in outcomes)
    totals = ", ".join(f"{counts[state]} {text}" for state, text in STATES.items() if counts[state])
    lines.append(f"{len(outcomes)} runs: {totals}; {duration(seconds)}; records in {root}")
    return "\n".join(lines)
