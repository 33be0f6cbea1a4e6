"""Write a trained model as a file that other programs load without hvdtrain.

examples:
  hvdtrain export results/RUN --to torch -o model.pt2
  hvdtrain export results/RUN --to onnx -o model.onnx
  hvdtrain export results/RUN --to safetensors -o model.safetensors --json

Every format works for runs of both frameworks, and uses the best checkpoint. The model takes raw inputs and
preprocesses them as in training. A safetensors file contains only arrays; its metadata describe the preprocessing.
The output must not exist yet, and a failed export leaves nothing behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain import frameworks
from hvdtrain.export.source import Source, open_run
from hvdtrain.inference import trained
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure, printable
from hvdtrain.training import summary

SCHEMA = "hvdtrain/export/1"
KEPT_KEYS = ("workload", "input", "outputs", "preprocessing", "classes")
"""Parts of a model's document that --json prints"""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A file format and its writer."""

    writer: str
    """Module and function, which takes a `Source` and a path"""
    framework: Any = None
    """Framework that the writer needs"""
    packages: tuple[str, ...] = ()
    """Other packages that the writer needs, of the extra `export`"""


FORMATS = {
    "torch": Format(writer="torch_program.save_program", framework="torch"),
    "safetensors": Format(writer="arrays.save_arrays"),
    "onnx": Format(writer="torch_program.save_onnx", framework="torch", packages=("onnx", "onnxscript", "onnxruntime")),
}


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. Raises Failure: 2, 65, 69, 73, 74, 77, 78."""
    options = parser().parse_args(arguments)
    chosen, out = FORMATS[options.to], options.out
    check(options.to, out)
    source = open_run(options.run, options.weights)
    with files.writing(out, "give a new file in a folder that is writable") as part:
        if chosen.framework:
            trained.begin(chosen.framework)
        module, function = chosen.writer.split(".")
        getattr(importlib.import_module(f"hvdtrain.export.{module}"), function)(source, part)
    show(source, options)
    return exits.OK


def parser() -> Parser:
    one = Parser(prog="hvdtrain export", description=__doc__)
    one.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    one.add_argument("--to", choices=FORMATS, required=True, help="format")
    one.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="file to create; must not exist")
    one.add_argument("--weights", metavar="FILE", help="VGG16 weights, if the file has moved since the run")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    return one


def check(name: str, out: Path) -> None:
    """Raises Failure if this format cannot be written here: 69 for a missing package, 73 if the file exists, 78 for a
    missing framework."""
    chosen = FORMATS[name]
    if os.path.lexists(out):
        raise Failure(f"{out} exists; hint: remove it, or choose another file", exits.CANNOT_WRITE)
    if chosen.framework:
        frameworks.resolve(chosen.framework)
    for package in chosen.packages:
        if importlib.util.find_spec(package) is None:
            message = f"--to {name} needs the package {package}"
            raise Failure(f"{message}; hint: pip install 'hvdtrain[export]'", exits.UNREACHABLE)


def show(source: Source, options: Any) -> None:
    """Prints the result: a line for people, or a JSON document."""
    out, size = options.out, options.out.stat().st_size
    about = source.about(complete=options.to != "safetensors")
    if options.json:
        kept = {name: about[name] for name in KEPT_KEYS if name in about}
        document = {"schema": SCHEMA, "run": str(options.run), "file": str(out), "format": options.to, "bytes": size}
        summary.emit(json.dumps({**document, **kept}))
        return
    tensors = [f"{each.name} {each.dtype} (batch, {', '.join(map(str, each.shape))})" for each in source.outputs]
    classes = f", {len(about['classes'])} classes" if "classes" in about else ""
    shape = ", ".join(map(str, source.input.shape))
    described = f"{source.input.name} {source.input.dtype} (batch, {shape}) -> {' and '.join(tensors)}"
    summary.emit(f"{printable(str(out))}: {source.workload} as {options.to}, {described}{classes}, {size / 1e6:.2f} MB")
