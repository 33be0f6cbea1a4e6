"""Use a classifier that hvdtrain.tabular has trained, on this machine's CPU.

examples:
  hvdtrain tabular test --run results/RUN --data other.csv
  hvdtrain tabular predict --run results/RUN --data new.csv --out answers.csv

Both load the run's best checkpoint, in either framework regardless of which one trained it. They use the columns that
the run saved: means and deviations, class names and the treatment of missing values. The file is read in blocks, so it
may be larger than memory. `test` computes the same scores as training. `predict` writes the line number, the class and
its probability for each row; the class column may be missing or empty.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import frameworks, models
from hvdtrain.data import csv_rows, tabular
from hvdtrain.data.csv_rows import Block, Form
from hvdtrain.data.tabular import Columns
from hvdtrain.models import mlp
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.records.metrics import Confusion
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure
from hvdtrain.training import summary, trained

SCHEMA = "hvdtrain/classes/1"
TRAINED_BY = "tabular"


Predictions = Iterator[tuple[Block, NDArray[np.float64]]]
"""Blocks of rows, each with the logarithms of its class probabilities, (n, classes)"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure if the run or the file is unusable."""
    options = parser().parse_args(arguments)
    spec, columns, parameters = open_run(options.run)
    has_classes = options.command == "test"
    form = check_columns(options.data, columns, needs_classes=has_classes)
    model = network(frameworks.resolve(options.framework), spec, parameters)
    predictions = predicted(options.data, form, columns, model, with_classes=has_classes)
    return (test if has_classes else predict)(options, columns, predictions)


def open_run(folder: Path) -> tuple[mlp.MLPSpec, Columns, Arrays]:
    """The model's sizes, its columns and its parameters in a run folder. Raises Failure (65, 74, 77)."""
    manifest, parameters = trained.opened(folder, TRAINED_BY)
    spec = trained.spec(folder, manifest, mlp.MLPSpec)
    path = folder / tabular.COLUMNS_FILE
    try:
        columns = Columns.from_json(files.from_json(files.read(path, tabular.INDEX_BYTES)))
    except OSError as error:
        raise files.refused(path, error, exits.BAD_DATA, "the run folder is incomplete") from None
    except ValueError as error:
        raise Failure(f"{path} does not describe columns ({error})", exits.BAD_DATA) from None
    trained.check_shapes(
        folder,
        parameters,
        mlp.parameters(spec),
        (spec.inputs, spec.outputs) == (len(columns.mean), len(columns.classes)),
    )
    return spec, columns, parameters


def parser() -> Parser:
    top = Parser(prog="hvdtrain tabular", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="test|predict", parser_class=Parser)
    for name, about in (("test", "score the predictions for a file"), ("predict", "write predictions to a file")):
        one = commands.add_parser(name, help=about, description=__doc__)
        one.add_argument("--run", type=Path, required=True, metavar="RUN", help="the run's folder")
        one.add_argument("--data", type=Path, required=True, metavar="FILE", help="CSV file with the run's columns")
        one.add_argument("--framework", choices=("auto", "torch", "tensorflow"), default="auto", help="default: auto")
        if name == "test":
            one.add_argument("--json", action="store_true", help="print one JSON document")
        else:
            one.add_argument("--out", type=Path, required=True, metavar="FILE", help="CSV file to write")
    return top


def check_columns(path: Path, columns: Columns, *, needs_classes: bool) -> Form:
    """The format of a file. Raises Failure (65) if its columns differ from the run's."""
    form, features = csv_rows.detect(path), len(columns.mean)
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


def network(framework: str, spec: mlp.MLPSpec, parameters: Arrays) -> Any:
    """The trained model."""
    trained.begin(framework)
    model = models.network("mlp.MLP", framework, spec, loss="cross_entropy")
    trained.fill(model, parameters, framework)
    return model


def predicted(path: Path, form: Form, columns: Columns, model: Any, *, with_classes: bool) -> Predictions:
    """Predictions for the rows of a file, block by block. Raises Failure (65, 77)."""
    for block in csv_rows.rows(path, form, columns.missing, features=None if with_classes else len(columns.mean)):
        logits = model.outputs(columns.standardize(block.features)).astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        yield block, logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))


def test(options: Any, columns: Columns, predictions: Predictions) -> int:
    """Prints loss, scores and confusion matrix. Raises Failure (65) for a class that the model does not know."""
    metric = Confusion(columns.classes)
    numbers = {name: number for number, name in enumerate(columns.classes)}
    confusion, loss = np.zeros(metric.sums["confusion"]), 0.0
    for block, log_probabilities in predictions:
        for line, name in zip(block.lines, block.classes, strict=True):
            if name not in numbers:
                message = f"class {name!r} was not in the training data{near(name, numbers)}"
                hint = f"the model knows {', '.join(numbers)}"
                place = f"{options.data}:{line}:{len(columns.mean) + 1}"
                raise Failure(f"{place}: {message}; hint: {hint}", exits.BAD_DATA)
        truth = np.array([numbers[name] for name in block.classes], np.int64)
        np.add.at(confusion, (truth, log_probabilities.argmax(axis=1)), 1)
        loss -= float(log_probabilities[np.arange(len(truth)), truth].sum())
    if not (samples := confusion.sum()):
        raise Failure(f"{options.data}: no rows; hint: give a file with rows", exits.BAD_DATA)
    scores = metric.score({"confusion": confusion}, samples)
    if options.json:
        about = {"schema": SCHEMA, "run": str(options.run), "data": str(options.data), "classes": columns.classes}
        results = {"loss": loss / samples, "scores": scores, "confusion": confusion.tolist()}
        summary.emit(json.dumps({**about, **results}))
        return exits.OK
    for title, table in metric.report({"confusion": confusion}):
        summary.emit("\n".join([title, *summary.aligned(table)]))
    summary.emit(f"{metric.words(scores)}, loss {loss / samples:.4f}, of {samples:,.0f} rows")
    return exits.OK


def predict(options: Any, columns: Columns, predictions: Predictions) -> int:
    """Writes the predictions as one complete file, or none. Raises Failure (73, 74)."""
    with (
        files.writing(Path(os.path.realpath(options.out)), "give a file in a folder that is writable") as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["line", "class", "probability"])
        for block, log_probabilities in predictions:
            best = log_probabilities.argmax(axis=1)
            probabilities = np.exp(log_probabilities[np.arange(len(best)), best])
            names = (columns.classes[number] for number in best.tolist())
            table.writerows(zip(block.lines.tolist(), names, (f"{p:.6f}" for p in probabilities), strict=True))
    return exits.OK
