"""hvdtrain watch: a run that trains, has ended or was stopped, shown from its records alone."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import LIMIT_S, ROOT, environment, failing, finished
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import records
from hvdtrain.results import watch
from hvdtrain.system import locks

METRICS = Path("metrics") / "rank0000.jsonl"
GOOD = runs.Made(hosts=2, epochs=3, energy_w={"cpu0": 30.0})


def frame(folder: Path) -> dict[str, Any]:
    return watch.read(folder)


def grown(whole: Path, folder: Path, cuts: list[int]) -> Iterator[Path]:
    """Copies a run's rank 0 file bit by bit, and everything else at once. Yields after each part."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("metrics", "COMPLETE"))
    (folder / "metrics").mkdir()
    data = (whole / METRICS).read_bytes()
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        with (folder / METRICS).open("ab") as file:
            file.write(data[start:end])
        yield folder
    (folder / "COMPLETE").touch()


# --- the frame --------------------------------------------------------------------------------------------------------


def test_a_complete_run_has_the_values_of_the_tables(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", GOOD)
    shown, row = frame(folder), runs.results("export", folder)["rows"][0]
    same = ("run_dir", "workload", "strategy", "ranks", "samples_per_s", "test_score", "steps")
    assert {name: shown[name] for name in same} == {name: row[name] for name in same}
    assert shown["step_s"] == pytest.approx(row["step_s"])  # all steps of this run are among the last
    assert shown["exchange_s"] == pytest.approx(row["communication_s"])
    assert [host["power_w"] for host in shown["hosts"]] == pytest.approx([30.0, 30.0])
    assert (shown["state"], shown["eta_s"], shown["epoch"]) == ("complete", None, 3)


@settings(max_examples=25)
@given(shares=st.lists(st.floats(0, 1), max_size=6))
def test_a_run_that_grows_ends_as_one_that_is_read_at_once(
    shares: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The file may be cut anywhere between two frames, also within a line."""
    root = tmp_path_factory.mktemp("grown")
    whole = runs.make(root / "whole", GOOD)
    size = (whole / METRICS).stat().st_size
    cuts = sorted(int(share * size) for share in shares)
    steps = [frame(folder)["step"] for folder in grown(whole, root / "part", cuts)]
    assert steps == sorted(steps) and steps[-1] == GOOD.steps
    ignored = {"run_dir": "", "updated_unix_s": 0}
    assert frame(root / "part") | ignored == frame(whole) | ignored


def test_a_resumed_run_takes_back_what_it_repeats(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", GOOD)
    assert frame(folder)["epoch"] == 3
    (folder / "COMPLETE").unlink()
    writer = records.Writer(folder / METRICS)
    writer.write(records.Resumed(step=7, utc=records.utc_now()))
    assert [frame(folder)[name] for name in ("step", "epoch", "test_score")] == [7, 1, None]
    writer.write(runs.step(GOOD, 7, 1))
    assert frame(folder)["step"] == 8


def test_the_state_follows_the_process_that_holds_the_lock(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", GOOD, complete=False)
    assert frame(folder)["state"] == "unknown"
    code = "import sys, pathlib; from hvdtrain.system import locks; locks.take(pathlib.Path(sys.argv[1]), 'j', 'now')"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); sys.stdin.read()", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        running = frame(folder)
        assert running["state"] == "running"
    assert frame(folder)["state"] == "stopped"
    assert running["eta_s"] == 0  # all its steps are done
    lock = json.loads((folder / locks.NAME).read_text())
    (folder / locks.NAME).write_text(json.dumps(lock | {"host": "elsewhere"}))
    assert frame(folder)["state"] == "unknown"


def test_what_is_left_is_estimated_from_steps_and_validations(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", GOOD, complete=False)
    with runs.edited(folder / METRICS) as lines:
        del lines[9:]  # an epoch of 5 steps, its two records, and 2 steps
    left_s = 8 * GOOD.step_s + 2 * GOOD.validation_s
    assert frame(folder)["eta_s"] == pytest.approx(left_s)
    rate = GOOD.rank_batch * GOOD.ranks / GOOD.step_s
    assert frame(folder)["samples_per_s"] == pytest.approx(rate)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_one_frame_of_80_columns(tmp_path: Path) -> None:
    runs.make(tmp_path / "old", GOOD)
    os.utime(tmp_path / "old" / METRICS, (1, 1))
    os.utime(tmp_path / "old" / "manifest.json", (1, 1))
    folder = runs.make(tmp_path / ("r" * 100), GOOD, complete=False)
    done = finished([sys.executable, "-m", "hvdtrain.cli", "watch", tmp_path], extra={"FORCE_COLOR": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    assert str(folder)[:70] in done.stdout, "the run written last"
    assert "step 15 of 15" in done.stdout and "h1 " in done.stdout


def test_without_runs_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with failing(65, "no runs in results; hint: start one"):
        watch.main([])


def test_a_terminal_follows_the_run_to_its_end(tmp_path: Path) -> None:
    whole = runs.make(tmp_path / "whole", GOOD)
    parts = grown(whole, tmp_path / "r", [random.Random(1).randrange(1000, 2000)])
    outer, inner = pty.openpty()
    words = [sys.executable, "-m", "hvdtrain.cli", "watch", str(next(parts))]
    variables = environment({"TERM": "xterm", "COLUMNS": "80"})
    with subprocess.Popen(words, env=variables, stdin=inner, stdout=inner, stderr=inner) as child:
        stop = threading.Timer(LIMIT_S, child.kill)
        stop.start()
        os.close(inner)
        text, awaited = "", ["last record", "step 15 of 15"]
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                text += os.read(outer, 65536).decode(errors="replace")
                if awaited and awaited[0] in text:
                    del awaited[0]
                    next(parts, None)
        stop.cancel()
        os.close(outer)
    assert child.returncode == 0
    assert "complete" in text and "test 0.9000" in text
