"""Train a classifier on a CSV file, features first and the class last: a multilayer perceptron, on one rank or many.

examples:
  python -m hvdtrain.tabular --layers 30,10
  python -m hvdtrain.tabular --data measured.csv --missing mean --epochs 50
  mpirun -np 2 python -m hvdtrain.tabular --framework tensorflow --json
  hvdtrain predict results/RUN new.csv --out answers.csv

Without --data it trains on the breast-cancer data that comes with hvdtrain.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

from hvdtrain import models
from hvdtrain.comm import lifecycle
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded, counts
from hvdtrain.data import tabular
from hvdtrain.data.csv_rows import Missing
from hvdtrain.models import mlp
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import workload

WORKLOAD = "tabular"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabularData(options.Data):
    """Table and its missing values."""

    data: str = "breast-cancer"
    """A CSV file, or breast-cancer, iris or wine"""
    missing: Missing = "refuse"
    """Missing values: an error, the mean, or drop the row

    The mean is that of the training part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabularConfig(TabularData, options.TrainConfig):
    """Options of this workload."""

    COMMON = (*options.TrainConfig.COMMON, "layers")

    layers: str = "30,10"
    """Units of each hidden layer, separated by commas"""
    optimizer: options.Optimizer = "adam"
    lr: float = bounded(5e-3, above=0)

    @property
    def hidden(self) -> tuple[int, ...]:
        """Units of each hidden layer. Raises Failure (78) if --layers cannot be parsed."""
        if not (units := counts(self.layers)):
            message = f"--layers {self.layers} is not a list of sizes; hint: give units per hidden layer, e.g. 30,10"
            raise Failure(message, exits.BAD_CONFIG)
        return units


def main(stop: lifecycle.StopSignal) -> int:
    # 1. Options: flags, file, environment; and this process's rank from the launcher.
    config, environment = workload.begin(TabularConfig, WORKLOAD, __doc__ or "")

    # 2. Data: the rows of the file, split and standardized.
    dataset = tabular.load(config.data, config.missing)
    columns = dataset.columns
    features, classes = len(columns.mean), len(columns.classes)

    # 3. Model: only its sizes, since a dry run needs no framework.
    spec = mlp.MLPSpec(inputs=features, hidden=config.hidden, outputs=classes)

    # 4. Metric: accuracy, and precision, recall and F1 of each class.
    metric = metrics.Confusion(columns.classes)

    # 5. Job: connect the ranks, build the model on each with the same weights from the seed, train.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        environment=environment,
        data=workload.Data(
            dataset=dataset,
            title=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
            f"test rows of {features} features, {classes} classes ({dataset.file_format})",
            facts={"classes": classes, "class_names": columns.classes, "features": features},
        ),
        model=workload.Model(
            title=f"multilayer perceptron {'-'.join(map(str, spec.sizes))}",
            facts={"name": "mlp", "spec": dataclasses.asdict(spec)},
            shapes=mlp.parameters(spec),
            multiply_adds=mlp.multiply_adds(spec),
            layers=mlp.layers(spec),
        ),
        metric=metric,
    ).connect()
    if job is None:  # a dry run
        return exits.OK
    model = models.maker("mlp.MLP", spec, config, job.data.in_framework.scope, loss="cross_entropy")
    initial = functools.partial(mlp.initial_state, spec, config.seed)
    job = job.staged(model, initial)
    replica = job.replica(model(job.part), initial(job.part))
    return job.train(replica, stop, documents={tabular.COLUMNS_FILE: columns.as_json()})


if __name__ == "__main__":
    lifecycle.run(main, debug="--debug" in sys.argv)
