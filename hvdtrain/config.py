"""What a run is told: frozen dataclasses whose fields become flags, variables and config-file keys.

A field `batch_size` with a docstring under it is the flag `--batch-size`, the variable `HVDTRAIN_BATCH_SIZE` and the
key `batch_size` of a `--config FILE.toml`; a flag behind it wins over the file, the file over flags before it and over
the variable, the variable over the default. Workloads extend `TrainConfig` in their own file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from hvdtrain import bounds, exits, files
from hvdtrain.arguments import near
from hvdtrain.bounds import bounded, field_docs
from hvdtrain.exits import Failure

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on."""

    verify_data: bool = False
    """Read all of a prepared folder and compare its SHA-256; otherwise only what this host has not yet verified"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimisation:
    """How the model learns."""

    epochs: int = bounded(12, least=1)
    """Passes over the training set, or parts of a pass: see --epoch-samples"""
    epoch_samples: int | None = bounded(None, least=1)
    """Samples of an epoch, the next of which goes on where it ended, so that large sets are evaluated more often
    (default: all of the training set)"""
    batch_size: int | None = bounded(None, least=1)
    """Samples per rank and step (default: 32); the global batch grows with the number of ranks"""
    global_batch_size: int | None = bounded(None, least=1)
    """Samples per step over all ranks, instead of --batch-size; at least one for each"""
    lr: float = bounded(0.05, above=0)
    """Learning rate for a global batch of the size given (--batch-size or --global-batch-size)"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply --lr by the ratio of the global batch to the batch size given, by its square root, or not at all"""
    warmup_epochs: float = bounded(1.0, least=0)
    """Epochs over which the learning rate rises linearly to its full value"""
    schedule: Literal["constant", "cosine", "step"] = "cosine"
    """After the warm-up: constant, half a cosine down to 0, or divided by 10 at 50 % and at 75 % of the epochs"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """SGD with --momentum, or Adam with its usual constants (0.9, 0.999, 1e-8)"""
    momentum: float = bounded(0.9, least=0, below=1)
    """Momentum of SGD"""
    weight_decay: float = bounded(0.0, least=0)
    """L2 penalty added to every parameter's gradient; with Adam decoupled from it (AdamW)"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward and backward pass; parameters stay fp32, fp16 uses dynamic loss scaling"""
    seed: int = bounded(0, least=0)
    """Seed of the initial weights and of the order of the data"""
    target_accuracy: float | None = bounded(None, above=0, most=1)
    """Stop after the first epoch with at least this accuracy: --target accuracy=VALUE"""
    target: str | None = None
    """SCORE=VALUE: stop after the first epoch whose score is as good as that (of an error: as small), e.g. bleu4=0.9"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """What ranks send each other."""

    strategy: str = "allreduce"
    """How ranks exchange what they learn: SCHEDULE[:KEY=VALUE,...][+REDUCER[:KEY=VALUE,...]], Horovod's own or one made
    for slow networks; 'help' lists them, 'help:NAME' tells all about one"""
    stages: int = bounded(1, least=1)
    """Parts that the model is cut into, each on ranks of its own (pipeline parallelism); the ranks of a part exchange
    gradients by --strategy"""
    micro_batches: int | None = bounded(None, least=1)
    """Parts in which a rank's batch goes through the model; their gradients add up, and BatchNorm sees one at a time
    (default: 1, with stages 4)"""
    cut_at: str | None = None
    """LAYER,... that begin the second stage and the others, as --dry-run names them (default: measured)"""
    stage_across: Literal["hosts", "ranks"] = "hosts"
    """Stages on different hosts, whose activations then cross the network, or on the ranks of each host"""
    stage_order: Literal["1f1b", "eager", "gpipe"] = "1f1b"
    """Order of a stage: one forward, one backward in turn; eager: more forward first, so that it computes while
    activations are on a slow link; gpipe: all forward first. Each holds more activations than the one before"""
    activations: Literal["fp32", "bf16", "int8"] = "fp32"
    """Numbers between stages, their gradients too; bf16 halves the bytes and rounds to 8 bits, int8 takes a quarter and
    rounds to 1/127 of the largest of 64"""
    recompute: bool = False
    """A stage holds only the inputs of its micro-batches, and goes forward anew before it goes backward: less memory"""
    stage_memory: str | None = None
    """SIZE, e.g. 800MB or 1.5GB, that no stage may need for weights, gradients, optimizer and activations"""
    stall_limit: float = bounded(60.0, least=0)
    """Seconds that ranks wait for one that takes no part in an exchange before its stack is shown; after five times as
    long in which no rank makes progress the job ends; 0: never"""
    check_replicas: int = bounded(100, least=0)
    """Steps between two comparisons of the weights' checksums over ranks; 0: never"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how the run happens."""

    framework: Literal["torch", "tensorflow", "auto"] = "auto"
    """PyTorch or TensorFlow; auto: PyTorch if it is installed, else TensorFlow"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute; auto: this rank's GPU if there is one, else the CPU"""
    threads: int = bounded(0, least=0)
    """CPU threads per rank; 0: what this host's cores, its ranks and the size of the layers allow"""
    run_dir: str | None = None
    """This run's own folder (default: results/<UTC>-<workload>-<6 hex>)"""
    resume: bool | str = False
    """Continue the run in this folder from its newest valid checkpoint, with its settings. Without a folder:
    continue the run in --run-dir, or start it if there is none"""
    checkpoint_epochs: int = bounded(1, least=0)
    """Save a checkpoint after every so many epochs (after the last only if they divide --epochs); 0: not by epochs"""
    checkpoint_steps: int = bounded(0, least=0)
    """Save a checkpoint after every so many steps too; 0: not by steps"""
    keep_checkpoints: int = bounded(2, least=1)
    """How many of the newest checkpoints stay; the best one (by the headline score) stays besides"""
    json: bool = False
    """Rank 0 prints one JSON document on stdout instead of tables"""
    dry_run: bool = False
    """Print the resolved config, the batch arithmetic, parameters and bytes per step, and exit"""
    debug: bool = False
    """Show the traceback of errors that are otherwise one line; no key of a file"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measuring:
    """What is measured and recorded."""

    evaluate_on: Literal["validation", "test"] = "validation"
    """Split that is evaluated after each epoch; test: only to measure the time to a test accuracy, as MLPerf does"""
    evaluate_samples: int | None = bounded(None, least=1)
    """Evaluate only the split's first so many samples after each epoch (default: all); captions are judged whole"""
    monitor: str = "none"
    """What one sampler process per host records meanwhile: power, resources, power,resources or none"""
    monitor_ms: int = bounded(500, least=50)
    """Milliseconds between two samples"""
    monitor_idle_s: float = bounded(0.0, least=0)
    """Seconds of idle power to measure before step 0, as the baseline; 0: none"""
    profile: str | None = None
    """N:M traces steps N to M of rank 0 with the framework's profiler (Chrome and TensorBoard) into the run's folder"""
    horovod_timeline: bool = False
    """Record Horovod's timeline of every tensor into the run's folder (a Chrome trace)"""
    inference: str | None = None
    """SAMPLES,SAMPLES,...: at the end, time what the model takes on rank 0 for so many at once, e.g. 2,64,512,1024"""
    tensorboard: bool = False
    """Write loss, accuracy and times as TensorBoard scalars into the run's folder too"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Data, Optimisation, Exchange, Run, Measuring):
    """What every training workload is told. Raises Failure (78) for values that do not fit together."""

    @property
    def goal(self) -> str | None:
        """--target, or what --target-accuracy says as one."""
        return self.target if self.target_accuracy is None else f"accuracy={self.target_accuracy}"

    @property
    def inference_sizes(self) -> list[int]:
        """Those of --inference. Raises Failure (78)."""
        sizes = bounds.counts(self.inference) if self.inference else ()
        if self.inference and not sizes:
            raise Failure(f"--inference {self.inference}: give numbers of samples, as 2,64,512,1024", exits.BAD_CONFIG)
        return list(sizes)

    def __post_init__(self) -> None:
        if isinstance(self.resume, str):
            if self.run_dir is not None and Path(self.run_dir) != Path(self.resume):
                raise Failure(f"--resume {self.resume} and --run-dir {self.run_dir}: give one folder", exits.BAD_CONFIG)
            object.__setattr__(self, "run_dir", self.resume)
            object.__setattr__(self, "resume", True)
        if wrong := bounds.problem(self, flag):
            raise Failure(wrong, exits.BAD_CONFIG)
        if self.target is not None and self.target_accuracy is not None:
            raise Failure("--target and --target-accuracy are both given: give one of them", exits.BAD_CONFIG)
        if self.batch_size and self.global_batch_size:
            raise Failure("--batch-size and --global-batch-size are both given: give one of them", exits.BAD_CONFIG)
        if self.warmup_epochs > self.epochs:
            raise Failure(
                f"--warmup-epochs {self.warmup_epochs} is more than --epochs {self.epochs}: lower it", exits.BAD_CONFIG
            )
        if self.monitor != "none" and not set(self.monitor.split(",")) <= {"power", "resources"}:
            raise Failure(f"--monitor {self.monitor}: give power, resources, power,resources or none", exits.BAD_CONFIG)
        if self.monitor_idle_s and "power" not in self.monitor:
            raise Failure("--monitor-idle-s measures power: add --monitor power", exits.BAD_CONFIG)
        _ = self.inference_sizes
        if self.resume and not self.run_dir:
            raise Failure("--resume needs the folder of the run to continue: --resume DIR", exits.BAD_CONFIG)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batch arithmetic of a run, fixed before step 0. Learning rates are per step of the global batch."""

    ranks: int
    rank_batch: int
    """Samples per rank and step; where the ranks do not divide the global batch, some have one fewer"""
    global_batch: int
    """Samples per step over all ranks"""
    steps_per_epoch: int
    steps: int
    """Steps of the whole run"""
    base_lr: float
    """Learning rate after scaling, before warm-up and schedule"""
    scaling: str
    """How base_lr came from --lr, in words"""
    warmup_steps: int
    schedule: str
    shares: tuple[float, ...] | None = None
    """Of each rank in a global batch, relative to each other; rank_batch is the mean then. None: all take the same"""
    stages: int = 1
    """Ranks that hold the model together; `ranks` counts replicas of it"""
    micro_batches: int = 1
    """Parts of a rank's batch"""
    cut: tuple[str, ...] = ()
    """The layers that begin the stages but the first"""

    def learning_rate(self, step: int) -> float:
        """Learning rate of step `step` (counted from 0 over the whole run)."""
        if step < self.warmup_steps:
            return self.base_lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "cosine":
            return self.base_lr * 0.5 * (1 + math.cos(math.pi * done))
        if self.schedule == "step":
            return self.base_lr * 0.1 ** ((step >= self.steps / 2) + (step >= self.steps * 3 / 4))
        return self.base_lr


def global_batch(config: TrainConfig, ranks: int) -> int:
    """Samples per step over all ranks."""
    return config.global_batch_size or (config.batch_size or 32) * ranks


def batch_plan(
    config: TrainConfig, ranks: int, global_batch: int, steps_per_epoch: int, shares: tuple[float, ...] | None = None
) -> BatchPlan:
    """The arithmetic of batches, steps and learning rate for `ranks` ranks, which take these `shares` of a step."""
    ratio = global_batch / (config.global_batch_size or config.batch_size or 32)
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]
    return BatchPlan(
        ranks=ranks,
        rank_batch=-(-global_batch // ranks),
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        steps=steps_per_epoch * config.epochs,
        base_lr=config.lr * factor,
        scaling=f"--lr {config.lr:g} x {factor:g} (--lr-scaling {config.lr_scaling}, batch ratio {ratio:g})",
        warmup_steps=round(config.warmup_epochs * steps_per_epoch),
        schedule=config.schedule,
        shares=shares,
        stages=config.stages,
        micro_batches=micro_batches(config),
    )


def micro_batches(config: TrainConfig) -> int:
    """Parts of a rank's batch."""
    return config.micro_batches or (1 if config.stages == 1 else 4)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _grouped(cls: type) -> dict[str, list[dataclasses.Field[Any]]]:
    """Title in the help -> its fields. A workload's field stands under the base of TrainConfig that its class extends,
    else under `model`."""
    found: dict[str, list[dataclasses.Field[Any]]] = {}
    if issubclass(cls, TrainConfig):
        first, *others = (base.__name__.lower() for base in TrainConfig.__bases__)
        found = {title: [] for title in (first, "model", *others)}
    for field in dataclasses.fields(cls):
        declared = next(each for each in reversed(cls.__mro__) if field.name in inspect.get_annotations(each))
        bases = [base.__name__.lower() for base in TrainConfig.__bases__ if issubclass(declared, base)]
        title = "model" if len(bases) > 1 or issubclass(declared, TrainConfig) else "".join(bases)
        found.setdefault(title, []).append(field)
    return {title: fields for title, fields in found.items() if fields}


def parser_for(cls: type, *, prog: str, purpose: str, positionals: Sequence[str] = (), helps: bool = True) -> Any:
    """A jsonargparse parser with one flag per field of `cls`; `purpose` heads the help and shows examples. `helps`: its
    help tells each flag's meaning, which takes a parse of the sources."""
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter):
        """Keeps the line breaks of the examples."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return "\n".join(indent + line for line in text.splitlines())

    parser = ArgumentParser(
        prog=prog,
        usage=argparse.SUPPRESS,  # the help starts with the purpose
        allow_abbrev=False,  # what looks for --run-dir or --resume in a command must find it
        print_config=None,
        description=purpose,
        env_prefix="HVDTRAIN",
        default_env=True,
        parser_mode="toml",
        exit_on_error=False,
        formatter_class=Formatter,
    )
    parser.add_argument("--config", action="config", help="TOML file with values for the flags below")
    hints, docs = get_type_hints(cls), field_docs(cls) if helps else {}
    for title, fields in _grouped(cls).items():
        group = parser.add_argument_group(title) if title else parser
        for field in fields:
            kind: dict[str, Any] = {"type": hints[field.name], "help": docs.get(field.name)}
            if field.name in positionals:
                group.add_argument(field.name, **kind)
            elif field.default is False and hints[field.name] is bool:
                group.add_argument(flag(field.name), action="store_true", help=kind["help"])
            elif field.default is dataclasses.MISSING:
                group.add_argument(flag(field.name), required=True, **kind)
            else:
                group.add_argument(flag(field.name), default=field.default, **kind)
    return parser


def parse(
    cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    purpose: str,
    positionals: Sequence[str] = (),
    earlier: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda settings: {},
) -> C:
    """The config that flags, file, variables and defaults add up to; what `earlier` makes of it are then the defaults.

    Raises Failure (2) for a flag, key or value that is not accepted, Failure (78) for values that do not fit together.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    helps = any(word.startswith(("-h", "--h")) for word in arguments)
    parser = parser_for(cls, prog=prog, purpose=purpose, positionals=positionals, helps=helps)
    for file in config_files(arguments):
        try:
            files.from_toml(text := files.read(file, files.SETTINGS_BYTES))
            if text.startswith(b"\xef\xbb\xbf"):  # jsonargparse, which reads it again, refuses it
                raise ValueError("it begins with a byte order mark: save it without one")
        except OSError as error:
            raise files.refused(f"--config {file}", error, exits.USAGE, "give a TOML file") from error
        except ValueError as error:
            raise Failure(f"--config {file}: no TOML ({error})", exits.BAD_CONFIG) from error
    pairs = itertools.pairwise([*arguments, "-"])
    arguments = ["--resume=true" if (word, after[:1]) == ("--resume", "-") else word for word, after in pairs]
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    try:
        space = parser.parse_args(arguments)
        if defaults := earlier({name: getattr(space, name) for name in names}):
            parser.set_defaults(defaults)
            space = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        reason = re.sub(r'Parser key "(\w+)":', lambda key: flag(key[1]) + ":", " ".join(str(error).split()))
        if unknown := re.search(r"[Uu]nrecognized arguments: (\S+)", reason):
            reason += near(unknown[1], map(flag, [*names, "config", "help"]))
        places = [f"--config {file}" for file in config_files(arguments)]
        if unknown := re.search(r"Option '([\w.-]+)' is not accepted", reason):
            reason = f"{' or '.join(places)}: {reason}{near(unknown[1].rpartition('.')[2], names)}"
        wrong = re.match(r"--([\w-]+):", reason)
        if wrong and f"--{wrong[1]}" not in [word.partition("=")[0] for word in arguments]:
            variable = f"HVDTRAIN_{wrong[1].replace('-', '_').upper()}"
            places += [variable] * (variable in os.environ)
            reason = f"{' or '.join(places)}: {reason}" if places else reason
        told = {key: f"{flag(key)} ({doc})" for key, doc in field_docs(cls).items() if key not in positionals}
        reason = re.sub(r"(?<=required: ).+", lambda all: ", ".join(told.get(w, w) for w in all[0].split(", ")), reason)
        reason = re.sub(r".* boolean value for environment variable (\w+): ?(.*)", r"\1=\2: give true or false", reason)
        reason = re.sub(r"<class '(\w+)'>", r"\1", reason).replace("a typing.Literal", "one of ")
        raise Failure(f"{reason} (see `{prog} --help`)", exits.USAGE) from error
    return cls(**{name: getattr(space, name) for name in names})


def misspelt(cls: type) -> list[str]:
    """`HVDTRAIN_EPOCH, did you mean HVDTRAIN_EPOCHS?` of each variable that is no setting of `cls` and looks like one.

    Others may be another workload's.
    """
    names = {f"HVDTRAIN_{field.name.upper()}" for field in dataclasses.fields(cls)}
    asked = sorted(name for name in os.environ if name.startswith("HVDTRAIN_") and name not in names)
    alike = [(name, difflib.get_close_matches(name, names, 1, 0.87)) for name in asked]
    return [f"{name}, did you mean {found[0]}?" for name, found in alike if found]


def config_files(arguments: Sequence[str]) -> list[str]:
    """The files named by --config, for an error that names them (jsonargparse takes a missing file for inline TOML)."""
    files = [following for word, following in itertools.pairwise(arguments) if word == "--config"]
    files += [word.partition("=")[2] for word in arguments if word.startswith("--config=")]
    return files + ([os.environ["HVDTRAIN_CONFIG"]] if "HVDTRAIN_CONFIG" in os.environ else [])
