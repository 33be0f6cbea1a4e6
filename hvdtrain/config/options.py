"""The options of a training run. `hvdtrain.config.parser` turns their fields into flags, variables and file keys.

Workloads extend `TrainConfig` in their own file.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from hvdtrain.config import constraints
from hvdtrain.config.constraints import bounded
from hvdtrain.config.parser import flag
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

Optimizer = Literal["sgd", "adam", "adamw", "muon"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Options for the data."""

    GROUP: ClassVar[str] = "data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """Options for the optimization."""

    GROUP: ClassVar[str] = "optimization"

    epochs: int = bounded(12, least=1)
    """Passes over the training set

    With --epoch-samples: the number of parts of that size."""
    epoch_samples: int | None = bounded(None, least=1)
    """Samples per epoch (default: all)

    The next epoch continues where the last one ended, so that large data sets are evaluated more often than once per
    pass."""
    batch_size: int | None = bounded(None, least=1)
    """Samples per rank and step (default: 32)

    The global batch grows with the number of ranks."""
    global_batch_size: int | None = bounded(None, least=1)
    """Samples per step over all ranks

    Replaces --batch-size. Each rank gets at least one sample."""
    lr: float = bounded(0.05, above=0)
    """Learning rate for the batch size given

    It belongs to --batch-size on one rank, or to --global-batch-size; see --lr-scaling."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale --lr with the global batch

    linear: multiply by the ratio of the global batch to the batch size given; sqrt: by the root of that ratio."""
    warmup_epochs: float = bounded(1.0, least=0)
    """Epochs of linear learning-rate warm-up"""
    schedule: Literal["constant", "cosine", "linear", "step"] = "cosine"
    """Learning rate after the warm-up

    cosine: half a cosine down to 0; linear: down to 0; step: divided by 10 after 50 % and after 75 % of the steps."""
    optimizer: Optimizer = "sgd"
    """Optimizer

    sgd: SGD with --momentum. adamw, or adam: AdamW with betas 0.9 and 0.999 and epsilon 1e-8. muon: the momentum of
    matrices and convolutions is orthogonalised; vectors and embeddings use SGD with Nesterov momentum."""
    momentum: float = bounded(0.9, least=0, below=1)
    """Momentum of SGD and Muon"""
    weight_decay: float = bounded(0.0, least=0)
    """L2 penalty

    SGD adds it to the gradient of every parameter. AdamW and Muon decouple it from the gradient."""
    clip_norm: float = bounded(0.0, least=0)
    """Largest norm of the gradient; 0: no limit

    A longer gradient is scaled to this norm over all parameters, after it has been averaged over all ranks. With
    local-sgd and async-ps each rank limits its own gradient, the mean over its own samples."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward and backward

    Parameters stay fp32. fp16 uses dynamic loss scaling."""
    ema: float = bounded(0.0, least=0, below=1)
    """Decay of the averaged weights to evaluate; 0: none

    After each step an exponential moving average of the weights moves towards the weights. It is evaluated, saved
    alongside the weights and used for predictions. In step t the decay is at most (1 + t) / (10 + t), as in TensorFlow,
    so that early weights are forgotten. With local SGD the average follows the weights that all ranks share. BatchNorm
    uses the running statistics of training; --precise-bn computes them for the averaged weights."""
    seed: int = bounded(0, least=0)
    """Seed of initial weights and data order"""
    target: str | None = None
    """SCORE=VALUE that ends the training

    The run stops after the first epoch whose score is at least that good, for example bleu4=0.9. For an error such as
    rmse, smaller is better."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communication:
    """Options for the communication between ranks."""

    GROUP: ClassVar[str] = "communication"

    strategy: str = "allreduce"
    """exact, balanced, fast, auto, or a strategy

    exact, balanced and fast are presets, whose strategies depend on --optimizer: see `hvdtrain strategies`. auto
    chooses a strategy before step 0, and again when steps take another time. auto:exact keeps sums exact,
    auto:within=0.3 limits the recorded loss of accuracy to 0.3 points. In full, a strategy is
    ALGORITHM[:KEY=VALUE,...][+REDUCER[:KEY=VALUE,...]]; `--strategy help` lists all of them with the bytes of the
    model."""
    backend: Literal["tcp", "mpi"] = "tcp"
    """What connects the hosts

    tcp: hvdtrain's own connections. mpi: the MPI that started the ranks, for the fabrics that it drives. For strategies
    on hvdtrain's TCP backend; not with --elastic or --stages."""
    shares: str | None = None
    """Unequal shares of each batch: measured, or e.g. 3:1

    One number per rank, in order of ranks: a rank with share 3 gets three times the samples of one with share 1.
    measured: hvdtrain measures the speed of each rank before step 0, and divides again at the end of an epoch if the
    speeds have changed. Needs a strategy on hvdtrain's TCP backend."""
    stages: int = bounded(1, least=1)
    """Pipeline stages

    The model is partitioned into this number of stages, each on its own ranks. The ranks of a stage exchange gradients
    with --strategy."""
    micro_batches: int | None = bounded(None, least=1)
    """Micro-batches per step (1; with stages 4)

    A rank's batch goes through the model in this number of parts, and their gradients are added up. BatchNorm sees one
    part at a time."""
    cut_at: str | None = None
    """LAYER,... that begin stages (default: measured)

    The first layer of each stage but the first, by the names that --dry-run prints."""
    buckets: int = bounded(0, least=0, most=4)
    """Parts of the gradients that are exchanged during backward; 0: the fastest number

    Reducers only. The first 27 steps try 1, 2 and 4. Runs that must have equal bits need a number."""
    check_replicas: int = bounded(100, least=0)
    """Steps between checks of replica checksums

    0: never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Options for the run."""

    GROUP: ClassVar[str] = "run"

    framework: Literal["torch", "tensorflow", "auto"] = "auto"
    """Framework

    auto: PyTorch if it is installed, otherwise TensorFlow."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device

    auto: this rank's GPU if there is one, otherwise the CPU."""
    threads: int = bounded(0, least=0)
    """CPU threads per rank; 0: automatic

    The choice depends on the host's cores, its ranks and the size of the layers."""
    run_dir: str | None = None
    """Run folder (default: results/UTC-NAME-ID)"""
    resume: bool | str = False
    """Continue the run in this folder

    It resumes from the newest valid checkpoint, with the settings of the run. Without a folder: continue the run in
    --run-dir, or start it if there is none."""
    checkpoint_steps: int | None = bounded(None, least=0)
    """Steps between checkpoints within an epoch; 0: none at all

    By default a checkpoint is saved at the end of each epoch only."""
    keep_checkpoints: int = bounded(2, least=1)
    """Newest checkpoints to keep

    The best one by the primary metric is kept as well."""
    json: bool = False
    """Print one JSON document on stdout"""
    dry_run: bool = False
    """Print the plan of the run and exit

    Options, batch arithmetic, parameters and bytes per step. No framework is loaded and no rank connected."""
    debug: bool = False
    """Show tracebacks of one-line errors"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Options for measurements and records."""

    GROUP: ClassVar[str] = "measurement"

    evaluate_on: Literal["validation", "test"] = "validation"
    """Split evaluated after each epoch

    test: only to measure the time to a test accuracy, as MLPerf does."""
    evaluate_samples: int | None = bounded(None, least=1)
    """Samples of that split to evaluate (default: all)

    Captions are always scored on the whole split."""
    monitor: str = "none"
    """power, resources, both or none

    One process per host samples them: power, resources, or power,resources. With power, the 5 s before step 0 measure
    the idle hosts."""
    profile: str | None = None
    """N:M, steps to trace with the profiler

    Rank 0 writes a trace of the framework's profiler for Chrome and TensorBoard into the run folder."""
    tensorboard: bool = False
    """Write TensorBoard scalars too"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Data, Optimization, Communication, Run, Measurement):
    """The options of every training workload. Raises Failure (78) for values that cannot be combined."""

    GROUP: ClassVar[str] = "model"
    COMMON: ClassVar[tuple[str, ...]] = (
        *("data", "epochs", "batch_size", "lr", "optimizer", "strategy"),
        *("framework", "run_dir", "resume", "dry_run"),
    )
    """Options that --help shows"""

    def __post_init__(self) -> None:
        if isinstance(self.resume, str):
            if self.run_dir is not None and Path(self.run_dir) != Path(self.resume):
                raise _bad(
                    f"--resume {self.resume} and --run-dir {self.run_dir} name two folders; hint: give one of them"
                )
            object.__setattr__(self, "run_dir", self.resume)
            object.__setattr__(self, "resume", True)
        if message := constraints.problem(self, flag):
            raise _bad(message)
        if self.optimizer == "adamw":  # records have the older name
            object.__setattr__(self, "optimizer", "adam")
        if self.batch_size and self.global_batch_size:
            raise _bad("--batch-size cannot be combined with --global-batch-size; hint: give one of them")
        if self.warmup_epochs > self.epochs:
            raise _bad(f"--warmup-epochs {self.warmup_epochs} is more than --epochs {self.epochs}; hint: lower it")
        if self.clip_norm and self.stages > 1:
            raise _bad(
                f"--clip-norm {self.clip_norm:g} cannot be combined with --stages {self.stages}, because no rank knows "
                "the norm over all stages; hint: lower --lr, or use --micro-batches without stages"
            )
        if self.monitor != "none" and not set(self.monitor.split(",")) <= {"power", "resources"}:
            raise _bad(f"--monitor {self.monitor} is unknown; hint: give power, resources, power,resources or none")
        if self.resume and not self.run_dir:
            raise _bad("--resume without a folder; hint: give the run's folder, --resume DIR")


def _bad(message: str) -> Failure:
    return Failure(message, exits.BAD_CONFIG)
