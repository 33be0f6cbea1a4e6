"""A strategy's step inside a TensorFlow graph.

A strategy exchanges, has the replica update itself, and may then look at the weights. A graph makes the update with
its own operations, so the step is two of them: `begin` gives the gradients to update with, `end` the weights to go on
from. In between a strategy that changes weights waits in a thread of its own. Nothing is computed by TensorFlow within
`begin` and `end`: a graph inside a graph would wait for ever where TensorFlow has one thread (`inter_op`).

Gradients are copied once, into the vector that the strategy changes in place; the update reads that very memory.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.horovod_api import job
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import Exchange, Strategy

TAIL = 3
"""See `strategies.Vectors.tail`; a script's ranks weigh the same, and its loss is not known here"""


class Step:
    """See `strategies.Vectors`: the same variables in every step, and all ranks make as many steps.

    `average`: whether the sum over ranks is divided by their number.
    """

    def __init__(self, exchange: Exchange, *, average: bool) -> None:
        self.exchange = exchange
        self._scale = 1.0 / job.job().size if average and not exchange.capabilities.local_updates else 1.0
        self._variables: list[Any] = []
        self._strategy: Strategy | None = None
        self.world: Communicator | None = None
        """Of the strategy, from the first step on"""
        self._clock, self._sent_bytes = Clock(), 0
        self._loaded: dict[str, np.ndarray] | None = None
        self._vector = np.zeros(TAIL, np.float32)
        self._new: np.ndarray | None = None
        self._events: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()
        self._resume = threading.Semaphore(0)
        self._due = False
        self.postponed = False
        """Whether a strategy that averages weights leaves the steps to each rank, as all do not begin alike yet"""

    def in_graph(self, gradients: Sequence[Any], variables: Sequence[Any], update: Callable[[list[Any]], Any]) -> None:
        """Exchanges dense gradients, and updates by `update(gradients)` if any are due. Collective when it runs.

        Raises ValueError for other variables than the first time.
        """
        if not self._variables:
            self._variables = list(variables)
        if [id(each) for each in variables] != [id(each) for each in self._variables]:
            raise ValueError(
                f"strategy {self.exchange}: an optimizer has to update the same variables in every step, in the same "
                "order; give each set of variables an optimizer of its own"
            )
        exchange = self.exchange
        flat = [tf.reshape(tf.cast(each, tf.float32), [-1]) for each in gradients]
        tail = tf.constant([0.0, 1.0 / self._scale, 0.0])  # scaled: no loss, one share, no stop
        vector = tf.concat([*flat, tail], 0) * self._scale
        size = vector.shape[0]
        vector, due = tf.numpy_function(self._begin, [vector], [tf.float32, tf.bool])
        vector.set_shape([size])
        if exchange.algorithm is None:
            update(self._split(vector))
            return
        updated = tf.cond(due, lambda: _done(update(self._split(vector))), lambda: False)
        if exchange.capabilities.local_updates:
            with tf.control_dependencies([updated]):
                weights, changed = tf.numpy_function(self._end, [], [tf.float32, tf.bool])
            weights.set_shape([None])
            tf.cond(changed, lambda: _done(self._assign(weights)), lambda: False)

    def _split(self, vector: Any) -> list[Any]:
        sizes = [each.shape.num_elements() for each in map(tensor, self._variables)]
        parts = tf.split(vector[: sum(sizes)], sizes)
        return [
            tf.cast(tf.reshape(part, each.shape), each.dtype)
            for part, each in zip(parts, map(tensor, self._variables), strict=True)
        ]

    def _assign(self, weights: Any) -> Any:
        for variable, part in zip(self._variables, self._split(weights), strict=True):
            tensor(variable).assign(part)
        return weights

    # --- within the graph's two operations ----------------------------------------------------------------------

    def _begin(self, vector: np.ndarray) -> tuple[np.ndarray, np.bool_]:
        if self.postponed and self.exchange.capabilities.local_updates:
            return vector, np.bool_(True)
        self._vector, self._due = vector, False
        strategy = self._made()
        if strategy.capabilities.local_updates:
            threading.Thread(target=self._run, args=(strategy,), daemon=True).start()
            self._wait()
        else:
            self._sent_bytes += strategy.step(self, 0.0, self._clock).sent_bytes
        return self._vector, np.bool_(self._due)

    def _end(self) -> tuple[np.ndarray, np.bool_]:
        self._new = None
        if self._due:
            self._resume.release()
            self._wait()
        new = self._new
        return (np.zeros(0, np.float32), np.bool_(False)) if new is None else (new, np.bool_(True))

    def _run(self, strategy: Strategy) -> None:
        try:
            self._sent_bytes += strategy.step(self, 0.0, self._clock).sent_bytes
            self._events.put(False)
        except BaseException as error:
            self._events.put(error)

    def _wait(self) -> None:
        """Until the strategy wants the update, or has made its step."""
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event

    def _made(self) -> Strategy:
        if self._strategy is None:
            shapes = [tuple(tensor(each).shape) for each in self._variables]
            self._strategy, self.world = job.job().strategy(self.exchange, shapes)
            if self._loaded is not None:
                self._strategy.load(self._loaded)
            if self._strategy.capabilities.local_updates:
                weights = 0 if self._loaded is not None else zlib.crc32(self.weights().data)
                how = "build the model, and call hvd.broadcast_variables(model.variables, root_rank=0)"
                job.check_beginning(self.world, weights, how)
        return self._strategy

    # --- strategies.Vectors -------------------------------------------------------------------------------------

    def vector(self) -> np.ndarray:
        return self._vector

    def tail(self) -> np.ndarray:
        return np.array([0.0, 1.0, 0.0])

    def share(self) -> tuple[int, int]:
        return 1, job.job().size

    def apply(self, lr: float) -> None:
        self._due = True
        if self._made().capabilities.local_updates:
            self._events.put(True)
            self._resume.acquire()

    def weights(self) -> np.ndarray:
        if self._new is not None:
            return self._new
        flat = [np.asarray(memoryview(tensor(each).read_value())).reshape(-1) for each in self._variables]
        return np.concatenate(flat, dtype=np.float32)

    def set_weights(self, weights: np.ndarray) -> None:
        self._new = weights

    # --- outside of graphs --------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for what is on its way, and makes the weights the same on all ranks. Collective."""
        if self._strategy is None:
            return
        self._new = None
        self._sent_bytes += self._strategy.synchronize(self, self._clock).sent_bytes
        if self._new is not None:
            self._assign(tf.constant(self._new))

    def spent(self) -> tuple[float, int, int]:
        """Since the last call: seconds waited for the exchange, bytes sent to other hosts, and to ranks of this one."""
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        local_sent_bytes = self.world.take_local_sent_bytes() if self.world else 0
        return self._clock.take("communication"), sent_bytes, local_sent_bytes

    def state(self) -> dict[str, np.ndarray]:
        """What this rank's exchange must have to go on as if never interrupted; empty before the first step."""
        return {} if self._strategy is None else self._strategy.state()

    def load(self, state: dict[str, np.ndarray]) -> None:
        if self._strategy is None:
            self._loaded = state
        else:
            self._strategy.load(state)


def apart(gradients: list[Any], variables: list[Any], own: set[int], ranks: int | None) -> tuple[list[int], list[Any]]:
    """Places of the gradients that are exchanged: those there are, but of a rank's `own` variables (their ids); and all
    gradients, the own ones divided by `ranks` unless it is None (see Horovod's `scale_local_gradients`)."""
    shared: list[int] = []
    found = list(gradients)
    for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if gradient is not None and id(tensor(variable)) not in own:
            shared.append(index)
        elif gradient is not None and ranks:
            found[index] = gradient / tf.cast(ranks, gradient.dtype)
    return shared, found


def tensor(variable: Any) -> Any:
    """TensorFlow's variable of a Keras one."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _done(_: Any) -> bool:
    return True
