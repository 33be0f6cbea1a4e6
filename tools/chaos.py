#!/usr/bin/env python3
"""Lose hosts of real elastic trainings, one random fault per run, and check in the records that nothing else is lost.

    sudo make chaos CHAOS_ARGS='--faults 20 --seed 1'
    sudo make chaos CHAOS_ARGS='--faults 1 --seed 7 --rates 10mbit'
    sudo make chaos CHAOS_ARGS='--cost --rates unlimited,10mbit'
    sudo make chaos CHAOS_ARGS='--every 60 --faults 12 --rates 100mbit'

Creates four virtual hosts. Needs root. A seed determines the fault, the hosts that it hits, the step, the host of the
launcher, strategy, framework and rate. The run must finish without help, or end with the error that
docs/guides/when-a-host-dies.md documents. Exits with 1 and names the seed if a law is broken: each sample counts once
per epoch, no step is missing or recorded twice, replicas are equal, no two sides continue, no process is left on any
host, and survivors are not restarted. Runs are stored in --out. Stored runs are checked again but not repeated, so the
same command resumes.

--every S loses a host every S seconds of one training, and compares its samples with those of undisturbed hosts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench import UNLIMITED, cluster, known, listed, options_of, say, show  # noqa: E402
from chaos_faults import BATCH, ENDS, KINDS, LIMIT_S, NAMES, RETURNS, TRAIN, Case, Lab, Run, drawn, send  # noqa: E402

from hvdtrain.observe.timing import WARMUP_STEPS  # noqa: E402
from hvdtrain.system import exits  # noqa: E402
from hvdtrain.system.commands import as_calling_user, need_root  # noqa: E402
from hvdtrain.system.exits import Failure  # noqa: E402

FIRST_S = 5.0
"""A lost host is not started again earlier than this"""
BATCH_OF_HOST = 32
"""For --every"""
START_S, IDLE_S = 4, 8
"""Time for a job without work to start, and time in which its bytes are counted"""

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


# --- the cost without faults ------------------------------------------------------------------------------------------


def cost(options: argparse.Namespace, lab: Lab) -> list[dict[str, Any]]:
    """Compare steps with and without --elastic in turn, and count the bytes of an elastic job that does nothing."""
    hosts, rows = listed(len(NAMES)), []
    for rate in options.rates:
        lab.set_rate(rate)
        medians: dict[str, list[float]] = {"plain": [], "elastic": []}
        for turn, how in itertools.product(range(options.rounds), medians):
            folder = options.out / f"cost-{rate}-{turn}-{how}"
            output = folder.with_suffix(".txt")
            if not (folder / "COMPLETE").exists():
                shutil.rmtree(folder, ignore_errors=True)
                words = [*(["--elastic"] if how == "elastic" else []), "-H", hosts, sys.executable, *TRAIN]
                words += ["--strategy", "powersgd", "--epochs", "20", "--evaluate-samples", "64"]
                if lab.start("a", *words, "--run-dir", str(folder), output=output).wait():
                    raise Failure(f"{folder}: {last_line(output.read_text())}")
            steps = [each for each in read(folder / "metrics" / "rank0000.jsonl") if each["type"] == "step"]
            seconds = [each["data_s"] + each["compute_s"] + each["communication_s"] for each in steps[WARMUP_STEPS:]]
            medians[how].append(statistics.median(seconds))
            say(f"{rate}, run {turn + 1}, {how}: {1000 * medians[how][-1]:.1f} ms")
        ratios = sorted(new / old for old, new in zip(medians["plain"], medians["elastic"], strict=True))
        row = {f"{how}_s": statistics.median(each) for how, each in medians.items()}
        row |= {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
        rows.append({"rate": rate, **row, "heartbeats_of_10mbit": heartbeats_bit_s(lab, hosts, options.out) / 10e6})
    return rows


def heartbeats_bit_s(lab: Lab, hosts: str, folder: Path) -> float:
    """Return the traffic of a job without work, on the busiest link in its busier direction."""
    job = lab.start("a", "--elastic", "-H", hosts, "sleep", str(START_S + 2 * IDLE_S), output=folder / "idle.txt")
    try:
        job.wait(START_S)
    except subprocess.TimeoutExpired:
        before = lab.counters()
        time.sleep(IDLE_S)
        return 8 * max(now - old for old, now in zip(before, lab.counters(), strict=True)) / IDLE_S
    finally:
        lab.clean()
    raise Failure(f"{folder}/idle.txt: {last_line((folder / 'idle.txt').read_text())}")


# --- a fault every S seconds ------------------------------------------------------------------------------------------


def repeatedly(options: argparse.Namespace, lab: Lab) -> list[dict[str, Any]]:
    """Kill the ranks of one host after the other in one training per rate. Each host comes back."""
    hosts, rows = listed(len(NAMES)), []
    for rate in options.rates:
        lab.set_rate(rate)
        folder = options.out / f"every-{options.every:g}-{rate}-{options.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        words = ["--elastic", "-H", hosts, sys.executable, *TRAIN]
        words += ["--width", "0.25", "--batch-size", str(BATCH_OF_HOST)]
        words += ["--strategy", options.strategy, "--epochs", "100000", "--evaluate-samples", "64"]
        words += ["--checkpoint-epochs", "0", "--run-dir", str(folder)]
        job, output = None, folder.with_suffix(".txt")
        try:
            job = lab.start("a", *words, output=output)
            kills = list(killed(options, lab, folder, job))
        finally:
            if job is not None:
                job.terminate()
                job.wait()
            lab.clean()
        if len(kills) < options.faults:
            raise Failure(f"{output}: {last_line(output.read_text())}")
        rows.append({"rate": rate, **compared(read(folder / "metrics" / "rank0000.jsonl"), kills)})
    return rows


def killed(options: argparse.Namespace, lab: Lab, folder: Path, job: subprocess.Popen[bytes]) -> Iterator[float]:
    """Kill ranks, and yield the time of each kill. Ends early if the job ends or a host does not come back."""
    draw, names, path = random.Random(options.seed), [*NAMES], folder / "metrics" / "rank0000.jsonl"
    wanted = b'"type":"step","step":100,'
    for number in range(options.faults):
        began = time.monotonic()
        while time.monotonic() - began < options.every or (number == 0 and not _holds(path, wanted)):
            if job.poll() is not None or time.monotonic() - began > LIMIT_S + options.every:
                return
            time.sleep(0.2)
        if number % len(NAMES) == 0:
            draw.shuffle(names)
        yield time.time()
        send([pid for pid, host in lab.ranks().items() if host == names[number % len(NAMES)]], signal.SIGKILL)
    time.sleep(options.every)


def _holds(path: Path, text: bytes) -> bool:
    return path.exists() and text in path.read_bytes()


def compared(rows: Sequence[dict[str, Any]], kills: Sequence[float]) -> dict[str, Any]:
    """Compare the samples between the first and the last change of members with those of undisturbed hosts.

    Four hosts are undisturbed before the first loss, three in the first FIRST_S seconds after a loss. Evaluations are
    left out.
    """
    views, parts = [row for row in rows if row["type"] == "view"], [list[float]()]
    for row in rows:
        if row["type"] == "view":
            parts.append([])
        elif row["type"] == "step" and not row["warmup"]:
            parts[-1].append(row["data_s"] + row["compute_s"] + row["communication_s"])
    four, three = statistics.mean(parts[0]), list[float]()
    for view, part in zip(views, parts[1:], strict=True):
        if view["hosts"] < len(NAMES) and part:
            three += first(part)
    step_s = {len(NAMES): four, len(NAMES) - 1: statistics.mean(three)}
    samples = capacity = whole = 0.0
    for view, later in itertools.pairwise(views):
        inside = [row for row in rows if row["type"] == "epoch" and view["step"] < row["step"] <= later["step"]]
        training_s = later["unix_s"] - view["unix_s"] - sum(row["validation_s"] for row in inside)
        samples += (later["step"] - view["step"]) * view["global_batch"]
        capacity += training_s * view["global_batch"] / step_s[view["hosts"]]
        whole += training_s * BATCH_OF_HOST * len(NAMES) / four
    after = [[view for view in views if view["unix_s"] > kill] for kill in kills]
    back = [[view["unix_s"] for view in each if view["hosts"] == len(NAMES)] for each in after]
    return {
        "faults": len(kills),
        "continued_s": max(each[0]["unix_s"] - kill for kill, each in zip(kills, after, strict=True)),
        "complete_s": max(each[0] - kill if each else math.inf for kill, each in zip(kills, back, strict=True)),
        "stop_s": max(view["lost_s"] for view in views if view["hosts"] == len(NAMES)),
        "four_s": four,
        "three_s": step_s[len(NAMES) - 1],
        "of_present": samples / capacity,
        "of_four": samples / whole,
    }


def first(steps: Sequence[float]) -> list[float]:
    """The first steps that take FIRST_S seconds together."""
    ends = itertools.accumulate(steps)
    return [step for step, end in zip(steps, ends, strict=True) if end <= FIRST_S] or [steps[0]]


# --- options and results ----------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    defaults: dict[str, Any] = {"rates": ["10mbit", "100mbit", UNLIMITED], "kinds": [*KINDS], "faults": 20, "seed": 1}
    top = options_of(__doc__, "chaos", **defaults, rounds=3, strategy="powersgd", out=ROOT / "results" / "chaos")
    top.add_argument("--cost", action="store_true", help="measure the cost of --elastic without faults")
    top.add_argument("--every", type=float, metavar="S", help="one training that loses a host every S seconds")
    options = top.parse_args(arguments)
    known(top, options.kinds, [*KINDS])
    options.out = options.out.resolve()
    if options.every is not None and options.every < 30:
        top.error(f"--every {options.every:g}: a lost host may need 30 s to come back; hint: give 30 or more")
    need_root("the virtual cluster")
    with as_calling_user():  # who the ranks are
        options.out.mkdir(parents=True, exist_ok=True)
    share = 0.8 * (os.cpu_count() or 1) / len(NAMES) if options.every else None
    lab = functools.cache(lambda: Lab(options.name, share))  # stored runs need none
    rows: list[dict[str, Any]] = []
    try:
        if options.every:
            shown = repeatedly(options, lab())
        else:
            shown = cost(options, lab()) if options.cost else by_kind(rows := chaos(options, lab))
    finally:
        cluster("down", "--name", options.name)
    show(options, rows if options.json and rows else shown)
    chosen = f"--rates {','.join(options.rates)} --kinds {','.join(options.kinds)}"
    failed = [row for row in rows if row["problems"]]
    for row in failed:
        again = f"make chaos CHAOS_ARGS='--faults 1 --seed {row['seed']} {chosen} --out DIR'"
        say(f"chaos: {row['case']}: {'; '.join(row['problems'])}; hint: repeat it: {again}")
    return exits.FAILED if failed else exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "chaos")
