"""Use the trained model of a run of any workload, on this machine's CPU.

examples:
  hvdtrain predict results/RUN photo.jpg photos/             # the class of each image, or its caption
  hvdtrain predict results/RUN --split test                  # captions of 24 of the run's own images
  hvdtrain predict results/RUN new.csv --out answers.csv     # a class for each row
  hvdtrain predict results/RUN other.csv --score             # the scores of the predictions
  hvdtrain predict results/RUN readings.csv                  # a forecast for each row

The run's best checkpoint is used, in either framework regardless of which one trained it. Images are converted as in
evaluation, and a folder stands for the images directly in it; unreadable images are reported on standard error and the
others are used, and the exit code is then 65. A CSV file has the columns of the run's data, whose class may be missing,
or for a forecast the readings in W/m2, the oldest first. It is read in blocks, so it may be larger than memory.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain import frameworks
from hvdtrain.captions import generation
from hvdtrain.captions.prepared import load
from hvdtrain.data import csv_rows, image_files
from hvdtrain.data.csv_rows import Block, Form
from hvdtrain.data.pixels import scaled
from hvdtrain.data.solar import SIDE, map_weights
from hvdtrain.data.tabular import Columns
from hvdtrain.inference import runs
from hvdtrain.inference.runs import Run
from hvdtrain.observe.progress import Progress
from hvdtrain.records.metrics import Confusion
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure, printable
from hvdtrain.training import summary

SCHEMA = "hvdtrain/predictions/2"
SCORES = "hvdtrain/classes/1"
BATCH_SIZE = 64
SPLIT_IMAGES = 24
BATCH_PIXELS = 1 << 24
"""Largest batch of images of more than 512x512 pixels"""

T = TypeVar("T")
Rows = Iterator[dict[str, Any]]
"""Predictions: column -> value. All have the same columns"""


def parser() -> Parser:
    one = Parser(prog="hvdtrain predict", description=__doc__)
    one.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    one.add_argument(
        "inputs", nargs="*", type=Path, metavar="INPUT", help="images and folders of images, or a CSV file"
    )
    one.add_argument("--framework", choices=("auto", "torch", "tensorflow"), default="auto", help="default: auto")
    one.add_argument("--out", type=Path, metavar="FILE", help="write a CSV file instead of a table")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--score", action="store_true", help="tables: print the scores of the predictions instead")
    one.add_argument("--beam", type=at_least_one, default=3, metavar="N", help="captions: beam width (default: 3)")
    one.add_argument("--split", choices=("train", "validation", "test"), help="captions: 24 of the run's own images")
    one.add_argument("--weights", metavar="FILE", help="captions: VGG16's weights, if the file has moved since the run")
    return one


def at_least_one(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure if the run or its inputs are unusable."""
    options = parser().parse_args(arguments)
    if bool(options.inputs) == bool(options.split):
        parser().error("give either inputs, or --split train, validation or test of a captioning run")
    run, problems = runs.open_run(options.run), list[dict[str, str]]()
    workload, framework = run.manifest.workload, frameworks.resolve(options.framework)
    if wrong := [name for name, fit in FITS.items() if getattr(options, name) and workload != fit]:
        parser().error(f"--{wrong[0]} is for {FITS[wrong[0]]} runs, and {options.run} is one of {workload}")
    if workload in ("tabular", "solar") and len(options.inputs) > 1:
        parser().error("give one CSV file")
    if options.score:
        return score(options, run, framework)
    predicted = {"resnet": classes, "captioning": captions, "tabular": table, "solar": forecasts}[workload]
    rows = predicted(options, run, framework, problems)
    if options.out:
        write(options.out, rows)
    else:
        show(options, framework, list(rows), problems)
    image_files.report(problems)
    return exits.BAD_DATA if problems else exits.OK


FITS = {"score": "tabular", "split": "captioning", "weights": "captioning"}
"""Option -> the only workload that has it"""


# --- output -----------------------------------------------------------------------------------------------------------


def write(path: Path, rows: Rows) -> None:
    """Writes one complete CSV file, or none. Raises Failure (73, 74)."""
    with (
        files.writing(Path(os.path.realpath(path)), "give a file in a folder that is writable") as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        first = next(rows, None)
        if first is not None:
            writer = csv.DictWriter(file, list(_as_text(first)), lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(_as_text, itertools.chain([first], rows)))


def show(options: Any, framework: str, rows: list[dict[str, Any]], problems: image_files.Problems) -> None:
    """Prints a JSON document, or a table of the predictions."""
    if options.json:
        document = {"schema": SCHEMA, "run": str(options.run), "framework": framework}
        summary.emit(json.dumps({**document, "predictions": rows, "problems": problems}))
    elif rows:
        texts = list(map(_as_text, rows))
        cells = [list(texts[0]), *([printable(str(text)) or "(no words)" for text in row.values()] for row in texts)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
        summary.emit("\n".join(lines))


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """The row for a table, which has no references."""
    known = {name: value for name, value in row.items() if name != "references"}
    return {name: f"{value:.6f}" if isinstance(value, float) else value for name, value in known.items()}


# --- images -----------------------------------------------------------------------------------------------------------


def classes(options: Any, run: Run, framework: str, problems: image_files.Problems) -> Rows:
    """The most likely class of each image. Only one batch of images is in memory at a time."""
    model, (height, width, _) = run.model(framework), run.image_shape
    count = max(1, min(BATCH_SIZE, BATCH_PIXELS // (height * width)))
    found = image_files.list_files(options.inputs, problems)
    for batch in _batches(image_files.read_files(found, run.image_shape, problems), count):
        inputs = scaled(np.stack([image for image, _ in batch]), run.facts.pixel_dtype)
        shares = np.exp(log_softmax(model.outputs(inputs)))
        for (_, path), row in zip(batch, shares, strict=True):
            best = int(row.argmax())
            yield {"image": path, "class": run.facts.class_names[best], "probability": float(row[best])}


def captions(options: Any, run: Run, framework: str, problems: image_files.Problems) -> Rows:
    """A caption of each image; for those of a split, also the sentences that people wrote."""
    images: Iterable[tuple[NDArray[np.uint8], str, tuple[str, ...]]]
    if options.split:
        split = getattr(load(run.manifest.config["data"]), options.split)
        count = min(SPLIT_IMAGES, len(split.names))
        images = zip(split.inputs[:count], split.names, split.references, strict=False)
    else:
        found = image_files.list_files(options.inputs, problems)
        count = len(found)
        read = image_files.read_files(found, run.image_shape, problems)
        images = ((image, path, ()) for image, path in read)
    writer, encode = run.model(framework), runs.encoder(run, framework, options.weights)
    with Progress("captioning", count, "images") as progress:
        for batch in _batches(images, generation.BATCH_SIZE):
            inputs = encode(np.stack([image for image, *_ in batch]))
            written = generation.write(writer, inputs, beam=options.beam)
            for (_, name, references), words in zip(batch, written, strict=True):
                yield {"image": name, "caption": run.facts.decode(words), "references": references}
            progress.advance(len(batch))


def _batches(images: Iterable[T], most: int) -> Iterator[list[T]]:
    rest = iter(images)
    while batch := list(itertools.islice(rest, most)):
        yield batch


# --- tables -----------------------------------------------------------------------------------------------------------


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Logarithms of the probabilities of the classes, (n, classes)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def table(options: Any, run: Run, framework: str, problems: image_files.Problems) -> Rows:
    """The most likely class of each row of a CSV file."""
    for block, likely in _blocks(options.inputs[0], run, framework, with_classes=False):
        for line, row in zip(block.lines.tolist(), likely, strict=True):
            best = int(row.argmax())
            yield {"line": line, "class": run.facts.classes[best], "probability": float(np.exp(row[best]))}


def _blocks(path: Path, run: Run, framework: str, *, with_classes: bool) -> Iterator[tuple[Block, NDArray[np.float64]]]:
    """Blocks of rows, each with the logarithms of its class probabilities. Raises Failure (65, 77)."""
    columns: Columns = run.facts
    form, model = _form(path, columns, needs_classes=with_classes), run.model(framework)
    for block in csv_rows.rows(path, form, columns.missing, features=None if with_classes else len(columns.mean)):
        yield block, log_softmax(model.outputs(columns.standardize(block.features)))


def _form(path: Path, columns: Columns, *, needs_classes: bool) -> Form:
    """The format of a file. Raises Failure (65) if its columns differ from the run's."""
    form, features = csv_rows.detect(path, columns.classes), len(columns.mean)
    if form.columns != features + 1 and (needs_classes or form.columns != features):
        expected = f"the run was trained on {features} features{' and a class' if needs_classes else ''}"
        raise Failure(f"{path}:{form.first}: {form.columns} columns, but {expected} ({form})", exits.BAD_DATA)
    print(f"{path}: {form}", file=sys.stderr)
    for number, (name, trained_name) in enumerate(zip(form.names or (), columns.names or (), strict=False), start=1):
        if name != trained_name:
            message = f"column {name!r}, but the run was trained with {trained_name!r} there"
            hint = "give the columns in the order of the training data"
            raise Failure(f"{path}:{form.first - 1}:{number}: {message}; hint: {hint}", exits.BAD_DATA)
    return form


def score(options: Any, run: Run, framework: str) -> int:
    """Prints loss, scores and confusion matrix. Raises Failure (65) for a class that the model does not know."""
    (path,), columns = options.inputs, run.facts
    metric = Confusion(columns.classes)
    numbers = {name: number for number, name in enumerate(columns.classes)}
    confusion, loss = np.zeros(metric.sums["confusion"]), 0.0
    for block, likely in _blocks(path, run, framework, with_classes=True):
        for line, name in zip(block.lines, block.classes, strict=True):
            if name not in numbers:
                message = f"class {name!r} was not in the training data{near(name, numbers)}"
                place, hint = f"{path}:{line}:{len(columns.mean) + 1}", f"the model knows {', '.join(numbers)}"
                raise Failure(f"{place}: {message}; hint: {hint}", exits.BAD_DATA)
        truth = np.array([numbers[name] for name in block.classes], np.int64)
        np.add.at(confusion, (truth, likely.argmax(axis=1)), 1)
        loss -= float(likely[np.arange(len(truth)), truth].sum())
    if not (samples := confusion.sum()):
        raise Failure(f"{path}: no rows; hint: give a file with rows", exits.BAD_DATA)
    scores = metric.score({"confusion": confusion}, samples)
    if options.json:
        about = {"schema": SCORES, "run": str(options.run), "data": str(path), "classes": columns.classes}
        results = {"loss": loss / samples, "scores": scores, "confusion": confusion.tolist()}
        summary.emit(json.dumps({**about, **results}))
        return exits.OK
    for title, lines in metric.report({"confusion": confusion}):
        summary.emit("\n".join([title, *summary.aligned(lines)]))
    summary.emit(f"{metric.words(scores)}, loss {loss / samples:.4f}, of {samples:,.0f} rows")
    return exits.OK


def forecasts(options: Any, run: Run, framework: str, problems: image_files.Problems) -> Rows:
    """The forecast in W/m2 for each row of readings."""
    (path,), facts, count = options.inputs, run.facts, run.readings
    form = csv_rows.detect(path)
    if form.columns != count:
        what = f"{len(facts.stations)} stations" if facts.look == "map" else f"{count} readings of {facts.station}"
        raise Failure(f"{path}:{form.first}: {form.columns} columns, but the model needs {what}", exits.BAD_DATA)
    model = run.model(framework)
    for block in csv_rows.rows(path, form, "refuse", features=count):
        inputs = block.features.astype(np.float32)
        if facts.look == "map":
            inputs = (inputs @ map_weights(facts.places)).reshape(-1, SIDE, SIDE)
        elif facts.look == "stack":
            inputs = np.lib.stride_tricks.sliding_window_view(inputs, SIDE, axis=1)
        inputs = (inputs - np.float32(facts.mean_w_m2)) / np.float32(facts.deviation_w_m2)
        found = model.outputs(inputs)[:, 0] * facts.deviation_w_m2 + facts.mean_w_m2
        for line, value in zip(block.lines.tolist(), found.tolist(), strict=True):
            yield {"line": line, "forecast_w_m2": value}
