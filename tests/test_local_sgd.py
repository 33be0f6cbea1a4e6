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


def span(arrays: range | None) -> slice:
    return slice(0 if not arrays or arrays.start == 0 else 128, 128 if arrays and arrays.stop == 1 else SIZE)


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

    def weights(self, arrays: range | None = None) -> np.ndarray:
        return self.own[span(arrays)]

    def set_weights(self, weights: np.ndarray, arrays: range | None = None) -> None:
        self.own[span(arrays)] = weights


def walked(meeting: ThreadRendezvous, text: str, loading: dict[int, Any], steps: int) -> list[np.ndarray]:
    """Weights after each step and after a synchronization. `loading`: step -> function of the rank that loads."""
    world = connect("torch", backend="tcp", group=RankGroup(meeting, None, reach(meeting.rank)))
    try:
        config = TrainConfig(framework="torch", device="cpu", strategy=text, optimizer="adam")
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
    [
        "local-sgd:every=4",
        "local-sgd:every=4+powersgd:rank=1",
        "local-sgd:every=2,staleness=3,outer_momentum=0.5+int8",
        "local-sgd:every=4,staleness=1,parts=2,outer_momentum=0.5+int8",
    ],
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
    for text in ("local-sgd:every=4", "local-sgd:every=4+int4", "local-sgd:every=4,parts=2+int4"):
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


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_part_is_averaged_in_its_turn(staleness: int) -> None:
    """The later arrays come first, and each part is averaged like a separate model. After 13 steps all are averaged."""
    text = f"local-sgd:every=4,parts=2,staleness={staleness},outer_lr=0.7,outer_momentum=0.5,lr_scaling=sqrt"
    seen = np.array(ranks(text, {}, 13))
    changes = np.array([[next_change(draw) for _ in range(13)] for draw in map(np.random.default_rng, range(3))])
    changes *= np.sqrt(3)  # the ranks
    for arrays, first in ((slice(128, SIZE), 2), (slice(0, 128), 4)):
        weights, common, velocity = np.zeros((3, SIZE)), np.zeros(SIZE), np.zeros(SIZE)
        began, sent = weights.copy(), list[tuple[int, np.ndarray]]()
        for step in range(1, 15):  # the last one is the synchronization
            if last := step == 14:
                step = 13
            else:
                weights = weights + changes[:, step - 1]
            if last or step % 4 == first % 4:
                sent.append((step, weights - began))
                began = weights.copy()
            while sent and (last or sent[0][0] + staleness <= step):
                own = sent.pop(0)[1]
                velocity = 0.5 * velocity + own.mean(axis=0)
                move = 0.7 * (own.mean(axis=0) + 0.5 * velocity)
                weights, began, common = weights + move - own, began + move - own, common + move
            np.testing.assert_allclose(seen[:, step - (not last), arrays], weights[:, arrays], atol=1e-5)


def next_change(draw: np.random.Generator) -> np.ndarray:
    return draw.normal(0, 0.1, SIZE)
