"""One run folder -> one row of the data frame, the columns of `columns.RUNS`; what is odd or refused is a Problem."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records, strategies
from hvdtrain.records.metrics import Score
from hvdtrain.results import metrics, power, scores
from hvdtrain.results.columns import NOT_SETTINGS, RUNS
from hvdtrain.results.folders import Problem, there
from hvdtrain.system.exits import Failure, printable

WIRE_SHARE = 0.936
"""What TCP payload gets of a link's rate with both directions busy: 1448 of 1514 bytes, less acknowledgements"""
FP32_BYTES = 4
SET_ASIDE = re.compile(r".*-r\d+-(failed|other|unfinished)\d+")
"""How a sweep renames the folder of a run that it makes anew"""


def row(folder: Path, problems: list[Problem]) -> dict[str, Any]:
    """The run's row; a figure that was not measured is None."""
    found: dict[str, Any] = dict.fromkeys(RUNS)
    found |= {"run_dir": str(folder), "run": printable(folder.name), "kind": "timing", "state": "refused"}
    try:
        manifest = records.read_document(folder / "manifest.json", records.Manifest)
        found |= _asked(manifest)
        about, declared = scores.row(manifest.metric, str(folder / "manifest.json"))
        found |= about
        if there(folder / "point.json"):
            found |= _point(records.read_document(folder / "point.json", records.Point))
            if SET_ASIDE.fullmatch(folder.name):
                found["marked"] = found["marked"] or "its sweep has set it aside"
        if found["hosts"] == 1:
            found["rate_mbit"] = None  # no link is used, so this run is the baseline of every rate
        found |= _measured(folder, manifest, declared, problems)
        found |= _efficiency(found, found.pop("timed_bytes_per_step", None))
        found |= _energy(folder, found, manifest, problems)
    except Failure as failure:
        problems.append(_problem(folder, failure))
        found["state"] = "refused"
    return found


def _problem(folder: Path, failure: Failure) -> Problem:
    """Splits a Failure's `path:line: what` into a Problem."""
    text = str(failure)
    head, _, what = text.partition(": ")
    path, _, line = head.rpartition(":")
    if line.isdigit():
        return Problem(printable(path), int(line), printable(what))
    return Problem(printable(head), None, printable(what))


# --- what was asked ---------------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """A finite number, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _asked(manifest: records.Manifest) -> dict[str, Any]:
    config, plan = manifest.config, manifest.plan
    hosts = manifest.hosts
    devices = {"cpu" if rank.get("device") == "cpu" else "gpu" for rank in manifest.ranks}
    parameters = number(manifest.model.get("parameters"))
    computing = [rank for rank in manifest.ranks if rank.get("device") == "cpu"]
    cores = {str(rank.get("host")): rank.get("cores") for rank in computing}
    processors = sorted({str(rank["cpu"]) for rank in manifest.ranks if rank.get("cpu")})
    return {
        "started_utc": printable(manifest.started_utc),
        "workload": printable(manifest.workload),
        "framework": _text(config.get("framework")),
        **exchange(config, manifest.exchange),
        "collectives": printable(manifest.collectives),
        "hosts": len(hosts) or None,
        "ranks": len(manifest.ranks) or None,
        "ranks_per_host": len(manifest.ranks) / len(hosts) if hosts else None,
        "device": None if not devices else devices.pop() if len(devices) == 1 else "mixed",
        "cores": _mean(cores.values()),
        "threads": _mean(rank.get("threads") for rank in computing),
        "processor": printable(" and ".join(processors)) or None,
        "precision": _text(config.get("precision")),
        "rate_mbit": _rate_mbit(manifest.links),
        "goodput_mbit": min(numbers(link.get("goodput_mbit") for link in manifest.links), default=None),
        "parameters": parameters,
        "payload_bytes": parameters and FP32_BYTES * parameters,
        "rank_batch": number(plan.get("rank_batch")),
        "global_batch": number(plan.get("global_batch")),
        "epochs": number(config.get("epochs")),
        "steps": number(plan.get("steps")),
        "seed": number(config.get("seed")),
        "train_samples": number(manifest.config.get("epoch_samples") or manifest.data.get("train")),
        "data_fingerprint": _text(manifest.data.get("fingerprint")),
        "marked": _watched(config),
        "settings": json.dumps(_settings(config, plan)),
    }


def _settings(config: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What no column holds. A run that was resumed names the micro-batches that others leave to the default."""
    found = {key: config[key] for key in sorted(config) if key not in NOT_SETTINGS}
    if found.get("micro_batches", 1) is None:
        found["micro_batches"] = plan.get("micro_batches")
    return found


def _watched(config: Mapping[str, Any]) -> str | None:
    """Why the times of a run that was watched from inside are not to be trusted."""
    flags = [f"--{key.replace('_', '-')}" for key in ("profile", "horovod_timeline") if config.get(key)]
    return f"{' and '.join(flags)} slowed it" if flags else None


def exchange(config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The canonical --strategy of a run, and of its exchange whether it runs beside the computation and sends what an
    allreduce sends: as the manifest tells, or of an earlier version's as its strategy is today. None: nobody knows."""
    if _text(config.get("strategy")) is None:
        return dict.fromkeys(("strategy", "beside", "exact"))
    name = strategies.canonical(str(config["strategy"]))
    if not facts:
        with contextlib.suppress(Failure):
            facts = strategies.parse(name).facts(buckets=False)
    return {
        "strategy": printable(name),
        "beside": bool(facts["overlaps_with"]) if "overlaps_with" in facts else None,
        "exact": facts.get("exact"),
    }


def numbers(values: Iterable[Any]) -> list[float]:
    return [found for value in values if (found := number(value)) is not None]


def _mean(values: Iterable[Any]) -> float | None:
    """None if any value is unknown."""
    given = list(values)
    known = numbers(given)
    return math.fsum(known) / len(known) if known and len(known) == len(given) else None


def _rate_mbit(links: list[dict[str, Any]]) -> float | None:
    """The lowest rate asked of any link's throttle; None without one."""
    throttles = [link["throttle"] for link in links if isinstance(link.get("throttle"), dict)]
    return min(numbers(each.get(key) for each in throttles for key in ("up_mbit", "down_mbit")), default=None)


def _point(point: records.Point) -> dict[str, Any]:
    cluster = point.settings.get("cluster")
    found: dict[str, Any] = {
        "fill": number(cluster.get("fill")) if isinstance(cluster, dict) else None,
        "sweep": printable(point.sweep),
        "point": printable(point.point),
        "repeat": point.repeat,
        "launcher": _text(point.settings.get("launcher")),
        "kind": printable(point.kind),
    }
    if point.marked is not None:
        found["marked"] = printable(point.marked)
    return found if point.rate_mbit is None else found | {"rate_mbit": point.rate_mbit}


# --- what was measured ------------------------------------------------------------------------------------------------


def _measured(
    folder: Path, manifest: records.Manifest, declared: Mapping[str, Score], problems: list[Problem]
) -> dict[str, Any]:
    path = folder / "metrics" / "rank0000.jsonl"
    complete = there(folder / "COMPLETE")
    if not there(path) and not complete:
        return {"state": "unfinished"}

    def torn(line: int) -> None:
        problems.append(Problem(str(path), line, "torn line, passed over"))

    read = metrics.read(path, torn, declared)
    summary = read.summary
    if not complete:
        return {"state": "unfinished", "resumed": read.resumed}
    if summary is None:
        raise Failure(f"{path}: COMPLETE is there, but the summary that belongs at the end of this file is not")
    checkpoint_s = None if summary.checkpoint_s is None else max(summary.checkpoint_s, read.checkpoint_s)
    phases = (summary.train_s, summary.validation_s, summary.test_s, checkpoint_s)
    found: dict[str, Any] = {
        "state": "complete",
        "resumed": read.resumed,
        "ranks": summary.ranks,
        "epochs": summary.epochs or None,
        "epochs_done": len(summary.validation_scores) or None,
        **_batch(summary, manifest),
        "steps": summary.steps,
        "train_s": summary.train_s,
        "validation_s": summary.validation_s,
        "test_s": summary.test_s,
        "checkpoint_s": checkpoint_s,
        "end_to_end_s": math.fsum(phase for phase in phases if phase is not None),
        "samples_per_s": summary.samples_per_s,
        **_scores(summary, manifest.metric.get("primary"), declared),
        "peak_rss_bytes": summary.peak_rss_bytes,
        "first_step_s": summary.first_step_s,
        "inference": _inference(summary),
        "began_unix_s": summary.began_unix_s,
        "ended_unix_s": summary.ended_unix_s,
    }
    found |= _moved(read.starts, manifest)
    since_start = summary.steps - read.last_start
    whole = manifest.plan.get("stages", 1) == 1  # an allreduce is no limit for the activations between stages
    parameters = number(manifest.model.get("parameters")) if whole else None
    found |= _wire(summary, since_start, len(manifest.hosts), parameters)
    if read.sums.steps == summary.steps:
        return found | _per_step(read.sums)
    what = f"records of {read.sums.steps} of {summary.steps} steps: its times and bytes per step are left out"
    problems.append(Problem(str(path), None, what))
    return found


def _batch(summary: records.Summary, manifest: records.Manifest) -> dict[str, Any]:
    """Of a script, whose manifest does not know it."""
    batch = summary.global_batch
    if batch is None or "global_batch" in manifest.plan:
        return {}
    return {"global_batch": batch, "rank_batch": batch / summary.ranks if summary.ranks else None}


def _moved(starts: Sequence[records.Resumed], manifest: records.Manifest) -> dict[str, Any]:
    """Marks a run that went on with another number of ranks or hosts: its times belong to neither."""
    first = (len(manifest.ranks), len(manifest.hosts))
    moves = [each for each in starts if each.ranks and each.hosts and (each.ranks, each.hosts) != first]
    if not moves:
        return {}
    told = [f"{each.ranks} on {each.hosts} from step {each.step}" for each in moves]
    marked = f"its ranks changed on the way: {first[0]} on {first[1]} host{'s' * (first[1] != 1)}, {', '.join(told)}"
    return {"marked": marked, "hosts": None, "ranks": None, "ranks_per_host": None, "rank_batch": None}


def _scores(summary: records.Summary, primary: Any, declared: Mapping[str, Score]) -> dict[str, float | None]:
    """The test's scores, and those of the epoch that was best by the primary metric (the last of equals)."""
    if primary is None:  # a script told none
        return {}
    best: dict[str, float] = {}
    for epoch in summary.validation_scores:
        if primary in epoch and (not best or not declared[primary].better(best[primary], epoch[primary])):
            best = epoch
    found = {"test_score": summary.test_scores.get(primary), "best_validation_score": best.get(primary)}
    for name in declared:
        found |= {f"test_{name}": summary.test_scores.get(name), f"best_validation_{name}": best.get(name)}
    return found


def _inference(summary: records.Summary) -> dict[int, float] | None:
    told = [(number(each.get("samples")), number(each.get("median_s"))) for each in summary.inference]
    return {int(samples): median_s for samples, median_s in told if samples and median_s} or None


def _per_step(sums: metrics.Sums) -> dict[str, Any]:
    found: dict[str, Any] = {"bytes_per_step": sums.bytes_sent / sums.steps if sums.steps else None}
    if not sums.timed:
        return found
    communication_s = None if sums.communication_s is None else sums.communication_s / sums.timed
    step_s = ((sums.data_s or 0.0) + sums.compute_s + (sums.communication_s or 0.0)) / sums.timed
    return found | {
        "timed_bytes_per_step": sums.timed_bytes_sent / sums.timed,
        "step_s": step_s,
        "data_s": None if sums.data_s is None else sums.data_s / sums.timed,
        "compute_s": sums.compute_s / sums.timed,
        "communication_s": communication_s,
        "communication_share": None if communication_s is None or not step_s else communication_s / step_s,
    }


def _wire(summary: records.Summary, steps: int, hosts: int, parameters: float | None) -> dict[str, Any]:
    """Bytes on the wire per step of the last process, because the NIC's counters are read when it starts."""
    found: dict[str, Any] = {}
    busiest = numbers(nic.get(key) for nic in summary.nic_bytes for key in ("sent_bytes", "received_bytes"))
    if busiest and steps > 0:
        found["wire_bytes_per_step"] = max(busiest) / steps
    if hosts > 1 and parameters is not None:
        found["limit_bytes_per_step"] = 2 * (hosts - 1) / hosts * FP32_BYTES * parameters
    return found


def _efficiency(found: dict[str, Any], sent_bytes: float | None) -> dict[str, Any]:
    """The strategy's own limit and how near its exchange comes; `sent_bytes`: by rank 0 per step, warm-up left out.

    With several ranks on a host rank 0's bytes are not the host's: then only strategies that send what an allreduce
    sends have a limit.
    """
    rate_mbit, beside, exact = found["rate_mbit"], found.pop("beside"), found.pop("exact")
    if (found["ranks_per_host"] or 1) > 1:
        sent_bytes = found["limit_bytes_per_step"] if exact else None
    if not rate_mbit or sent_bytes is None:
        return {}
    limit_s = sent_bytes * 8 / (WIRE_SHARE * rate_mbit * 1e6)
    exchange_s = found["step_s"] if beside else found["communication_s"]
    return {"own_limit_s_per_step": limit_s, "wire_efficiency": limit_s / exchange_s if exchange_s else None}


# --- energy -----------------------------------------------------------------------------------------------------------


def _energy(folder: Path, found: dict[str, Any], manifest: records.Manifest, problems: list[Problem]) -> dict[str, Any]:
    """Joules of all hosts if their records are complete; nothing for an unfinished run."""
    facts: dict[str, Any] = {}
    rate_mbit, limit_bytes = found["rate_mbit"], found["limit_bytes_per_step"]
    if rate_mbit and limit_bytes is not None:
        facts["limit_s_per_step"] = limit_bytes * 8 / (WIRE_SHARE * rate_mbit * 1e6)
    began, ended = found.pop("began_unix_s", None), found.pop("ended_unix_s", None)
    files = sorted((folder / "monitors").glob("*.jsonl"))
    if found["state"] != "complete" or not files:
        return facts
    measured = [power.read(path, problems) for path in files]
    if not any(host.power_asked for host in measured):
        return facts
    # The clocks are of the last start, the sums and the samples of all.
    expected_s = max(found["end_to_end_s"], 0.0 if began is None or ended is None else ended - began)
    if reason := _not_whole(measured, manifest, expected_s):
        problems.append(Problem(str(folder / "monitors"), None, f"{reason}: its energy is left out"))
        return facts
    return facts | _joules(measured)


def _not_whole(measured: list[power.HostPower], manifest: records.Manifest, expected_s: float) -> str | None:
    missing = set(manifest.hosts) - {host.host for host in measured}
    if missing:
        return f"no samples of host {printable(min(missing))}"
    named = [(device, f"{host.host}:{device}") for host in measured for device in host.energy_j]
    known = {device[:3]: name for device, name in named if not device.startswith("dram")}  # which few processors count
    for host in measured:
        if host.seconds < power.COVERED * expected_s:
            return f"samples of {printable(host.host)} cover {host.seconds:.1f} of {expected_s:.1f} s"
        partial = [device for device, why in host.absent.items() if why.startswith("has energy in")]
        if partial:
            return f"{printable(host.host)}: {printable(partial[0])} {host.absent[partial[0]]}"
        for device, why in host.absent.items():
            other = known.get(device[:3])
            if other and host.used.get(device, True) and not why.startswith(ELSEWHERE):
                return printable(f"no energy of {host.host}:{device}, unlike {other} ({why})")
    return None


ELSEWHERE = "recorded by host"
"""Begins the reason of a device that another host of the same machine records"""


def _joules(measured: list[power.HostPower]) -> dict[str, Any]:
    by_device = {f"{host.host}:{name}": joules for host in measured for name, joules in host.energy_j.items()}
    absent: dict[str, dict[str, None]] = {}
    for host in measured:
        for name, why in host.absent.items():
            if not why.startswith(ELSEWHERE):
                absent.setdefault(why, {})[name] = None
    reasons = [f"{', '.join(names)}: {why}" for why, names in absent.items()]
    facts = {"energy_absent": printable("; ".join(reasons)) or None}
    if not by_device:
        return facts
    unused = {f"{host.host}:{name}" for host in measured for name in host.energy_j if not host.used.get(name, True)}
    used = [joules for name, joules in by_device.items() if name not in unused]
    idle = [joules for name, joules in by_device.items() if name in unused]
    seconds = max(host.seconds for host in measured)
    baselines = [watts for host in measured for watts in host.baseline_w.values()]
    return facts | {
        "energy_j": math.fsum(by_device.values()),
        "energy_used_j": math.fsum(used) if used else None,
        "idle_energy_j": math.fsum(idle) if idle else None,
        "power_w": math.fsum(by_device.values()) / seconds if seconds else None,
        "baseline_w": math.fsum(baselines) if baselines else None,
        "idle_devices": printable(",".join(sorted(unused))),
        "energy_by_device": {printable(name): joules for name, joules in by_device.items()},
    }
