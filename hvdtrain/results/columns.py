"""The columns of the data frame of runs: name, kind, unit and meaning; and which of them make a group of repeats."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Column:
    kind: Literal["text", "number", "flag", "object"]
    unit: str
    """As printed; empty for counts, shares and text"""
    meaning: str


def _text(meaning: str) -> Column:
    return Column("text", "", meaning)


def _number(meaning: str, unit: str = "") -> Column:
    return Column("number", unit, meaning)


RUNS: dict[str, Column] = {
    "run_dir": _text("the run's folder"),
    "run": _text("its name"),
    "state": _text("complete, unfinished or refused (its records cannot be trusted); only complete runs are averaged"),
    "kind": _text("timing, or energy: sampled for power by a sweep, left out of timing figures"),
    "marked": _text("why the figures are not to be trusted (a sweep's check, a profiler); null: nothing known"),
    "resumed": Column("flag", "", "whether the run was stopped and continued"),
    "sweep": _text("name of the sweep"),
    "point": _text("name of the sweep's point; equal for repeats"),
    "repeat": _number("number of the repeat"),
    "launcher": _text("what a sweep started it with"),
    "fill": _number("of one host of a sweep: how many others did the same meanwhile, each by itself"),
    "started_utc": _text("when the run began"),
    "workload": _text("what was trained"),
    "framework": _text("torch or tensorflow"),
    "strategy": _text("how gradients are exchanged, as --strategy takes it"),
    "collectives": _text("what carries them: none, gloo, mpi, nccl, grpc"),
    "hosts": _number("hosts"),
    "ranks": _number("ranks"),
    "ranks_per_host": _number("ranks divided by hosts"),
    "device": _text("cpu, gpu, or mixed"),
    "cores": _number("cores that a host may use, where ranks compute on the CPU (the mean, where hosts differ)"),
    "threads": _number("CPU threads per rank, where ranks compute on the CPU (the mean, where ranks differ)"),
    "processor": _text("the ranks' CPUs, and their cores"),
    "precision": _text("arithmetic of the forward and backward pass: fp32, bf16 or fp16"),
    "rate_mbit": _number("rate asked of the throttle; null: unlimited, or one host", "Mbit/s"),
    "goodput_mbit": _number("TCP payload of the slowest link, measured before step 0", "Mbit/s"),
    "parameters": _number("parameters of the model"),
    "payload_bytes": _number("gradients of one step: 4 bytes per parameter", "B"),
    "rank_batch": _number("samples per rank and step"),
    "global_batch": _number("samples per step over all ranks"),
    "epochs": _number("passes over the training set that were asked for"),
    "epochs_done": _number("those that were made: fewer where --target ended the run"),
    "steps": _number("steps of the run"),
    "seed": _number("seed of weights and order"),
    "train_samples": _number("training samples of an epoch"),
    "data_fingerprint": _text("SHA-256 of the data set"),
    "settings": _text("all other settings that may change the result, as JSON"),
    "train_s": _number("training phase", "s"),
    "validation_s": _number("validation", "s"),
    "test_s": _number("test evaluation", "s"),
    "checkpoint_s": _number("saving checkpoints", "s"),
    "end_to_end_s": _number("train + validation + test + checkpoint; loading and initialisation are outside", "s"),
    "samples_per_s": _number("training samples per second over all ranks, warm-up left out", "1/s"),
    "step_s": _number("mean step of rank 0, warm-up left out: data + compute + communication", "s"),
    "data_s": _number("waiting for the batch, per step", "s"),
    "compute_s": _number("forward, backward, update, per step (with the exchange that backward hides)", "s"),
    "communication_s": _number("waiting for the exchange after backward, per step; null: not told apart", "s"),
    "communication_share": _number("communication_s / step_s"),
    "bytes_per_step": _number(
        "what rank 0 gave to the network per step; of allreduce and native what a ring sends", "B"
    ),
    "wire_bytes_per_step": _number("busiest NIC, sent or received, per step, headers and all other traffic too", "B"),
    "limit_bytes_per_step": _number("2 (h - 1) / h x payload: the least an allreduce of fp32 over h hosts sends", "B"),
    "limit_s_per_step": _number("the time of limit_bytes_per_step at 0.936 of the rate", "s"),
    "own_limit_s_per_step": _number("the time of what rank 0 gave to the exchange, at 0.936 of the rate", "s"),
    "wire_efficiency": _number(
        "own_limit_s_per_step / time of the exchange: communication_s, or, where it may run beside the computation, "
        "step_s (then it is a lower bound)"
    ),
    "primary_metric": _text("the score by which the run's best epoch is told"),
    "test_score": _number("the primary metric of the test split"),
    "best_validation_score": _number("the primary metric of the best epoch's validation"),
    "scores": _text("label, unit, bounds and direction of the run's scores, as JSON"),
    "energy_j": _number("energy of all measured devices of all hosts, idle devices too", "J"),
    "energy_used_j": _number("energy of the devices that ranks compute on", "J"),
    "idle_energy_j": _number("energy of measured devices that no rank computes on", "J"),
    "power_w": _number("energy_j / sampled time", "W"),
    "baseline_w": _number("power before step 0, idle (--monitor-idle-s)", "W"),
    "energy_by_device": Column("object", "J", "host:device -> energy"),
    "idle_devices": _text("measured devices that no rank computes on, as host:device, separated by commas"),
    "energy_absent": _text("devices whose energy could not be measured, and why"),
    "inference": Column("object", "s", "of inference, samples at once -> median time"),
    "peak_rss_bytes": _number("largest resident memory of a rank", "B"),
    "first_step_s": _number("start of the process to the end of its first step", "s"),
}

GROUP = (
    *("workload", "framework", "strategy", "collectives", "device", "cores", "threads", "precision"),
    *("hosts", "ranks_per_host", "rate_mbit", "launcher", "fill"),
    *("rank_batch", "global_batch", "parameters", "data_fingerprint", "train_samples", "epochs", "settings"),
)
"""Runs that are equal in these are repeats of one experiment: what varies in a group is seed, repeat and luck"""

TIMING = frozenset(
    {
        *("train_s", "validation_s", "test_s", "checkpoint_s", "end_to_end_s", "samples_per_s", "first_step_s"),
        *("step_s", "data_s", "compute_s", "communication_s", "communication_share", "wire_efficiency", "inference"),
    }
)
"""Figures that power sampling may disturb: runs of kind energy stay out of them"""

NOT_SETTINGS = frozenset(
    {
        *("framework", "strategy", "epochs", "batch_size", "global_batch_size", "device", "seed", "data"),
        *("threads", "precision"),
        *("run_dir", "resume", "json", "dry_run", "debug", "monitor", "monitor_ms", "monitor_idle_s"),
        *("profile", "horovod_timeline", "tensorboard", "checkpoint_epochs", "checkpoint_steps", "keep_checkpoints"),
        *("check_replicas", "verify_data", "inference"),
    }
)
"""Keys of a run's config that a column holds already, or that change neither times nor accuracy"""
