"""What a run is made of: a workload, and the connected ranks that train it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.config.options import TrainConfig
from hvdtrain.data.loader import Loader
from hvdtrain.frameworks import in_vector
from hvdtrain.models.layers import Layer
from hvdtrain.pipeline.plan import Stages
from hvdtrain.pipeline.schedule import Pipe
from hvdtrain.plan.profile import Profile
from hvdtrain.records.metrics import Metric
from hvdtrain.strategies import Spec, Strategy
from hvdtrain.training import run_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a workload."""

    dataset: Any
    """Its name, its fingerprint, and the splits train, validation and test: see `data.Split`"""
    title: str
    """One line for people"""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the manifest besides name, fingerprint and the lengths of the splits"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a workload, described by numbers before a framework is loaded."""

    title: str
    """Name and size, for people"""
    facts: Mapping[str, Any]
    """Fields of the manifest besides the number of parameters: name, spec ..."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the trainable arrays, in the model's order and PyTorch's layout"""
    multiply_adds: float
    """Multiply-adds of a layer of mean size for one sample, forward"""
    layers: Sequence[Layer] = ()
    """The model as a sequence of layers, if it can be partitioned into stages: see `Job.staged`"""

    def vector_shapes(self, framework: str, names: Iterable[str] | None = None) -> list[tuple[int, ...]]:
        """Return the shapes of the trainable arrays as they lie in a vector; `names`: only of these arrays."""
        names = self.shapes if names is None else names
        return in_vector(framework, [self.shapes[name] for name in names if name in self.shapes])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """A model, its data and its metric."""

    name: str
    config: TrainConfig
    environment: LaunchEnv
    data: Data
    model: Model
    metric: Metric
    inference: Sequence[int] = ()
    """Batch sizes to time inference with at the end"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connected:
    """The connected ranks of a run, and what this rank contributes."""

    workload: Described
    run: run_folder.Run
    facts: Mapping[str, Any]
    """Shown before step 0"""
    loader: Loader
    exchange: Spec
    """The resolved --strategy"""
    strategy: Strategy | None
    """None for a model in stages until `staged` has partitioned it"""
    ranks: Communicator
    """All ranks"""
    data: Communicator
    """The ranks with the same stage, which share out the data"""
    device: str
    threads: int
    stages: Stages
    pipe: Pipe | None = None
    """Runs a step in micro-batches; None if a step is not divided"""
    part: range | None = None
    """The layers of this rank's stage; None for all"""
    chosen: str | None = None
    """Why --strategy auto chose the strategy; None if it was named or if the run was resumed"""
    auto: str | None = None
    """The option, such as auto:exact; None if the strategy was named"""
    profile: Profile | None = None
    """What --strategy auto knows of the model on this rank; None on a single host"""

    @property
    def dataset(self) -> Any:
        return self.workload.data.dataset

    def over(self, dataset: Any) -> Self:
        """Return this job with the same samples in another form, such as precomputed features."""
        data = dataclasses.replace(self.workload.data, dataset=dataset)
        workload = dataclasses.replace(self.workload, data=data)
        return dataclasses.replace(self, workload=workload, loader=self.loader.over(dataset.train))
