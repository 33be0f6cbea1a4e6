"""Train ResNet-34 on images, on one process or on many ranks.

examples:
  python -m hvdtrain.resnet --epochs 2 --width 0.25
  horovodrun -np 4 -H a:2,b:2 python -m hvdtrain.resnet
  mpirun -np 2 python -m hvdtrain.resnet --framework tensorflow --json
  python -m hvdtrain.resnet --config cruz2021_resnet34 --data PREPARED --dry-run
  hvdtrain predict results/RUN photo.jpg

Without --data it trains on handwritten digits that come with hvdtrain. `hvdtrain data list` shows other data sets.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

from hvdtrain import data, models
from hvdtrain.comm import lifecycle
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded, counts
from hvdtrain.models import resnet
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import workload

WORKLOAD = "resnet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetData(options.Data):
    """Images and their size."""

    data: str = "digits"
    """digits, fashion-mnist, idx:DIR or a prepared folder

    idx:DIR contains files like MNIST's. `hvdtrain data images` prepares a folder of images."""
    image_size: str | None = None
    """N or WIDTHxHEIGHT (default: 32 for digits)

    Images are resized to it; by default only digits are. A prepared folder has a fixed size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(ResNetData, options.TrainConfig):
    """Options of this workload."""

    COMMON = (*options.TrainConfig.COMMON, "width")

    width: float = 1.0
    """Number of channels relative to ResNet-34"""
    zero_gamma: bool = True
    """Start each block's last BatchNorm scale at 0

    Blocks then start as the identity (Goyal et al., 2017)."""
    precise_bn: int = bounded(0, least=0)
    """Batches for exact BatchNorm statistics; 0: none

    Statistics are computed from each rank's last N batches of the epoch before evaluation (precise BN: Wu and Johnson,
    2021). Running statistics lag behind fast-changing weights."""

    def size(self) -> tuple[int, int] | None:
        """(width, height) of --image-size. Raises Failure (78) if it cannot be parsed."""
        if self.image_size is None:
            return None
        sides = counts(self.image_size.lower(), "x")
        if len(sides) not in (1, 2) or sides[0] * sides[-1] > data.MAX_PIXELS:
            message = f"--image-size {self.image_size} is not N or WIDTHxHEIGHT with at most {data.MAX_PIXELS:,} pixels"
            raise Failure(f"{message}; hint: for example 32 or 197x148", exits.BAD_CONFIG)
        return sides[0], sides[-1]


def main(stop: lifecycle.StopSignal) -> int:
    # 1. Options: flags, file, environment; and this process's rank from the launcher.
    config, environment = workload.begin(ResNetConfig, WORKLOAD, __doc__ or "")

    # 2. Data: memory-mapped splits.
    dataset = data.load(config.data, config.size())
    height, width, channels = dataset.image_shape
    classes = len(dataset.classes)

    # 3. Model: only its sizes, since a dry run needs no framework.
    spec = resnet.ResNetSpec(channels=channels, classes=classes, width=config.width, zero_gamma=config.zero_gamma)

    # 4. Metric
    metric = metrics.Accuracy()

    # 5. Job: connect the ranks, build the model on each with the same weights from the seed, train.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        environment=environment,
        data=workload.Data(
            dataset=dataset,
            title=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
            f"test images of {width}x{height}x{channels}, {classes} classes",
            facts={
                "classes": classes,
                "class_names": dataset.classes,
                "image_shape": dataset.image_shape,
                "pixel_dtype": str(dataset.train.samples.dtype),
            },
        ),
        model=workload.Model(
            title=f"ResNet-34, width {config.width:g}",
            facts={"name": "resnet34", "spec": dataclasses.asdict(spec)},
            shapes=resnet.parameters(spec),
            multiply_adds=resnet.multiply_adds(spec, height, width),
            layers=resnet.layers(spec, height, width),
        ),
        metric=metric,
    ).connect()
    if job is None:  # a dry run
        return exits.OK
    plan, (rows, columns, _) = job.run.plan, job.workload.model.layers[-2].output
    if plan.global_batch // plan.ranks * rows * columns == 1:
        message = f"with {plan.global_batch} samples per step a rank has one, and the last feature maps have one pixel"
        hint = "BatchNorm needs two values: increase the batch size or --image-size"
        raise Failure(f"{message}; hint: {hint}", exits.BAD_CONFIG)

    model = models.maker("resnet.ResNet", spec, config, job.data.in_framework.scope)
    initial = functools.partial(resnet.initial_state, spec, config.seed)
    job = job.staged(model, initial)
    if job.part and job.part.start:
        job = job.over(dataset.labels_only())
    replica = job.replica(model(job.part), initial(job.part))

    return job.train(replica, stop, precise_bn=config.precise_bn)


if __name__ == "__main__":
    lifecycle.run(main, debug="--debug" in sys.argv)
