"""Progress: what reaches stderr, on a terminal and elsewhere, and what it costs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest
from conftest import LIMIT_S

from hvdtrain.observe import progress
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


def test_disabled_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PLAIN_S", 0.0)
    with Progress("quiet", 3, "steps", enabled=False) as bar:
        bar.advance(3)
    assert capsys.readouterr() == ("", "")


def on_terminal(**environment: str) -> str:
    """What a short run writes to a real (pseudo) terminal."""
    master, slave = pty.openpty()
    code = (
        "import time\nfrom hvdtrain.observe.progress import Progress\n"
        "with Progress('working', 30, 'steps') as p:\n"
        "    for n in range(30): time.sleep(0.01); p.advance(note='[x] loss')\n"
    )
    names = {"TERM": "xterm-256color", **environment}
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    subprocess.run([sys.executable, "-c", code], stderr=slave, env={**clean, **names}, check=True, timeout=LIMIT_S)
    os.close(slave)
    text = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # how Linux says that the terminal's other end is closed
            break
        if not piece:
            break
        text += piece
    os.close(master)
    return text.decode()


def test_a_terminal_gets_a_bar_that_ends_full() -> None:
    text = on_terminal(COLUMNS="120")
    assert "working" in text and "30/30 steps" in text and "[x] loss" in text and "\x1b[" in text


def test_a_narrow_terminal_cuts_no_number() -> None:
    text = on_terminal(COLUMNS="40")
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.rpartition("30/30")[2])
    assert "…" not in last
    assert all(word in f"30/30{last}".split() for word in ("30/30", "steps,", "[x]", "loss")), last


def test_no_color_is_obeyed() -> None:
    assert "\x1b[38;5;" in on_terminal(COLUMNS="120")
    assert "\x1b[38;5;" not in on_terminal(COLUMNS="120", NO_COLOR="1")


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
