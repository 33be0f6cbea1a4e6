"""Prints the planned runs of a sweep and its results."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.observe.progress import duration
from hvdtrain.sweep.grid import Run
from hvdtrain.system.redaction import without_secret_values, without_secrets

SCHEMA = "hvdtrain/sweep/1"
STATES = {
    "done": "done",
    "marked": "marked",
    "kept": "done before",
    "failed": "FAILED",
    "skipped": "skipped",
    "waiting": "not run",
}


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


def dry_run_document(name: str, root: Path, rows: Iterable[tuple[Outcome, Sequence[str]]]) -> dict[str, Any]:
    """The dry run as one JSON document."""
    runs = [{**_run_document(outcome), "command": without_secrets(words)} for outcome, words in rows]
    return {"schema": SCHEMA, "sweep": name, "root": str(root), "runs": runs}


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
