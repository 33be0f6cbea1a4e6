"""Shows progress on stderr: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

TERMINAL_S = 0.1  # between two updates of the bar
PLAIN_S = 10.0  # between two plain lines
BAR = 10  # least columns of a bar; text that leaves fewer is wrapped


class Progress:
    """Counts finished work and shows it on stderr.

        with Progress("training", total=1527, unit="steps") as progress:
            ...
            progress.advance(note="loss 0.31")

    On a terminal it draws a rich bar. Otherwise, or with `TERM=dumb`, it prints a line at most every ten seconds:
    `training 120/1527 steps, 310 steps/s, ETA 5 s, loss 0.31`.

    `done` units were finished before the start, in a resumed run. They fill the bar but do not count for the rate.
    `advance` only reads a clock unless it is time to draw, so it can be called in every step.
    """

    def __init__(self, label: str, total: int, unit: str, enabled: bool = True, *, done: int = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self._done = self._done_before = done
        self._note = ""
        self._enabled = enabled
        self._bar: Bar | None = None
        self._period_s = PLAIN_S
        self._started_s = time.monotonic()
        self._due_s = float("inf")

    def __enter__(self) -> Self:
        if self._enabled:
            if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
                self._bar, self._task = _started_bar(self.label, self.total, self._done)
                self._period_s = TERMINAL_S
            self._started_s = time.monotonic()
            self._due_s = self._started_s + self._period_s
        return self

    def advance(self, n: int = 1, note: str = "") -> None:
        """Add `n` finished units. `note` is shown after the numbers."""
        self._done += n
        self._note = note
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + self._period_s
            self._show()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._due_s = float("inf")
        if self._bar is not None:
            self._show()
            self._bar.stop()
            self._bar = None

    def _show(self) -> None:
        if self._bar is not None:
            text = wrapped(self._numbers(), self._bar.console.width - len(self.label) - 1)
            self._bar.update(self._task, completed=self._done, text=text, refresh=True)
        else:
            print(f"{self.label} {self._numbers()}", file=sys.stderr, flush=True)

    def _numbers(self) -> str:
        rate = (self._done - self._done_before) / max(time.monotonic() - self._started_s, 1e-9)
        numbers = f"{self._done}/{self.total} {self.unit}, {rate:,.{0 if rate >= 10 else 2}f} {self.unit}/s"
        if rate > 0 and self._done < self.total:
            numbers += f", ETA {duration((self.total - self._done) / rate)}"
        return f"{numbers}, {self._note}" if self._note else numbers


def wrapped(text: str, width: int) -> str:
    """Wrap the text next to a bar, which rich would truncate."""
    return textwrap.fill(text, max(1, width - BAR), break_long_words=False, break_on_hyphens=False)


def _started_bar(label: str, total: int, done: int) -> tuple[Bar, TaskID]:
    """Return a bar on stderr with a field `text`.

    It draws only in updates, because rich's refresh thread would take processor time from the training.
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]")]
    bar = Bar(columns[0], BarColumn(), columns[1], console=Console(stderr=True), auto_refresh=False)
    bar.start()
    bar.console.show_cursor(True)  # a process that is killed could not restore it
    return bar, bar.add_task(label, total=total, completed=done, text="")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
