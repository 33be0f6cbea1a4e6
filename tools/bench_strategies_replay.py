"""The part of `tools/bench_strategies.py` where computation is slept: seconds per step of every row, at two widths."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import bench_strategies_rows as rows_
import bench_strategies_table as table
from bench_strategies_rows import Cell, Row
from bench_strategies_runs import Bench, patience_s, starter
from bench_strategies_table import Line, Seen

from hvdtrain import records, strategies
from hvdtrain.config import flag
from hvdtrain.exits import Failure
from hvdtrain.results import runs

REPLAY_S, REPLAY_STEPS, REPLAY_WHOLE_S = 20.0, 20, 30.0
"""The timed steps take about so long, and are at most so many; steps longer than the last are two, none untimed"""


def replay_steps(row: Row, expected_s: float) -> tuple[int, int]:
    """How many steps are timed, and how many before: whole rounds of local-sgd."""
    every = getattr(strategies.parse(row.strategy).settings, "every", 1)
    if every * expected_s > REPLAY_WHOLE_S:
        return max(2, every), 0
    steps = min(REPLAY_STEPS, max(2, round(REPLAY_S / expected_s)))
    return -(-steps // every) * every, max(2, every)


def estimate_s(row: Row, rate: int, hosts: int, width: float) -> float:
    step_s = rows_.expected_step_s(row, hosts, rate, width)
    return rows_.START_S[row.starter] + step_s * sum(replay_steps(row, step_s))


def replay(bench: Bench, row: Row, rate: int, hosts: int, width: float, compute_s: float) -> Any:
    """tools/replay.py's document for a row, made now or earlier; None if it failed each time."""
    name = Cell(row=row, rate=rate, seed=0, short=True, hosts=hosts, epochs=1, width=width).name
    kept = bench.keep / f"replay-{name}-{compute_s:.3g}.json"
    estimate = estimate_s(row, rate, hosts, width)
    if kept.exists():
        bench.tell(kept.stem, "kept", estimate)
        return json.loads(kept.read_text())
    steps, untimed = replay_steps(row, compute_s + rows_.wire_s(row, hosts, rate, width))
    given = row.settings | {"width": width, "compute_s": compute_s, "steps": steps, "untimed": untimed}
    given |= {"framework": "torch", "threads": 1}
    flags = [word for key, value in given.items() for word in (flag(key), str(value))]
    words = [*starter(row, hosts), sys.executable, "tools/replay.py", *flags]

    def once(attempt: int) -> Any:
        output = bench.cluster.run(words, kept.with_suffix(".log"), patience_s(estimate))
        for text in output.splitlines():
            if "hvdtrain/replay/" in text:
                found = json.loads(text[text.index("{") :])
                records.write_document(kept, found)
                return found
        raise Failure(f"tools/replay.py printed no document; see {kept.with_suffix('.log')}")

    return bench.attempts(kept.stem, rate, estimate, once)


def replays(asked: argparse.Namespace) -> Iterator[tuple[Row, int, int, float]]:
    """Row, rate, hosts, width of each."""
    for width in asked.widths:
        for rate in asked.rates:
            for row in asked.rows:
                if row.hosts is None:
                    yield row, rate, asked.hosts, width
    if 100_000_000 in asked.rates and asked.two_by_two:
        yield rows_.REPLAY_ONLY, 100_000_000, 2, rows_.WIDTH


def profiles(asked: argparse.Namespace) -> dict[tuple[float, int], Cell]:
    """The runs that tell how long computation takes: by width and hosts."""
    uncompressed = Row(name="profile", starter="ours", settings={"strategy": rows_.UNCOMPRESSED})
    alone = Row(name="profile alone", starter="alone")
    return {
        (width, hosts): Cell(
            row=row, rate=max(rows_.RATES), seed=0, short=True, hosts=hosts, epochs=1, width=width, extra=asked.flags
        )
        for width in sorted({*asked.widths, rows_.WIDTH})
        for row, hosts in ((alone, 1), (uncompressed, asked.hosts))
    }


def replayed(bench: Bench, asked: argparse.Namespace) -> list[Line]:
    """Profiles the computation, then replays every row: the lines of the table."""
    alone_s: dict[float, float] = {}
    compute_s: dict[float, float] = {}
    for (width, hosts), cell in profiles(asked).items():
        if folder := bench.run(cell, 0):
            about = runs.row(folder, [])
            (alone_s if hosts == 1 else compute_s)[width] = about["data_s"] + about["compute_s"]
    lines = [
        replay_line(rows_.ALONE, "allreduce", rate, 1, width, alone_s[width], 0.0, None)
        for width in asked.widths
        for rate in asked.rates
        if width in alone_s
    ]
    for row, rate, hosts, width in replays(asked):
        if width not in compute_s:
            continue
        found = replay(bench, row, rate, hosts, width, compute_s[width])
        if found is not None:
            step_s, waited_s = (sum(found[key]) / len(found[key]) for key in ("steps_s", "communication_s"))
            limit_s = rows_.wire_s(row, hosts, rate, width)
            lines.append(replay_line(row.name, row.strategy, rate, hosts, width, step_s, waited_s, limit_s))
    return table.with_speedups(lines, "step_s")


def replay_line(
    name: str, strategy: str, rate: int, hosts: int, width: float, step_s: float, waited_s: float, limit_s: float | None
) -> Line:
    """A line with the figures that a time per step gives."""
    here = Seen(
        steps_to_target=None,
        crossed_steps=None,
        train_to_target_s=None,
        accuracy=None,
        step_s=step_s,
        communication_s=waited_s,
        limit_s=limit_s,
        efficiency=limit_s / taken if limit_s and (taken := step_s if table.beside(strategy) else waited_s) else None,
        nic_bytes_per_step=None,
        goodput_mbit=None,
    )
    made = table.line(name, strategy, rate, [here], is_projected=False, hosts=hosts)
    return made | {"mode": "replay", "width": width, "reached": None}
