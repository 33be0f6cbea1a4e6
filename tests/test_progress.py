"""Progress: what reaches stderr, on a terminal and elsewhere, and what it costs."""

from __future__ import annotations

import sys

import pytest

from hvdtrain.observe.progress import Progress


def test_plain_lines_at_most_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr("hvdtrain.observe.progress.time.monotonic", lambda: now_s)
    with Progress("training", 1527, "steps") as bar:
        for _ in range(240):
            now_s += 0.125
            bar.advance(note="loss 0.5")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training 80/1527 steps, 8.00 steps/s, ETA 3 min 1 s, loss 0.5"
    assert len(lines) == 3, "30 s are three lines"


def test_a_resumed_run_counts_only_its_own_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr("hvdtrain.observe.progress.time.monotonic", lambda: now_s)
    with Progress("preparing", 9000, "images", done=5000) as bar:
        now_s = 10.0
        bar.advance(1000)
    assert capsys.readouterr().err == "preparing 6000/9000 images, 100 images/s, ETA 30 s\n"


def test_advance_is_cheap_enough_for_every_step() -> None:
    with Progress("fast", 10_000, "steps") as bar:
        bar.advance(note="x")
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for _ in range(1000):
                bar.advance(note="x")
        finally:
            sys.setprofile(None)
        assert calls < 10_000, "ten calls of functions for a step, nothing drawn"
