"""Nothing heavy loads before it is used. Which package may import which is in setup.cfg ([importlinter])."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

FILES = sorted((ROOT / "hvdtrain").rglob("*.py"))


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
