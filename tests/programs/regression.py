"""A workload outside the package: a line through noise, in PyTorch, judged by its errors. For test_metrics.py."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from hvdtrain import data
from hvdtrain.comm import lifecycle
from hvdtrain.config.options import TrainConfig
from hvdtrain.models.layers import regression_terms
from hvdtrain.records.metrics import Regression
from hvdtrain.system import exits
from hvdtrain.training import workload

FEATURES = 3


class Split(data.Split):
    """See `data.Split`."""

    def __init__(self, seed: int, samples: int) -> None:
        draw = np.random.default_rng(seed)
        self.inputs = draw.normal(size=(samples, FEATURES)).astype(np.float32)
        line = self.inputs @ np.array([1.0, -2.0, 0.5])
        self.targets = (line + 0.3 * draw.normal(size=samples)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, mine: np.ndarray, everyones: np.ndarray, key: int | None) -> data.Batch:
        arrays = self.inputs[mine], self.targets[mine]
        return data.Batch(arrays=arrays, weight=len(mine), total_weight=len(everyones))


@dataclasses.dataclass(frozen=True)
class Line:
    name = "line"
    fingerprint = "0" * 64
    train, validation, test = Split(1, 240), Split(2, 50), Split(3, 50)


def main(stop: lifecycle.StopSignal) -> int:
    config, environment = workload.begin(TrainConfig, "line", __doc__ or "")
    job = workload.Workload(
        name="line",
        config=config,
        environment=environment,
        data=workload.Data(dataset=Line(), title="points of a line"),
        model=workload.Model(
            title="line", facts={"name": "line", "spec": {}}, shapes={"weight": (FEATURES,)}, multiply_adds=FEATURES
        ),
        metric=Regression("W/m2"),
    ).connect()
    if job is None:
        return exits.OK
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(FEATURES))

        def loss(self, inputs: Any, targets: Any) -> Any:
            terms = regression_terms(inputs @ self.weight, targets)
            return terms["squared"].sum(), {name: each.detach().sum() for name, each in terms.items()}

    return job.train(job.replica(Model(), {"weight": np.zeros(FEATURES, np.float32)}), stop)


if __name__ == "__main__":
    lifecycle.run(main, debug="--debug" in sys.argv)
