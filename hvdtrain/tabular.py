"""Train a classifier on a CSV file, features first and the class last: a multilayer perceptron, on one rank or many.

examples:
  python -m hvdtrain.tabular --layers 30,10
  python -m hvdtrain.tabular --data measured.csv --missing mean --epochs 50
  mpirun -np 2 python -m hvdtrain.tabular --framework tensorflow --json
  python -m hvdtrain.tabular test --run results/RUN --data other.csv
  python -m hvdtrain.tabular predict --run results/RUN --data new.csv --out answers.csv

Without --data it trains on scikit-learn's breast-cancer data. `test` and `predict` need the run's folder and a CSV file
with the same columns.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal

from hvdtrain.comm import world
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded, counts
from hvdtrain.data import tabular
from hvdtrain.data.csv_rows import Missing
from hvdtrain.models import mlp
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import job as workload

WORKLOAD = "tabular"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabularData(options.Data):
    """Rows of a table."""

    data: str = "breast-cancer"
    """A CSV file, or one that scikit-learn brings: 'breast-cancer', 'iris', 'wine'"""
    missing: Missing = "refuse"
    """What to do about a value that is not there: refuse the file, take the training part's mean, or drop the row"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabularConfig(TabularData, options.TrainConfig):
    """What this workload is told besides."""

    layers: str = "30,10"
    """Units of the hidden layers, first to last, with commas between them"""
    optimizer: Literal["sgd", "adam"] = "adam"
    """SGD with --momentum, or Adam with its usual constants (0.9, 0.999, 1e-8)"""
    lr: float = bounded(5e-3, above=0)
    """Learning rate for a global batch of the size given (--batch-size or --global-batch-size)"""

    @property
    def hidden(self) -> tuple[int, ...]:
        """Raises Failure (78) for what are no layers."""
        if not (units := counts(self.layers)):
            raise Failure(f"--layers {self.layers}: give units of each hidden layer, e.g. 30,10", exits.BAD_CONFIG)
        return units


def main(stop: world.StopSignal) -> int:
    # 1. Config: flags, file, variables; then what the launcher says of our place among the ranks.
    config, place = workload.begin(TabularConfig, WORKLOAD, __doc__ or "")
    hidden = config.hidden

    # 2. Data: rows of the file, cut and standardised.
    dataset = tabular.load(config.data, config.missing)
    columns = dataset.columns
    features, classes = len(columns.mean), len(columns.classes)

    # 3. Model: numbers first, so that a dry run needs no framework.
    spec = mlp.MLPSpec(inputs=features, hidden=hidden, outputs=classes)

    # 4. Ranks: the arithmetic of batches and of the exchange; then they connect.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        place=place,
        dataset=dataset,
        data={"classes": classes, "class_names": columns.classes, "features": features},
        data_words=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
        f"test rows of {features} features, {classes} classes ({dataset.words})",
        model={"name": "mlp", "spec": dataclasses.asdict(spec)},
        model_words=f"multilayer perceptron {'-'.join(map(str, spec.sizes))}",
        shapes=mlp.parameters(spec),
        measure=metrics.Confusion(columns.classes),
        multiply_adds=mlp.multiply_adds(spec),
        layers=mlp.layers(spec),
    ).connect()
    if job is None:
        return exits.OK

    # 5. Replica: the same weights from the same seed on every rank, or those of its part of the layers.
    scope = job.data.ranks.scope

    def model(part: range | None) -> Any:
        if config.framework == "torch":
            from hvdtrain.models import mlp_torch

            return mlp_torch.MLPTorch(spec, mlp_torch.cross_entropy, part)
        from hvdtrain.models import mlp_tf

        return mlp_tf.MLPTF(spec, mlp_tf.cross_entropy, workload.compute_dtype(config), scope(), part)

    job = job.staged(model)
    replica = job.replica(model(job.part), mlp.initial_state(spec, config.seed, job.part))

    # 6. Train, evaluate, save: every record goes to the run's folder; then the results, on stdout, once.
    return job.train(replica, stop, documents={tabular.KEPT: columns.as_json()})


if __name__ == "__main__":
    if sys.argv[1:2] in (["test"], ["predict"]):
        from hvdtrain.training import predict

        exits.end(predict.main, sys.argv[1:])
    world.run(main, debug="--debug" in sys.argv)
