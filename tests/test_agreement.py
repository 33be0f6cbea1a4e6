"""Ranks whose weights differ are found, named and stopped; equal ranks are told from them by a few bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, launch
from runs import read_run
from thread_ranks import Room, at_once

from hvdtrain.system.exits import Failure
from hvdtrain.training import consistency

CALM = ["--image-size", "8", "--width", "0.125", "--global-batch-size", "192", "--lr", "0.005"]
TENSOR, TENSORS = "layer2.0.conv1.weight", 110


class Rank:
    """A world of threads, as far as a check needs it; counts what goes round."""

    def __init__(self, rank: int, room: Room) -> None:
        self.rank, self.size = rank, room.size
        self.gathers = self.given_bytes = 0
        self._room = room

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value)
        self.gathers += 1
        self.given_bytes += len(text)
        return [json.loads(each) for each in self._room.gather(self.rank, text)]


def checked(states: list[dict[str, np.ndarray]]) -> tuple[list[str | None], list[Rank]]:
    """What each rank's check said, None if nothing; and the ranks."""
    room = Room(len(states))
    ranks = [Rank(rank, room) for rank in range(len(states))]

    def check(rank: Rank) -> None:
        consistency.check(states[rank.rank], rank)  # type: ignore[arg-type]

    found = at_once([functools.partial(check, rank) for rank in ranks], Failure, room=room)
    assert all(failure is None or failure.code == 1 for failure in found)
    return [None if failure is None else str(failure) for failure in found], ranks


def state() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    arrays = {f"parameter.{name}": draw.normal(size=(5, 7)).astype(np.float32) for name in "abc"}
    return arrays | {"parameter.turned": draw.normal(size=(4, 6)).T, "momentum.a": np.zeros((5, 7), np.float32)}


def changed(change: Callable[[dict[str, np.ndarray]], None]) -> dict[str, np.ndarray]:
    arrays = state()
    change(arrays)
    return arrays


def last_bit(name: str) -> dict[str, np.ndarray]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][1, 2] = np.nextafter(arrays[name][1, 2], np.float32(9))

    return changed(change)


def test_equal_ranks_pass_and_a_few_bytes_tell() -> None:
    said, ranks = checked([state(), state(), state()])
    assert said == [None] * 3
    assert all(rank.gathers == 1 and rank.given_bytes <= 12 for rank in ranks)


def test_one_rank_alone_asks_nobody() -> None:
    said, (rank,) = checked([state()])
    assert said == [None]
    assert rank.gathers == 0


def test_weights_that_are_no_numbers_are_compared_too() -> None:
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays["parameter.b"][:] = np.nan

    said, _ = checked([changed(spoil), changed(spoil)])
    assert said == [None, None]


def test_momentum_may_differ() -> None:
    """With a local strategy it is each rank's own."""
    said, _ = checked([state(), last_bit("momentum.a")])
    assert said == [None, None]


@pytest.mark.parametrize("name", ["b", "turned"])
def test_one_bit_of_one_rank_is_found_by_all(name: str) -> None:
    said, ranks = checked([state(), state(), last_bit(f"parameter.{name}"), state()])
    assert len(set(said)) == 1
    assert said[0] is not None
    assert f"the weights of rank 2 differ from those of the other ranks in {name} of 4 tensors" in said[0]
    assert all(rank.given_bytes < 100 for rank in ranks)


def test_several_ranks_and_tensors_are_named() -> None:
    both = last_bit("parameter.a")
    both["parameter.c"] = both["parameter.c"] + 1
    said, _ = checked([both, state(), state(), last_bit("parameter.c"), state()])
    assert said[0] is not None
    assert "the weights of rank 0, 3 differ from those of the other ranks in a and 1 more of 4 tensors" in said[0]


def test_of_two_ranks_that_differ_the_second_is_named() -> None:
    """Nobody can tell which of them is wrong; rank 0 is who saves checkpoints."""
    said, _ = checked([last_bit("parameter.a"), state()])
    assert said[0] is not None
    assert "the weights of rank 1 differ from those" in said[0]


@pytest.mark.parametrize(
    ("framework", "ranks", "launcher", "flags", "disturbed_before", "steps"),
    [
        ("torch", 3, "mpirun", "--epochs 1 --strategy allreduce --check-replicas 3", 1, 3),
        ("tensorflow", 2, "horovodrun --gloo", "--epochs 1 --strategy hierarchical --check-replicas 4", 2, 4),
    ],
)
@pytest.mark.slow
def test_a_disturbed_rank_stops_the_run_and_is_named(
    framework: str, ranks: int, launcher: str, flags: str, disturbed_before: int, steps: int, tmp_path: Path
) -> None:
    program = [str(PROGRAMS / "strategy_disturbed.py"), framework, "1", str(disturbed_before)]
    done = launch(ranks, [*program, *CALM, *flags.split(), "--run-dir", str(tmp_path)], launcher)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if "hvdtrain: " in line]
    assert said, done.stderr
    text = f"the weights of rank 1 differ from those of the other ranks in {TENSOR} of {TENSORS} tensors"
    assert all(text in line for line in said)
    assert launcher != "mpirun" or len(said) == 1, said
    assert len(read_run(tmp_path)["step"]) == steps
