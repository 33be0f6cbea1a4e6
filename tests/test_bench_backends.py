"""tools/bench_backends.py runs the same operations with three backends, which check the results."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import finished, unique

BENCH = [sys.executable, "tools/bench_backends.py"]


@pytest.mark.root
@pytest.mark.slow
def test_each_case_is_measured_with_each_backend() -> None:
    flags = ["--quick", "--hosts", "2", "--rates", "100mbit", "--ranks-per-host", "1,2", "--json"]
    done = finished([*BENCH, *flags, "--operations", "sum-1,sum-1000,pairs-100", "--name", unique()])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    cases = [(1, "sum-1"), (1, "sum-1000"), (1, "pairs-100"), (2, "sum-1"), (2, "sum-1000")]
    assert [(row["ranks_per_host"], row["operation"]) for row in rows] == cases
    for row in rows:
        for backend in ("tcp", "over_mpi", "gloo", "mpi"):
            # A queue lets a burst through, which shortens small transfers.
            assert row[f"{backend}_s"] > (row["limit_s"] / 1.2 if row["operation"] == "sum-1000" else 0), row
            assert row[f"{backend}_cpu_s"] > 0, row


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--operations", "sum"], "'sum' is not an operation; hint: write sum-KB or pairs-KB"),
        (["--hosts", "9"], "--hosts 9; hint: give 2 to 8"),
        (["--ranks-per-host", "0"], "--ranks-per-host 0; hint: give 1 to 64"),
    ],
)
def test_wrong_options_are_one_line(flags: list[str], problem: str) -> None:
    done = finished([*BENCH, *flags])
    assert done.returncode == 2 and problem in done.stderr and done.stderr.count("\n") == 1, done.stderr
