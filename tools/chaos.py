#!/usr/bin/env python3
"""Lose hosts of real elastic trainings, one random fault per run, and check in the records that nothing else is lost.

    sudo make chaos CHAOS_ARGS='--faults 20 --seed 1'
    sudo make chaos CHAOS_ARGS='--faults 1 --seed 7 --rates 10mbit'

Creates four virtual hosts. Needs root. A seed determines the fault, the hosts that it hits, the step, the host of the
launcher, strategy, framework and rate. The run must finish without help, or end with the error that
docs/guides/when-a-host-dies.md documents. Exits with 1 and names the seed if a law is broken: each sample counts once
per epoch, no step is missing or recorded twice, replicas are equal, no two sides continue, no process is left on any
host, and survivors are not restarted. Runs are stored in --out. Stored runs are checked again but not repeated, so the
same command resumes.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench import UNLIMITED, cluster, known, options_of, say, show  # noqa: E402
from chaos_faults import BATCH, ENDS, KINDS, LIMIT_S, RETURNS, Case, Lab, Run, drawn  # noqa: E402

from hvdtrain.system import exits  # noqa: E402
from hvdtrain.system.commands import as_calling_user, need_root  # noqa: E402

# --- the laws ---------------------------------------------------------------------------------------------------------


def broken(case: Case, result: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield the laws that a run has broken."""
    output, code = (folder / "output.txt").read_text(errors="replace"), result["code"]
    yield from (f"process {each} is left" for each in result["left"])
    if result["started_later"] != (len(case.victims) if case.kind in RETURNS else 0):
        yield f"{result['started_later']} ranks were started again"
    if result["ranks"] != len(case.hosts):
        yield f"{result['ranks']} ranks ran at the time of the fault: {last_line(output)}"
    elif code is None:
        yield f"it did not end within {LIMIT_S:g} s: {last_line(output)}"
    elif case.survivors is None:
        if code == 0 or ENDS[case.kind] not in output or "Traceback" in output:
            yield f"it ended with {code}, not as documented: {last_line(output)}"
    elif code:
        yield f"it ended with {code}: {last_line(output)}"
    else:
        if not (folder / "run" / "COMPLETE").exists():
            yield "COMPLETE is missing"
        yield from broken_records(case, {path.name: read(path) for path in (folder / "run").glob("metrics/*.jsonl")})


def broken_records(case: Case, files: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the laws that the records of a finished run break. `files`: the records of each file."""
    steps, epochs, views, summaries = (
        [each for each in files["rank0000.jsonl"] if each["type"] == kind]
        for kind in ("step", "epoch", "view", "summary")
    )
    numbers, expected = [each["step"] for each in steps], [*range(summaries[0]["steps"] if summaries else 0)]
    if numbers != expected or len(summaries) != 1:
        yield f"{len(numbers)} steps are recorded instead of {len(expected)}, in {len(summaries)} summaries"
    if [each["epoch"] for each in epochs] != [*range(int(case.flags[case.flags.index("--epochs") + 1]))]:
        yield f"these epochs are recorded: {[each['epoch'] for each in epochs]}"
    is_local = case.strategy.startswith("local-sgd")
    for each in epochs:
        # With local SGD a lost host's samples since the last averaging do not count.
        interrupted = is_local and each["epoch"] in {view["epoch"] for view in views}
        lost = 4 * 2 * BATCH * len(case.victims) if interrupted else 0
        if not case.samples - lost <= each["samples"] <= case.samples:
            yield f"epoch {each['epoch']} has {each['samples']} of {case.samples} samples"
    present = views[-1]["members"] if views else case.hosts
    if sorted(present) != sorted(case.survivors or []):
        yield f"{', '.join(present)} continued instead of {', '.join(case.survivors or [])}"
    members: dict[int, list[str]] = {}
    for name, lines in files.items():
        own = [each for each in lines if each["type"] == "view"]
        first = own[-1]["members"][0] if own else case.hosts[0]  # files of lost first ranks are called lost-*.jsonl
        number = int(name[4:8]) if name.startswith("rank") else None
        if number is not None and number >= len(case.hosts):
            continue  # of a former rank 0 that came back; copied from rank 0's
        host = first if number is None else case.hosts[number]
        if case.kind in RETURNS and host in case.victims:
            continue  # these records were copied from rank 0's
        for view in own:
            if view["members"] != members.setdefault(view["view"], view["members"]):
                yield f"view {view['view']} has two lists of members"
            if name.startswith("rank") and name != "rank0000.jsonl" and host not in view["members"]:
                yield f"{host} continued in view {view['view']}, of which it is not a member"
        end = min((view["step"] for view in views if host not in view["members"]), default=math.inf)
        last = max((each["step"] for each in lines if each["type"] == "step"), default=0)
        if name != "rank0000.jsonl" and not is_local and last >= end:
            yield f"{host} recorded step {last}, and the others continued without it from step {end} on"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without an incomplete last line."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if "hvdtrain: " in line] or output.splitlines() or ["no output"]
    return lines[-1][:300]


# --- all runs ---------------------------------------------------------------------------------------------------------


def chaos(options: argparse.Namespace, lab: Callable[[], Lab]) -> list[dict[str, Any]]:
    """Run all cases that are not stored yet, and check all of them."""
    rows = []
    for number in range(options.faults):
        case = drawn(options.seed + number, options.rates, options.kinds)
        folder = options.out / f"{case.seed}-{case.kind}-{case.rate}"
        stored = folder.with_suffix(".json")
        if not stored.exists():
            shutil.rmtree(folder, ignore_errors=True)
            with as_calling_user():  # who the ranks are
                folder.mkdir(parents=True)
            lab().set_rate(case.rate)
            try:
                result = Run(lab(), case, folder).finished()
            finally:
                lab().clean()
            stored.write_text(json.dumps(result))
        result = json.loads(stored.read_text())
        problems, finished = [*broken(case, result, folder)], result["code"] == 0
        first = read(folder / "run" / "metrics" / "rank0000.jsonl") if finished else []
        continued = [each["unix_s"] for each in first if each["type"] == "view"]
        seconds = continued[-1] - result["injected_unix_s"] if continued else None
        rows.append(
            {"kind": case.kind, "seed": case.seed, "case": str(case), "finished": finished, "problems": problems}
            | {"continued_s": seconds, "run_s": result["run_s"]}
        )
        words = "; ".join(problems) or ("finished" if finished else "ended as documented")
        words += "" if seconds is None else f", the others continued after {seconds:.1f} s"
        say(f"{number + 1} of {options.faults}, {case}: {words}")
    return rows


def by_kind(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine the runs of each kind of fault. Times are from the fault until the others computed again."""
    lines = []
    for kind in (kind for kind in KINDS if kind in {row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        times = sorted(row["continued_s"] for row in own if row["continued_s"] is not None)
        counts = {"finished": sum(row["finished"] for row in own), "broken": sum(bool(row["problems"]) for row in own)}
        median, p95 = (statistics.median(times), times[math.ceil(0.95 * len(times)) - 1]) if times else (None, None)
        lines.append({"fault": kind, "runs": len(own), **counts, "median_s": median, "p95_s": p95})
    return lines


# --- options and results ----------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    defaults: dict[str, Any] = {"rates": ["10mbit", "100mbit", UNLIMITED], "kinds": [*KINDS], "faults": 20, "seed": 1}
    top = options_of(__doc__, "chaos", **defaults, out=ROOT / "results" / "chaos")
    options = top.parse_args(arguments)
    known(top, options.kinds, [*KINDS])
    options.out = options.out.resolve()
    need_root("the virtual cluster")
    with as_calling_user():  # who the ranks are
        options.out.mkdir(parents=True, exist_ok=True)
    lab = functools.cache(lambda: Lab(options.name))  # stored runs need none
    try:
        rows = chaos(options, lab)
    finally:
        cluster("down", "--name", options.name)
    show(options, rows if options.json else by_kind(rows))
    chosen = f"--rates {','.join(options.rates)} --kinds {','.join(options.kinds)}"
    failed = [row for row in rows if row["problems"]]
    for row in failed:
        again = f"make chaos CHAOS_ARGS='--faults 1 --seed {row['seed']} {chosen} --out DIR'"
        say(f"chaos: {row['case']}: {'; '.join(row['problems'])}; hint: repeat it: {again}")
    return exits.FAILED if failed else exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "chaos")
