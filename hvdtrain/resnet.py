"""Train ResNet-34 on images, on one process or on many ranks.

examples:
  python -m hvdtrain.resnet --epochs 2 --width 0.25
  horovodrun -np 4 -H a:2,b:2 python -m hvdtrain.resnet
  mpirun -np 2 python -m hvdtrain.resnet --framework tensorflow --json
  python -m hvdtrain.resnet --config launch/presets/cruz2021_resnet34.toml --data PREPARED --dry-run

Without --data it trains on scikit-learn's handwritten digits; `hvdtrain data images` prepares a folder of pictures.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from hvdtrain import config as configuration
from hvdtrain import data, exits, observe, resume, run, strategies, threads, workload, world
from hvdtrain.data.loader import Loader
from hvdtrain.exits import Failure
from hvdtrain.frameworks import resolve
from hvdtrain.models import resnet
from hvdtrain.strategies import catalogue

WORKLOAD = "resnet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(configuration.TrainConfig):
    """What this workload is told besides."""

    data: str = "digits"
    """'digits', or a folder made by `hvdtrain data images`"""
    image_size: str | None = None
    """N or WIDTHxHEIGHT that digits are resized to (default: 32); a prepared folder has its own"""
    width: float = 1.0
    """Channels relative to ResNet-34"""
    zero_gamma: bool = True
    """Start the last BatchNorm's scale of each block at 0, so that blocks start as the identity (Goyal et al., 2017)"""
    precise_bn: int = 0
    """Evaluate with BatchNorm statistics that each rank takes anew from its last so many batches of the epoch (precise
    BN: Wu and Johnson, 2021); 0: with running ones, which lag behind weights that change fast"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precise_bn < 0:
            raise Failure(f"--precise-bn is {self.precise_bn}: it must be at least 0", exits.BAD_CONFIG)

    def size(self) -> tuple[int, int] | None:
        """(width, height) as asked; raises Failure (78) if it is no size."""
        if self.image_size is None:
            return None
        parts = self.image_size.lower().split("x")
        if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise Failure(
                f"--image-size {self.image_size}: give N or WIDTHxHEIGHT, e.g. 32 or 197x148", exits.BAD_CONFIG
            )
        return int(parts[0]), int(parts[-1])


def main(stop: world.StopSignal) -> int:
    # 1. Config: flags, file, variables; then what the launcher says of our place among the ranks.
    config = resume.parse(ResNetConfig, WORKLOAD, __doc__ or "")
    framework = resolve(config.framework)
    config = dataclasses.replace(config, framework=framework)
    place = world.place()

    # 2. Data: memory-mapped splits, and this rank's share of each epoch.
    dataset = data.load(config.data, config.size(), verify=config.verify_data and place.local_rank == 0)
    batch = configuration.rank_batch(config, place.size)
    shares = configuration.rank_shares(config, place.size)
    loader = Loader(dataset.train, batch_size=batch, rank=place.rank, size=place.size, seed=config.seed, shares=shares)
    plan = configuration.batch_plan(config, place.size, loader.steps_per_epoch)
    observe.check(config, plan.steps, place)

    # 3. Model: numbers first, so that a dry run needs no framework.
    height, width, channels = dataset.image_shape
    spec = resnet.ResNetSpec(
        channels=channels, classes=len(dataset.classes), width=config.width, zero_gamma=config.zero_gamma
    )
    parameters = resnet.parameter_count(spec)
    used = threads.per_rank(config.threads, place, batch * resnet.multiply_adds(spec, height, width))
    facts = {
        "model": f"ResNet-34, width {config.width:g}: {parameters:,} parameters, {4 * parameters / 1e6:.2f} MB",
        "data": f"{dataset.name}: {len(dataset.train):,} training, {len(dataset.validation):,} validation, "
        f"{len(dataset.test):,} test images of {width}x{height}x{channels}, {len(dataset.classes)} classes",
        "ranks": f"{place.size} ({place.launcher}), {framework}, {used}",
    }
    shapes = list(resnet.parameters(spec).values())
    layout = strategies.Layout(ranks=place.size, hosts=-(-place.size // place.local_size))
    if config.strategy == "help":
        catalogue.show(config, shapes, layout)
        return exits.OK
    facts["exchange"] = strategies.fact(config, shapes, layout)
    if config.strategy == "hybrid":
        facts["shares"] = run.show_shares(plan.shares, loader.rank_samples)
    this = run.Run(
        workload=WORKLOAD,
        config=config,
        plan=plan,
        data={"name": dataset.name, "classes": len(dataset.classes), "fingerprint": dataset.fingerprint}
        | {"image_shape": dataset.image_shape}
        | {split: len(getattr(dataset, split)) for split in ("train", "validation", "test")},
        model={"name": "resnet34", "parameters": parameters, "spec": dataclasses.asdict(spec)},
    )
    if config.dry_run:
        if place.rank == 0:
            run.show_dry_run(this, facts)
        return exits.OK

    # 4. World and strategy: connect the ranks.
    job = workload.connect(config, place, used, shapes)

    # 5. Replica: the same weights from the same seed on every rank.
    model: Any
    if framework == "torch":
        from hvdtrain.models.resnet_torch import ResNetTorch

        model = ResNetTorch(spec)
    else:
        from hvdtrain.models.resnet_tf import ResNetTF

        model = ResNetTF(spec, workload.compute_dtype(config), job.ranks.tensorflow.scope())
    replica = job.replica(model, resnet.initial_state(spec, config.seed), buffers=resnet.buffers(spec))

    # 6. Train, evaluate, save: every record goes to the run's folder; then the results, on stdout, once.
    return job.train(this, facts, replica, dataset, loader, stop, precise_bn=config.precise_bn)


if __name__ == "__main__":
    world.run(main, debug="--debug" in sys.argv)
