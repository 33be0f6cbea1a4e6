"""docs/ARCHITECTURE.md says which room may import what: a test for each file. Nothing heavy loads before it is used."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, finished

PACKAGE = ROOT / "hvdtrain"
# A twin imports its own framework: the ending of its file name -> the package.
TWINS = {"torch": "torch", "tf": "tensorflow", "tensorflow": "tensorflow"}

# Room -> what it may import, as docs/ARCHITECTURE.md tells; the last row is for every room that has no row.
ROWS = re.findall(
    r"^\| (?:`(\w+)`|a workload: .*?) \| .* \| (.*?) ?\|$", (ROOT / "docs" / "ARCHITECTURE.md").read_text(), re.M
)
ALLOWED = {room: allowed.split() for room, allowed in ROWS}
FREE = {"__init__", "arguments", "bounds", "exits", "files", "redaction"}  # import nothing of ours but each other
LATE = {"cli"}  # imports rooms and packages inside functions only, so that each subcommand loads its own part
# standard library at import time
FRONT = {"hvdtrain", "hvdtrain.arguments", "hvdtrain.bounds", "hvdtrain.config", "hvdtrain.exits"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def exists(module: str) -> bool:
    """Whether it is a module of this package."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of each import; `from package import module` names the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                parts = [*path.relative_to(ROOT).parts[: -node.level], *parts]
            base = ".".join(parts)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = exists(inner) if base != "hvdtrain" else not alias.name.startswith("__")
                yield node.lineno, inner if is_module else base


def may_import(path: Path, module: str) -> bool:
    """Whether the table lets the file import the module."""
    top, *inner = module.split(".")
    own, allowed = room(path), ALLOWED.get(room(path), ALLOWED[""])
    if top == "hvdtrain":
        target = inner[0] if inner else "__init__"
        front = f".{target}!" in allowed and len(inner) == 1
        return target in {own, *FREE} or f".{target}" in allowed or front
    if own in {"models", "frameworks"} and any(path.stem.endswith(end) and top == twin for end, twin in TWINS.items()):
        return True
    return top in sys.stdlib_module_names or top in allowed


def violations(path: Path, source: str) -> list[str]:
    tree = ast.parse(source)
    found = [f"{path.name}:{line} imports {name}" for line, name in imports(tree, path) if not may_import(path, name)]
    if room(path) in LATE:
        top_level = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        for line, name in imports(top_level, path):
            if name.partition(".")[0] not in sys.stdlib_module_names and name not in FRONT:
                found.append(f"{path.name}:{line} imports {name} before a subcommand asked for it")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_imports_only_what_the_table_allows(path: Path) -> None:
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("records/files.py", "import json, hvdtrain.exits", True),
        ("records/files.py", "from hvdtrain.config import Config", False),
        ("loop.py", "def f():\n    import torch", False),
        ("loop.py", "from hvdtrain.strategies import Strategy", True),
        ("loop.py", "from hvdtrain.strategies.allreduce import Allreduce", False),
        ("models/resnet.py", "import torch", False),
        ("models/resnet_torch.py", "import torch.nn.functional\nfrom hvdtrain.models import resnet", True),
        ("models/resnet_torch.py", "import tensorflow", False),
        ("models/resnet_tf.py", "from . import resnet\nfrom .. import exits", True),
        ("data/loader.py", "from ..world import World", False),
        ("strategies/powersgd.py", "import horovod.torch", False),
        ("cluster/net.py", "import psutil", False),
        ("resnet.py", "from hvdtrain import captioning", False),
        ("cli.py", "from hvdtrain import world", False),
        ("cli.py", "def f():\n    from hvdtrain import world", True),
    ],
)
def test_the_table_tells_right_from_wrong(name: str, source: str, allowed: bool) -> None:
    assert (violations(PACKAGE / name, source) == []) is allowed


def test_the_table_is_that_of_the_rooms() -> None:
    """No row of a room that is gone, none twice; a row for every folder."""
    rooms = [room for room, _ in ROWS]
    assert len(set(rooms)) == len(rooms)
    assert set(rooms) - {""} <= {room(path) for path in FILES}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(rooms)


def entry_points() -> list[str]:
    """Modules that run with `python -m`."""
    runnable = (path for path in FILES if '__name__ == "__main__"' in path.read_text())
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in runnable]


@pytest.mark.parametrize("command", ["-c import hvdtrain", *(f"-m {name} --help" for name in entry_points())])
def test_import_and_help_load_no_framework(command: str) -> None:
    option, rest = command.split(" ", 1)
    words = [rest] if option == "-c" else rest.split()
    python = [sys.executable, "-X", "importtime", option, *words]  # each import is a line on standard error
    done = subprocess.run(python, cwd=ROOT, text=True, capture_output=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 0, done.stderr[-2000:]
    assert option == "-c" or done.stdout.strip(), "no help on standard output"
    assert "hvdtrain" in loaded
    assert not loaded & {"torch", "tensorflow", "horovod", "mpi4py", "sklearn", "pandas", "matplotlib"}


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "tensorflow"))), reason="needs both frameworks")
def test_pytorch_works_in_a_process_that_has_loaded_tensorflow(tmp_path: Path) -> None:
    """Triton, part of PyTorch's CUDA builds, crashes after TensorFlow; if it is not installed, a stand-in does so."""
    if not importlib.util.find_spec("triton"):
        (tmp_path / "triton.py").write_text("import os, sys\n'tensorflow' in sys.modules and os.abort()\n")
    program = "import tensorflow, hvdtrain, torch, torch._dynamo\nprint('alive')\nimport triton"
    done = finished([sys.executable, "-c", program], extra={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.stdout == "alive\n", done.stderr[-2000:]
    assert "hint: import triton before tensorflow" in done.stderr
