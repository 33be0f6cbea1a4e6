#!/usr/bin/env python3
"""Which communication strategy gets to a test accuracy soonest on slow links? Needs root (virtual hosts).

    sudo tools/bench_strategies.py --keep results/bench         # everything: hours; call again to go on
    sudo tools/bench_strategies.py --quick --json               # one seed at 10 Mbit/s, a short list of rows
    sudo tools/bench_strategies.py --rows 'powersgd*,1 host' --rates 10mbit --seeds 1,2

Makes a virtual cluster of its own (4 hosts of half a core) and throttles it. Every row trains the same cell, ResNet-34
at width 0.25 on digits of 128x128 pixels with one global batch and one learning-rate schedule, to the end; the rows
take turns, a seed of each at each rate, every other round backwards. The time to the target is read from the epochs'
records. Where a row's wire would take too long, an epoch is run and the rest projected: the table says where, and what
every column means. `--mode replay` replaces the computation by a sleep of the profiled time (tools/replay.py), also for
full-width ResNet-34. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_strategies_replay as replay
import bench_strategies_rows as rows_
import bench_strategies_table as table
from bench_strategies_rows import Cell
from bench_strategies_runs import ATTEMPTS, NAMES, Bench, Cluster, hand_over, minutes
from bench_strategies_table import Line, Seen

from hvdtrain import exits
from hvdtrain.cluster.commands import need_root
from hvdtrain.cluster.rates import parse_rate, show_rate
from hvdtrain.exits import Failure

SCHEMA = "hvdtrain/bench-strategies/1"


def trained(bench: Bench, made: Sequence[Cell], asked: argparse.Namespace) -> list[Line]:
    """Runs all cells; the lines of the table, rate by rate."""
    found: dict[Cell, Seen] = {}
    for order, cell in enumerate(made):
        if folder := bench.run(cell, order):
            found[cell] = table.seen(folder, asked.target)
    lines = []
    for rate in asked.rates:
        for row in asked.rows:
            hosts = row.hosts or asked.hosts
            made_at = rows_.rate_of(row, rate, asked.rates)
            here = {cell.seed: cell for cell in found if (cell.row, cell.rate) == (row, made_at)}
            short = rows_.is_projected(row, hosts, rate)
            if short:
                at = rows_.reference_rate(row, hosts, asked.rates)
                whole = {c.seed: found[c] for c in found if (c.row, c.rate, c.short) == (row, at, False)}
                each = [table.projected(found[here[s]], whole[s]) for s in here if s in whole and here[s].short]
            else:
                each = [found[cell] for cell in here.values()]
            if each:
                lines.append(table.line(row.name, row.strategy, rate, each, is_projected=short, hosts=hosts))
    return table.with_speedups(lines)


# --- the command ----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    listed = ", ".join(row.name for row in (*rows_.ROWS, rows_.REPLAY_ONLY))
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"rows: {listed}"
    )
    top.add_argument("--quick", action="store_true", help="one seed, 10 Mbit/s, fewer rows, no replay")
    top.add_argument("--mode", choices=("all", "train", "replay"), help="default: all; with --quick train")
    top.add_argument("--rows", metavar="NAMES", help="only these, separated by commas; * stands for anything")
    top.add_argument("--rates", metavar="RATES", help="default: 10mbit,100mbit,1gbit")
    top.add_argument("--seeds", metavar="N,N,..", help="default: 1,2,3")
    top.add_argument("--hosts", type=int, default=rows_.HOSTS, metavar="N", help="default: 4")
    top.add_argument("--epochs", type=int, default=rows_.EPOCHS, metavar="N", help=f"default: {rows_.EPOCHS}")
    top.add_argument("--target", type=float, default=rows_.TARGET, metavar="X", help=f"default: {rows_.TARGET}")
    top.add_argument("--widths", default="0.25,1", metavar="X,..", help="of the replay (default: 0.25,1)")
    top.add_argument("--flags", default="", metavar="WORDS", help="further flags of every run: --flags='--lr 0.1'")
    top.add_argument("--keep", type=Path, metavar="DIR", help="where runs stay; those already there are not run again")
    top.add_argument("--name", default="tstrat", help="of the cluster that is made (default: tstrat)")
    top.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    top.add_argument("--dry-run", action="store_true", help="print the runs and how long they take, and exit")
    return top


def resolve(asked: argparse.Namespace) -> argparse.Namespace:
    """What was asked, with what follows from --quick. Raises Failure (2)."""
    patterns = asked.rows.split(",") if asked.rows else ["*"]
    everything = [*rows_.ROWS, rows_.REPLAY_ONLY]
    if unknown := [p for p in patterns if not any(fnmatchcase(row.name, p) for row in everything)]:
        raise Failure(
            f"--rows {unknown[0]}: no such row; known: {', '.join(row.name for row in everything)}", exits.USAGE
        )
    chosen = [row for row in everything if any(fnmatchcase(row.name, pattern) for pattern in patterns)]
    if asked.quick and not asked.rows:
        chosen = [row for row in chosen if row.quick]
    asked.two_by_two = rows_.REPLAY_ONLY in chosen
    chosen = [row for row in chosen if row != rows_.REPLAY_ONLY]
    asked.rows, problems = rows_.known(chosen)
    for problem in problems:
        print(f"bench: {problem}", file=sys.stderr)
    try:
        asked.seeds = [int(word) for word in (asked.seeds or ("1" if asked.quick else "1,2,3")).split(",")]
        asked.widths = [float(word) for word in asked.widths.split(",")]
    except ValueError as error:
        raise Failure(f"--seeds and --widths are numbers separated by commas ({error})", exits.USAGE) from error
    rates = asked.rates or ("10mbit" if asked.quick else ",".join(map(show_rate, rows_.RATES)))
    asked.rates = [parse_rate(word) for word in rates.split(",")]
    if not 2 <= asked.hosts <= len(NAMES) or len(set(asked.seeds)) < len(asked.seeds) or asked.epochs < 1:
        raise Failure(f"--hosts is 2 to {len(NAMES)}, --epochs at least 1, and no seed is given twice", exits.USAGE)
    if bad := [width for width in asked.widths if width not in rows_.ALONE_STEP_S]:
        raise Failure(f"--widths {bad[0]:g}: known are {', '.join(f'{w:g}' for w in rows_.ALONE_STEP_S)}", exits.USAGE)
    asked.mode = asked.mode or ("train" if asked.quick else "all")
    asked.flags = tuple(asked.flags.split())
    return asked


def measure(asked: argparse.Namespace, keep: Path | None) -> Line | None:
    """Everything that was asked, as the document of --json; None for a dry run, which prints the runs."""
    made: list[Cell] = []
    if asked.mode != "replay":
        made = rows_.cells(asked.rows, asked.rates, asked.seeds, asked.hosts, asked.epochs, asked.flags)
    again = list(replay.replays(asked)) if asked.mode != "train" else []
    profiling = list(replay.profiles(asked).values()) if again else []
    total_s = sum(cell.estimate_s for cell in [*made, *profiling])
    total_s += sum(replay.estimate_s(row, rate, hosts, width) for row, rate, hosts, width in again)
    print(
        f"bench: {len(made)} runs, {len(profiling)} profiles, {len(again)} replays, about {minutes(total_s)}",
        file=sys.stderr,
        flush=True,
    )
    if keep is None or asked.dry_run:
        for cell in made:
            print(f"{cell.name}: {cell.estimate_s:.0f} s")
        return None
    need_root("the benchmark's virtual cluster")
    try:
        keep.mkdir(parents=True, exist_ok=True)
        hand_over(keep)
    except OSError as error:
        raise Failure(f"--keep {keep}: {error.strerror}; choose a folder to write to", exits.CANNOT_WRITE) from error
    with Cluster(asked.name, asked.hosts) as cluster:
        bench = Bench(cluster, keep.resolve(), total_s)
        lines = trained(bench, made, asked) if made else []
        from_replay = replay.replayed(bench, asked) if again else []
    found = table.goals(lines, from_replay)
    best = table.best(lines, 10.0)
    return {
        "schema": SCHEMA,
        "hosts": asked.hosts,
        "cpu_share": rows_.CPU_SHARE,
        "cell": rows_.CELL | rows_.SCHEDULE | {"width": rows_.WIDTH, "epochs": asked.epochs},
        "flags": list(asked.flags),
        "target_accuracy": asked.target,
        "seeds": asked.seeds,
        "best_speedup_10mbit": best["speedup"] if best else None,
        "best_strategy_10mbit": best["strategy"] if best else None,
        "rows": [*lines, *from_replay],
        "goals": found,
        "failed": bench.failed,
        "notes": table.NOTES,
    }


def main(arguments: list[str]) -> int:
    """Returns the exit code; raises Failure, whose message is for the user."""
    asked = resolve(parser().parse_args(arguments))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the cluster is removed
    with contextlib.ExitStack() as stack:
        keep = asked.keep
        if keep is None and not asked.dry_run:
            keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-bench-")))
        document = measure(asked, keep)
    if document is None:
        return exits.OK
    print(json.dumps(document, allow_nan=False) if asked.json else table.show(document))
    for name in document["failed"]:
        print(f"bench: {name} failed {ATTEMPTS} times", file=sys.stderr)
    missed = any(each["met"] is False and not each["stretch"] for each in document["goals"])
    return exits.FAILED if missed or document["failed"] else exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
