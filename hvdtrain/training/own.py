"""`hvdtrain.train`: the loop of the built-in workloads for any model and data; see docs/guides/hvdtrain-train.md."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import records, strategies
from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import digest
from hvdtrain.comm.elastic import unsupported
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config import workloads
from hvdtrain.config.options import TrainConfig
from hvdtrain.config.parser import flag
from hvdtrain.data import own
from hvdtrain.records.metrics import Accuracy, Metric, Regression
from hvdtrain.strategies import catalog
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits, locks
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure
from hvdtrain.training import workload
from hvdtrain.training.job import Job

METRICS: dict[str, type[Metric]] = {"accuracy": Accuracy, "regression": Regression}
OPTIONS = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "framework"]
PROBE_SAMPLES = 2
"""Samples that run through the model before training"""

_CLASSES = "number the classes from 0, and give the model an output for each"
_SHAPES = "give all samples of a batch one shape, or pad them in the DataLoader's collate_fn"
_WORKER = "a worker process of the DataLoader has ended, perhaps out of memory; num_workers=0 shows its own error"
KNOWN_ERRORS = (
    (r"Target -?\d+ is out of bounds", exits.BAD_DATA, _CLASSES),
    (r"label value of -?\d+ which is outside the valid range of [^)]*\)", exits.BAD_DATA, _CLASSES),
    ("stack expects each tensor to be equal size.*", exits.BAD_DATA, _SHAPES),
    ("Trying to resize storage that is not resizable", exits.BAD_DATA, _SHAPES),  # the same in a worker process
    ("all input arrays must have the same shape", exits.BAD_DATA, _SHAPES),
    ("DataLoader worker .*(?:exited unexpectedly|killed by signal: [^.]*)", exits.FAILED, _WORKER),
    (r"/multiprocessing/\w+\.py ((?:EOFError|ConnectionResetError): .*)", exits.FAILED, _WORKER),
)
"""Errors of libraries as regular expressions for the file, the class and the message, with exit code and hint"""

_finished = False
"""Whether several ranks have trained and disconnected: ranks that MPI connected cannot find each other again"""
Sums = Callable[[Any, Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchrunConfig(TrainConfig):
    """Options for torchrun, which Horovod does not support."""

    strategy: str = DEFAULT_REDUCER


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Raise Failure for errors of libraries that mean a mistake in the data, or a lost worker process."""
    try:
        yield
    except Exception as error:
        file = traceback.extract_tb(error.__traceback__)[-1].filename
        for words, code, hint in KNOWN_ERRORS:
            if found := re.search(words, f"{file} {type(error).__name__}: {error}"):
                raise Failure(f"{found[found.lastindex or 0]}; hint: {hint}", code) from error
        raise


@_one_line()
def train(
    model: Any,
    *,
    loss: Any,
    train: Any,
    validation: Any = None,
    test: Any = None,
    metric: str | Metric | None = None,
    sums: Sums | None = None,
    stream: bool = False,
    argv: Sequence[str] = (),
    **settings: Any,
) -> records.Summary:
    """Train `model` on all ranks and return the run's summary, which is equal on all of them. Collective.

    model: a torch.nn.Module, or a Keras 3 model on the TensorFlow backend. All ranks start with rank 0's weights.
    Afterwards it holds the trained weights on every rank.
    loss: for PyTorch a function of (outputs, targets) that returns the loss of each sample, or the mean; for Keras the
    `loss` argument of `compile`. Means are weighted by samples over ranks.
    train, validation, test: see `data.own`. The last two are optional. Each sample is used once per epoch, on any
    number of ranks. If samples are dicts, a module gets keyword arguments and a Keras model gets a dict. A `DataLoader`
    sets the batch size if no option does.
    stream: read a tf.data.Dataset in its own order while training, and not into memory.
    metric: accuracy (default for integer targets), regression (default for others), or a `metrics.Metric`. For a metric
    of another class, `sums` is a function of (outputs, targets) that returns each sample's terms in its sums, by name.
    argv: flags of the built-in workloads, such as sys.argv[1:]. They take precedence over `settings`, which are fields
    of `config.TrainConfig`. Variables (HVDTRAIN_EPOCHS=2) set the others.

    Ends the process with 75 after a signal has stopped the run, with 0 after a dry run. Raises Failure (2, 65, 69, 73,
    74, 78). An uncaught Failure ends the whole job with one line.
    """
    global _finished
    exits.replace_unknown_characters()
    lifecycle.guard(debug=bool(settings.get("debug")) or "--debug" in argv)
    if _finished:
        raise Failure(
            "hvdtrain.train was called again, but the ranks have disconnected; hint: call it once per start of several "
            "ranks",
            exits.BAD_CONFIG,
        )
    framework, adapter = _adapter(model)
    purpose, name = sys.modules["__main__"].__doc__ or "", _name()
    cls = TorchrunConfig if launch_env().launcher == "torchrun" else TrainConfig
    config, environment = workload.begin(cls, name, purpose, [*_flags(settings, framework), *argv])
    if environment.launcher == "elastic":
        raise unsupported()
    if config.framework != framework:
        raise Failure(f"--framework {config.framework}: the model is a {framework} model", exits.BAD_CONFIG)
    exchange = None if catalog.help_requested(config.strategy) else strategies.resolve(config)
    if exchange and framework == "tensorflow" and exchange.capabilities.backend == "native":
        raise Failure(
            f"--strategy {config.strategy}: TensorFlow's collectives must be set up before a model is made; hint: "
            f"--strategy {DEFAULT_REDUCER}",
            exits.BAD_CONFIG,
        )
    dataset = own.opened(train, validation, test, stream=stream)
    if config.shares is not None and dataset.streamed:
        message = f"cannot be combined with {dataset.streamed[0]}=, of which each rank reads every n-th sample"
        raise Failure(f"--shares {message}; hint: give a data set with random access", exits.BAD_CONFIG)
    if dataset.batch_size and not (config.batch_size or config.global_batch_size):
        config = dataclasses.replace(config, batch_size=dataset.batch_size)
    for note in dataset.notes if environment.rank == 0 else ():
        print(f"hvdtrain: {note}", file=sys.stderr)
    first = np.arange(min(PROBE_SAMPLES, len(dataset.train)))
    batch = dataset.train.batch(first, first, None).arrays
    metric, sums = _metric(metric, sums, batch[-2], adapter)
    adapted = adapter.Own(model, loss, sums, metric.sums, config, dataset.train.names)
    multiply_adds = adapted.probe(batch)
    job = workload.Workload(
        name=name,
        config=dataclasses.replace(config, threads=config.threads or adapted.threads),
        environment=environment,
        data=workload.Data(
            dataset=dataset,
            title=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
            f"test samples of {own.sample(dataset.train, 'train')}",
        ),
        model=workload.Model(
            title=type(model).__name__,
            facts={"name": type(model).__name__},
            shapes=adapted.shapes,
            multiply_adds=multiply_adds,
            layers=adapted.layers,
        ),
        metric=metric,
    ).connect()
    if job is None:
        raise SystemExit(exits.OK)
    stop, _finished = lifecycle.StopSignal(), environment.size > 1
    try:
        summary = _trained(job, adapted, stop)
    finally:
        stop.restore()
        locks.release()
    adapted.release()
    if summary is None:
        raise SystemExit(exits.RESUMABLE)
    return summary


def _trained(job: Job, adapted: Any, stop: lifecycle.StopSignal) -> records.Summary | None:
    """Train a model that has rank 0's arrays on all ranks, and return the result of `Job.trained`. Collective."""
    _check_alike(job, adapted)
    constants = job.ranks.agreed(adapted.constants())
    adapted.set_constants(constants)
    constants_digest = digest(constants) if constants else None
    run = dataclasses.replace(job.run, model={**job.run.model, "constants": constants_digest})
    job = dataclasses.replace(job, run=run)
    state = job.ranks.agreed({name: array.copy() for name, array in adapted.arrays().items()})
    job = job.staged(lambda part: adapted if part is None else adapted.part(part), lambda _: state)
    adapted.release()  # measurements change statistics, and where weights are
    part = adapted.part(job.part) if job.part else adapted
    replica = job.replica(part, {name: state[name] for name in part.arrays()})
    summary = job.trained(replica, stop)
    if job.part and summary is not None:
        adapted.take(job.whole(replica))
    job.shut_down()
    return summary


def _adapter(model: Any) -> tuple[str, Any]:
    """Return the model's framework and the module that adapts its models. Raises Failure (78) for other objects."""
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        if (backend := keras.config.backend()) != "tensorflow":
            raise Failure(f"model: Keras uses {backend}; hint: set KERAS_BACKEND=tensorflow", exits.BAD_CONFIG)
        from hvdtrain.models import own_tf

        return "tensorflow", own_tf
    if torch is not None and isinstance(model, torch.nn.Module):
        from hvdtrain.models import own_torch

        return "torch", own_torch
    raise Failure(f"model is a {type(model).__name__}; hint: pass a torch.nn.Module or a keras.Model", exits.BAD_CONFIG)


def _name() -> str:
    """Return the workload's name, which is the script's."""
    stem = re.sub(r"[^\w.-]", "-", Path(sys.argv[0]).stem) or "own"
    return f"own-{stem}" if stem in workloads.known() else stem


def _flags(settings: Mapping[str, Any], framework: str) -> list[str]:
    """Return settings as flags. Raises Failure (2) for unknown ones."""
    for name in settings:
        if name not in OPTIONS:
            raise Failure(
                f"hvdtrain.train has no setting {name}{near(name, OPTIONS)}; it has {', '.join(OPTIONS)}", exits.USAGE
            )
    values = {name: value for name, value in settings.items() if value is not None and value is not False}
    words = [flag(name) if value is True else f"{flag(name)}={value}" for name, value in values.items()]
    return [f"--framework={framework}", *words]


def _metric(metric: str | Metric | None, sums: Sums | None, targets: np.ndarray, adapter: Any) -> tuple[Metric, Sums]:
    """Return the metric and the function that computes its sums.

    Raises Failure (78) for an unknown metric, or one without `sums`.
    """
    if metric is None:
        metric = "accuracy" if targets.dtype.kind in "iu" else "regression"
    if isinstance(metric, str):
        if metric not in METRICS:
            raise Failure(
                f"metric={metric!r} is unknown{near(metric, METRICS)}; hint: {' or '.join(METRICS)}, or a "
                "hvdtrain.records.metrics.Metric",
                exits.BAD_CONFIG,
            )
        metric = METRICS[metric]()
    known = {Accuracy: adapter.correct, Regression: adapter.errors}
    function = sums or known.get(type(metric))
    if function is None:
        raise Failure(
            f"metric: {type(metric).__name__} needs sums=, a function of (outputs, targets) that returns each sample's "
            f"terms of {', '.join(metric.sums)}, by name",
            exits.BAD_CONFIG,
        )
    return metric, function


def _check_alike(job: Job, adapted: Any) -> None:
    """Raise Failure (78) if a rank has another model than rank 0."""
    models = job.ranks.gather({name: list(shape) for name, shape in adapted.shapes.items()})
    for rank, model in enumerate(models):
        if model != models[0]:
            raise Failure(
                f"rank {rank} has another model than rank 0; hint: make the same model on all ranks", exits.BAD_CONFIG
            )
