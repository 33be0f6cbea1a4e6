"""The record types, with the meaning and the unit of every field. All of them hide the secrets of command lines."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any, ClassVar, get_args

from hvdtrain.system.redaction import without_secret_values, without_secrets

SCHEMA = "hvdtrain/2"
READ = ("hvdtrain/1", SCHEMA)
"""Schemas that are read: see `version1`"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was asked and where it ran; `manifest.json`, written by rank 0 before step 0."""

    type: ClassVar[str] = "manifest"
    schema: str = SCHEMA
    workload: str
    started_utc: str
    argv: list[str]
    config: dict[str, Any]
    """The whole config, defaults included"""
    exchange: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Facts of the strategy: behind (what is computed while an exchange is under way; empty: nothing) and exact
    (whether hosts send what an allreduce does). Earlier versions wrote none"""
    plan: dict[str, Any]
    """The batch arithmetic: ranks, rank_batch, global_batch, steps, base_lr ..."""
    data: dict[str, Any]
    """Name, classes, sample counts and fingerprint of the data set"""
    model: dict[str, Any]
    """Parameters, bytes and spec of the model"""
    metric: dict[str, Any]
    """What was added up over samples: primary (the score by which the best epoch is told) and scores (by name: label,
    unit, least, most, higher_is_better and shown, see `metrics.Score`). Empty of a script that told none"""
    ranks: list[dict[str, Any]]
    """For each rank: host, local_rank, device, threads, cpu (model and cores of the machine), cores (that its host may
    use: fewer by a CPU quota)"""
    collectives: str
    """What carries the collectives: none, gloo, mpi, nccl, grpc, tcp or servers"""
    links: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each of several hosts: host, nic, address, speed_mbit (as the NIC negotiated), throttle (what was asked of
    `tools/throttle.sh` there, null without one), goodput_to and goodput_mbit (TCP payload this host could send to that
    one before step 0, while every host sent to its next), reason (why goodput is null). Empty on a single host"""
    launch: dict[str, Any] = dataclasses.field(default_factory=dict)
    """By launch/mpirun.sh or horovodrun.sh: launcher (as typed, with its hosts) and settings (name, value, reason, and
    mca: whether it is a parameter of Open MPI); empty if something else started the ranks"""
    versions: dict[str, str | None]
    git_commit: str | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", without_secrets(self.argv))
        if isinstance(rest := self.config.get("arguments"), list):  # of a script
            object.__setattr__(self, "config", self.config | {"arguments": without_secrets(rest)})

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that ranks ran on, each once, in the order of their first ranks."""
        return list(dict.fromkeys(str(rank.get("host")) for rank in self.ranks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one rank."""

    type: ClassVar[str] = "step"
    step: int
    """Counted from 0 over the whole run"""
    epoch: int
    loss: float | None
    """Mean per sample over all ranks; over this rank with strategies whose ranks do not tell each other in each step;
    null if a script did not tell"""
    samples: int | None
    """Samples of this rank: images, or words to be predicted (tokens); null if a script did not tell"""
    lr: float | None
    """Null behind a tape of TensorFlow, which does not see it"""
    data_s: float | None
    """Waiting for the batch; null in a script: its compute_s has it"""
    compute_s: float
    """Forward, backward and update; with an overlapped strategy also the part of the exchange that backward hides"""
    communication_s: float | None
    """Waiting for the exchange after backward; null where the framework runs both in one graph, or waits on a GPU"""
    bytes_sent: int
    """Payload this rank gave to the network (without headers); see `Summary.bytes_sent_source`"""
    warmup: bool
    """One of the first steps since the start of the process, or one that the profiler distorts: left out of rates"""
    staleness: float | None = None
    """Updates by other ranks between the pull and the push of this one: mean over parameter servers, and the largest;
    null with strategies without servers"""
    staleness_max: int | None = None
    local_bytes_sent: int | None = None
    """Payload this rank gave to other ranks of its host while the step lasted; null where bytes_sent is computed"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch, written by rank 0. Scores are those of the manifest's metric; a missing one could not be told."""

    type: ClassVar[str] = "epoch"
    epoch: int
    step: int
    """Steps done since the start of the run"""
    train_loss: float | None
    """null if a script did not tell"""
    train_scores: dict[str, float]
    validation_loss: float | None
    """null, and its scores empty, if that split is empty"""
    validation_scores: dict[str, float]
    train_s: float
    validation_s: float
    samples: int | None
    """Training samples over all ranks (of captions: words, as in a step); null if a script did not tell"""
    samples_per_s: float | None
    """Images or captions over all ranks, warm-up steps left out; null if the epoch is warm-up only"""
    unix_s: float | None = None
    """When the epoch's validation was over, by rank 0's clock (seconds since 1970)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint is in place."""

    type: ClassVar[str] = "saved"
    step: int
    checkpoint_s: float
    best: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """The process started again from a checkpoint; records after it supersede those of the same step."""

    type: ClassVar[str] = "resumed"
    step: int
    utc: str
    links: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """As in the manifest, measured at this start"""
    ranks: int | None = None
    """From here on, and the hosts that they are on; null in older records: as before"""
    hosts: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a complete run, written by rank 0: also the document of `--json`."""

    type: ClassVar[str] = "summary"
    schema: str = SCHEMA
    run_dir: str
    workload: str
    framework: str
    strategy: str
    ranks: int
    """Alive at the end: fewer than the manifest's only where a strategy goes on without a rank that died"""
    hosts: int
    parameters: int
    global_batch: int | None
    """null of a script that did not tell its samples"""
    epochs: int
    """Of a script: that it told the scores of"""
    steps: int
    test_loss: float | None
    test_scores: dict[str, float]
    """Of the weights that were tested"""
    validation_scores: list[dict[str, float]]
    """After each epoch"""
    train_s: float
    validation_s: float
    """Of a script: from the last step of an epoch until it told that epoch's scores"""
    test_s: float | None
    """null of a script, and so the next: within the others"""
    checkpoint_s: float | None
    samples_per_s: float | None
    """Training samples per second over all ranks, warm-up steps left out"""
    samples_per_s_per_rank: float | None
    data_share: float | None
    """Share of the training time that rank 0 waited for data, warm-up steps left out"""
    bytes_sent: int
    """By rank 0 to the network, over the whole run"""
    first_step_s: float | None
    """From the start of the process to the end of its first step (rank 0); null if it made none"""
    peak_rss_bytes: int
    """Largest over the ranks"""
    nic_bytes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each of several hosts: host, nic, and sent_bytes and received_bytes over its link from the loop's start in
    this process to the end of the test evaluation, with headers and whatever else used the NIC. Empty on a single
    host"""
    tested_step: int | None = None
    """Steps after which the weights were as they were tested: the last ones, or those of the best epoch"""
    step_shares: dict[str, float] = dataclasses.field(default_factory=dict)
    """Where the time of a step went, as shares of 1, mean over ranks, of the steps in this process that are no warm-up:
    data (waiting for the batch), compute, exchange (waiting for it, and for slower ranks), and exchange_least (of the
    rank that waited least: what the network takes at most). Empty where the framework does not tell them apart"""
    inference: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """Of the model on rank 0's device, for each number of samples at once that --inference asked for: samples, passes,
    and of these median_s, least_s and most_s: from samples in host memory to their loss and scores there"""
    began_unix_s: float | None = None
    """When the loop began in this process, and when the test evaluation was over, by rank 0's clock"""
    ended_unix_s: float | None = None
    bytes_sent_source: str | None = None
    """counted: payload given to other hosts. computed: what a ring of all ranks sends, because neither Horovod nor the
    frameworks' own exchange counts. null of older versions, whose bytes_sent has bytes inside the host too"""
    local_bytes_sent: int | None = None
    """By rank 0 to other ranks of its host, over the whole run; null if bytes_sent is computed"""
    test_sums: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the test scores are made of, by name: a confusion matrix, say, as lists. Empty of a script"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensors:
    """What the sampler of one host can read, and whence: opens `monitors/<host>.jsonl`, again after each resume."""

    type: ClassVar[str] = "sensors"
    schema: str = SCHEMA
    host: str
    unix_s: float
    interval_s: float
    """Asked; each sample tells how long it really was"""
    monitors: list[str]
    """Of power, resources"""
    devices: list[dict[str, Any]]
    """What takes energy there: device (`cpu0`, `dram0`, `gpu0` ...), name, source (`rapl`, `nvml-energy`, `nvml-power`;
    null without a reading), reason (why there is none, else null), used (whether a rank of this run computes on it;
    null: cannot be told)"""
    idle_s: float | None = None
    """Length of the idle baseline taken before the run; null if none was asked for"""
    idle_w: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean power of each device in that time"""
    resources: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the resources are counted of: cores (that cpu_percent is a share of), cpu (`machine`, or the control group
    whose quota limits this host), ram_bytes (of the machine), disks (names of the physical ones that are summed)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One interval of one host, closed at `unix_s` by that host's clock. What was not measured is null or absent."""

    type: ClassVar[str] = "sample"
    unix_s: float
    seconds: float
    """Length of the interval, by the monotonic clock"""
    energy_j: dict[str, float] = dataclasses.field(default_factory=dict)
    """By device, over the interval"""
    cpu_percent: float | None = None
    """Of all cores of the host: 100 is all of them busy"""
    ranks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each rank on the host: rank, cpu_percent (100 is one core), rss_bytes"""
    ram_used_bytes: int | None = None
    gpus: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each GPU: device, utilisation_percent, memory_used_bytes"""
    nics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each NIC but loopback: nic, sent_bytes and received_bytes over the interval"""
    disk_read_bytes: int | None = None
    """Of all disks, over the interval"""
    disk_written_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """What a sweep asked of a run: `point.json`, written into the run's folder before it is launched."""

    type: ClassVar[str] = "point"
    schema: str = SCHEMA
    sweep: str
    point: str
    """Its settings as a short name; equal for repeats"""
    repeat: int
    kind: str
    """timing or energy (a run with power sampling, whose times are left out of timing figures)"""
    attempt: int
    """1, or 2 after a failure"""
    order: int
    """Place in the sweep's order of launches, from 0"""
    settings: dict[str, Any]
    command: list[str]
    rate_mbit: float | None
    """Asked of the throttle; null: unlimited"""
    rate_off_percent: float | None
    """The worst link's goodput against what that rate allows, as verified before the run; null: not verified"""
    marked: str | None
    """Why the figures of this run are not to be trusted; null: nothing known against them"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", without_secret_values(self.settings))
        object.__setattr__(self, "command", without_secrets(self.command))


Record = Manifest | Step | Epoch | Saved | Resumed | Summary | Sensors | Sample | Point
RECORDS: dict[str, type[Record]] = {cls.type: cls for cls in get_args(Record)}


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def as_json(record: Record) -> dict[str, Any]:
    return {"type": record.type, **{f.name: getattr(record, f.name) for f in dataclasses.fields(record)}}


def by_score(record: Record) -> dict[str, Any]:
    """A record's scores, each as a value of its own: train_accuracy, test_accuracy, validation_accuracy (a list of all
    epochs' in a summary) ..."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value, prefix = getattr(record, field.name), field.name.removesuffix("scores")
        if prefix == field.name:
            continue
        if isinstance(value, dict):
            found |= {prefix + name: score for name, score in value.items()}
        else:
            names = dict.fromkeys(name for scores in value for name in scores)
            found |= {prefix + name: [scores.get(name) for scores in value] for name in names}
    return found
