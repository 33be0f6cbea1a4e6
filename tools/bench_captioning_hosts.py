"""The captioning model over 1, 2 and 4 virtual hosts of half a core, for `tools/bench_captioning.py`. Needs root.

Every run is one epoch of the drawn scenes with one global batch, so that more hosts should make a step shorter: plainly
by horovodrun, and by launch/mpirun.sh with the exact exchange and with PowerSGD. The wire's limit is what the payload
of the strategy needs at the goodput that the run measured; the speed-up at best, what follows if computing takes 1/h of
one host's time beside it. One more run, over two hosts, keeps VGG16 frozen, and tells the bytes at the network card.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import spread
from bench_strategies_rows import CPU_SHARE, Row
from bench_strategies_runs import Bench, Cluster, patience_s, starter

from hvdtrain.cluster.rates import show_rate
from hvdtrain.config import flag
from hvdtrain.exits import Failure
from hvdtrain.results import runs
from hvdtrain.results.folders import Problem

RATE = 100_000_000
HOSTS = (2, 4)
BATCH = 1024
"""Captions per step: with fewer, the wire alone takes longer than one host for all of it"""
FLAGS = ["--epochs", "1", "--checkpoint-epochs", "0", "--beam", "1", "--threads", "1", "--json"]
SHAPES = ["--framework", "torch", "--global-batch-size", str(BATCH)]
ROWS = (
    Row(name="plain horovodrun", starter="horovodrun"),
    Row(name="hierarchical", starter="ours", settings={"strategy": "hierarchical"}),
    Row(name="powersgd:rank=4", starter="ours", settings={"strategy": "powersgd:rank=4"}),
)
ALONE = Row(name="1 host", starter="alone")
FROZEN = Row(name="vgg16 frozen", starter="ours", settings={"strategy": "hierarchical"})
ESTIMATE_S = 120.0
"""Of a run, about"""
Line = dict[str, Any]


def measure(rounds: int, keep: Path, *, frozen: Sequence[str], name: str = "tcapt") -> list[Line]:
    """A line for each row and number of hosts, from `rounds` runs of each in turn; what failed twice is left out.

    `frozen` are the flags of a run with a frozen encoder.
    """
    cells = [(ALONE, 1), *((row, hosts) for hosts in HOSTS for row in ROWS)]
    found: dict[tuple[Row, int], list[Line]] = {}
    with Cluster(name, max(HOSTS)) as cluster:
        bench = Bench(cluster, keep, ESTIMATE_S * (rounds * len(cells) + 1))
        for number in range(rounds):
            for row, hosts in cells if number % 2 == 0 else reversed(cells):
                if seen := once(bench, row, hosts, f"{row.name} {hosts} {number}", SHAPES):
                    found.setdefault((row, hosts), []).append(seen)
        if seen := once(bench, FROZEN, HOSTS[0], FROZEN.name, frozen):
            found[FROZEN, HOSTS[0]] = [seen]
    return [
        {"row": row.name, "hosts": hosts, "runs": found[row, hosts]}
        for row, hosts in [*cells, (FROZEN, HOSTS[0])]
        if (row, hosts) in found
    ]


def once(bench: Bench, row: Row, hosts: int, name: str, flags: Sequence[str]) -> Line | None:
    """One run: seconds, payload limit and network card's bytes of a step, None where there are none."""
    folder = bench.keep / name.replace(" ", "-")
    settings = [word for setting, value in row.settings.items() for word in (flag(setting), str(value))]
    words = [*starter(row, hosts), sys.executable, "-m", "hvdtrain.captioning", *flags, *settings, *FLAGS]

    def run(attempt: int) -> Line:
        shutil.rmtree(folder, ignore_errors=True)
        log = bench.keep / f"{folder.name}.log"
        bench.cluster.run([*words, "--run-dir", str(folder)], log, patience_s(ESTIMATE_S))
        problems: list[Problem] = []
        seen = runs.row(folder, problems)
        if seen["state"] != "complete" or seen["step_s"] is None:
            raise Failure(f"{folder}: {seen['state']}; {'; '.join(map(str, problems)) or 'no figures'}")
        return {
            "step_s": seen["step_s"],
            "limit_s": seen["own_limit_s_per_step"],
            "goodput_mbit": seen["goodput_mbit"],
            "nic_bytes": seen["wire_bytes_per_step"],
            "parameters": seen["parameters"],
        }

    return bench.attempts(name, RATE, ESTIMATE_S, run)


def rows(lines: Sequence[Line]) -> list[tuple[str, str, str, str]]:
    """The lines as rows of the table."""
    alone = [run["step_s"] for line in lines if line["row"] == ALONE.name for run in line["runs"]]
    one_s = statistics.median(alone) if alone else None
    shown = [(f"step of {BATCH} captions, {CPU_SHARE:g} core, 1 host, s", spread(alone, 3), "", "")] if alone else []
    for line in lines:
        hosts, of_line = line["hosts"], line["runs"]
        if line["row"] == FROZEN.name:
            limit = 2 * (hosts - 1) / hosts * 4 * of_line[0]["parameters"]
            sent = spread([run["nic_bytes"] / 1e6 for run in of_line if run["nic_bytes"]], 2)
            what = f"MB per step at the card, VGG16 frozen, {hosts} hosts"
            shown.append((what, sent, f"limit {limit / 1e6:.2f}", "1.07 x: headers"))
        elif line["row"] != ALONE.name:
            steps_s = [run["step_s"] for run in of_line]
            limits_s = [run["limit_s"] for run in of_line if run["limit_s"]]
            wire = f"wire {statistics.median(limits_s):.3f}" if limits_s else ""
            what = f"{hosts} hosts at {show_rate(RATE)}, {line['row']}"
            shown.append((f"{what}: step, s", spread(steps_s, 3), wire, ""))
            if one_s is not None:
                least_s = max(one_s / hosts, statistics.median(limits_s)) if limits_s else one_s / hosts
                bound = f"at best {one_s / least_s:.2f}"
                shown.append((f"{what}: speed-up over 1 host", spread([one_s / s for s in steps_s], 2), bound, ""))
    return shown
