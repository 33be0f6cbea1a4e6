"""A rank of an elastic job that trains on random gradients, and kills itself at given points of an exchange.

    launch/mpirun.sh --elastic -H 127.0.0.1:1,127.0.0.2:1,... python elastic_ranks.py FOLDER STRATEGY KILLS

KILLS is a JSON list of [rank, step, n]: from that step on, the rank dies in its n-th message, half of which it sends.
Each survivor writes FOLDER/RANK.json. Used by test_elastic.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain import strategies
from hvdtrain.comm import lifecycle, world
from hvdtrain.comm.backends import tcp
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import STOP, Exchanged
from hvdtrain.training.membership import ElasticMembership, Outcome
from hvdtrain.training.train_state import Position

SHAPES = ((60, 50), (50,), (80, 70), (70, 90), (30,))
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)
BORDERS = [0, *itertools.accumulate(int(np.prod(shape)) for shape in SHAPES)]
STEPS, LR, SAMPLES = 12, 0.05, 8


def span(arrays: range | None) -> slice:
    return slice(BORDERS[arrays.start], BORDERS[arrays.stop]) if arrays else slice(0, SIZE)


class Replica:
    """Weights with momentum, and one running statistic. See `strategies.Vectors`."""

    def __init__(self) -> None:
        self._weights, self.momentum = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self.memory, self.statistic = np.zeros(SIZE + 3, np.float32), np.zeros(4, np.float32)

    def backward(self, step: int, rank: int, ranks: int, local: bool, request: float) -> None:
        samples = SAMPLES + rank
        self._share = samples, sum(SAMPLES + each for each in range(ranks))
        random = np.random.default_rng([step, rank])
        self.memory[:SIZE] = random.normal(size=SIZE) * samples / (samples if local else self._share[1])
        self.memory[SIZE:] = samples, samples, request
        self.statistic += random.normal()

    def vector(self) -> np.ndarray:
        return self.memory

    def tail(self) -> np.ndarray:
        return self.memory[SIZE:].astype(np.float64)

    def share(self) -> tuple[int, int]:
        return self._share

    updates_parts = False

    def apply(self, lr: float) -> None:
        self.momentum *= np.float32(0.9)
        self.momentum += self.memory[:SIZE]
        self._weights -= np.float32(lr) * self.momentum

    def weights(self, arrays: range | None = None) -> np.ndarray:
        return self._weights[span(arrays)]

    def set_weights(self, weights: np.ndarray, arrays: range | None = None) -> None:
        self._weights[span(arrays)] = weights

    def local_state(self) -> dict[str, np.ndarray]:
        return {"statistic": self.statistic}

    def load_local(self, state: dict[str, np.ndarray]) -> None:
        self.statistic[:] = state["statistic"]


def die_in_message(ranks: Any, step: int, number: int) -> None:
    """From `step` on, send half of the `number`-th message and die."""
    swap, count = tcp.swap, 0

    def deadly(target: Any, data: Any, source: Any, *more: Any) -> Any:
        nonlocal count
        count += ranks.step >= step
        if count < number:
            return swap(target, data, source, *more)
        if target is not None and data is not None:
            message = data.nbytes.to_bytes(8, "little") + data.tobytes()
            target.socket.setblocking(True)
            target.socket.sendall(message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    tcp.swap = deadly


def main(stop: lifecycle.StopSignal) -> int:
    folder, text, kills = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    ranks: Any = world.connect("torch", backend="tcp", group=world.find_ranks("torch", horovod=False, elastic=True))
    own, replica, clock = ranks.rank, Replica(), Clock()
    strategy: Any = strategies.parse(text).make(TrainConfig(strategy=text), ranks, SHAPES)
    buckets, local = strategy.buckets(), strategy.capabilities.local_updates
    for rank, step, number in kills:
        if rank == own:
            die_in_message(ranks, step, number)
    views: list[Any] = []
    unchanged: list[bool] = []
    before: list[bytes] = []
    totals, stopped = np.zeros(2), False

    def learn(done: Exchanged) -> None:
        nonlocal totals, stopped
        totals += 0 if done.totals is None else done.totals
        stopped |= done.stop

    class Members(ElasticMembership):
        """They have no work to divide."""

        def _divide(self, lost_s: float) -> None:
            views.append(list(ranks.view.ranks))
            self._divisions += 1

    at = Position()
    state: Any = SimpleNamespace(replica=replica, strategy=strategy, at=at, learn=learn, job=None)
    members = Members(state, ranks, None, None)

    def arrays() -> list[bytes]:
        all_arrays = [replica.weights(), replica.momentum, replica.statistic, *strategy.state().values()]
        return [np.asarray(array).tobytes() for array in all_arrays]

    settle, load_local = strategy.settle, replica.load_local

    def settled(replica: Any, counts: bool) -> Any:
        weights = replica.weights().copy()
        done = settle(replica, counts)
        if done.totals is None:  # nothing was exchanged, so this rank keeps its own weights
            unchanged.append(weights.tobytes() == replica.weights().tobytes())
        return done

    def restored(statistics: Any) -> None:  # the last part of undoing a step
        load_local(statistics)
        if before:
            unchanged.append(before == arrays())

    def train() -> None:
        replica.backward(at.step, ranks.rank, ranks.size, local, STOP * (ranks.number == 2 and at.step == 3))
        for number in range(len(buckets)):
            strategy.on_bucket_ready(number, replica.memory)
        learn(strategy.step(replica, LR, clock))
        at.step += 1

    strategy.settle, replica.load_local = settled, restored  # type: ignore[method-assign]
    ranks.begin({})
    while at.step < STEPS:
        before = arrays() if strategy.in_sync else []
        members.step(train)
    before = []
    while members.agree(lambda: learn(strategy.synchronize(replica, clock))) is Outcome.CHANGED:
        pass
    digests = members.until_done(lambda: ranks.gather(hashlib.sha256(replica.weights().tobytes()).hexdigest()))
    report = {
        "digests": digests,
        "unchanged": unchanged,
        "views": views,
        "totals": totals.tolist(),
        "stopped": stopped,
        "view": ranks.view.number,
    }
    (folder / f"{own}.json").write_text(json.dumps(report))
    members.until_done(lambda: None)
    return 0


lifecycle.run(main, debug=True)
