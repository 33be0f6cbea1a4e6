"""Caption images with a model that a run has trained, on this machine's CPU.

examples:
  hvdtrain caption photo.jpg --run results/RUN
  hvdtrain caption holiday/ more.png --run results/RUN --beam 5
  hvdtrain caption --split test --limit 100 --run results/RUN --json

The run's best checkpoint is used, in either framework regardless of which one trained it. A folder stands for the
images directly in it. Unreadable images are reported on standard error and the others are captioned; the exit code is
then 65.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain import frameworks
from hvdtrain.captions import generation
from hvdtrain.captions.dataset import CaptionSplit
from hvdtrain.captions.prepared import load
from hvdtrain.captions.trained import Encode, Pixels, model, open_run
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.data import image_files
from hvdtrain.observe.progress import Progress
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import printable

SCHEMA = "hvdtrain/captions/1"


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """An image and its caption."""

    image: str
    caption: str = ""
    references: Sequence[str] = ()
    """Sentences that people wrote; empty if unknown"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure if the run, its weights or its data are unusable."""
    options = parser().parse_args(arguments)
    if bool(options.images) == bool(options.split):
        parser().error("give either images and folders, or --split train, validation or test")
    trained = open_run(options.run)
    framework = frameworks.resolve(options.framework)
    problems: image_files.Problems = []
    images: Iterator[tuple[Pixels, Captioned]]
    if options.split:
        split: CaptionSplit = getattr(load(trained.config["data"]), options.split)
        count = min(options.limit, len(split.names))
        images = from_split(split, count)
    else:
        files = image_files.list_files(options.images, problems)
        read = image_files.read_files(files, trained.shape, problems)
        images, count = ((image, Captioned(image=path)) for image, path in read), len(files)
    writer, encode = model(trained, framework, options.weights)
    captions = write_captions(images, count, writer, encode, trained.vocabulary, options.beam)
    image_files.report(problems)
    if options.json:
        document = {"schema": SCHEMA, "run": str(options.run), "framework": framework, "beam": options.beam}
        print(json.dumps({**document, "captions": list(map(dataclasses.asdict, captions)), "problems": problems}))
    elif captions:
        show(captions)
    return exits.BAD_DATA if problems else exits.OK


def parser() -> Parser:
    one = Parser(prog="hvdtrain caption", description=__doc__)
    one.add_argument("images", nargs="*", type=Path, metavar="IMAGE", help="an image, or a folder of images")
    one.add_argument("--run", type=Path, required=True, metavar="RUN", help="the run's folder")
    one.add_argument("--beam", type=at_least_one, default=3, metavar="N", help="beam width; 1: greedy (default: 3)")
    one.add_argument("--framework", choices=("auto", "torch", "tensorflow"), default="auto", help="default: auto")
    one.add_argument("--split", choices=("train", "validation", "test"), help="caption the run's own data instead")
    one.add_argument("--limit", type=at_least_one, default=24, metavar="N", help="images of --split (default: 24)")
    one.add_argument("--weights", metavar="FILE", help="VGG16 weights, if the file has moved since the run")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    return one


def at_least_one(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


# --- the images -------------------------------------------------------------------------------------------------------


def from_split(split: CaptionSplit, count: int) -> Iterator[tuple[Pixels, Captioned]]:
    """The first `count` images of a split, as the model's input, with their names and references."""
    for number in range(count):
        yield split.inputs[number], Captioned(image=split.names[number], references=split.references[number])


def write_captions(
    images: Iterator[tuple[Pixels, Captioned]],
    count: int,
    writer: generation.Writer,
    encode: Encode,
    vocabulary: Vocabulary,
    beam: int,
) -> list[Captioned]:
    """Captions up to `count` images, in order. Only one batch of images is in memory at a time."""
    captions: list[Captioned] = []
    with Progress("captioning", count, "images") as progress:
        while batch := [pair for _, pair in zip(range(generation.BATCH_SIZE), images, strict=False)]:
            inputs = encode(np.stack([image for image, _ in batch]))
            for (_, caption), words in zip(batch, generation.write(writer, inputs, beam=beam), strict=True):
                captions.append(dataclasses.replace(caption, caption=vocabulary.decode(words)))
            progress.advance(len(batch))
    return captions


def show(captions: Sequence[Captioned]) -> None:
    """Prints one line per image on stdout: its name and its caption."""
    names = ["image", *(printable(caption.image) for caption in captions)]
    texts = ["caption", *(printable(caption.caption) or "(no words)" for caption in captions)]
    width = max(map(len, names))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in zip(names, texts, strict=True)))
