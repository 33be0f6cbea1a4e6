"""`pytest -n 2`: files run side by side, but a test marked `alone` has the machine for itself."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT

FILE = """
import os, time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(3))
{mark}
def test_it(number):
    began = time.monotonic()
    Path("{name}").touch()
    while "{name}" != "a" and not (Path("b").exists() and Path("c").exists()):
        time.sleep(0.05)
    time.sleep(0.2)
    with open("times", "a") as times:
        print("{name}", os.environ["PYTEST_XDIST_WORKER"], began, time.monotonic(), file=times)
"""


def test_tests_that_run_alone_overlap_with_none_and_come_last(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="no pytest-xdist: run `make setup`")
    (tmp_path / "tests").mkdir()
    for name, mark in (("a", "@pytest.mark.alone"), ("b", ""), ("c", "")):
        (tmp_path / "tests" / f"test_{name}.py").write_text(FILE.format(name=name, mark=mark))
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-p", "conftest", "-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "tests"],
        cwd=tmp_path,
        env=own | {"PYTHONPATH": str(ROOT / "tests")},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
    found = sorted((float(began), float(ended), name, worker) for name, worker, began, ended in lines)
    assert len({worker for *_, worker in found}) == 2
    assert "".join(name for _, _, name, _ in found).lstrip("bc") == "aaa"
    pairs = list(itertools.combinations(found, 2))
    overlapping = {a[2] + b[2] for a, b in pairs if b[0] < a[1]}
    assert overlapping <= {"bc", "cb"}
    assert overlapping, "b and c run side by side"
