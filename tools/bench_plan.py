"""Predictions of `hvdtrain plan` beside real runs on virtual hosts.

    sudo make bench-plan BENCH_ARGS='--rates 10mbit --hosts 4 --strategy powersgd:rank=4'
    sudo make bench-plan BENCH_ARGS='--model captioning --cores 0.25 --repeats 2'
    tools/bench.py plan --report results/bench-plan

Profiles the model on all of four virtual hosts at once, and writes the predictions of all cells and their SHA-256
before the first run. Nothing is fitted to the cells. Then it runs each cell, and `--strategy auto` once per rate and
number of hosts. It prints the errors, next to those of latency-bandwidth arithmetic without overlap: computation +
bytes / goodput + latencies. A cell's step time is the mean over ranks and over steps without warm-up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from bench import NAMES, ROOT, hosts_up, known, listed, on_host, options_of, say, throttle
from scipy.stats import kendalltau

from hvdtrain import records
from hvdtrain.plan import learning
from hvdtrain.plan.network import LATENCY_S, Link
from hvdtrain.strategies import automatic
from hvdtrain.strategies.cost import Layout
from hvdtrain.strategies.spec import parse
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate

HOSTS = NAMES[:4]
PLACE = ["model", "cores", "rate", "hosts"]
CELL_S = 8.0
"""Aim for the steps of a cell"""
BATCH, LEAST_STEPS, MOST_STEPS = 32, 8, 44  # an epoch of the digits has 44 steps
MODELS = {
    "resnet": ["resnet", "--width", "0.25", "--image-size", "96", "--global-batch-size", "32"],
    "small": ["resnet", "--width", "0.125", "--image-size", "64", "--global-batch-size", "32"],
    "captioning": ["captioning", "--encoder", "small", "--beam", "1", "--global-batch-size", "32"],
}


def profiles(options: argparse.Namespace, folder: Path) -> Any:
    """Profile on all hosts at once, each with its own cache, and return the plan of a median host."""
    flags = MODELS[options.model]
    strategies = [word for each in options.strategy for word in ("--strategy", each)]
    cells = ["--hosts", ",".join(map(str, [1, *options.hosts])), "--rates", ",".join(options.rates)]
    running = []
    for host in HOSTS:
        cache = f"XDG_CACHE_HOME={folder.parent / 'cache' / host}"
        words = ["env", cache, sys.executable, "-m", "hvdtrain.cli", "plan", *flags, *cells, *strategies, "--json"]
        running.append(subprocess.Popen(on_host(options.name, words, host), cwd=ROOT, stdout=subprocess.PIPE))
    plans = [json.loads(process.communicate()[0] or "null") for process in running]
    if not all(plans):
        raise Failure("bench_plan: a host made no plan; its error is above")
    return sorted(plans, key=lambda plan: plan["one_host"]["step_s"])[len(plans) // 2]


def predictions_of(plan: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each cell, with the prediction and the baseline without overlap."""
    rows = list[dict[str, Any]]()
    for network in plan["networks"]:
        link = Link.of_rate(parse_rate(network["network"]))
        for each in (prediction for hosts in network["hosts"] for prediction in hosts["predictions"]):
            shapes = [tuple(shape) for shape in plan["shapes"]]
            cost = parse(each["strategy"]).cost(shapes, Layout(ranks=each["ranks"], hosts=each["hosts"]))
            exchange_s = cost.sent_bytes / link.up + cost.hops * LATENCY_S
            row = {"model": options.model, "cores": options.cores, "rate": network["network"], "hosts": each["hosts"]}
            row |= {"strategy": each["strategy"], "predicted_s": each["step_s"], "interval_s": each["interval_s"]}
            row |= {"baseline_s": each["computing_s"] + exchange_s, "predicted_bytes": each["sent_bytes"]}
            rows.append(row)
    return rows


def train(options: argparse.Namespace, row: dict[str, Any], path: Path, steps: int) -> str | None:
    """Train with the row's strategy on its hosts. Returns the last line of the error, or None."""
    workload, *flags = MODELS[options.model]
    words = ["launch/mpirun.sh", "-H", listed(row["hosts"]), sys.executable, "-m", f"hvdtrain.{workload}", *flags]
    words += ["--strategy", row["strategy"], "--epochs", "1", "--epoch-samples", str(BATCH * steps)]
    words += ["--run-dir", str(path), "--checkpoint-steps", "0", "--evaluate-samples", "16", "--json"]
    words += ["--warmup-epochs", "0"]
    done = subprocess.run(on_host(options.name, words), cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else None


def run(options: argparse.Namespace, row: dict[str, Any], folder: Path, turn: int) -> dict[str, Any]:
    """Run a cell and return its row with the recorded times and bytes."""
    steps = int(max(LEAST_STEPS, min(MOST_STEPS, CELL_S / row["predicted_s"])))
    steps -= steps % 4  # whole rounds of local steps
    name = f"{row['model']}-{row['rate']}-{row['hosts']}-{row['strategy'].replace(':', '_').replace(',', '_')}-{turn}"
    path = folder / name
    if problem := train(options, row, path, steps):
        return row | {"problem": problem}
    times, sent = [], []
    for metrics in sorted(path.glob("metrics/rank*.jsonl")):
        rank = [record for record in records.read(metrics) if isinstance(record, records.Step)]
        timed = [each for each in rank if not each.warmup]
        timed = timed[-1 - 4 * ((len(timed) - 1) // 4) : -1]  # whole rounds, without the last step, which averages
        times += [(each.data_s or 0.0) + each.compute_s + (each.communication_s or 0.0) for each in timed]
        sent += [each.bytes_sent for each in rank]
    return row | {"recorded_s": statistics.mean(times), "recorded_bytes": statistics.mean(sent), "steps": steps}


def chosen(options: argparse.Namespace, rate: str, hosts: int, folder: Path) -> dict[str, Any]:
    """Let `--strategy auto` choose, and return its choice."""
    row = {"model": options.model, "cores": options.cores, "rate": rate, "hosts": hosts, "strategy": automatic.NAME}
    path = folder / f"{options.model}-{rate}-{hosts}-auto"
    if problem := train(options, row, path, LEAST_STEPS):
        return row | {"problem": problem}
    manifest = records.read_document(path / "manifest.json", records.Manifest)
    return row | {"chosen": manifest.config["strategy"]}


# --- the report -------------------------------------------------------------------------------------------------------


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the errors of each cell, and a summary."""
    found = pd.DataFrame([row for row in rows if "recorded_s" in row])
    if found.empty:
        raise Failure("bench_plan: no cell was recorded; hint: see the problems above")
    found["error_%"] = 100 * (found.predicted_s / found.recorded_s - 1)
    found["baseline_%"] = 100 * (found.baseline_s / found.recorded_s - 1)
    found["bytes_%"] = 100 * (found.predicted_bytes / found.recorded_bytes - 1)
    table = found.drop(columns=["interval_s", "predicted_bytes", "recorded_bytes"], errors="ignore").to_string(
        index=False, float_format="{:.3g}".format
    )
    lines = [table, ""]
    for name in ("error_%", "baseline_%", "bytes_%"):
        size = found[name].abs()
        lines.append(
            f"{name}: median {size.median():.1f}, 95th percentile {size.quantile(0.95):.1f}, {len(found)} cells"
        )
    cells = [(row["recorded_s"], *row["interval_s"]) for row in rows if "recorded_s" in row and row.get("interval_s")]
    inside = sum(low <= recorded_s <= high for recorded_s, low, high in cells)
    lines.append(f"90 % intervals contain {inside} of {len(cells)} recorded times")
    for key in ("rate", "hosts", "strategy", "model", "cores"):
        medians = found.groupby(key)["error_%"].apply(lambda each: each.abs().median())
        lines.append(f"median error by {key}: " + ", ".join(f"{k} {v:.1f}" for k, v in medians.items()))
    taus = defaultdict(list)
    for _, cells in found.groupby(PLACE):
        cells = cells.groupby("strategy", as_index=False)[["predicted_s", "baseline_s", "recorded_s"]].mean()  # repeats
        best = cells.recorded_s.min()
        for name in ("predicted_s", "baseline_s"):
            if len(cells) > 2:
                taus[f"Kendall's tau of {name}"].append(kendalltau(cells[name], cells.recorded_s).statistic)
            first = cells.loc[cells[name].idxmin()]
            taus[f"recorded time of the first strategy by {name} / the fastest"].append(first.recorded_s / best)
    lines += [f"{name}: " + ", ".join(f"{value:.2f}" for value in values) for name, values in taus.items()]
    lines += regrets(found, [row for row in rows if "chosen" in row])
    repeats = found.groupby([*PLACE, "strategy"]).recorded_s.agg(["min", "max", "count"])
    repeated = repeats[repeats["count"] > 1]
    if len(repeated):
        apart = 100 * (repeated["max"] / repeated["min"] - 1)
        lines.append(
            f"repeats of {len(repeated)} cells differ by {apart.median():.1f} % (median), at most {apart.max():.1f} %"
        )
    lines += [f"not run: {row['strategy']}: {row['problem']}" for row in rows if "problem" in row]
    return "\n".join(lines)


def regrets(found: pd.DataFrame, choices: Sequence[dict[str, Any]]) -> list[str]:
    """Return the time to a target with the strategy that `auto` chose, relative to the best recorded cell.

    The time to a target is the recorded time of a step times the recorded steps to a target that `auto` uses.
    """
    lines = []
    for choice in choices:
        cells = found[(found[PLACE] == pd.Series({key: choice[key] for key in PLACE})).all(axis=1)]
        seconds = {}
        for strategy, times in cells.groupby("strategy").recorded_s:
            if strategy in learning.candidates("sgd"):
                seconds[strategy] = times.mean() * statistics.mean(learning.RECORDED[str(strategy)].steps)
        if choice["chosen"] in seconds:
            regret = seconds[choice["chosen"]] / min(seconds.values())
            place = ", ".join(str(choice[key]) for key in PLACE)
            lines.append(f"auto on {place}: {choice['chosen']}, regret {regret:.2f} of {len(seconds)} strategies")
    return lines


def main(arguments: list[str]) -> int:
    rates, root = ["10mbit", "100mbit", "1gbit"], Path("results/bench-plan")
    top = options_of(__doc__, "plan", rates=rates, hosts=[2, 3, 4], model="resnet", cores=0.5, repeats=1, out=root)
    top.add_argument("--strategy", action="append", metavar="S", help="only this one; give it again for more")
    top.add_argument("--report", type=Path, metavar="DIR", help="only print the errors of all cells below DIR")
    options = top.parse_args(arguments)
    known(top, [options.model], [*MODELS])
    if options.report:
        paths = sorted(options.report.glob("*/cells.json"))
        print(report([row for path in paths for row in json.loads(path.read_text())]))
        return 0
    options.strategy = options.strategy or list(learning.SHOWN)
    folder = options.out.resolve() / records.utc_now().replace(":", "")
    folder.mkdir(parents=True)
    rows = list[dict[str, Any]]()
    with hosts_up(options.name, len(HOSTS), options.cores, "--slots", "1"):
        cells = predictions_of(profiles(options, folder), options)
        content = json.dumps(cells, indent=1).encode()
        (folder / "predictions.json").write_bytes(content)
        print(f"predictions of {len(cells)} cells: SHA-256 {hashlib.sha256(content).hexdigest()}", flush=True)
        for rate in options.rates:
            throttle(options.name, rate)
            for cell in (each for each in cells if each["rate"] == rate for _ in range(options.repeats)):
                rows.append(run(options, cell, folder, len(rows)))
                (folder / "cells.json").write_text(json.dumps(rows, indent=1))
                say(rows[-1])
            rows += [chosen(options, rate, hosts, folder) for hosts in options.hosts if hosts > 1]
            (folder / "cells.json").write_text(json.dumps(rows, indent=1))
    print(report(rows))
    return 0
