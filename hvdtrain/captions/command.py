"""Caption pictures with a model that a run has trained, on this machine's processor.

examples:
  hvdtrain caption photo.jpg --run results/RUN
  hvdtrain caption holiday/ more.png --run results/RUN --beam 5 --html
  hvdtrain caption --split test --limit 100 --run results/RUN --json

The run's best checkpoint is used, by either framework whichever of them trained it. A folder stands for the pictures
that are directly in it. A picture that cannot be read is named on standard error and the others are captioned; the
exit code is then 65.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hvdtrain import frameworks
from hvdtrain.captions import contact_sheet, generation
from hvdtrain.captions.contact_sheet import Card
from hvdtrain.captions.dataset import CaptionSplit
from hvdtrain.captions.load import load
from hvdtrain.captions.sources import PICTURES
from hvdtrain.captions.trained import Encode, Pixels, model, open_run
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.data.pixels import pixels, reason
from hvdtrain.observe.progress import Progress
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import printable
from hvdtrain.system.files import put

SCHEMA = "hvdtrain/captions/1"
SHEET = "captions.html"


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure if the run, its weights or its data are unusable."""
    asked = parser().parse_args(arguments)
    if bool(asked.pictures) == bool(asked.split):
        parser().error("name pictures and folders, or else --split train, validation or test")
    trained = open_run(asked.run)
    framework = frameworks.resolve(asked.framework)
    problems: list[dict[str, str]] = []
    if asked.split:
        split: CaptionSplit = getattr(load(trained.config["data"]), asked.split)
        count = min(asked.limit, len(split.names))
        pictures = of_split(split, count, sheet=asked.html)
    else:
        files = listed(asked.pictures, problems)
        pictures, count = opened(files, trained.shape, problems, sheet=asked.html), len(files)
    writer, encode = model(trained, framework, asked.weights)
    cards = captioned(pictures, count, writer, encode, trained.vocabulary, asked.beam)
    for problem in problems:
        print(f"hvdtrain: {printable(problem['picture'])}: {problem['problem']}", file=sys.stderr)
    sheet = asked.run / SHEET if asked.html and cards else None
    if sheet:
        about = f"by the model of {asked.run.resolve().name}, beam {asked.beam}; pictures: {len(cards)}"
        page = contact_sheet.page("Captions", about, cards).encode(errors="replace")
        put(sheet, page, "the run's folder must be writable for --html")
        print(f"contact sheet: {sheet}", file=sys.stderr)
    if asked.json:
        told = [{"picture": card.name, "caption": card.caption, "references": list(card.references)} for card in cards]
        document = {"schema": SCHEMA, "run": str(asked.run), "framework": framework, "beam": asked.beam}
        document |= {"captions": told, "problems": problems, "html": sheet and str(sheet)}
        print(json.dumps(document))
    elif cards:
        show(cards)
    return exits.BAD_DATA if problems else exits.OK


def parser() -> Parser:
    one = Parser(prog="hvdtrain caption", description=__doc__)
    one.add_argument("pictures", nargs="*", type=Path, metavar="PICTURE", help="a picture, or a folder of pictures")
    one.add_argument("--run", type=Path, required=True, metavar="RUN", help="the run's folder")
    one.add_argument("--beam", type=at_least_one, default=3, metavar="N", help="beam width; 1: greedy (default: 3)")
    one.add_argument("--framework", choices=("auto", "torch", "tensorflow"), default="auto", help="default: auto")
    one.add_argument("--split", choices=("train", "validation", "test"), help="caption the run's own data instead")
    one.add_argument("--limit", type=at_least_one, default=24, metavar="N", help="pictures of --split (default: 24)")
    one.add_argument("--weights", metavar="FILE", help="VGG16's, if they are no longer where the run had them")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--html", action="store_true", help=f"write a contact sheet, RUN/{SHEET}")
    return one


def at_least_one(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of 1 or more")
    return int(text)


# --- the pictures -----------------------------------------------------------------------------------------------------


def of_split(split: CaptionSplit, count: int, *, sheet: bool) -> Iterator[tuple[Pixels, Card]]:
    """The first `count` pictures of a split, as the model wants them, and what is shown of each but its caption."""
    for number in range(count):
        seen = split.inputs[number]
        jpeg = contact_sheet.jpeg(seen) if sheet else b""
        yield seen, Card(name=split.names[number], caption="", references=split.references[number], jpeg=jpeg)


def listed(paths: Sequence[Path], problems: list[dict[str, str]]) -> list[Path]:
    """The files that paths name, folders by the pictures in them, in order of name."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        try:
            inside = sorted(each for each in path.iterdir() if each.suffix.lower() in PICTURES and each.is_file())
        except OSError as error:
            problems.append({"picture": str(path), "problem": error.strerror or str(error)})
            continue
        if not inside:
            problems.append({"picture": str(path), "problem": f"no pictures in this folder ({', '.join(PICTURES)})"})
        files += inside
    return files


def opened(
    files: Sequence[Path], shape: tuple[int, int, int], problems: list[dict[str, str]], *, sheet: bool
) -> Iterator[tuple[Pixels, Card]]:
    """Yields the pictures that can be read, as `of_split` does; the others are added to `problems`."""
    for path in files:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe may never end
                raise ValueError("not a plain file")
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # Pillow's are about metadata, and about the bombs that `pixels` refuses
                seen = pixels(str(path), shape)
                jpeg = contact_sheet.thumbnail(path) if sheet else b""
        except Exception as error:  # a damaged file makes Pillow raise nearly anything
            problems.append({"picture": str(path), "problem": reason(error, str(path))})
            continue
        yield seen, Card(name=str(path), caption="", references=(), jpeg=jpeg)


def captioned(
    pictures: Iterator[tuple[Pixels, Card]],
    count: int,
    writer: generation.Writer,
    encode: Encode,
    vocabulary: Vocabulary,
    beam: int,
) -> list[Card]:
    """Captions `count` pictures or fewer, in their order. Only the pictures of one batch are in memory."""
    cards: list[Card] = []
    with Progress("captioning", count, "pictures") as progress:
        while some := [picture for _, picture in zip(range(generation.BATCH_SIZE), pictures, strict=False)]:
            inputs = encode(np.stack([seen for seen, _ in some]))
            for (_, card), words in zip(some, generation.write(writer, inputs, beam=beam), strict=True):
                cards.append(dataclasses.replace(card, caption=vocabulary.decode(words)))
            progress.advance(len(some))
    return cards


# --- what is shown ----------------------------------------------------------------------------------------------------


def show(cards: Sequence[Card]) -> None:
    """A line for each picture on stdout: its name, its caption."""
    names = ["picture", *(printable(card.name) for card in cards)]
    told = ["caption", *(printable(card.caption) or "(no words)" for card in cards)]
    width = max(map(len, names))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in zip(names, told, strict=True)))
