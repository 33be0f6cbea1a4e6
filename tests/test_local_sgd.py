"""Local SGD on ranks that are threads: what scripts write to the weights, and loaded models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from thread_ranks import ThreadRendezvous, at_once, meetings, reach

from hvdtrain import strategies
from hvdtrain.comm.backends.base import RankGroup
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock

SHAPES = [(16, 8), (8,)]
SIZE = 16 * 8 + 8


class Walk:
    """A replica whose updates add random numbers."""

    updates_parts = False

    def __init__(self, rank: int, ranks: int) -> None:
        self._draw, self._ranks = np.random.default_rng(rank), ranks
        self.own = np.zeros(SIZE, np.float32)

    def vector(self) -> np.ndarray:
        raise AssertionError("nothing sums gradients here")

    def tail(self) -> np.ndarray:
        return np.array([0.0, 1.0, 0.0])

    def share(self) -> tuple[int, int]:
        return 1, self._ranks

    def apply(self, lr: float, arrays: range | None = None) -> None:
        self.own += self._draw.normal(0, lr, SIZE).astype(np.float32)

    def weights(self) -> np.ndarray:
        return self.own

    def set_weights(self, weights: np.ndarray) -> None:
        self.own[:] = weights


def walked(meeting: ThreadRendezvous, text: str, loading: dict[int, Any], steps: int) -> list[np.ndarray]:
    """Weights after each step and after a synchronization. `loading`: step -> function of the rank that loads."""
    world = connect("torch", backend="tcp", group=RankGroup(meeting, None, reach(meeting.rank)))
    try:
        config = TrainConfig(framework="torch", device="cpu", strategy=text)
        strategy = strategies.resolve(config).make(config, world, SHAPES)
        walk, seen = Walk(meeting.rank, meeting.size), []
        for step in range(steps):
            if step in loading and (loaded := loading[step](meeting.rank)) is not None:
                walk.own[:] = loaded
                strategy.restart(walk)
            strategy.step(walk, 0.1, Clock())
            seen.append(walk.own.copy())
        strategy.synchronize(walk, Clock())
        return [*seen, walk.own.copy()]
    finally:
        world.shutdown()


def ranks(text: str, loading: dict[int, Any], steps: int, size: int = 3) -> list[list[np.ndarray]]:
    return at_once([lambda each=each: walked(each, text, loading, steps) for each in meetings(size)])


WHO = {
    "all ranks the same": lambda rank: np.full(SIZE, 7.0),
    "each rank another": lambda rank: np.full(SIZE, 1.0 + rank),
    "one rank": lambda rank: np.full(SIZE, 7.0) if rank == 1 else None,
}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(
    "text",
    ["local-sgd:every=4", "local-sgd:every=4+powersgd:rank=1", "local-sgd:every=2,staleness=3,outer_momentum=0.5+int8"],
)
def test_ranks_agree_again_whoever_has_loaded_a_model(text: str, who: str) -> None:
    """Also within a round, and while earlier rounds are being exchanged."""
    for step in (5, 6, 8):
        ends = [seen[-1] for seen in ranks(text, {step: WHO[who]}, 18)]
        for other in ends[1:]:
            np.testing.assert_array_equal(other, ends[0])


@pytest.mark.parametrize("who", WHO)
def test_loaded_models_are_averaged_as_they_are(who: str) -> None:
    """With a lossy reducer too, whose error would be that of the whole jump."""
    for text in ("local-sgd:every=4", "local-sgd:every=4+int4"):
        seen = ranks(text, {6: WHO[who]}, 8)
        before, after = [each[6] for each in seen], [each[7] for each in seen]
        changes = 0.1 * np.sqrt(SIZE)  # of one more step
        error = np.linalg.norm(after[0] - np.mean(before, axis=0))
        assert error < changes, (text, error)


def test_what_a_script_writes_is_averaged_though_ranks_write_different_things() -> None:
    """Between two rounds as well: the ranks' common weights stay the same on all of them."""
    world = "local-sgd:every=2"

    def writing(meeting: ThreadRendezvous) -> np.ndarray:
        connected = connect("torch", backend="tcp", group=RankGroup(meeting, None, reach(meeting.rank)))
        try:
            config = TrainConfig(framework="torch", device="cpu", strategy=world)
            strategy = strategies.resolve(config).make(config, connected, SHAPES)
            walk = Walk(meeting.rank, meeting.size)
            for _ in range(6):
                strategy.step(walk, 0.1, Clock())
                walk.own += meeting.rank  # after every second step all ranks have equal weights
            strategy.synchronize(walk, Clock())
            for _ in range(2):
                strategy.step(walk, 0.1, Clock())
            return walk.own.copy()
        finally:
            connected.shutdown()

    first, *others = at_once([lambda each=each: writing(each) for each in meetings(3)])
    for other in others:
        np.testing.assert_array_equal(first, other)
    assert abs(first.mean() - 6) < 0.5, "three rounds of two writes, whose mean is 1"
