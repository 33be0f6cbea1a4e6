"""Unmodified scripts: what they do with their weights is what the same training written by hand does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, document, launch

SLOW = ("local-sgd:every=4+powersgd:rank=2", "auto:exact")
STRATEGIES = ["local-sgd:every=2,staleness=1", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]


@functools.cache
def report(strategy: str) -> Any:
    return document(launch(2, ["-W", "ignore", str(PROGRAMS / "own_idioms.py"), strategy], "forks"))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hierarchical"])
def test_idioms_equal_the_training_by_hand(strategy: str) -> None:
    """What the script reads, and the weights at the end."""
    for idiom, distance in report(strategy)["distances"][strategy].items():
        assert distance < 1e-6, idiom


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_cannot_be_averaged_is_refused_in_one_line(strategy: str) -> None:
    for what, message in report(strategy)["messages"][strategy].items():
        assert "; hint: " in message and "\n" not in message, what


@pytest.mark.parametrize("backend", ["tcp", pytest.param("mpi", marks=pytest.mark.slow)])
def test_an_unmodified_loop_that_ends_early_on_one_rank_ends_the_job(backend: str) -> None:
    extra = {"HVDTRAIN_BACKEND": backend, "HVDTRAIN_STRATEGY": "hierarchical", "HVDTRAIN_RECORD": "0"}
    done = launch(2, [str(PROGRAMS / "own_ends_early.py")], "mpirun", extra, limit_s=60)
    assert done.returncode
    assert "lost contact with another rank" in done.stderr


def test_forked_ranks_may_end_one_after_another(tmp_path: Path) -> None:
    done = launch(0, [str(PROGRAMS / "own_forked.py"), str(tmp_path / "store")], extra={"HVDTRAIN_RECORD": "0"})
    assert (done.returncode, done.stdout) == (0, "evaluated\n"), done.stderr


def test_a_script_that_spawns_its_own_ranks_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text("import torch\nif __name__ == '__main__':\n    torch.multiprocessing.spawn(print, nprocs=2)\n")
    done = launch(0, ["-m", "hvdtrain.ddp", "--strategy", "int8", str(script)])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert "; hint: " in done.stderr
