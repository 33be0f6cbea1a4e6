"""`hvdtrain.train`: the loop of the built-in workloads for any model and data; see docs/guides/hvdtrain-train.md."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import records, strategies
from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import digest
from hvdtrain.comm.launch_env import LaunchEnv, launch_env
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
from hvdtrain.training import job as workload

METRICS: dict[str, type[Metric]] = {"accuracy": Accuracy, "regression": Regression}
SETTINGS = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "framework"]
PROBED = 2
"""Samples that the model sees before it trains"""

_parted = False
"""Whether several ranks have trained: those that MPI connects cannot meet again"""
Sums = Callable[[Any, Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnTorchrun(TrainConfig):
    """Of ranks that Horovod cannot connect."""

    strategy: str = DEFAULT_REDUCER


def train(
    model: Any,
    *,
    loss: Any,
    train: Any,
    validation: Any = None,
    test: Any = None,
    metric: str | Metric | None = None,
    sums: Sums | None = None,
    argv: Sequence[str] = (),
    **settings: Any,
) -> records.Summary:
    """Trains `model` on all ranks, and returns the run's summary, the same on all of them. Collective.

    model: a torch.nn.Module, or a Keras 3 model on the TensorFlow backend. Rank 0's weights are everyone's; afterwards
    it holds the trained ones on every rank.
    loss: for PyTorch a function of (outputs, targets) that returns each sample's loss, or their mean; for Keras what
    `compile` takes. Means are weighted by samples over ranks.
    train, validation, test: see `data.own`. The last two may be left out.
    metric: accuracy (for whole numbers as targets), regression (for others), or a `metrics.Metric`, whose `sums` is
    a function of (outputs, targets): what each sample adds to the metric's sums, by name.
    argv: flags as of the built-in workloads, sys.argv[1:] say, which win over `settings`: fields of
    `config.TrainConfig`. Variables (HVDTRAIN_EPOCHS=2) count for what neither says.

    Ends the process with 75 after a signal has stopped the run, with 0 after a dry run. Raises Failure (2, 65, 69, 73,
    74, 78); one that nobody catches ends the whole job with one line.
    """
    global _parted
    lifecycle.guard(debug=bool(settings.get("debug")) or "--debug" in argv)
    if _parted:
        told = "hvdtrain.train has been called before, and the ranks have parted"
        raise Failure(f"{told}: train once in a start of several ranks", exits.BAD_CONFIG)
    framework, twin = _twin(model)
    purpose, name = sys.modules["__main__"].__doc__ or "", _name()
    cls = OnTorchrun if launch_env().launcher == "torchrun" else TrainConfig
    config, place = workload.begin(cls, name, purpose, [*_flags(settings, framework), *argv])
    if config.framework != framework:
        raise Failure(f"--framework {config.framework}: the model is one of {framework}", exits.BAD_CONFIG)
    asked = None if catalog.help_requested(config.strategy) else strategies.parse(config.strategy)
    if asked and framework == "tensorflow" and asked.capabilities.backend == "native":
        told = "TensorFlow's own must begin before a model is made"
        raise Failure(f"--strategy {config.strategy}: {told}; take {DEFAULT_REDUCER}", exits.BAD_CONFIG)
    dataset = own.opened(train, validation, test)
    first = np.arange(min(PROBED, len(dataset.train)))
    probed = dataset.train.batch(first, first, None).arrays
    judged, added = _metric(metric, sums, probed[-2], twin)
    adapted = twin.Own(model, loss, added, judged.sums, config)
    job = _workload(name, config, place, model, dataset, judged, adapted, probed).connect()
    if job is None:
        raise SystemExit(exits.OK)
    stop, _parted = lifecycle.StopSignal(), place.size > 1
    try:
        summary = _trained(job, adapted, stop)
    finally:
        stop.restore()
        locks.release()
    adapted.release()
    if summary is None:
        raise SystemExit(exits.RESUMABLE)
    return summary


def _workload(
    name: str,
    config: TrainConfig,
    place: LaunchEnv,
    model: Any,
    dataset: own.Own,
    judged: Metric,
    adapted: Any,
    probed: Sequence[np.ndarray],
) -> workload.Workload:
    """What the loop is told of the model and its data."""
    multiply_adds = adapted.probe(probed)
    return workload.Workload(
        name=name,
        config=dataclasses.replace(config, threads=config.threads or adapted.threads),
        place=place,
        dataset=dataset,
        data={},
        data_words=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
        f"test samples of {own.sample(dataset.train, 'train')}",
        model={"name": type(model).__name__},
        model_words=type(model).__name__,
        shapes=adapted.shapes,
        metric=judged,
        multiply_adds=multiply_adds,
        layers=adapted.layers,
    )


def _trained(job: workload.Job, adapted: Any, stop: lifecycle.StopSignal) -> records.Summary | None:
    """What `Job.trained` returns, of a model whose arrays are now rank 0's on all ranks. Collective."""
    _check_alike(job, adapted)
    constants = job.ranks.agreed(adapted.constants())
    adapted.set_constants(constants)
    constants_digest = digest(constants) if constants else None
    about = dataclasses.replace(job.about, model={**job.about.model, "constants": constants_digest})
    job = dataclasses.replace(job, about=about)
    state, mine = adapted.arrays(), adapted
    if job.about.config.stages > 1:
        state = job.ranks.agreed({name: array.copy() for name, array in state.items()})
        job = job.staged(adapted.part)  # which times its layers, and so changes statistics
        adapted.release()
        mine = adapted.part(job.part)
    replica = job.replica(mine, {name: state[name] for name in mine.arrays()})
    summary = job.trained(replica, stop)
    if job.part and summary is not None:
        adapted.take(job.whole(replica))
    job.leave()
    return summary


def _twin(model: Any) -> tuple[str, Any]:
    """The model's framework, and the module that adapts such models. Raises Failure (78) for what is no model."""
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        if (backend := keras.config.backend()) != "tensorflow":
            raise Failure(
                f"model: Keras computes with {backend}; start with KERAS_BACKEND=tensorflow", exits.BAD_CONFIG
            )
        from hvdtrain.models import own_tf

        return "tensorflow", own_tf
    if torch is not None and isinstance(model, torch.nn.Module):
        from hvdtrain.models import own_torch

        return "torch", own_torch
    raise Failure(f"model is a {type(model).__name__}: give a torch.nn.Module or a keras.Model", exits.BAD_CONFIG)


def _name() -> str:
    """The workload's: the script's."""
    stem = re.sub(r"[^\w.-]", "-", Path(sys.argv[0]).stem) or "own"
    return f"own-{stem}" if stem in workloads.known() else stem


def _flags(settings: Mapping[str, Any], framework: str) -> list[str]:
    """The settings as flags. Raises Failure (2) for unknown ones."""
    for name in settings:
        if name not in SETTINGS:
            told = f"hvdtrain.train has no setting {name}{near(name, SETTINGS)}"
            raise Failure(f"{told}; it has {', '.join(SETTINGS)}", exits.USAGE)
    given = {name: value for name, value in settings.items() if value is not None and value is not False}
    words = [flag(name) if value is True else f"{flag(name)}={value}" for name, value in given.items()]
    return [f"--framework={framework}", *words]


def _metric(metric: str | Metric | None, sums: Sums | None, targets: np.ndarray, twin: Any) -> tuple[Metric, Sums]:
    """The metric, and what a sample adds to its sums. Raises Failure (78) for an unknown one, or one without sums."""
    asked = ("accuracy" if targets.dtype.kind in "iu" else "regression") if metric is None else metric
    if isinstance(asked, str):
        if asked not in METRICS:
            told = f"metric={asked!r} is unknown{near(asked, METRICS)}: give {' or '.join(METRICS)}"
            raise Failure(f"{told}, or a hvdtrain.records.metrics.Metric", exits.BAD_CONFIG)
        asked = METRICS[asked]()
    known = {Accuracy: twin.correct, Regression: twin.errors}
    if (found := sums or known.get(type(asked))) is None:
        raise Failure(
            f"metric: {type(asked).__name__} needs sums=, a function of (outputs, targets) that returns what each "
            f"sample adds to {', '.join(asked.sums)}, by name",
            exits.BAD_CONFIG,
        )
    return asked, found


def _check_alike(job: workload.Job, adapted: Any) -> None:
    """Raises Failure (78) if a rank has another model than rank 0."""
    every = job.ranks.gather({name: list(shape) for name, shape in adapted.shapes.items()})
    for rank, model in enumerate(every):
        if model != every[0]:
            raise Failure(f"rank {rank} has another model than rank 0: make the same on all", exits.BAD_CONFIG)
