"""Train an image-captioning model (VGG16 or a small CNN, and an LSTM), on one process or on many ranks.

examples:
  python -m hvdtrain.captioning --epochs 8
  horovodrun -np 4 -H a:2,b:2 python -m hvdtrain.captioning --data flickr8k:/path/to/Flickr8k
  horovodrun -np 2 python -m hvdtrain.captioning --data flickr8k:Flickr8k --weights vgg16.safetensors
  mpirun -np 2 python -m hvdtrain.captioning --framework tensorflow --json
  hvdtrain caption photo.jpg --run results/RUN

Without --data it trains on drawn scenes of coloured shapes, made on the fly. `hvdtrain data captions` prepares pictures
with sentences, `hvdtrain data vgg16` the encoder's weights; `caption` tells what a trained model sees in a picture.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import Any, Literal

from hvdtrain.captions import bleu, features, frozen, generation
from hvdtrain.captions.dataset import CaptionDataset, CaptionSplit
from hvdtrain.captions.load import load
from hvdtrain.comm import world
from hvdtrain.config import options
from hvdtrain.config.constraints import bounded
from hvdtrain.models import captioner
from hvdtrain.records import metrics
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import job as workload
from hvdtrain.training import trained

WORKLOAD = "captioning"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptioningData(options.Data):
    """Pictures with sentences."""

    data: str = "shapes"
    """'shapes', 'flickr8k:DIR' (as distributed: prepared once), or a folder made by `hvdtrain data captions`"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptioningConfig(CaptioningData, options.TrainConfig):
    """What this workload is told besides."""

    encoder: Literal["auto", "small", "vgg16", "none"] = "auto"
    """What sees the pictures: a small CNN trained with the rest, VGG16 as its --weights are, or nothing (words alone);
    auto: vgg16 if --weights are given, else small"""
    weights: str | None = None
    """VGG16's, a file made by `hvdtrain data vgg16`; 'random' only to try the way"""
    embedding: int = bounded(256, least=1)
    """Values per word"""
    hidden: int = bounded(256, least=1)
    """Size of the LSTM and of the layers round it"""
    dropout: float = bounded(0.5, least=0, below=1)
    """Share of the picture's and the words' values that each step leaves out"""
    beam: int = bounded(3, least=1)
    """Width of the beam search; captions are also written greedily"""
    optimizer: Literal["sgd", "adam"] = "adam"
    """SGD with --momentum, or Adam with its usual constants (0.9, 0.999, 1e-8)"""
    lr: float = bounded(2e-3, above=0)
    """Learning rate for a global batch of the size given (--batch-size or --global-batch-size)"""
    epochs: int = bounded(8, least=1)
    """Passes over the training captions"""

    @property
    def sees(self) -> Literal["small", "vgg16", "none"]:
        """The encoder, chosen; raises Failure (78) if it lacks its weights."""
        chosen = self.encoder if self.encoder != "auto" else "vgg16" if self.weights else "small"
        if chosen == "vgg16" and self.weights is None:
            raise Failure(
                "--encoder vgg16 needs --weights FILE: `hvdtrain data vgg16 --help` tells how to make it from "
                "torchvision's or Keras' weights; or train --encoder small from the start",
                exits.BAD_CONFIG,
            )
        if chosen != "vgg16" and self.weights is not None:
            raise Failure(f"--weights means nothing to --encoder {chosen}: leave it out", exits.BAD_CONFIG)
        return chosen


class Captions(metrics.Accuracy):
    """The share of words that are right when all words before are given, and corpus BLEU of what the model writes."""

    scores: Mapping[str, metrics.Score] = {
        **metrics.Accuracy.scores,
        **{
            f"{prefix}bleu{order}": metrics.Score(label=f"{prefix}bleu{order}", least=0, most=1, shown=order == 4)
            for prefix in ("", "beam_")
            for order in range(1, 5)
        },
    }
    headline = "bleu4"


def judged(
    writer: generation.Writer, split: CaptionSplit, dataset: CaptionDataset, ranks: world.World, beam: int
) -> dict[str, float]:
    """Corpus BLEU-1..4 of a split, of captions written greedily and by beam search. Collective."""
    scores = generation.judge(writer, split, dataset.vocabulary, ranks, 1)
    if beam == 1:
        return scores
    searched = generation.judge(writer, split, dataset.vocabulary, ranks, beam)
    return scores | {f"beam_{name}": value for name, value in searched.items()}


def main(stop: world.StopSignal) -> int:
    # 1. Config: flags, file, variables; then what the launcher says of our place among the ranks.
    config, place = workload.begin(CaptioningConfig, WORKLOAD, __doc__ or "")
    config = dataclasses.replace(config, encoder=config.sees)

    # 2. Data: pictures and captions; a batch is captions of nearly one length, and counts as its words.
    dataset = load(config.data, verify=config.verify_data and place.local_rank == 0)
    height, width = dataset.pictures.shape[1:3]
    splits = {name: getattr(dataset, name) for name in ("train", "validation", "test")}
    counts = ", ".join(f"{len(each):,} {name} captions of {len(each.names):,}" for name, each in splits.items())

    # 3. Model: numbers first, so that a dry run needs no framework.
    spec = captioner.CaptionerSpec(
        vocabulary=len(dataset.vocabulary),
        encoder=config.sees,
        image_size=(width, height),
        embedding=config.embedding,
        hidden=config.hidden,
        dropout=config.dropout,
    )
    weights = frozen.digest(config.weights, (width, height)) if config.weights else None

    # 4. Ranks: the arithmetic of batches and of the exchange; then they connect.
    job = workload.Workload(
        name=WORKLOAD,
        config=config,
        place=place,
        dataset=dataset,
        data={"words": len(dataset.vocabulary), "image_shape": dataset.pictures.shape[1:], "bleu": bleu.signature()},
        data_words=f"{counts} pictures of {width}x{height}, {len(dataset.vocabulary):,} words",
        model={"name": "captioner", "spec": dataclasses.asdict(spec), "encoder": weights},
        model_words=f"captioner, encoder {config.encoder}",
        shapes=captioner.parameters(spec),
        measure=Captions(),
        multiply_adds=captioner.multiply_adds(spec),
        layers=captioner.layers(spec, math.ceil(dataset.train.lengths.mean())),
    ).connect()
    if job is None:
        return exits.OK

    # 5. Features of a frozen encoder, once; then the replica: the same weights from the same seed on every rank, or
    # those of its part of the layers.
    if config.weights:
        make = functools.partial(frozen.encoder, config.weights, config.framework, job.device)
        key = {"encoder": config.encoder, "weights": weights}
        dataset = dataset.with_inputs(features.extract(dataset.pictures, make, key=key, world=job.ranks))
        job = job.over(dataset)
    scope = job.data.ranks.scope

    def model(part: range | None) -> Any:
        if config.framework == "torch":
            from hvdtrain.models.captioner_torch import CaptionerTorch

            return CaptionerTorch(spec, part)
        from hvdtrain.models.captioner_tf import CaptionerTF

        return CaptionerTF(spec, workload.compute_dtype(config), scope(), part)

    job = job.staged(model)
    mine = model(job.part)
    replica = job.replica(mine, captioner.initial_state(spec, config.seed, job.part))

    # 6. Train, evaluate, save: every record goes to the run's folder; then the results, on stdout, once.
    writer = mine if job.part is None else model(None)

    def judge(split: CaptionSplit) -> dict[str, float]:
        if job.part is not None:
            trained.fill(writer, job.whole(replica), config.framework)
        return judged(writer, split, dataset, job.ranks, config.beam)

    words = {"vocabulary.json": dataset.vocabulary.as_json()}
    return job.train(replica, stop, judge=judge, documents=words)


if __name__ == "__main__":
    if sys.argv[1:2] == ["caption"]:
        from hvdtrain.captions import command

        exits.end(command.main, sys.argv[2:])
    world.run(main, debug="--debug" in sys.argv)
