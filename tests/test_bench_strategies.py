"""tools/bench_strategies.py: what is run in which order, the table's arithmetic, goals, replays, and one real bench."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import secrets
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from conftest import ROOT, document, environment, launch

from hvdtrain.config import flag
from hvdtrain.exits import Failure
from hvdtrain.models import resnet

sys.path.insert(0, str(ROOT / "tools"))

import bench_strategies as bench
import bench_strategies_replay as replay
import bench_strategies_rows as rows
import bench_strategies_table as table

SLOW, MIDDLE, FAST = rows.RATES
PARAMETERS = resnet.parameter_count(resnet.ResNetSpec(channels=1, classes=10, width=0.25))
BY_NAME = {row.name: row for row in rows.ROWS}


def seen(**known: Any) -> table.Seen:
    nothing = dict.fromkeys(table.Seen.__dataclass_fields__)
    return table.Seen(**(nothing | known))


# --- what is run ------------------------------------------------------------------------------------------------------


def test_every_row_is_known_and_named_once() -> None:
    found, problems = rows.known(rows.ROWS)
    assert (len(found), problems) == (len(rows.ROWS), [])
    assert max(Counter(row.name for row in rows.ROWS).values()) == 1
    strange = rows.Row(name="x", starter="ours", settings={"strategy": "telepathy"})
    found, problems = rows.known([strange])
    assert found == []
    assert problems[0].startswith("x: left out (--strategy telepathy: unknown")


def test_an_exact_sum_is_projected_where_its_wire_takes_minutes_an_epoch() -> None:
    plain, low_rank = BY_NAME[rows.HOROVODRUN], BY_NAME["powersgd"]
    assert rows.wire_s(plain, 4, SLOW, 0.25) == pytest.approx(2 * 3 / 4 * 4 * PARAMETERS * 8 / (0.936 * 10e6), rel=1e-6)
    assert rows.is_projected(plain, 4, SLOW)
    assert not rows.is_projected(plain, 4, MIDDLE)
    assert not any(rows.is_projected(low_rank, 4, rate) for rate in rows.RATES)
    assert rows.wire_s(BY_NAME[rows.ALONE], 1, SLOW, 0.25) == 0


def test_rounds_turn_and_each_projected_run_has_a_whole_one_to_lean_on() -> None:
    chosen = [BY_NAME[name] for name in (rows.ALONE, rows.HOROVODRUN, "powersgd")]
    made = rows.cells(chosen, [SLOW], [1, 2], 4)
    first = [(cell.rate, cell.row.name, cell.short) for cell in made if cell.seed == 1]
    second = [(cell.rate, cell.row.name, cell.short) for cell in made if cell.seed == 2]
    assert first == [
        (SLOW, rows.ALONE, False),
        (SLOW, rows.HOROVODRUN, True),
        (SLOW, "powersgd", False),
        (FAST, rows.HOROVODRUN, False),
    ]
    assert second == first[::-1]
    assert [cell.seed for cell in made] == [1] * 4 + [2] * 4
    all_rates = rows.cells(chosen, rows.RATES, [1], 4)
    assert len(all_rates) == 7, "one host is run once; the whole run at 1 Gbit/s is one of its own"


def test_flags_are_the_same_for_all_rows_but_the_strategys_own() -> None:
    common = [flags_of(cell) for cell in rows.cells(rows.ROWS, [FAST], [1], 4)]
    own = {flag(name) for row in rows.ROWS for name in row.settings}
    assert len({json.dumps({k: v for k, v in each.items() if k not in own}) for each in common}) == 1
    assert common[0]["--global-batch-size"] == "128"
    cell = rows.cells(rows.ROWS[:1], [SLOW], [1], 4)[0]
    other = rows.cells(rows.ROWS[:1], [SLOW], [1], 4, extra=("--lr", "0.1"))[0]
    assert cell.name != other.name, "what was made with other flags is not taken for it"


def flags_of(cell: rows.Cell) -> dict[str, str]:
    words = cell.flags()
    assert words[-1] == "--json"
    return dict(zip(words[:-1:2], words[1:-1:2], strict=True))


def test_what_is_asked_is_checked() -> None:
    def asked(*words: str) -> Any:
        return bench.resolve(bench.parser().parse_args(words))

    quick = asked("--quick")
    assert (quick.rates, quick.seeds, quick.mode) == ([SLOW], [1], "train")
    assert {rows.ALONE, rows.HOROVODRUN} < {row.name for row in quick.rows}
    assert [row.name for row in asked("--rows", "powersgd*,1 host").rows] == [
        rows.ALONE,
        *("powersgd:rank=1", "powersgd", "powersgd:rank=4", "powersgd:bits=32"),
    ]
    for words in (["--rows", "typo"], ["--seeds", "a"], ["--hosts", "1"], ["--rates", "10mbps"], ["--widths", "0.3"]):
        with pytest.raises(Failure) as refused:
            asked(*words)
        assert refused.value.code == 2, words


@pytest.mark.root
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, str(ROOT / "tools" / "bench_strategies.py"), "--rows", rows.ALONE, "--mode", "train"]
    done = subprocess.run([*words, "--keep", str(tmp_path / "file" / "x")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 73
    assert done.stderr.splitlines()[-1].startswith(f"hvdtrain: --keep {tmp_path}/file/x: Not a directory")
    assert "Traceback" not in done.stderr


# --- the table --------------------------------------------------------------------------------------------------------


def test_spreads_equal_an_independent_calculation_and_never_is_later_than_all() -> None:
    draw = random.Random(1)
    for _ in range(500):
        values = [draw.choice([None, draw.uniform(0, 100)]) for _ in range(draw.randint(1, 5))]
        there, late = [v for v in values if v is not None], sorted(math.inf if v is None else v for v in values)
        found, never = table.spread(values), table.spread(values, never=True)
        assert (found is None) == (never is None) == (not there)
        if found and never:
            assert found["median"] == statistics.median(there)
            assert (found["min"], found["max"]) == (never["min"], never["max"]) == (min(there), max(there))
            middle = (late[(len(late) - 1) // 2] + late[len(late) // 2]) / 2
            assert never["median"] == (middle if middle < math.inf else None)


def made_line(name: str, times: list[float | None], accuracy: float, rate: int = SLOW) -> dict[str, Any]:
    found = [
        seen(
            steps_to_target=None if t is None else 100,
            crossed_steps=None if t is None else 80,
            train_to_target_s=t,
            accuracy=accuracy,
            step_s=0.5,
        )
        for t in times
    ]
    return table.line(name, name, rate, found, is_projected=False, hosts=1 if name == rows.ALONE else 4)


def test_a_line_from_its_runs() -> None:
    run = seen(
        steps_to_target=80,
        train_to_target_s=40.0,
        accuracy=0.96,
        step_s=0.5,
        communication_s=0.1,
        limit_s=0.05,
        efficiency=0.5,
        nic_bytes_per_step=1e6,
    )
    late = dataclasses.replace(run, steps_to_target=None, train_to_target_s=None)
    found = table.line("x", "powersgd", SLOW, [run, late, run], is_projected=False, hosts=4)
    assert (found["n"], found["reached"], found["rate_mbit"]) == (3, 2, 10.0)
    assert found["time_to_target_s"]["median"] == 40.0
    assert found["bytes_per_host_to_target"]["median"] == 80e6
    assert found["exposed_share"]["median"] == pytest.approx(0.2)
    assert (found["limit_s_per_step"], found["wire_efficiency"]["median"]) == (0.05, 0.5)
    timed = seen(step_s=7.0, communication_s=6.8, nic_bytes_per_step=8e6, accuracy=0.3, steps_to_target=None)
    joined = table.projected(timed, run)
    assert (joined.train_to_target_s, joined.accuracy, joined.communication_s) == (560.0, 0.96, 6.8)
    assert table.projected(timed, late).train_to_target_s is None


def test_a_target_is_crossed_between_epochs_where_the_lines_say(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "run", epochs=3, steps_per_epoch=10, accuracies=[0.5, 0.9, 0.96])
    found = table.seen(folder, 0.95)
    assert found.steps_to_target == 30
    assert found.crossed_steps == pytest.approx(np.interp(0.95, [0, 0.5, 0.9, 0.96], [0, 10, 20, 30]))
    assert table.seen(folder, 0.25).crossed_steps == pytest.approx(5)
    assert table.seen(folder, 0.9).crossed_steps == pytest.approx(20)
    late = table.seen(folder, 0.97)
    assert late.crossed_steps is None and late.steps_to_target is None
    made = table.line("x", "x", SLOW, [found, late], is_projected=False, hosts=4)
    assert made["crossed_s"]["min"] == pytest.approx(found.train_to_target_s / 30 * found.crossed_steps)
    assert made["crossed_s"]["median"] is None
    timed = table.projected(seen(step_s=7.0), found)
    assert (timed.train_to_target_s, timed.crossed_steps) == (210.0, found.crossed_steps)


def test_goals_from_lines() -> None:
    lines = [
        made_line(rows.ALONE, [88.0, 90.0, 86.0], 0.97),
        made_line(rows.HOROVODRUN, [700.0, 710.0, None], 0.97),
        made_line("DDP + powerSGD_hook r1", [60.0], 0.97),
        made_line("DDP + powerSGD_hook r2", [50.0], 0.97),
        made_line(rows.UNCOMPRESSED, [690.0], 0.97),
        made_line("powersgd", [25.0, 27.0, 26.0], 0.966),
        made_line("fast and wrong", [20.0], 0.96),
        made_line("never", [None, None, 10.0], 0.97),
    ]
    lines = table.with_speedups(lines)
    best = table.best(lines, 10.0)
    assert best is not None and best["strategy"] == "powersgd"
    assert best["speedup"] == pytest.approx(88 / 26)
    two = made_line(rows.TWO_BY_TWO, [None], 0.97, MIDDLE) | {"wire_efficiency": {"median": 0.94}}
    found = {each["goal"]: each for each in table.goals(lines, [two])}
    values = {goal: (each["value"], each["met"]) for goal, each in found.items() if each["met"] is not None}
    expected = {
        "best strategy (powersgd) over 1 host at 10 Mbit/s": (88 / 26, True),
        "the same, ideal 4": (88 / 26, False),
        "best strategy sooner than plain horovodrun at 10 Mbit/s, times": (710 / 26, True),
        "best strategy sooner than DDP + powerSGD_hook's best rank at 10 Mbit/s": (50 / 26, True),
        "its final accuracy against uncompressed at 10 Mbit/s, points": (-0.4, True),
        f"{rows.TWO_BY_TWO}, share of its limit at 100 Mbit/s (replay)": (0.94, False),
    }
    assert values == {goal: (pytest.approx(value), met) for goal, (value, met) in expected.items()}
    assert found["the same, ideal 4"]["stretch"] is True
    crossed = [each["crossed"] for each in found.values() if each["crossed"] is not None]
    assert crossed == [pytest.approx(88 / 26)], "all cross at 0.8 of their time"
    text = table.show(
        {"hosts": 4, "cpu_share": 0.5, "target_accuracy": 0.95, "cell": {}, "flags": [], "rows": lines}
        | {"goals": list(found.values())}
    )
    assert "26 [25 .. 27]" in text
    assert "3.38 (between epochs: 3.38), goal 3.2 or more" in text
    assert "missed: hierarchical a:2,b:2" in text
    assert table.best([], 10.0) is None
    assert all(each["met"] is None for each in table.goals([], []))


# --- replay -----------------------------------------------------------------------------------------------------------


def test_replays_time_whole_rounds_and_few_of_the_long_steps() -> None:
    local, plain = BY_NAME["local-sgd:every=4"], BY_NAME[rows.HOROVODRUN]
    assert replay.replay_steps(plain, 110.0) == (2, 0)
    assert replay.replay_steps(plain, 0.5) == (20, 2)
    for step_s in (0.1, 1.0, 3.0, 10.0):
        steps, untimed = replay.replay_steps(local, step_s)
        assert steps % 4 == untimed % 4 == 0 < steps


@pytest.mark.parametrize(
    "strategy",
    [
        ["--strategy", "hierarchical"],
        ["--strategy", "delayed+powersgd"],
        ["--strategy", "native:hook=powersgd,rank=1"],
        ["--strategy", "allreduce"],
    ],
)
def test_a_replay_sleeps_its_computation_and_exchanges_for_real(strategy: list[str]) -> None:
    flags = ["--width", "0.125", "--compute-s", "0.2", "--steps", "3", "--threads", "1", *strategy]
    found = document(launch(2, [str(ROOT / "tools" / "replay.py"), "--framework", "torch", *flags]))
    assert (found["ranks"], found["hosts"], len(found["steps_s"])) == (2, 1, 3)
    assert min(found["steps_s"]) > 0.199
    if strategy[1] in ("native", "allreduce"):
        assert found["bytes_sent_per_step"] == found["bytes_per_step"] > 0


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_small_bench_ends_with_one_document_and_goes_on_where_it_was(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools" / "bench_strategies.py"), "--json", "--keep", str(tmp_path)]
    words += ["--name", f"t{secrets.token_hex(3)}", "--hosts", "2", "--epochs", "1", "--mode", "train"]
    words += ["--rates", "100mbit", "--seeds", "1", "--rows", "1 host,powersgd", "--target", "0.05"]
    words += ["--flags=--image-size 16"]
    documents = []
    for kept in (False, True):
        done = subprocess.run(words, env=environment(dict(os.environ)), capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, 1), done.stderr
        assert done.stderr.count(": kept; ") == (2 if kept else 0), done.stderr
        documents.append(json.loads(done.stdout))
    assert documents[0] == documents[1]
    one, two = documents[0]["rows"]
    assert (one["strategy"], two["strategy"]) == ("1 host", "powersgd")
    assert (one["hosts"], two["hosts"], two["rate_mbit"]) == (1, 2, 100.0)
    assert documents[0]["best_speedup_10mbit"] is None
    for row in (one, two):
        assert (row["n"], row["reached"], row["steps_to_target"]["median"]) == (1, 1, 12)
    assert two["speedup"] == pytest.approx(one["time_to_target_s"]["median"] / two["time_to_target_s"]["median"])
    sent = rows.payload_bytes(BY_NAME["powersgd"], 2, 0.25)
    assert two["limit_s_per_step"] == pytest.approx(8 * sent / (0.936 * 100e6), rel=0.05)
    assert sent * 12 < two["bytes_per_host_to_target"]["median"] < 3 * sent * 12
