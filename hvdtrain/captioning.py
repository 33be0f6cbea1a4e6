"""Train an image-captioning model (VGG16 or a small CNN, and an LSTM), on one process or on many ranks.

examples:
  python -m hvdtrain.captioning --epochs 8
  horovodrun -np 4 -H a:2,b:2 python -m hvdtrain.captioning --data prepared
  horovodrun -np 2 python -m hvdtrain.captioning --data prepared --weights vgg16.safetensors
  mpirun -np 2 python -m hvdtrain.captioning --framework tensorflow --json
  hvdtrain predict results/RUN photo.jpg

Without --data it trains on 5,000 drawn scenes of coloured shapes. `hvdtrain predict` writes captions of images.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import Literal

from hvdtrain import models
from hvdtrain.captions import bleu, features, generation
from hvdtrain.captions.dataset import CaptionDataset, CaptionSplit
from hvdtrain.captions.prepared import load
from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded
from hvdtrain.inference import trained
from hvdtrain.models import captioner
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import workload

WORKLOAD = "captioning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptioningData(options.Data):
    """Images with sentences."""

    data: str = "shapes"
    """shapes or a prepared folder

    `hvdtrain data captions` prepares a folder of images with sentences, such as Flickr8k."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptioningConfig(CaptioningData, options.TrainConfig):
    """Options of this workload."""

    COMMON = (*options.TrainConfig.COMMON, "weights")

    encoder: Literal["auto", "small", "vgg16", "none"] = "auto"
    """Image encoder

    A small CNN that is trained too, frozen VGG16 with --weights, or none (words alone); auto: vgg16 if --weights is
    given, else small."""
    weights: str | None = None
    """VGG16 weights, made by `hvdtrain data vgg16`

    'random' is for testing only."""
    embedding: int = bounded(256, least=1)
    """Size of a word's embedding"""
    hidden: int = bounded(256, least=1)
    """Size of the LSTM and of the adjacent layers"""
    dropout: float = bounded(0.5, least=0, below=1)
    """Dropout of image features and word embeddings"""
    beam: int = bounded(3, least=1)
    """Beam width; captions are also written greedily"""
    optimizer: options.Optimizer = "adam"
    lr: float = bounded(2e-3, above=0)
    epochs: int = bounded(8, least=1)

    @property
    def chosen_encoder(self) -> Literal["small", "vgg16", "none"]:
        """--encoder with 'auto' resolved. Raises Failure (78) if it does not match --weights."""
        chosen = self.encoder if self.encoder != "auto" else "vgg16" if self.weights else "small"
        if chosen == "vgg16" and self.weights is None:
            raise Failure(
                "--encoder vgg16 needs --weights FILE; hint: `hvdtrain data vgg16 --help` says how to make it from "
                "torchvision's or Keras' weights; --encoder small needs none",
                exits.BAD_CONFIG,
            )
        if chosen != "vgg16" and self.weights is not None:
            raise Failure(f"--weights cannot be combined with --encoder {chosen}", exits.BAD_CONFIG)
        return chosen


class Captions(metrics.Accuracy):
    """Accuracy of each word given all previous words, and corpus BLEU of the captions that the model writes."""

    scores: Mapping[str, metrics.Score] = {
        **metrics.Accuracy.scores,
        **{
            f"{prefix}bleu{order}": metrics.Score(label=f"{prefix}bleu{order}", least=0, most=1, shown=order == 4)
            for prefix in ("", "beam_")
            for order in range(1, 5)
        },
    }
    primary = "bleu4"


def bleu_scores(
    writer: generation.Writer, split: CaptionSplit, dataset: CaptionDataset, ranks: Communicator, beam: int
) -> dict[str, float]:
    """Corpus BLEU-1 to BLEU-4 of a split, for captions written greedily and by beam search. Collective."""
    scores = generation.bleu_scores(writer, split, dataset.vocabulary, ranks, 1)
    if beam == 1:
        return scores
    searched = generation.bleu_scores(writer, split, dataset.vocabulary, ranks, beam)
    return scores | {f"beam_{name}": value for name, value in searched.items()}


def main(stop: lifecycle.StopSignal) -> int:
    # 1. Options: flags, file, environment; and this process's rank from the launcher.
    config, environment = workload.begin(CaptioningConfig, WORKLOAD, __doc__ or "")
    config = dataclasses.replace(config, encoder=config.chosen_encoder)

    # 2. Data: images and captions. A batch has captions of similar length, and is weighted by its number of words.
    dataset = load(config.data)
    height, width = dataset.images.shape[1:3]
    splits = {name: getattr(dataset, name) for name in ("train", "validation", "test")}
    counts = ", ".join(f"{len(split):,} {name} captions of {len(split.names):,}" for name, split in splits.items())

    # 3. Model: only its sizes, since a dry run needs no framework.
    spec = captioner.CaptionerSpec(
        vocabulary=len(dataset.vocabulary),
        encoder=config.chosen_encoder,
        image_size=(width, height),
        embedding=config.embedding,
        hidden=config.hidden,
        dropout=config.dropout,
    )
    weights = features.digest(config.weights, (width, height)) if config.weights else None

    # 4. Metric: accuracy per word during training; BLEU, which is computed for whole splits.
    metric, signature = Captions(), bleu.signature()

    # 5. Job: connect the ranks, compute a frozen encoder's features once, build the model on each rank with the same
    # weights from the seed, train.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        environment=environment,
        data=workload.Data(
            dataset=dataset,
            title=f"{counts} images of {width}x{height}, {len(dataset.vocabulary):,} words",
            facts={"words": len(dataset.vocabulary), "image_shape": dataset.images.shape[1:], "bleu": signature},
        ),
        model=workload.Model(
            title=f"captioner, encoder {config.encoder}",
            facts={"name": "captioner", "spec": dataclasses.asdict(spec), "encoder": weights},
            shapes=captioner.parameters(spec),
            multiply_adds=captioner.multiply_adds(spec),
            layers=captioner.layers(spec, math.ceil(dataset.train.lengths.mean())),
        ),
        metric=metric,
    ).connect()
    if job is None:  # a dry run
        return exits.OK
    if config.weights:
        make = functools.partial(features.encoder, config.weights, config.framework, job.device)
        key = {"encoder": config.encoder, "weights": weights}
        dataset = dataset.with_inputs(features.extract(dataset.images, make, key=key, world=job.ranks))
        job = job.over(dataset)
    model = models.maker("captioner.Captioner", spec, config, job.data.in_framework.scope)
    initial = functools.partial(captioner.initial_state, spec, config.seed)
    job = job.staged(model, initial)
    network = model(job.part)
    replica = job.replica(network, initial(job.part))
    writer = network if job.part is None else model(None)

    def judge(split: CaptionSplit) -> dict[str, float]:
        if job.part is not None:
            trained.fill(writer, job.whole(replica), config.framework)
        return bleu_scores(writer, split, dataset, job.ranks, config.beam)

    return job.train(replica, stop, judge=judge, documents={"vocabulary.json": dataset.vocabulary.as_json()})


if __name__ == "__main__":
    lifecycle.run(main, debug="--debug" in sys.argv)
