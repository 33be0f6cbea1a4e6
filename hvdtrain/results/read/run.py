"""Reads one run folder into one row of the data frame. Its columns are declared in `columns.RUNS`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.plan.network import Link
from hvdtrain.records.metrics import Score
from hvdtrain.results import scores
from hvdtrain.results.columns import NOT_SETTINGS, RUNS
from hvdtrain.results.read import energy, steps
from hvdtrain.results.read.folders import Problem, exists
from hvdtrain.system.exits import Failure, printable
from hvdtrain.system.rates import ring_bytes

FP32_BYTES = 4
SET_ASIDE = re.compile(r".*-r\d+-(failed|other|unfinished)\d+")
"""New name of a run folder when a sweep repeats the run"""


def row(folder: Path, problems: list[Problem], epochs: dict[str, list[steps.TimedEpoch]]) -> dict[str, Any]:
    """The run's row; None for values that were not measured. A run that cannot be read becomes a refused row.

    Adds to `epochs` those that count.
    """
    columns: dict[str, Any] = dict.fromkeys(RUNS)
    columns |= {"run_dir": str(folder), "run": printable(folder.name), "kind": "timing", "state": "refused"}
    try:
        manifest = records.read_document(folder / "manifest.json", records.Manifest)
        columns |= _settings_of(manifest)
        score_columns, declared = scores.row(manifest.metric, str(folder / "manifest.json"))
        columns |= score_columns
        if exists(folder / "experiment.json"):
            columns |= _experiment(records.read_document(folder / "experiment.json", records.Experiment))
            if SET_ASIDE.fullmatch(folder.name):
                columns["marked"] = columns["marked"] or "set aside by its sweep"
        if columns["hosts"] == 1:
            columns |= {"rate_mbit": None, "network": None}  # uses no link, so it is the baseline of every rate
        columns |= _measured(folder, manifest, declared, columns, problems, epochs)
    except Failure as failure:
        problems.append(_problem(failure))
        columns["state"] = "refused"
    return columns


def _problem(failure: Failure) -> Problem:
    """Splits the message `path:line: what` of a Failure."""
    head, _, what = str(failure).partition(": ")
    path, _, line = head.rpartition(":")
    if line.isdigit():
        return Problem(printable(path), int(line), printable(what))
    return Problem(printable(head), None, printable(what))


# --- settings ---------------------------------------------------------------------------------------------------------


def _recorded(documents: Mapping[str, Any]) -> dict[str, Any]:
    """The columns whose values these documents have under the same name."""
    columns = {}
    for name, column in RUNS.items():
        for document in (documents[source] for source in column.source.split() if source in documents):
            value = document.get(name) if isinstance(document, Mapping) else getattr(document, name)
            columns[name] = text(value) if column.kind == "text" else number(value)
    return columns


def _settings_of(manifest: records.Manifest) -> dict[str, Any]:
    config, plan, hosts = manifest.config, manifest.plan, manifest.hosts
    devices = {"cpu" if rank.get("device") == "cpu" else "gpu" for rank in manifest.ranks}
    cpu_ranks = [rank for rank in manifest.ranks if rank.get("device") == "cpu"]
    cores = {str(rank.get("host")): rank.get("cores") for rank in cpu_ranks}
    processors = sorted({str(rank["cpu"]) for rank in manifest.ranks if rank.get("cpu")})
    throttles = [link["throttle"] for link in manifest.links if "throttle" in link]
    limits = [each for each in throttles if isinstance(each, dict)]
    recorded = {"manifest": manifest, "config": config, "plan": plan, "model": manifest.model}
    recorded["versions"], framework = manifest.versions, str(config.get("framework"))
    return _recorded(recorded) | {
        "hosts": len(hosts) or None,
        "ranks": len(manifest.ranks) or None,
        "ranks_per_host": len(manifest.ranks) / len(hosts) if hosts else None,
        "device": None if not devices else devices.pop() if len(devices) == 1 else "mixed",
        "cores": mean(cores.values()),
        "threads": mean(rank.get("threads") for rank in cpu_ranks),
        "processor": printable(" and ".join(processors)) or None,
        "rate_mbit": min(numbers(each.get(key) for each in limits for key in ("up_mbit", "down_mbit")), default=None),
        "network": printable("; ".join(sorted(set(map(_throttle, throttles))))) or None,
        "goodput_mbit": min(numbers(link.get("goodput_mbit") for link in manifest.links), default=None),
        "framework_version": text(manifest.versions.get(framework) or manifest.versions.get(f"{framework}-cpu")),
        "train_samples": number(config.get("epoch_samples") or manifest.data.get("train")),
        "data_fingerprint": text(manifest.data.get("fingerprint")),
        "marked": "slowed by --profile" if config.get("profile") else None,
        "settings": json.dumps(_other_settings(config, plan)),
    }


def _other_settings(config: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a column. A resumed run records the micro-batches that others leave to the default."""
    others = {key: config[key] for key in sorted(config) if key not in NOT_SETTINGS}
    if others.get("micro_batches", 1) is None:
        others["micro_batches"] = plan.get("micro_batches")
    return others


def _throttle(throttle: Any) -> str:
    """`10/1000 Mbit/s, 50 ms, 2 % loss`."""
    if not isinstance(throttle, dict):
        return "unlimited"
    up, down, delay, loss = map(number, map(throttle.get, ("up_mbit", "down_mbit", "delay_ms", "loss_percent")))
    rates = "/".join("unlimited" if rate is None else f"{rate:g}" for rate in (up, down))
    words = [f"{rates} Mbit/s", f"{delay:g} ms" if delay else "", f"{loss:g} % loss" if loss else ""]
    return ", ".join(filter(None, words))


def _experiment(experiment: records.Experiment) -> dict[str, Any]:
    cluster = experiment.settings.get("cluster")
    columns: dict[str, Any] = _recorded({"experiment": experiment}) | {
        "fill": number(cluster.get("fill")) if isinstance(cluster, dict) else None,
        "launcher": text(experiment.settings.get("launcher")),
        "kind": printable(experiment.kind),
    }
    if experiment.marked is not None:
        columns["marked"] = printable(experiment.marked)
    return columns if experiment.rate_mbit is None else columns | {"rate_mbit": experiment.rate_mbit}


# --- measurements -----------------------------------------------------------------------------------------------------


def _measured(
    folder: Path,
    manifest: records.Manifest,
    declared: Mapping[str, Score],
    settings: Mapping[str, Any],
    problems: list[Problem],
    epochs: dict[str, list[steps.TimedEpoch]],
) -> dict[str, Any]:
    path = folder / "metrics" / "rank0000.jsonl"
    complete = exists(folder / "COMPLETE")
    if not exists(path) and not complete:
        return {"state": "unfinished"}

    def incomplete(line: int) -> None:
        problems.append(Problem(str(path), line, "incomplete line ignored"))

    metrics = steps.read(path, incomplete, declared)
    epochs[str(folder)] = metrics.epochs
    summary = metrics.summary
    columns: dict[str, Any] = {"state": "unfinished", "resumed": metrics.resumed}
    columns |= {"views": _views(metrics), "divisions": _divisions(metrics)}
    if not complete:
        return columns
    if summary is None:
        raise Failure(f"{path}: no summary at the end of the file, although COMPLETE exists")
    sums = metrics.sums
    if sums.steps != summary.steps:
        what = f"has {sums.steps} of {summary.steps} steps, so times and bytes per step are ignored"
        problems.append(Problem(str(path), None, what))
        sums = steps.Sums()
    changed = _changed_strategy(metrics, settings["strategy"])
    if changed:  # the means describe no strategy
        sums = steps.Sums()
    columns |= {"state": "complete"} | _from_summary(summary, metrics.checkpoint_s)
    if (batch := summary.global_batch) is not None and "global_batch" not in manifest.plan:  # a script
        columns |= {"global_batch": batch, "rank_batch": batch / summary.ranks if summary.ranks else None}
    columns |= changed | _other_ranks(metrics, manifest)
    columns |= _scores(summary, settings["primary_metric"], declared)
    columns |= (per_step := _per_step(sums))
    columns |= _network(summary, metrics, sums, manifest, per_step, settings["rate_mbit"])
    # The clocks are of the last start, the sums and the samples of all starts.
    began, ended = summary.began_unix_s, summary.ended_unix_s
    expected_s = max(columns["end_to_end_s"], 0.0 if began is None or ended is None else ended - began)
    return columns | energy.columns(folder, manifest, expected_s, problems)


def _from_summary(summary: records.Summary, saved_s: float) -> dict[str, Any]:
    checkpoint_s = None if summary.checkpoint_s is None else max(summary.checkpoint_s, saved_s)
    phases = (summary.train_s, summary.validation_s, summary.test_s, checkpoint_s)
    timed = [(number(each.get("samples")), number(each.get("median_s"))) for each in summary.inference]
    return _recorded({"summary": summary}) | {
        "ranks": summary.ranks,
        "epochs": summary.epochs or None,
        "epochs_done": len(summary.validation_scores) or None,
        "checkpoint_s": checkpoint_s,
        "end_to_end_s": math.fsum(phase for phase in phases if phase is not None),
        "inference": {int(samples): median_s for samples, median_s in timed if samples and median_s} or None,
    }


def _views(metrics: steps.RankMetrics) -> str | None:
    """Who continued from which step and sample of an elastic run, and why."""
    texts = [
        f"{', '.join(dict.fromkeys(view.members))} from step {view.step} (epoch {view.epoch + 1}, "
        f"sample {view.sample}) after {view.lost_s:.1f} s: {view.reason}"
        for view in metrics.views
    ]
    return " | ".join(texts) or None


def _divisions(metrics: steps.RankMetrics) -> str | None:
    """Each new division of the batches by the ranks' speed."""
    texts = [f"{':'.join(f'{share:g}' for share in shares)} from step {step}" for step, shares in metrics.divisions]
    return ", ".join(texts) or None


def _other_ranks(metrics: steps.RankMetrics, manifest: records.Manifest) -> dict[str, Any]:
    """Marks a run whose number of ranks or hosts changed, because its times describe neither."""
    first = (len(manifest.ranks), len(manifest.hosts))
    starts: list[records.Resumed | records.View] = [*metrics.starts, *metrics.views]
    moves = [each for each in starts if each.ranks and each.hosts and (each.ranks, each.hosts) != first]
    if not moves:
        return {}
    later = [f"{each.ranks} on {each.hosts} from step {each.step}" for each in moves]
    marked = f"its ranks changed: {first[0]} on {first[1]} host{'s' * (first[1] != 1)}, {', '.join(later)}"
    return {"marked": marked, "hosts": None, "ranks": None, "ranks_per_host": None, "rank_batch": None}


def _changed_strategy(metrics: steps.RankMetrics, first: str) -> dict[str, Any]:
    """Marks a run whose strategy --strategy auto changed, because its times describe none of the strategies."""
    changes, running = [], first
    for each in metrics.choices:
        if each.strategy != running:
            running = each.strategy
            changes.append(f"{running} from step {each.step}")
    return {"marked": printable(f"its strategy changed: {first}, {', '.join(changes)}")} if changes else {}


def _scores(summary: records.Summary, primary: str | None, declared: Mapping[str, Score]) -> dict[str, float | None]:
    """Scores of the test and of the best epoch by the primary metric (the last one if several are equal)."""
    if primary is None:  # a script without scores
        return {}
    best: dict[str, float] = {}
    for epoch in summary.validation_scores:
        if primary in epoch and (not best or not declared[primary].better(best[primary], epoch[primary])):
            best = epoch
    columns = {"test_score": summary.test_scores.get(primary), "best_validation_score": best.get(primary)}
    for name in declared:
        columns |= {f"test_{name}": summary.test_scores.get(name), f"best_validation_{name}": best.get(name)}
    return columns


def _per_step(sums: steps.Sums) -> dict[str, Any]:
    columns: dict[str, Any] = {"bytes_per_step": sums.bytes_sent / sums.steps if sums.steps else None}
    if not sums.timed:
        return columns | dict.fromkeys(("step_s", "communication_s"))
    parts = (sums.data_s, sums.compute_s, sums.communication_s)
    data_s, compute_s, communication_s = (None if part is None else part / sums.timed for part in parts)
    step_s = ((sums.data_s or 0.0) + sums.compute_s + (sums.communication_s or 0.0)) / sums.timed
    return columns | {
        "step_s": step_s,
        "step_blocks": sums.blocks,
        "data_s": data_s,
        "compute_s": compute_s,
        "communication_s": communication_s,
        "communication_share": None if communication_s is None or not step_s else communication_s / step_s,
    }


def _network(
    summary: records.Summary,
    metrics: steps.RankMetrics,
    sums: steps.Sums,
    manifest: records.Manifest,
    per_step: Mapping[str, Any],
    rate_mbit: float | None,
) -> dict[str, Any]:
    """Bytes on the network, the limits, and how close the exchange comes to the limit of its strategy.

    A NIC's counters start with the process, so they cover the steps since the last start.
    """
    columns: dict[str, Any] = {}
    hosts, since_start = len(manifest.hosts), summary.steps - metrics.last_start
    busiest = numbers(nic.get(key) for nic in summary.nic_bytes for key in ("sent_bytes", "received_bytes"))
    if busiest and since_start > 0:
        columns["network_bytes_per_step"] = max(busiest) / since_start
    parameters = number(manifest.model.get("parameters"))
    limit_bytes = None
    if hosts > 1 and parameters is not None and manifest.plan.get("stages", 1) == 1:  # stages send activations
        limit_bytes = columns["limit_bytes_per_step"] = ring_bytes(FP32_BYTES * int(parameters), hosts)
    # With several ranks per host, rank 0's bytes are not the host's: only exact strategies have a known limit.
    one_rank_per_host = len(manifest.ranks) <= hosts
    sent_bytes = sums.timed_bytes_sent / sums.timed if sums.timed else None
    if not one_rank_per_host:
        sent_bytes = limit_bytes if manifest.exchange.get("exact") else None
    if not rate_mbit:
        return columns
    link = Link.of_rate(rate_mbit * 1e6)
    if limit_bytes is not None:
        columns["limit_s_per_step"] = link.seconds(limit_bytes, limit_bytes)
    if sent_bytes is None:
        return columns
    limit_s = columns["strategy_limit_s_per_step"] = link.seconds(sent_bytes, sent_bytes)
    exchange_s = per_step["step_s" if manifest.exchange.get("overlaps_with") else "communication_s"]
    return columns | {"network_efficiency": limit_s / exchange_s if exchange_s else None}


# --- values of records without a schema: config, plan and ranks of a manifest -----------------------------------------


def number(value: Any) -> float | None:
    """The value as a finite number; None if it is not one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None


def numbers(values: Iterable[Any]) -> list[float]:
    return [known for value in values if (known := number(value)) is not None]


def mean(values: Iterable[Any]) -> float | None:
    """None if there is no value, or any value is not a number."""
    given = list(values)
    known = numbers(given)
    return math.fsum(known) / len(known) if known and len(known) == len(given) else None


def text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None
