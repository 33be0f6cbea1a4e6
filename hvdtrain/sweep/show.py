"""Prints a sweep's plan, its progress and its outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hvdtrain.observe.progress import duration, on_terminal, started_bar, whole
from hvdtrain.sweep.estimate import Estimate
from hvdtrain.sweep.plan import Run
from hvdtrain.system.redaction import without_secret_values, without_secrets

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

SCHEMA = "hvdtrain/sweep/1"
STATES = {
    "done": "done",
    "marked": "marked",
    "kept": "done before",
    "failed": "FAILED",
    "refused": "refused",
    "lacking": "lacking",
    "waiting": "not run",
}
DRAW_S, PLAIN_S = 0.5, 60.0


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """State of a run in a sweep."""

    run: Run
    state: str = "waiting"
    """A key of STATES"""
    reason: str | None = None
    folder: Path
    seconds: float | None = None
    marked: str | None = None
    log: Path | None = None
    lines: Sequence[str] = ()
    """The last lines of the log of a failed run"""


def say(text: str) -> None:
    """Prints one line on stderr; a closed stderr is no error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"sweep: {text}", file=sys.stderr, flush=True)


class Display:
    """Progress on stderr: a bar on a terminal, elsewhere a line when a run begins and ends and one a minute."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._now, self._since, self._due = "", time.monotonic(), 0.0
        self._left: float | None = None
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self._total and on_terminal():
            self._bar, self._task = started_bar("", self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, what: str, left_s: float | None) -> None:
        """Run `what` begins; `left_s`: expected seconds of all that are left."""
        self._now, self._since, self._left = what, time.monotonic(), left_s
        self._due = self._since + (DRAW_S if self._bar else PLAIN_S)
        self._draw(0)

    def tick(self) -> None:
        now = time.monotonic()
        if self._now and now >= self._due:
            self._due = now + (DRAW_S if self._bar else PLAIN_S)
            self._draw(now - self._since)

    def end(self, text: str, count: int = 1) -> None:
        """Prints the line `text` for good; `count` runs have ended."""
        self._done += count
        if self._bar is None:
            say(text)
        else:
            self._bar.console.print(f"sweep: {text}", markup=False, highlight=False, soft_wrap=True)
            self._draw(time.monotonic() - self._since)

    def _draw(self, running_s: float) -> None:
        took = f", {duration(running_s)}" if running_s else ""
        left = "" if self._left is None else f", ETA {duration(max(0.0, self._left - running_s))}"
        numbers = f"{min(self._done + 1, self._total)}/{self._total} {self._now}{took}{left}"
        if self._bar is None:
            say(numbers)
            return
        with contextlib.suppress(OSError):
            text = whole(numbers, self._bar.console.width)
            self._bar.update(self._task, completed=self._done, text=text, refresh=True)


def plan_document(
    name: str, root: Path, rows: Iterable[tuple[Outcome, Sequence[str], Estimate]], seconds: float | None
) -> dict[str, Any]:
    """The dry run as one JSON document."""
    listed = []
    for outcome, words, estimate in rows:
        about = {"command": without_secrets(words), "estimate_s": estimate.seconds, "estimate_basis": estimate.basis}
        listed.append(_run_document(outcome) | about)
    estimate_s = None if seconds is None else round(seconds, 1)
    return {"schema": SCHEMA, "sweep": name, "root": str(root), "estimate_s": estimate_s, "runs": listed}


def end_document(name: str, root: Path, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The outcome as one JSON document."""
    counts = Counter(outcome.state for outcome in outcomes)
    about = {"counts": {state: counts.get(state, 0) for state in STATES}, "seconds": round(seconds, 1)}
    runs = [_run_document(outcome) for outcome in outcomes]
    return {"schema": SCHEMA, "sweep": name, "root": str(root), **about, "runs": runs}


def _run_document(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    return {
        "order": run.order,
        "point": run.point.name,
        "kind": run.kind,
        "repeat": run.repeat,
        "state": outcome.state,
        "reason": outcome.reason,
        "marked": outcome.marked,
        "run_dir": str(outcome.folder),
        "seconds": outcome.seconds,
        "log": str(outcome.log) if outcome.log else None,
        "settings": without_secret_values(run.point.settings),
    }


def end_text(root: Path, outcomes: Sequence[Outcome], seconds: float) -> str:
    """The outcome as text: failures in full, the rest as counts."""
    lines = []
    for outcome in outcomes:
        if outcome.state in ("failed", "refused"):
            lines.append(f"{STATES[outcome.state]}: {outcome.run.name}: {outcome.reason}")
            lines += [f"    {line}" for line in outcome.lines]
            lines += [f"    log: {outcome.log}"] if outcome.log else []
    for reason, count in Counter(o.reason for o in outcomes if o.state == "lacking").items():
        lines.append(f"lacking: {reason} ({count} runs)")
    marked = [outcome for outcome in outcomes if outcome.state == "marked"]
    lines += [f"marked: {outcome.run.name}: {outcome.marked}" for outcome in marked]
    if marked:
        lines.append("hint: the same command repeats marked runs; --set off_percent=10 accepts links up to 10 % off")
    counts = Counter(outcome.state for outcome in outcomes)
    told = ", ".join(f"{counts[state]} {text}" for state, text in STATES.items() if counts[state])
    lines.append(f"{len(outcomes)} runs: {told}; {duration(seconds)}; records in {root}")
    return "\n".join(lines)
