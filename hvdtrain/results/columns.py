"""The columns of the data frame of runs and of the tables, and the columns that define a group of repeats."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from hvdtrain.results.statistics import Interval, Statistic


@dataclasses.dataclass(frozen=True)
class Column:
    key: str
    """Name in the data frame, CSV and JSON, where values are in base units: seconds, bytes, joules, fractions of 1"""
    label: str = ""
    unit: str = ""
    """As printed: s, MB, %, kJ ..."""
    scale: float = 1.0
    """Printed value = value x scale"""
    spread: bool = True
    """Whether to print the spread of a statistic"""
    prose: bool = False
    """Whether a narrow terminal may wrap its text"""
    role: Literal["result", "detail", "setting", "data"] = "result"
    """People always see results; details where they fit, the first ones first; settings that differ between the rows.
    CSV and JSON have all columns"""
    of: type[Statistic | Interval] | None = None
    """The type of values with a spread, which take several columns in CSV"""
    kind: Literal["text", "number", "flag", "object"] = "text"
    """Of the values in the data frame"""
    base: str = ""
    """The base unit; empty for counts, shares and text"""
    meaning: str = ""
    source: str = ""
    """The documents of a run that have the value under the same name; the last one counts. Known are manifest, config,
    plan, model, experiment and summary. Empty: `read.run` computes the value"""

    @property
    def heading(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


def _text(meaning: str, label: str = "", source: str = "") -> Column:
    return Column("", label, meaning=meaning, source=source)


def _number(meaning: str, base: str = "", heading: str = "", **printed: Any) -> Column:
    """`heading` is the label, and the unit as printed if it is not empty: `network limit (MB)`."""
    label, _, unit = heading.rstrip(")").partition(" (")
    scale = {("s", "ms"): 1e3, ("B", "MB"): 1e-6, ("", "%"): 100.0}.get((base, unit), 1.0)
    return Column("", label, unit or base, scale, kind="number", base=base, meaning=meaning, **printed)


def _figure(meaning: str, base: str, heading: str, **printed: Any) -> Column:
    """A measurement, whose mean over a group and its spread the tables print."""
    return _number(meaning, base, heading, of=Statistic, **printed)


def _detail(meaning: str, base: str, heading: str, source: str = "") -> Column:
    return _figure(meaning, base, heading, spread=False, role="detail", source=source)


_RUNS = {
    "run_dir": _text("folder of the run"),
    "run": _text("name of the run"),
    "state": _text("complete, unfinished, or refused (its records cannot be trusted); only complete runs count"),
    "kind": _text("timing, or energy (a sweep's run with power sampling, whose times do not count)"),
    "marked": _text("why the run does not count (a sweep's check, a profiler); null: no objection"),
    "resumed": Column("", kind="flag", meaning="whether the run was stopped and resumed"),
    "views": _text("members of an elastic run after each change: which hosts, from where, why, seconds lost"),
    "divisions": _text(
        "shares of the ranks in a batch that changed during the run (--shares measured), and from where"
    ),
    "sweep": _text("name of the sweep", source="experiment"),
    "experiment": _text("name of the sweep's experiment; equal for repeats", source="experiment"),
    "repeat": _number("number of the repeat", source="experiment"),
    "launcher": _text("launcher of the sweep"),
    "fill": _number("for a single host of a sweep: number of other hosts that trained alongside"),
    "started_utc": _text("start of the run", source="manifest"),
    "workload": _text("workload, or name of the script", source="manifest"),
    "framework": _text("torch or tensorflow", source="config"),
    "strategy": _text("how gradients are exchanged, as in --strategy", source="config"),
    "backend": _text("library that connects the ranks: none, gloo, mpi, nccl, grpc, tcp or servers", source="manifest"),
    "hosts": _number("hosts"),
    "ranks": _number("ranks"),
    "ranks_per_host": _number("ranks / hosts"),
    "device": _text("cpu, gpu, or mixed"),
    "cores": _number(
        "cores that a host may use, if its ranks compute on the CPU (mean over hosts)", "", "cores per host"
    ),
    "threads": _number("CPU threads per rank, if ranks compute on the CPU (mean over ranks)", "", "threads per rank"),
    "processor": _text("CPU models of the ranks, and their cores"),
    "precision": _text("arithmetic of the forward and backward pass: fp32, bf16 or fp16", source="config"),
    "rate_mbit": _number("rate of the throttle; null: unlimited, or a single host", "Mbit/s", "rate (Mbit/s)"),
    "network": _text("throttles of the links: rates up/down, delay and loss; null: not recorded, or a single host"),
    "goodput_mbit": _number("TCP payload of the slowest link, measured before step 0", "Mbit/s", "goodput (Mbit/s)"),
    "framework_version": _text("version of the framework"),
    "git_commit": _text("commit of hvdtrain's checkout; null: an installed package", source="manifest"),
    "parameters": _number("parameters of the model", source="model"),
    "rank_batch": _number("samples per rank and step", "", "batch per rank", source="plan"),
    "global_batch": _number("samples per step over all ranks", source="plan"),
    "epochs": _number("requested passes over the training set", source="config"),
    "epochs_done": _number("completed passes: fewer if --target ended the run"),
    "steps": _number("steps of the run", source="plan summary"),
    "seed": _number("seed of weights and order", source="config"),
    "train_samples": _number("training samples of an epoch", "", "training samples"),
    "data_fingerprint": _text("SHA-256 of the data set", "data set"),
    "settings": _text("all other settings that can change the result, as JSON"),
    "train_s": _figure("training phase", "s", "train (s)", source="summary"),
    "validation_s": _detail("validation", "s", "validation (s)", source="summary"),
    "test_s": _detail("test evaluation", "s", "test (s)", source="summary"),
    "checkpoint_s": _detail("saving checkpoints", "s", "checkpoint (s)"),
    "end_to_end_s": _figure(
        "train + validation + test + checkpoint, without loading and initialisation",
        "s",
        "end to end (s)",
        role="detail",
    ),
    "samples_per_s": _detail(
        "training samples per second over all ranks, without warm-up", "1/s", "throughput (samples/s)", source="summary"
    ),
    "step_s": _number("mean step of rank 0, without warm-up: data + compute + communication", "s"),
    "step_blocks": Column("", kind="object", base="s", meaning="step_s in at most 31 equal parts of the run"),
    "data_s": _detail("waiting for the batch, per step", "s", "data (ms)"),
    "compute_s": _figure(
        "forward, backward and update, per step, including the exchange that backward hides",
        "s",
        "compute (ms)",
        spread=False,
    ),
    "communication_s": _figure(
        "waiting for the exchange after backward, per step; null: not separable", "s", "exchange (ms)"
    ),
    "communication_share": _detail("communication_s / step_s", "", "waiting for exchange (%)"),
    "bytes_per_step": _number(
        "payload that rank 0 gave to the network, per step; for allreduce and native: what a ring sends", "B"
    ),
    "network_bytes_per_step": _detail(
        "bytes of the busiest NIC (sent or received) per step, including headers", "B", "network per step (MB)"
    ),
    "limit_bytes_per_step": _number(
        "2 (h - 1) / h x 4 x parameters: the least of an fp32 all-reduce over h hosts",
        "B",
        "network limit (MB)",
        role="detail",
    ),
    "limit_s_per_step": _number("time of limit_bytes_per_step at 0.936 of the rate", "s"),
    "strategy_limit_s_per_step": _detail(
        "time of the strategy's own payload at 0.936 of the rate", "s", "exchange at full rate (ms)"
    ),
    "network_efficiency": _detail(
        "strategy_limit_s_per_step / time of the exchange: communication_s, or step_s if the exchange overlaps with "
        "computation (then it is a lower bound)",
        "",
        "network efficiency (%)",
    ),
    "primary_metric": _text("score that selects the run's best epoch"),
    "test_score": _number("primary metric on the test split"),
    "best_validation_score": _number("primary metric of the best epoch's validation"),
    "scores": _text("label, unit, bounds and direction of the run's scores, as JSON"),
    "energy_j": _figure(
        "energy of all measured devices of all hosts, including idle devices", "J", "energy (J)", role="detail"
    ),
    "energy_used_j": _figure("energy of the devices that ranks compute on", "J", "energy of used devices (J)"),
    "power_w": _number("energy_j / sampled time", "W"),
    "baseline_w": _number("idle power before step 0", "W"),
    "energy_by_device": Column("", kind="object", base="J", meaning="host:device -> energy"),
    "idle_devices": _text("measured devices that no rank computes on: host:device, separated by commas"),
    "energy_absent": _text("devices whose energy was not measured, and why"),
    "inference": Column("", kind="object", base="s", meaning="inference: batch size -> median time"),
    "peak_rss_bytes": _figure("largest resident memory of a rank", "B", "memory per rank (MB)", source="summary"),
    "first_step_s": _number("start of the process to the end of its first step", "s", source="summary"),
}
RUNS = {
    key: dataclasses.replace(column, key=key, label=column.label or key.replace("_", " "))
    for key, column in _RUNS.items()
}
"""The columns of the data frame of runs"""


def label(name: str) -> str:
    """The name of a column or setting as printed."""
    return RUNS[name].label if name in RUNS else name.replace("_", " ")


GROUP = (
    *("workload", "framework", "strategy", "backend", "device", "cores", "threads", "precision"),
    *("framework_version", "git_commit"),
    *("hosts", "ranks_per_host", "rate_mbit", "network", "goodput_mbit", "launcher", "fill"),
    *("rank_batch", "global_batch", "parameters", "data_fingerprint", "train_samples", "epochs", "settings"),
)
"""Runs that agree in these are repeats of one experiment; they differ only in seed, repeat and chance. See `alike` for
goodputs"""


def alike(goodput_mbit: float, next_mbit: float) -> bool:
    """Whether the next larger goodput may be of the same link. Above 1 Gbit/s processors limit it, and it varies."""
    return next_mbit <= (1.2 if goodput_mbit < 1000 else 2.0) * goodput_mbit


TIMING = frozenset(
    {
        *("train_s", "validation_s", "test_s", "checkpoint_s", "end_to_end_s", "samples_per_s", "first_step_s"),
        "step_blocks",
        *("step_s", "data_s", "compute_s", "communication_s", "communication_share", "network_efficiency", "inference"),
    }
)
"""Columns that power sampling may disturb: they ignore runs of kind energy"""

NOT_SETTINGS = frozenset(
    {
        *("framework", "strategy", "epochs", "batch_size", "global_batch_size", "device", "seed", "data"),
        *("threads", "precision"),
        *("run_dir", "resume", "json", "dry_run", "debug", "monitor", "monitor_ms", "monitor_idle_s"),
        *("profile", "tensorboard", "checkpoint_epochs", "checkpoint_steps", "keep_checkpoints"),
        *("check_replicas", "inference"),
    }
)
"""Keys of a run's config that have a column, or that change neither times nor accuracy"""
