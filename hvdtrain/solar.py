"""Train a network to forecast solar irradiance, on one process or on many ranks.

examples:
  python -m hvdtrain.solar
  horovodrun -np 2 -H localhost:2 python -m hvdtrain.solar --epochs 3 --json
  python -m hvdtrain.solar --net p2-k5 --batch-size 1000 --dry-run
  mpirun -np 2 python -m hvdtrain.solar --net cnn --data oahu --station AP1 --ahead 10 --framework tensorflow

Without --data it trains on five years of readings, one per 15 minutes, from the package pvanalytics. `hvdtrain data
solar` prepares days of NREL's Oahu grid. docs/workloads/solar.md defines good readings.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any

from hvdtrain import models
from hvdtrain.comm import lifecycle
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded, counts
from hvdtrain.data import solar as data
from hvdtrain.models import mlp
from hvdtrain.models import solar as nets
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import workload

WORKLOAD = "solar"
DEFAULT_NET, DEFAULT_BATCH = "p3-k1", 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolarData(options.Data):
    """Readings and windows."""

    data: str = data.PACKAGED
    """pvanalytics, or a folder made by `hvdtrain data solar`"""
    station: str | None = None
    """Station to forecast (default: the folder's first)"""
    window: int = bounded(50, least=1)
    """Number of readings that a pyramid sees"""
    ahead: int = bounded(4, least=1)
    """Number of readings from the last one of the window to the target"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolarConfig(SolarData, options.TrainConfig):
    """Options of this workload."""

    COMMON = (*options.TrainConfig.COMMON, "net")

    net: str | None = None
    """p1-k0 to p3-k9 of the study, or cnn (default: p3-k1)

    p3-k1 is a pyramid with hidden layers of 100, 50 and 26. The CNN sees maps of several stations or 50 windows of one.
    horovodrun uses --net for itself, so set HVDTRAIN_NET there."""
    hidden: str | None = None
    """Hidden layers instead of --net: 100,50,25"""
    optimizer: options.Optimizer = "adam"
    lr: float = bounded(1e-3, above=0)
    epochs: int = bounded(6, least=1)
    batch_size: int | None = bounded(None, least=1)
    """Samples per rank and step (default: 100)"""
    inference: str | None = None
    """SAMPLES,... to time inference with

    At the end rank 0 times the model on batches of these sizes, for example 2,64,512,1024."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is self.global_batch_size is None:
            object.__setattr__(self, "batch_size", DEFAULT_BATCH)
        if self.net is not None and self.hidden is not None:
            raise Failure("--net and --hidden cannot be combined; hint: give only one", exits.BAD_CONFIG)
        if self.net == "cnn" and self.window != data.SIDE:
            hint = f"leave it out: --net cnn sees maps, or {data.SIDE} windows of {data.SIDE} readings"
            raise Failure(f"--window {self.window} cannot be combined with --net cnn; hint: {hint}", exits.BAD_CONFIG)
        if self.inference and self.stages > 1:
            problem = "--inference cannot be combined with --stages, because rank 0 has only a part of the model"
            raise Failure(f"{problem}; hint: resume the run with --stages 1", exits.BAD_CONFIG)
        _ = self.layers, self.inference_sizes

    @property
    def inference_sizes(self) -> tuple[int, ...]:
        """The batch sizes of --inference. Raises Failure (78)."""
        sizes = counts(self.inference) if self.inference else ()
        if self.inference and not sizes:
            message = f"--inference {self.inference}: not a list of sample counts; hint: give 2,64,512"
            raise Failure(message, exits.BAD_CONFIG)
        return sizes

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Hidden layers of the pyramid; None for the CNN. Raises Failure (78) for an unknown network."""
        if self.net == "cnn":
            return None
        if self.hidden is None:
            return nets.pyramid(self.net or DEFAULT_NET)
        if not (units := counts(self.hidden)):
            message = f"--hidden {self.hidden} is not a list of sizes"
            raise Failure(f"{message}; hint: give units per layer, e.g. 100,50,25", exits.BAD_CONFIG)
        return units


class Forecast(metrics.Regression):
    """Errors in W/m2 of forecasts of scaled readings; and skill, the share by which the RMSE is lower than that of
    persistence, the forecast that nothing changes."""

    sums: Mapping[str, tuple[int, ...]] = {**metrics.Regression.sums, "persistence": ()}
    primary = "rmse"

    def __init__(self, deviation: float) -> None:
        super().__init__("W/m2")
        self.scores = {**self.scores, "skill": metrics.Score(label="skill", most=1)}
        self._deviation = deviation

    def score(self, sums: metrics.Sums, samples: float) -> dict[str, float]:
        scores = super().score(sums, samples)
        scaled = {name: scores[name] * self._deviation for name in ("mae", "rmse", "bias")}
        skill = 1 - math.sqrt(sums["squared"] / sums["persistence"]) if sums["persistence"] else math.nan
        return {**scores, **scaled, "skill": skill}


def opened(config: SolarConfig) -> data.Windows:
    """The windows for these options."""
    series = data.load(config.data)
    maps = len(set(series.places)) > 1
    look: data.Look = "window" if config.layers is not None else "map" if maps else "stack"
    return data.windows(series, look=look, window=config.window, ahead=config.ahead, station=config.station)


def network(spec: mlp.MLPSpec | nets.CNNSpec) -> tuple[str, dict[str, str]]:
    """Name and options of the network of a spec, for `models.network`."""
    return ("solar.CNN", {}) if isinstance(spec, nets.CNNSpec) else ("mlp.MLP", {"loss": "forecast_error"})


def main(stop: lifecycle.StopSignal) -> int:
    # 1. Options: flags, file, environment; and this process's rank from the launcher.
    config, environment = workload.begin(SolarConfig, WORKLOAD, __doc__ or "")

    # 2. Data: windows of readings, as views, split by time.
    dataset = opened(config)
    about, layers = dataset.about, config.layers
    counts = {**about["windows_left_out"], "bad readings": sum(about["readings_flagged"].values())}
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)

    # 3. Model: only its sizes, since a dry run needs no framework.
    spec = nets.CNNSpec() if layers is None else mlp.MLPSpec(inputs=config.window, hidden=layers, outputs=1)
    numbers: Any = nets if layers is None else mlp
    words = "CNN" if layers is None else f"pyramid {', '.join(map(str, layers))}"

    # 4. Metric: errors in W/m2, and skill.
    metric = Forecast(about["deviation_w_m2"])

    # 5. Job: connect the ranks, build the model on each with the same weights from the seed, train.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        environment=environment,
        data=workload.Data(
            dataset=dataset,
            title=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
            f"test windows of {'x'.join(map(str, dataset.shape))}, {about['step_s']} s from reading to reading, "
            f"{about['step_s'] * config.ahead} s ahead; left out: {left_out or 'none'}",
            facts=about,
        ),
        model=workload.Model(
            title=words,
            facts={"name": config.net or ("own" if config.hidden else DEFAULT_NET), "spec": dataclasses.asdict(spec)},
            shapes=numbers.parameters(spec),
            multiply_adds=numbers.multiply_adds(spec),
            layers=numbers.layers(spec),
        ),
        metric=metric,
        inference=config.inference_sizes,
    ).connect()
    if job is None:  # a dry run
        return exits.OK

    name, options = network(spec)
    model = models.maker(name, spec, config, job.data.in_framework.scope, **options)
    initial = functools.partial(numbers.initial_state, spec, config.seed)
    job = job.staged(model, initial)
    replica = job.replica(model(job.part), initial(job.part))

    return job.train(replica, stop)


if __name__ == "__main__":
    lifecycle.run(main, debug="--debug" in sys.argv)
