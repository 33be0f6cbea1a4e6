"""Classify images with a model that hvdtrain.resnet has trained, on this machine's CPU.

examples:
  hvdtrain resnet predict results/RUN photo.jpg
  hvdtrain resnet predict results/RUN photos/ more.png --json

The run's best checkpoint is used, in either framework regardless of which one trained it. Images are converted as in
evaluation: resized, and in gray if the training images are gray. A folder stands for the images directly in it.
Unreadable images are reported on standard error and the others are classified; the exit code is then 65.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain import frameworks, models, records
from hvdtrain.data import MAX_PIXELS, image_files
from hvdtrain.data.pixels import scaled
from hvdtrain.models import resnet
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import printable
from hvdtrain.training import summary, trained

SCHEMA = "hvdtrain/predictions/1"
TRAINED_BY = "resnet"
BATCH_SIZE = 64
BATCH_PIXELS = 1 << 24
"""Largest batch of images of more than 512x512 pixels"""


Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_PIXELS)]


class ImageFacts(msgspec.Struct, frozen=True):
    """What a manifest says about the images of its run."""

    class_names: tuple[str, ...]
    image_shape: tuple[Side, Side, Side]
    """(height, width, channels)"""
    pixel_dtype: Literal["uint8", "float16", "float32"]
    """Type in which the data set stored pixels: see `pixels.scaled`"""

    def __post_init__(self) -> None:
        if math.prod(self.image_shape[:2]) > MAX_PIXELS:
            raise ValueError(f"image_shape {self.image_shape} has more than {MAX_PIXELS:,} pixels")


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """The trained model of a run."""

    manifest: records.Manifest
    spec: resnet.ResNetSpec
    arrays: Arrays
    facts: ImageFacts


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An image and its most likely class."""

    image: str
    class_name: str
    probability: float

    def as_json(self) -> dict[str, Any]:
        return {"image": self.image, "class": self.class_name, "probability": self.probability}


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure if the run is unusable."""
    options = parser().parse_args(arguments)
    run = open_run(options.run)
    framework = frameworks.resolve(options.framework)
    problems: image_files.Problems = []
    found = image_files.list_files(options.images, problems)
    predictions = list(predict(run, framework, image_files.read_files(found, run.facts.image_shape, problems)))
    image_files.report(problems)
    if options.json:
        document = {"schema": SCHEMA, "run": str(options.run), "framework": framework}
        rows = [prediction.as_json() for prediction in predictions]
        summary.emit(json.dumps({**document, "predictions": rows, "problems": problems}))
    elif predictions:
        show(predictions)
    return exits.BAD_DATA if problems else exits.OK


def parser() -> Parser:
    top = Parser(prog="hvdtrain resnet", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="predict", parser_class=Parser)
    one = commands.add_parser("predict", help="print the class of each image", description=__doc__)
    one.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    one.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="an image, or a folder of images")
    one.add_argument("--framework", choices=("auto", "torch", "tensorflow"), default="auto", help="default: auto")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    return top


def open_run(folder: Path) -> Classifier:
    """The trained model in a run folder. Raises Failure (65, 74, 77) for any other folder."""
    manifest, arrays = trained.opened(folder, TRAINED_BY, statistics=True)
    spec = trained.spec(folder, manifest, resnet.ResNetSpec)
    facts = trained.facts(folder, manifest.data, ImageFacts)
    fits = (facts.image_shape[2], len(facts.class_names)) == (spec.channels, spec.classes)
    trained.check_shapes(folder, arrays, resnet.parameters(spec) | resnet.buffers(spec), fits)
    return Classifier(manifest=manifest, spec=spec, arrays=arrays, facts=facts)


def predict(run: Classifier, framework: str, images: Iterator[tuple[NDArray[np.uint8], str]]) -> Iterator[Prediction]:
    """The most likely class of each image. Only one batch of images is in memory at a time."""
    height, width, _ = run.facts.image_shape
    count = max(1, min(BATCH_SIZE, BATCH_PIXELS // (height * width)))
    trained.begin(framework)
    model = models.network("resnet.ResNet", framework, run.spec)
    trained.fill(model, run.arrays, framework)
    while batch := list(itertools.islice(images, count)):
        inputs = scaled(np.stack([image for image, _ in batch]), run.facts.pixel_dtype)
        logits = model.outputs(inputs).astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities = shares / shares.sum(axis=1, keepdims=True)
        for (_, path), row in zip(batch, probabilities, strict=True):
            best = int(row.argmax())
            yield Prediction(image=path, class_name=run.facts.class_names[best], probability=float(row[best]))


def show(predictions: list[Prediction]) -> None:
    """Prints one line per image on stdout: its name, its class and the class's probability."""
    rows = [(printable(each.image), printable(each.class_name), f"{each.probability:.4f}") for each in predictions]
    rows.insert(0, ("image", "class", "probability"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    summary.emit("\n".join(f"{name:<{widths[0]}}  {label:<{widths[1]}}  {share}" for name, label, share in rows))
