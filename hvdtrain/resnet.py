"""Train ResNet-34 on images, on one process or on many ranks.

examples:
  python -m hvdtrain.resnet --epochs 2 --width 0.25
  horovodrun -np 4 -H a:2,b:2 python -m hvdtrain.resnet
  mpirun -np 2 python -m hvdtrain.resnet --framework tensorflow --json
  python -m hvdtrain.resnet --config launch/presets/cruz2021_resnet34.toml --data PREPARED --dry-run

Without --data it trains on scikit-learn's handwritten digits; `hvdtrain data list` names what else there is, and
`hvdtrain data images` prepares a folder of pictures.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from hvdtrain import data
from hvdtrain.comm import world
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded, counts
from hvdtrain.models import resnet
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import job as workload

WORKLOAD = "resnet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetData(options.Data):
    """Images, and their size."""

    data: str = "digits"
    """'digits', 'fashion-mnist', 'idx:DIR' with files in MNIST's form, or a folder made by `hvdtrain data images`"""
    image_size: str | None = None
    """N or WIDTHxHEIGHT that pictures are resized to (default: digits 32, others as they are); a prepared folder has
    its own"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(ResNetData, options.TrainConfig):
    """What this workload is told besides."""

    width: float = 1.0
    """Channels relative to ResNet-34"""
    zero_gamma: bool = True
    """Start the last BatchNorm's scale of each block at 0, so that blocks start as the identity (Goyal et al., 2017)"""
    precise_bn: int = bounded(0, least=0)
    """Evaluate with BatchNorm statistics that each rank recomputes from its last N batches of the epoch (precise
    BN: Wu and Johnson, 2021); 0: with running ones, which lag behind weights that change fast"""

    def size(self) -> tuple[int, int] | None:
        """(width, height) as asked; raises Failure (78) if it is no size."""
        if self.image_size is None:
            return None
        sides = counts(self.image_size.lower(), "x")
        if len(sides) not in (1, 2) or sides[0] * sides[-1] > data.MAX_PIXELS:
            what = f"--image-size {self.image_size}: give N or WIDTHxHEIGHT, e.g. 32 or 197x148, with at most"
            raise Failure(f"{what} {data.MAX_PIXELS:,} pixels", exits.BAD_CONFIG)
        return sides[0], sides[-1]


def main(stop: world.StopSignal) -> int:
    # 1. Config: flags, file, variables; then what the launcher says of our place among the ranks.
    config, place = workload.begin(ResNetConfig, WORKLOAD, __doc__ or "")

    # 2. Data: memory-mapped splits.
    dataset = data.load(config.data, config.size(), verify=config.verify_data and place.local_rank == 0)
    height, width, channels = dataset.image_shape
    classes = len(dataset.classes)

    # 3. Model: numbers first, so that a dry run needs no framework.
    spec = resnet.ResNetSpec(channels=channels, classes=classes, width=config.width, zero_gamma=config.zero_gamma)

    # 4. Ranks: the arithmetic of batches and of the exchange; then they connect.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        place=place,
        dataset=dataset,
        data={"classes": classes, "image_shape": dataset.image_shape},
        data_words=f"{len(dataset.train):,} training, {len(dataset.validation):,} validation, {len(dataset.test):,} "
        f"test images of {width}x{height}x{channels}, {classes} classes",
        model={"name": "resnet34", "spec": dataclasses.asdict(spec)},
        model_words=f"ResNet-34, width {config.width:g}",
        shapes=resnet.parameters(spec),
        measure=metrics.Accuracy(),
        multiply_adds=resnet.multiply_adds(spec, height, width),
        layers=resnet.layers(spec, height, width),
    ).connect()
    if job is None:
        return exits.OK
    plan, (rows, columns, _) = job.about.plan, job.work.layers[-2].output
    if plan.global_batch // plan.ranks * rows * columns == 1:
        told = f"{plan.global_batch} samples per step leave a rank one, and the last maps have one pixel"
        raise Failure(f"{told}: BatchNorm needs two values; give a larger batch or --image-size", exits.BAD_CONFIG)

    # 5. Replica: the same weights from the same seed on every rank, or those of its part of the layers.
    scope = job.data.ranks.scope

    def model(part: range | None) -> Any:
        if config.framework == "torch":
            from hvdtrain.models.resnet_torch import ResNetTorch

            return ResNetTorch(spec, part)
        from hvdtrain.models.resnet_tf import ResNetTF

        return ResNetTF(spec, workload.compute_dtype(config), scope(), part)

    job = job.staged(model)
    if job.part and job.part.start:
        job = job.over(dataset.labels_only())
    replica = job.replica(model(job.part), resnet.initial_state(spec, config.seed, job.part))

    # 6. Train, evaluate, save: every record goes to the run's folder; then the results, on stdout, once.
    return job.train(replica, stop, precise_bn=config.precise_bn)


if __name__ == "__main__":
    world.run(main, debug="--debug" in sys.argv)
