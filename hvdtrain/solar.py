"""Train a network to look ahead in measured solar irradiance, on one process or on many ranks.

examples:
  python -m hvdtrain.solar
  horovodrun -np 2 -H localhost:2 python -m hvdtrain.solar --epochs 3 --json
  python -m hvdtrain.solar --net p2-k5 --batch-size 1000 --dry-run
  mpirun -np 2 python -m hvdtrain.solar --net cnn --data oahu --station AP1 --ahead 10 --framework tensorflow

Without --data it trains on five years of readings, one in 15 minutes, which pvanalytics ships; `hvdtrain data solar`
prepares days of NREL's Oahu grid, MIDC exports and BSRN files. docs/SOLAR.md has the rules of what is a good reading.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hvdtrain.comm import world
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded, counts
from hvdtrain.data import solar as data
from hvdtrain.models import mlp
from hvdtrain.models import solar as nets
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import job as workload
from hvdtrain.training import trained

WORKLOAD = "solar"
DEFAULT_NET, DEFAULT_BATCH = "p3-k1", 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolarData(options.Data):
    """Readings, and the windows of them."""

    data: str = data.PACKAGED
    """'pvanalytics', or a folder made by `hvdtrain data solar`"""
    station: str | None = None
    """Station whose readings are predicted (default: the folder's first)"""
    window: int = bounded(50, least=1)
    """Readings that a pyramid sees"""
    ahead: int = bounded(4, least=1)
    """How many readings after the last one seen is the one to predict"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolarConfig(SolarData, options.TrainConfig):
    """What this workload is told besides."""

    net: str | None = None
    """A pyramid of the study, p1-k0 to p3-k9, or cnn, which sees maps of several stations, or 50 windows of one
    (default: p3-k1, whose hidden layers are 100, 50 and 26); horovodrun takes --net for its own, so set HVDTRAIN_NET"""
    hidden: str | None = None
    """Hidden layers of a pyramid of your own in place of --net: 100,50,25"""
    optimizer: Literal["sgd", "adam"] = "adam"
    """SGD with --momentum, or Adam with its usual constants (0.9, 0.999, 1e-8)"""
    lr: float = bounded(1e-3, above=0)
    """Learning rate for a global batch of the size given (--batch-size or --global-batch-size)"""
    epochs: int = bounded(6, least=1)
    """Passes over the training windows"""
    batch_size: int | None = bounded(None, least=1)
    """Samples per rank and step (default: 100); the global batch grows with the number of ranks"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is self.global_batch_size is None:
            object.__setattr__(self, "batch_size", DEFAULT_BATCH)
        if self.net is not None and self.hidden is not None:
            raise Failure("--net and --hidden are both given: give one of them", exits.BAD_CONFIG)
        if self.net == "cnn" and self.window != data.SIDE:
            told = f"--net cnn sees maps, or {data.SIDE} windows of {data.SIDE} readings: leave it out"
            raise Failure(f"--window {self.window}: {told}", exits.BAD_CONFIG)
        _ = self.layers

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Hidden layers of the pyramid, None for the CNN; raises Failure (78) for what is neither."""
        if self.net == "cnn":
            return None
        if self.hidden is None:
            return nets.pyramid(self.net or DEFAULT_NET)
        if not (units := counts(self.hidden)):
            raise Failure(f"--hidden {self.hidden}: give units per layer, e.g. 100,50,25", exits.BAD_CONFIG)
        return units


class Forecast(metrics.Regression):
    """Errors in W/m2 of what a model finds in scaled readings, and its skill: by which share its RMSE is less than that
    of persistence, which says that nothing changes."""

    sums: Mapping[str, tuple[int, ...]] = {**metrics.Regression.sums, "persistence": ()}
    headline = "rmse"

    def __init__(self, deviation: float) -> None:
        super().__init__("W/m2")
        self.scores = {**self.scores, "skill": metrics.Score(label="skill", most=1)}
        self._deviation = deviation

    def score(self, sums: metrics.Sums, samples: float) -> dict[str, float]:
        found = super().score(sums, samples)
        scaled = {name: found[name] * self._deviation for name in ("mae", "rmse", "bias")}
        skill = 1 - math.sqrt(sums["squared"] / sums["persistence"]) if sums["persistence"] else math.nan
        return {**found, **scaled, "skill": skill}


def opened(config: SolarConfig, *, verify: bool = False) -> data.Windows:
    """The windows that a config asks for."""
    series = data.load(config.data, verify=verify)
    maps = len(set(series.places)) > 1
    look: data.Look = "window" if config.layers is not None else "map" if maps else "stack"
    return data.windows(series, look=look, window=config.window, ahead=config.ahead, station=config.station)


def made(framework: str, spec: mlp.MLPSpec | nets.CNNSpec, part: range | None = None, **settings: Any) -> Any:
    """The network of a spec, without its values, or a `part` of its layers; `settings` are TensorFlow's."""
    if framework == "torch":
        from hvdtrain.models import mlp_torch, solar_torch

        if isinstance(spec, nets.CNNSpec):
            return solar_torch.CNNTorch(spec, part)
        return mlp_torch.MLPTorch(spec, solar_torch.forecast_error, part)
    from hvdtrain.models import mlp_tf, solar_tf

    if isinstance(spec, nets.CNNSpec):
        return solar_tf.CNNTF(spec, part=part, **settings)
    return mlp_tf.MLPTF(spec, solar_tf.forecast_error, part=part, **settings)


def open_run(folder: Path, framework: str) -> tuple[Any, data.Windows]:
    """The trained model of a run's folder on the CPU, and the windows that it was trained on. `model(inputs)` takes a
    tensor of a batch's first array and returns (N, 1), scaled. Raises Failure (65, 74, 77)."""
    manifest, parameters = trained.opened(folder, WORKLOAD)
    fields = {field.name for field in dataclasses.fields(SolarConfig)}
    config = SolarConfig(**{name: value for name, value in manifest.config.items() if name in fields})
    spec = trained.spec(folder, manifest, nets.CNNSpec if config.layers is None else mlp.MLPSpec)
    trained.begin(framework)
    model = made(framework, spec)
    trained.fill(model, parameters, framework)
    if framework == "torch":
        model.eval()
    return model, opened(config)


def main(stop: world.StopSignal) -> int:
    # 1. Config: flags, file, variables; then what the launcher says of our place among the ranks.
    config, place = workload.begin(SolarConfig, WORKLOAD, __doc__ or "")

    # 2. Data: windows of readings, as views, cut by time.
    dataset = opened(config, verify=config.verify_data and place.local_rank == 0)
    about, layers = dataset.about, config.layers
    told = {**about["windows_left_out"], "bad readings": sum(about["readings_flagged"].values())}
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in told.items() if count)

    # 3. Model: numbers first, so that a dry run needs no framework.
    spec = nets.CNNSpec() if layers is None else mlp.MLPSpec(inputs=config.window, hidden=layers, outputs=1)
    numbers: Any = nets if layers is None else mlp
    words = "CNN" if layers is None else f"pyramid {', '.join(map(str, layers))}"

    # 4. Ranks: the arithmetic of batches and of the exchange; then they connect.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        place=place,
        dataset=dataset,
        data=about,
        data_words=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
        f"test windows of {'x'.join(map(str, dataset.shape))}, {about['step_s']} s from reading to reading, "
        f"{about['step_s'] * config.ahead} s ahead; left out: {left_out or 'none'}",
        model={"name": config.net or ("own" if config.hidden else DEFAULT_NET), "spec": dataclasses.asdict(spec)},
        model_words=words,
        shapes=numbers.parameters(spec),
        measure=Forecast(about["deviation_w_m2"]),
        multiply_adds=numbers.multiply_adds(spec),
        layers=numbers.layers(spec),
    ).connect()
    if job is None:
        return exits.OK

    # 5. Replica: the same weights from the same seed on every rank, or those of its part of the layers.
    scope = job.data.ranks.scope

    def model(part: range | None) -> Any:
        if config.framework == "torch":
            return made("torch", spec, part)
        return made("tensorflow", spec, part, compute_dtype=workload.compute_dtype(config), scope=scope())

    job = job.staged(model)
    replica = job.replica(model(job.part), numbers.initial_state(spec, config.seed, job.part))

    # 6. Train, evaluate, save: every record goes to the run's folder; then the results, on stdout, once.
    return job.train(replica, stop)


if __name__ == "__main__":
    world.run(main, debug="--debug" in sys.argv)
