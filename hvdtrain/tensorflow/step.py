"""A strategy's step inside a TensorFlow graph.

A strategy exchanges gradients, lets the replica update itself, and may then change the weights. In a graph the update
consists of the graph's own operations, so the step is divided: `report` copies a bucket of gradients into the vector as
soon as backward has computed them, and starts its exchange; `begin` returns the sums for the update, and `end` returns
the new weights. A strategy that changes weights waits between the last two, in its own thread. None of them runs a
graph, because a graph inside a graph would deadlock with one inter-op thread.

Gradients are copied once, into the vector that the strategy changes in place. The update reads the same memory.
"""

from __future__ import annotations

import functools
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.frameworks.flat_tensorflow import FlatVariables, aligned
from hvdtrain.horovod_api import job
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import Spec, Strategy
from hvdtrain.strategies.algorithms.synchronous import buckets

TAIL = 4
"""Numbers that follow the gradients: the loss (unknown here), whether this rank has joined (`hvd.join`), the samples,
and requests (none)"""
JOINED = 1
"""Index in the tail"""
NOT_SHARED = 2
"""References to an array that one name refers to, as `sys.getrefcount` counts them"""


class Step:
    """Exchanges the gradients of the same variables in every step. Implements `strategies.Vectors`.

    All ranks must make the same number of steps. With `average`, the sum over ranks is divided by their number.
    """

    def __init__(self, exchange: Spec, *, average: bool, optimizer: type = object) -> None:
        self.exchange, self._optimizer = exchange, optimizer
        self._divided = average and not exchange.capabilities.local_updates
        self._variables: list[Any] = []
        self._flat = FlatVariables([])
        self._strategy: Strategy | None = None
        self._generation = 0
        self.world: Communicator | None = None
        """The strategy's communicator, after the first step"""
        self._clock, self._sent_bytes = Clock(), 0
        self._loaded: dict[str, np.ndarray] | None = None
        self._vector = np.zeros(0, np.float32)
        self._buckets: Sequence[range] = ()
        """The strategy's buckets; empty if it reads the whole vector"""
        self._new: np.ndarray | None = None
        self._events: queue.SimpleQueue[bool | BaseException] = queue.SimpleQueue()
        self._resume = threading.Semaphore(0)
        self._due = False
        self._joined = False
        """Whether this rank has no more steps, and takes part with zeros"""
        self.postponed = False
        """Whether ranks make their steps alone, because a strategy that averages weights must not start yet"""

    def in_graph(self, gradients: Sequence[Any], variables: Sequence[Any], update: Callable[[list[Any]], Any]) -> None:
        """Exchange dense gradients and call `update(gradients)` if an update is due. Collective when the graph runs.

        Raises ValueError if the variables differ from the first call's.
        """
        if not self._variables:
            self._variables, self._flat = list(variables), FlatVariables(map(tensor, variables))
        if [id(each) for each in variables] != [id(each) for each in self._variables]:
            raise ValueError(
                f"strategy {self.exchange}: an optimizer must update the same variables in the same order in every "
                "step; hint: use an optimizer for each set of variables"
            )
        exchange = self.exchange
        before: list[Any] = []
        for number, bucket in enumerate(self._traced_buckets()):
            pieces = [tf.cast(gradients[index], tf.float32) for index in bucket]
            report = functools.partial(self._report, number, self._flat.borders[bucket.start])
            with tf.control_dependencies(before):
                before = [tf.numpy_function(report, pieces, [])]
        with tf.control_dependencies(before):
            vector, due = tf.numpy_function(self._begin, [], [tf.float32, tf.bool])
        vector.set_shape([self._flat.size + TAIL])
        if exchange.algorithm is None:
            update(self._flat.split_tensor(vector))
            return
        updated = tf.cond(due, lambda: _true(update(self._flat.split_tensor(vector))), lambda: False)
        if exchange.capabilities.local_updates:
            with tf.control_dependencies([updated]):
                weights, changed = tf.numpy_function(self._end, [], [tf.float32, tf.bool])
            weights.set_shape([None])
            tf.cond(changed, lambda: self._assign(weights), lambda: False)

    def _assign(self, weights: Any) -> bool:
        for variable, piece in zip(self._flat.variables, self._flat.split_tensor(weights), strict=True):
            variable.assign(piece)
        return True

    def _traced_buckets(self) -> list[range]:
        """Return the buckets that the graph reports; the strategy may exchange them together."""
        reducer = self.exchange.reducer
        if self.exchange.algorithm is None and reducer is not None and reducer.cls.supports_buckets:
            return buckets([tuple(variable.shape) for variable in self._flat.variables])
        return [range(len(self._variables))]

    # --- inside the graph's operations --------------------------------------------------------------------------

    def _report(self, number: int, begin: int, *gradients: np.ndarray) -> None:
        if number == 0:
            # A tensor of an earlier step may still share the memory.
            if self._vector.size != self._flat.size + TAIL or sys.getrefcount(self._vector) > NOT_SHARED:
                self._vector = aligned(self._flat.size + TAIL)
            self._vector[self._flat.size :] = self.tail()
        piece = self._vector[begin : begin + sum(each.size for each in gradients)]
        np.concatenate([each.reshape(-1) for each in gradients], out=piece)
        if self._is_postponed():
            return
        if number == 0:
            job.job().exchanging(id(self))
        if self._divided:  # here, because the number of ranks may change, while a graph is constant
            piece *= np.float32(1.0 / job.job().size)
        strategy = self._made()
        if self._buckets:
            strategy.on_bucket_ready(number, self._vector)

    def _is_postponed(self) -> bool:
        return self.postponed and self.exchange.capabilities.local_updates

    def _begin(self) -> tuple[np.ndarray, np.bool_]:
        if self._is_postponed():
            return self._vector, np.bool_(True)
        self._due = False
        strategy = self._made()
        if strategy.capabilities.local_updates:
            threading.Thread(target=self._run, args=(strategy,), daemon=True).start()
            self._wait()
        else:
            self._sent_bytes += strategy.step(self, 1.0, self._clock).sent_bytes
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
            self._sent_bytes += strategy.step(self, 1.0, self._clock).sent_bytes
            self._events.put(False)
        except BaseException as error:
            self._events.put(error)

    def _wait(self) -> None:
        """Wait until the strategy asks for the update or ends its step."""
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event

    def _present(self) -> Strategy | None:
        """Return the strategy; None before the first step, and after the loss of a host until the next step."""
        if self._strategy is not None and self._generation != job.job().generation:
            self._strategy = self._loaded = None
            self._events, self._resume = queue.SimpleQueue(), threading.Semaphore(0)
        return self._strategy

    def _made(self) -> Strategy:
        strategy = self._present()
        if strategy is None:
            shapes = [tuple(variable.shape) for variable in self._flat.variables]
            strategy, self.world = job.job().strategy(self.exchange, shapes, self._optimizer)
            self._strategy, self._generation = strategy, job.job().generation
            self._buckets = strategy.buckets()
            if self._generation == 0:
                job.job().on_join(self._take_part)
            if self._loaded is not None:
                strategy.load(self._loaded)
            if strategy.capabilities.local_updates:
                weights = 0 if self._loaded is not None else zlib.crc32(self.weights().data)
                hint = "build the model, and call hvd.broadcast_variables(model.variables, root_rank=0)"
                job.check_beginning(self.world, weights, hint)
        return strategy

    # --- strategies.Vectors -------------------------------------------------------------------------------------

    def vector(self) -> np.ndarray:
        return self._vector

    def tail(self) -> np.ndarray:
        return np.array([0.0, self._joined, 1.0, 0.0])

    def share(self) -> tuple[int, int]:
        return 1, job.job().size

    updates_parts = False

    def apply(self, lr: float, arrays: range | None = None) -> None:
        self._due = True
        if not self._joined and self._made().capabilities.local_updates:
            before = self.weights() if lr != 1 else None  # the graph has the learning rate
            self._events.put(True)
            self._resume.acquire()
            if before is not None:
                self.set_weights(before + np.float32(lr) * (self.weights() - before))

    def weights(self, arrays: range | None = None) -> np.ndarray:
        return self._flat.weights(arrays) if self._new is None else self._new[self._flat.span(arrays)]

    def set_weights(self, weights: np.ndarray, arrays: range | None = None) -> None:
        if self._new is None:
            self._new = weights.copy() if arrays is None else self._flat.weights()
        self._new[self._flat.span(arrays)] = weights

    # --- outside of graphs --------------------------------------------------------------------------------------

    def _take_part(self) -> bool:
        """Exchange once without gradients, because this rank has joined. Returns whether all ranks have. Collective."""
        strategy, self._new, self._joined = self._made(), None, True
        before = {} if strategy.capabilities.local_updates else {n: each.copy() for n, each in strategy.state().items()}
        self._vector = aligned(self._flat.size + TAIL)
        self._vector[: self._flat.size], self._vector[self._flat.size :] = 0, self.tail()
        try:
            done = strategy.step(self, 1.0, self._clock)
        finally:
            self._joined = False
        if self._new is not None:
            self._assign(tf.constant(self._new))
        all_joined = done.totals is not None and bool(done.totals[JOINED] == done.totals[-1])
        if all_joined and before:  # no rank has used the sum, so the residual must keep its part of it
            strategy.load(before)
        return all_joined

    def synchronize(self) -> None:
        """Wait for exchanges under way and give all ranks the same weights. Collective."""
        strategy = self._present()
        if strategy is None:
            return
        self._new = None
        self._sent_bytes += strategy.synchronize(self, self._clock).sent_bytes
        if self._new is not None:
            self._assign(tf.constant(self._new))

    def spent(self) -> tuple[float, int, int]:
        """Return the seconds waited for the exchange, and the bytes sent to other hosts and within this host.

        All count from the last call.
        """
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        local_sent_bytes = self.world.take_local_sent_bytes() if self.world else 0
        return self._clock.take("communication"), sent_bytes, local_sent_bytes

    def state(self) -> dict[str, np.ndarray]:
        """Return the strategy's state on this rank, to resume exactly; empty before the first step."""
        strategy = self._present()
        return (self._loaded or {}) if strategy is None else strategy.state()

    def load(self, state: dict[str, np.ndarray]) -> None:
        strategy = self._present()
        if strategy is None:
            self._loaded = state
        else:
            strategy.load(state)


def split_local(gradients: list[Any], variables: list[Any], local: set[int], ranks: Any) -> tuple[list[int], list[Any]]:
    """Return the indices of the gradients to exchange, and all gradients.

    Gradients of variables whose ids are `local` are not exchanged. They are divided by `ranks` unless it is None (see
    Horovod's `scale_local_gradients`).
    """
    shared: list[int] = []
    scaled = list(gradients)
    for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if gradient is not None and id(tensor(variable)) not in local:
            shared.append(index)
        elif gradient is not None and ranks is not None:
            scaled[index] = gradient / tf.cast(ranks, gradient.dtype)
    return shared, scaled


def tensor(variable: Any) -> Any:
    """Return the TensorFlow variable of a Keras variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _true(_: Any) -> bool:
    return True
