"""The record types, with the meaning and the unit of every field.

msgspec checks types and bounds on reading. Manifests and experiments hide the secrets of command lines whenever they
are built: before they are written, and when a file that holds secrets is read.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import Meta

from hvdtrain.system.redaction import without_secret_values, without_secrets

SCHEMA = "hvdtrain/3"

Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**18)]
"""A whole number of 0 or more: steps, samples, bytes"""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]
"""A finite number of 0 or more: seconds, joules, shares"""
Signed: TypeAlias = Annotated[float, Meta(ge=-1e18, le=1e18)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """A JSON object whose "type" is the class's name in lower case. Unknown fields are ignored when it is read."""

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)

    def __post_init__(self) -> None:
        schema = getattr(self, "schema", SCHEMA)
        if schema != SCHEMA:
            raise ValueError(f"written as {schema!a:.40}, but this hvdtrain reads {SCHEMA}; hint: use that version")


class Manifest(_Record, frozen=True, kw_only=True):
    """The settings and the surroundings of a run: `manifest.json`, written by rank 0 before step 0."""

    schema: str = SCHEMA
    workload: str
    started_utc: str
    argv: list[str]
    config: dict[str, Any]
    """The whole config, including defaults"""
    exchange: dict[str, Any] = {}
    """Facts about the strategy: overlaps_with (the computation that hides an exchange; empty: none), exact (whether
    hosts send the bytes of a full-precision all-reduce), chosen (why --strategy auto chose it), auto (the option).
    Empty: not known"""
    plan: dict[str, Any]
    """Batch arithmetic: ranks, rank_batch, global_batch, steps, base_lr ..."""
    data: dict[str, Any]
    """Name, classes, sample counts and fingerprint of the data set"""
    model: dict[str, Any]
    """Parameters, bytes and spec of the model"""
    shapes: list[list[int]] = []
    """Shapes of the trainable arrays, in the order of the vector that ranks exchange"""
    metric: dict[str, Any]
    """The run's scores: each one's label, unit, bounds and direction, and the name of the primary one, which selects
    the best epoch. See `records.metrics`. Empty for a script that logs no scores"""
    ranks: list[dict[str, Any]]
    """For each rank: host, local_rank, device, threads, cpu (model and cores of the machine), cores (that its host may
    use; a CPU quota lowers it)"""
    backend: str
    """The library that connects the ranks: none, gloo, mpi, nccl, grpc, tcp or servers"""
    links: list[dict[str, Any]] = []
    """For each of several hosts: host, nic, address, speed_mbit (negotiated by the NIC), throttle (the settings of
    `tools/throttle.sh`, or null), goodput_to, goodput_mbit and reason (why it is null). Goodput is the TCP payload to
    the host `goodput_to` before step 0, while every host sends to the next. Empty for a single host"""
    launch: dict[str, Any] = {}
    """Written by launch/mpirun.sh and horovodrun.sh: launcher (the command line with its hosts), settings (name, value,
    reason, and mca: whether it is a parameter of Open MPI), and the numbers of ranks and hosts that it started. Empty
    for other launchers"""
    versions: dict[str, str | None]
    git_commit: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "argv", without_secrets(self.argv))
        if isinstance(arguments := self.config.get("arguments"), list):  # of a script
            msgspec.structs.force_setattr(self, "config", self.config | {"arguments": without_secrets(arguments)})

    @property
    def hosts(self) -> list[str]:
        """The hosts of the ranks, each once, in the order of their first ranks."""
        return list(dict.fromkeys(str(rank.get("host")) for rank in self.ranks))


class Step(_Record, frozen=True, kw_only=True):
    """One training step of one rank."""

    step: Count
    """Counted from 0 over the whole run"""
    epoch: Count
    loss: float | None
    """Mean per sample over all ranks, or over this rank if the strategy does not share the loss in each step; null if a
    script does not log it"""
    samples: Count | None
    """Samples of this rank: images, or words to predict (tokens); null if a script does not log it"""
    lr: Amount | None
    """Null for a TensorFlow tape, which does not see it"""
    data_s: Amount | None
    """Waiting for the batch; null for a script, whose compute_s includes it"""
    compute_s: Amount
    """Forward, backward and update; with an overlapped strategy also the part of the exchange that backward hides"""
    communication_s: Amount | None
    """Waiting for the exchange after backward; null if the framework runs both in one graph, or waits on a GPU"""
    bytes_sent: Count
    """Payload that this rank gave to the network, without headers; see `Summary.bytes_sent_source`"""
    warmup: bool
    """Excluded from rates: one of the first steps of the process, or a step that the profiler distorts"""
    staleness: Amount | None = None
    """With parameter servers: updates by other ranks between the pull and the push of this one (mean over servers)"""
    staleness_max: Count | None = None
    local_bytes_sent: Count | None = None
    """Payload that this rank gave to other ranks of its host during the step; null if bytes_sent is computed"""


class Epoch(_Record, frozen=True, kw_only=True):
    """One epoch, written by rank 0. Scores are the manifest's; a score without a value is absent."""

    epoch: Count
    step: Count
    """Steps done since the start of the run"""
    train_loss: float | None
    """Null if a script does not log it"""
    train_scores: dict[str, Signed]
    validation_loss: float | None
    """Null, with empty scores, if the validation split is empty"""
    validation_scores: dict[str, Signed]
    train_s: Amount
    validation_s: Amount
    samples: Count | None
    """Training samples over all ranks (words for captions, as in a step); null if a script does not log it"""
    samples_per_s: Amount | None
    """Images or captions over all ranks, without warm-up steps; null if the epoch is warm-up only"""
    unix_s: Amount | None = None
    """End of the epoch's validation by rank 0's clock (seconds since 1970)"""
    shares: list[Amount] = []
    """Share of each rank in a batch from the next epoch on, if --shares measured changed it; otherwise empty"""


class Saved(_Record, frozen=True, kw_only=True):
    """A checkpoint was saved."""

    step: Count
    checkpoint_s: Amount
    best: bool


class Resumed(_Record, frozen=True, kw_only=True):
    """The process resumed from a checkpoint; later records of a step replace earlier ones."""

    step: Count
    utc: str
    links: list[dict[str, Any]] = []
    """As in the manifest, measured at this start"""
    ranks: Count | None = None
    """Ranks and hosts from here on; null if unchanged"""
    hosts: Count | None = None


class View(_Record, frozen=True, kw_only=True):
    """Hosts of an elastic job were lost, and the others continue. Written by every rank."""

    view: Count
    """Number of the view: of the list of members"""
    step: Count
    """Steps done before it"""
    epoch: Count
    sample: Count
    """Samples of this epoch that were consumed before it"""
    members: list[str]
    """The host of each rank"""
    ranks: Count
    hosts: Count
    global_batch: Count
    shares: list[Amount] = []
    """Share of each rank in a batch; empty: equal"""
    reason: str
    unix_s: Amount
    """When training continued, by this rank's clock"""
    lost_s: Amount
    """From the start of the interrupted step, evaluation, check or save until training continued. Without one: from the
    notice of the loss"""


class Chosen(_Record, frozen=True, kw_only=True):
    """`--strategy auto` chose again: steps took another time than before, or the members of an elastic job changed.

    Written by rank 0, in an elastic job by every rank."""

    step: Count
    """First step of this choice"""
    strategy: str
    """May be the one that ran before"""
    reason: str
    choice_s: Amount
    """Time for measuring the links, choosing and changing the strategy; part of the training time"""
    links: list[dict[str, Any]] = []
    """As in the manifest, measured for this choice. After a change of members: as measured before"""


class Summary(_Record, frozen=True, kw_only=True):
    """The end of a complete run, written by rank 0; `--json` prints it too."""

    schema: str = SCHEMA
    run_dir: str
    workload: str
    framework: str
    strategy: str
    """The one that ran last"""
    ranks: Count
    """At the end. In an elastic job the manifest may have another number"""
    hosts: Count
    parameters: Count
    global_batch: Count | None
    """Null for a script that does not log its samples"""
    epochs: Count
    """For a script: epochs whose scores it logged"""
    steps: Count
    test_loss: float | None
    test_scores: dict[str, Signed]
    validation_scores: list[dict[str, Signed]]
    """After each epoch"""
    train_s: Amount
    validation_s: Amount
    """For a script: from the last step of an epoch until it logged that epoch's scores"""
    test_s: Amount | None
    """Null for a script, as is checkpoint_s: both are part of the other times"""
    checkpoint_s: Amount | None
    samples_per_s: Amount | None
    """Training samples per second over all ranks, without warm-up steps"""
    samples_per_s_per_rank: Amount | None
    data_share: Amount | None
    """Share of the training time that rank 0 waited for data, without warm-up steps"""
    bytes_sent: Count
    """By rank 0 to the network, over the whole run"""
    first_step_s: Amount | None
    """From the start of the process to the end of its first step (rank 0); null if it made none"""
    peak_rss_bytes: Count
    """Largest over the ranks"""
    nic_bytes: list[dict[str, Any]] = []
    """For each of several hosts: host, nic, and sent_bytes and received_bytes over its link, from the loop's start in
    this process to the end of the test evaluation, including headers and all other traffic. Empty for a single host"""
    tested_step: Count | None = None
    """Step of the tested weights: the last one, or the last step of the best epoch"""
    step_shares: dict[str, Amount] = {}
    """Where the time of a step went, as shares of 1, mean over ranks and over this process's steps after warm-up: data
    (waiting for the batch), compute, exchange (waiting for it, and for slower ranks), and exchange_least (of the rank
    that waited least: an upper bound of the network's share). Empty if the framework cannot separate them"""
    inference: list[dict[str, Amount]] = []
    """Inference on rank 0's device for each batch size of --inference: samples, passes, and over these median_s,
    least_s and most_s, from samples in host memory to their loss and scores there"""
    began_unix_s: Amount | None = None
    """Start of the loop in this process and end of the test evaluation, by rank 0's clock"""
    ended_unix_s: Amount | None = None
    bytes_sent_source: str | None = None
    """counted: payload given to other hosts. computed: what a ring of all ranks sends, because neither Horovod nor the
    frameworks' own exchange counts it. Null if it was not recorded"""
    local_bytes_sent: Count | None = None
    """By rank 0 to other ranks of its host, over the whole run; null if bytes_sent is computed"""
    test_sums: dict[str, Any] = {}
    """The sums behind the test scores by name, such as a confusion matrix, as lists. Empty for a script"""


class Sensors(_Record, frozen=True, kw_only=True):
    """The sensors of one host: first line of `monitors/<host>.jsonl`, repeated after each resume."""

    schema: str = SCHEMA
    host: str
    unix_s: Amount
    interval_s: Amount
    """Requested; each sample has the actual length"""
    monitors: list[str]
    """power, resources"""
    devices: list[dict[str, Any]]
    """Consumers of energy: device (`cpu0`, `dram0`, `gpu0` ...), name, source (`rapl`, `nvml-energy`, `nvml-power`;
    null without a sensor), reason (why there is none, else null), used (whether a rank of this run computes on it; null
    if unknown)"""
    idle_s: Amount | None = None
    """Length of the idle baseline before the run; null without one"""
    idle_w: dict[str, Amount] = {}
    """Mean power of each device in that time"""
    resources: dict[str, Any] = {}
    """The scope of the resources: cores (100 cpu_percent), cpu (`machine`, or the control group whose quota limits this
    host), ram_bytes (of the machine), disks (names of the physical disks that are added up)"""


class Sample(_Record, frozen=True, kw_only=True):
    """One interval of one host, which ended at `unix_s` by that host's clock. Missing values are null or absent."""

    unix_s: Amount
    seconds: Amount
    """Length of the interval by the monotonic clock"""
    energy_j: dict[str, Amount] = {}
    """By device"""
    cpu_percent: Amount | None = None
    """100 means that all cores of the host are busy"""
    ranks: list[dict[str, Any]] = []
    """For each rank on the host: rank, cpu_percent (100 is one core), rss_bytes"""
    ram_used_bytes: Count | None = None
    gpus: list[dict[str, Any]] = []
    """For each GPU: device, utilisation_percent, memory_used_bytes"""
    nics: list[dict[str, Any]] = []
    """For each NIC except loopback: nic, sent_bytes and received_bytes in the interval"""
    disk_read_bytes: Count | None = None
    """All disks together"""
    disk_written_bytes: Count | None = None


class Experiment(_Record, frozen=True, kw_only=True):
    """A sweep's request: `experiment.json`, written into the run's folder before the launch."""

    schema: str = SCHEMA
    sweep: str
    experiment: str
    """Its settings as a short name; equal for repeats"""
    repeat: Count
    kind: str
    """timing, or energy (with power sampling, so its times do not count)"""
    attempt: Count
    """1, or 2 after a failure"""
    order: Count
    """Place in the sweep's order of launches, from 0"""
    settings: dict[str, Any]
    program: str | None = None
    """SHA-256 of the script that a sweep's command names and of the Python files beside it; null: a workload"""
    command: list[str]
    rate_mbit: Amount | None
    """Requested from the throttle; null: unlimited"""
    rate_off_percent: Signed | None
    """Deviation of the slowest link's goodput from the expected one, measured before the run; null: not measured"""
    marked: str | None
    """Why the measurements of this run cannot be trusted; null: no objection"""

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "settings", without_secret_values(self.settings))
        msgspec.structs.force_setattr(self, "command", without_secrets(self.command))


Record: TypeAlias = Manifest | Step | Epoch | Saved | Resumed | View | Chosen | Summary | Sensors | Sample | Experiment
RECORDS: dict[str, type[Record]] = {cls.__name__.lower(): cls for cls in get_args(Record)}


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def as_json(record: Record) -> dict[str, Any]:
    return {"type": record.type, **msgspec.structs.asdict(record)}


def by_score(record: Record) -> dict[str, Any]:
    """A record's scores as separate values: train_accuracy, test_accuracy, validation_accuracy (in a summary a list
    over the epochs) ..."""
    flat: dict[str, Any] = {}
    for field, value in msgspec.structs.asdict(record).items():
        prefix = field.removesuffix("scores")
        if prefix == field:
            continue
        if isinstance(value, dict):
            flat |= {prefix + name: score for name, score in value.items()}
        else:
            names = dict.fromkeys(name for scores in value for name in scores)
            flat |= {prefix + name: [scores.get(name) for scores in value] for name in names}
    return flat
