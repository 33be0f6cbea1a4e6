"""Ask a classifier that a run of hvdtrain.tabular has trained, on this machine's processor.

examples:
  hvdtrain tabular test --run results/RUN --data other.csv
  hvdtrain tabular predict --run results/RUN --data new.csv --out answers.csv

The run's best checkpoint is used, by either framework whichever of them trained it, and the columns as the run kept
them: their standardisation, the classes' names, and what to do about missing values. The file is read in blocks, so it
may be larger than memory. `test` scores the answers, as training does; `predict` writes a line for each row: its line
in the file, the class, and its probability. For `predict` the class column may be missing, or not filled in.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import frameworks
from hvdtrain.data import csv_rows, tabular
from hvdtrain.data.csv_rows import Block, Form
from hvdtrain.data.tabular import Columns
from hvdtrain.models import mlp
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.records.metrics import Confusion
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure
from hvdtrain.training import run_folder, trained

SCHEMA = "hvdtrain/classes/1"
TRAINED_BY = "tabular"


Answers = Iterator[tuple[Block, NDArray[np.float64]]]
"""Some rows, and logarithms of their classes' probabilities, (n, classes)"""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure if the run or the file is unusable."""
    asked = parser().parse_args(arguments)
    manifest, parameters = trained.opened(asked.run, TRAINED_BY)
    spec = trained.spec(asked.run, manifest, mlp.MLPSpec)
    kept = asked.run / tabular.KEPT
    try:
        columns = Columns.from_json(files.from_json(files.read(kept, tabular.INDEX_BYTES)))
    except OSError as error:
        raise files.refused(kept, error, exits.BAD_DATA, "the run's folder is not whole") from None
    except ValueError as error:
        raise Failure(f"{kept}: not what a run keeps of its columns ({error})", exits.BAD_DATA) from None
    found = {name: array.shape for name, array in parameters.items()}
    if found != mlp.parameters(spec) or (spec.inputs, spec.outputs) != (len(columns.mean), len(columns.classes)):
        told = f"manifest, {tabular.KEPT} and checkpoint are not of one model"
        raise Failure(f"{asked.run}: {told}", exits.BAD_DATA)
    judged = asked.command == "test"
    form = fitting(asked.data, columns, needs_classes=judged)
    model = network(frameworks.resolve(asked.framework), spec, parameters)
    answers = answered(asked.data, form, columns, model, judged=judged)
    return test(asked, columns, answers) if judged else predict(asked, columns, answers)


def parser() -> Parser:
    top = Parser(prog="hvdtrain tabular", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="test|predict", parser_class=Parser)
    for name, about in (("test", "score the answers to a file"), ("predict", "write the answers to a file")):
        one = commands.add_parser(name, help=about, description=__doc__)
        one.add_argument("--run", type=Path, required=True, metavar="RUN", help="the run's folder")
        one.add_argument("--data", type=Path, required=True, metavar="FILE", help="CSV with the run's columns")
        one.add_argument("--framework", choices=("auto", "torch", "tensorflow"), default="auto", help="default: auto")
        if name == "test":
            one.add_argument("--json", action="store_true", help="print one JSON document")
        else:
            one.add_argument("--out", type=Path, required=True, metavar="FILE", help="CSV to write")
    return top


def fitting(path: Path, columns: Columns, *, needs_classes: bool) -> Form:
    """The form of a file that has the run's columns. Raises Failure (65)."""
    form, features = csv_rows.form(path), len(columns.mean)
    if form.columns != features + 1 and (needs_classes or form.columns != features):
        known = f"the run was trained on {features} features{' and their class' if needs_classes else ''}"
        raise Failure(f"{path}:{form.first}: {form.columns} columns, and {known} ({form})", exits.BAD_DATA)
    print(f"{path}: {form}", file=sys.stderr)
    for number, (name, known) in enumerate(zip(form.names or (), columns.names or (), strict=False), start=1):
        if name != known:
            told = f"column {name!r}, and the run was trained with {known!r} there; give the columns in its order"
            raise Failure(f"{path}:{form.first - 1}:{number}: {told}", exits.BAD_DATA)
    return form


def network(framework: str, spec: mlp.MLPSpec, parameters: Arrays) -> Any:
    """The trained model."""
    trained.begin(framework)
    model: Any
    if framework == "torch":
        from hvdtrain.models import mlp_torch

        model = mlp_torch.MLPTorch(spec, mlp_torch.cross_entropy)
    else:
        from hvdtrain.models import mlp_tf

        model = mlp_tf.MLPTF(spec, mlp_tf.cross_entropy)
    trained.fill(model, parameters, framework)
    return model


def answered(path: Path, form: Form, columns: Columns, model: Any, *, judged: bool) -> Answers:
    """The file's rows, block by block, with their classes if answers are `judged`. Raises Failure (65, 77)."""
    for block in csv_rows.rows(path, form, columns.missing, features=None if judged else len(columns.mean)):
        logits = model.outputs(columns.standard(block.features)).astype(np.float64)
        highest = logits.max(axis=1, keepdims=True)
        logs = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
        yield block, logs


def test(asked: Any, columns: Columns, answers: Answers) -> int:
    """Prints loss, scores and confusion matrix. Raises Failure (65) for a class that the model does not know."""
    metric = Confusion(columns.classes)
    known = {name: number for number, name in enumerate(columns.classes)}
    confusion, loss = np.zeros(metric.sums["confusion"]), 0.0
    for block, logs in answers:
        for line, name in zip(block.lines, block.classes, strict=True):
            if name not in known:
                told = f"class {name!r} was not in training{near(name, known)}; it has {', '.join(known)}"
                raise Failure(f"{asked.data}:{line}:{len(columns.mean) + 1}: {told}", exits.BAD_DATA)
        truth = np.array([known[name] for name in block.classes], np.int64)
        np.add.at(confusion, (truth, logs.argmax(axis=1)), 1)
        loss -= float(logs[np.arange(len(truth)), truth].sum())
    if not (samples := confusion.sum()):
        raise Failure(f"{asked.data}: has no row; give it some", exits.BAD_DATA)
    scores = metric.score({"confusion": confusion}, samples)
    if asked.json:
        about = {"schema": SCHEMA, "run": str(asked.run), "data": str(asked.data), "classes": columns.classes}
        run_folder.emit(
            json.dumps({**about, "loss": loss / samples, "scores": scores, "confusion": confusion.tolist()})
        )
        return exits.OK
    for title, table in metric.report({"confusion": confusion}):
        run_folder.emit("\n".join([title, *run_folder.aligned(table)]))
    run_folder.emit(f"{metric.words(scores)}, loss {loss / samples:.4f}, of {samples:,.0f} rows")
    return exits.OK


def predict(asked: Any, columns: Columns, answers: Answers) -> int:
    """Writes the answers, whole or not at all. Raises Failure (73, 74)."""
    out = Path(os.path.realpath(asked.out))
    part = out.parent / f".{out.name}.{os.getpid()}"
    try:
        if out.exists() and not out.is_file():  # a rename would put a file in the place of a device
            raise OSError(errno.EINVAL, "not a plain file")
        with part.open("x", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["line", "class", "probability"])
            for block, logs in answers:
                best = logs.argmax(axis=1)
                chances = np.exp(logs[np.arange(len(best)), best])
                names = (columns.classes[place] for place in best.tolist())
                table.writerows(zip(block.lines.tolist(), names, (f"{x:.6f}" for x in chances), strict=True))
        part.replace(out)
    except OSError as error:
        raise files.unwritable(f"--out {asked.out}", error, "give a file in a folder that may be written") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return exits.OK
