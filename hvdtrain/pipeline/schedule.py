"""The schedule of a stage: the order of its forward and backward passes and of its messages.

With K stages and M micro-batches, stage s runs K - 1 - s of them forward before its first backward, and then alternates
(1F1B). So it holds the activations of at most K - s micro-batches. It runs backward in the order of the micro-batches.
So gradients are added in that order, and the weights equal the weights of one process that runs the same micro-batches,
bit for bit if its arithmetic is the same.

After the last activations of a step each stage sends on whether any rank before it was asked to stop. After the last
gradients the last stage sends back the step's totals, which only it knows. So all stages record the same and stop
together, without waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from hvdtrain.comm.channel import Channel
from hvdtrain.data import Batch

T = TypeVar("T")
NUMBER_BYTES = 4
"""Of activations and their gradients"""
"""Bytes per number sent"""


class StageModel(Protocol):
    """The layers of a stage in a framework.

    Arrays are float32. Images have the shape (samples, height, width, channels).
    """

    def forward(self, number: int, batch: Batch, inputs: np.ndarray | None) -> np.ndarray | None:
        """Run micro-batch `number` forward and return the input of the next stage.

        `inputs` come from the previous stage; None in the first stage, which uses the batch's own inputs. The last
        stage keeps the loss and returns None.
        """

    def back(self, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        """Return the gradient of the inputs, given the gradient of the outputs. None at the pipeline's ends."""

    def totals(self) -> np.ndarray:
        """Return the sums of losses and of the metric since the last call. Only for the last stage."""

    def see(self, batch: Batch, inputs: np.ndarray | None, training: bool) -> np.ndarray:
        """Run forward alone and return the outputs; in the last stage, the totals.

        With `training`, running statistics are updated.
        """


class Parted:
    """Common base of both frameworks' replicas that run a batch in micro-batches.

    It implements `frameworks.Replica` and `StageModel`. Subclasses define `through`, which runs a micro-batch forward,
    stores it in `_under_way` and returns the next stage's input and the last stage's totals, and `back`.
    """

    one_backward = False

    def __init__(self, model: Any, *, pipe: Pipe, **options: Any) -> None:
        super().__init__(model, **options)  # type: ignore[call-arg]
        self._pipe = pipe
        self._under_way: dict[int, Any] = {}
        self._totals: list[Any] = []
        self._mean_of = 1.0

    def forward(self: Any, number: int, batch: Batch, inputs: np.ndarray | None) -> np.ndarray | None:
        output, totals = self.through(number, batch, inputs)
        if totals is not None:
            self._totals.append(totals)
        return output

    def _given(self, batch: Batch, inputs: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """Return the batch's arrays. The first is replaced by `inputs` from the previous stage, if there is one."""
        return batch.arrays if inputs is None else (inputs, *batch.arrays[1:])

    def observe(self: Any, batch: Batch) -> None:
        self._pipe.see(self, batch, training=True)

    def evaluate(self: Any, batch: Batch) -> np.ndarray:
        totals = self._pipe.see(self, batch, training=False)
        return np.zeros(self._metric.size) if totals is None else totals

    def waited_s(self) -> float | None:
        return self._pipe.waited_s

    def sent_bytes(self) -> tuple[int, int]:
        return self._pipe.take_sent_bytes()


class Pipe:
    """Runs one rank's stage of a pipeline.

    `before` and `after`: the neighbours, None at the ends. `inputs` and `outputs`: shapes of one sample's activations
    from the previous stage and to the next one.
    """

    def __init__(
        self,
        stage: int = 0,
        stages: int = 1,
        *,
        before: Channel | None = None,
        after: Channel | None = None,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
    ) -> None:
        self._stage, self._stages = stage, stages
        self._before, self._after, self._inputs, self._outputs = before, after, inputs, outputs
        self.last = stage == stages - 1
        self.waited_s = 0.0
        """Seconds that this rank waited for its neighbours in the last step"""
        self._sent_bytes = 0, 0

    def take_sent_bytes(self) -> tuple[int, int]:
        """Return the payload sent to neighbours on other hosts and on this host since the last call or step."""
        neighbours, (network, local) = [each for each in (self._before, self._after) if each], self._sent_bytes
        self._sent_bytes = (
            sum(each.sent_bytes for each in neighbours),
            sum(each.local_sent_bytes for each in neighbours),
        )
        return self._sent_bytes[0] - network, self._sent_bytes[1] - local

    def train(self, model: StageModel, batch: Batch, stop: float) -> np.ndarray:
        """Run a step's micro-batches forward and backward; the gradients stay in `model`.

        Returns the step's totals, float32 of shape (metric.size + 1,): the losses, the metric's sums, the samples, and
        whether to stop.
        """
        self.waited_s = 0.0
        self.take_sent_bytes()
        micros = batch.parts or (batch,)
        stop_asked, tail = np.array([stop], np.float32), np.empty(0, np.float32)
        for forward, number in order(self._stage, self._stages, len(micros)):
            micro, is_last = micros[number], number == len(micros) - 1
            if forward:
                inputs = self._receive(self._before, micro, self._inputs)
                self._send(self._after, model.forward(number, micro, inputs))
                if is_last:
                    stop_asked = np.maximum(stop_asked, self._message(self._before, stop_asked))
                    tail = self._forwarded(self._after, stop_asked)
                    if self.last:
                        tail = np.concatenate([model.totals(), [batch.weight], stop_asked], dtype=np.float32)
            else:
                gradient = self._receive(self._after, micro, self._outputs)
                self._send(self._before, model.back(number, gradient))
                if is_last:
                    tail = self._forwarded(self._before, self._message(self._after, tail))
        return tail

    def see(self, model: StageModel, batch: Batch, *, training: bool) -> np.ndarray | None:
        """Run forward alone. Returns the totals in the last stage, None in the others."""
        totals: list[np.ndarray] = []
        for micro in batch.parts or (batch,):
            output = model.see(micro, self._receive(self._before, micro, self._inputs), training)
            if self.last:
                totals.append(output)
            else:
                self._send(self._after, output)
        return np.sum(totals, axis=0) if self.last else None

    def shut_down(self) -> None:
        """Close the connections after everything has been sent."""
        for each in (self._before, self._after):
            if each is not None:
                each.shutdown()

    def _send(self, channel: Channel | None, array: np.ndarray | None) -> None:
        if channel is not None and array is not None:
            self._waits(channel.send, array)

    def _receive(self, channel: Channel | None, batch: Batch, shape: tuple[int, ...]) -> np.ndarray | None:
        if channel is None:
            return None
        return self._waits(channel.receive).view(np.float32).reshape(len(batch.arrays[0]), -1, *shape[1:])

    def _message(self, channel: Channel | None, own: np.ndarray) -> np.ndarray:
        """Return a neighbour's message about the step; without a neighbour, this rank's own."""
        return own if channel is None else self._waits(channel.receive).view(np.float32)

    def _forwarded(self, channel: Channel | None, message: np.ndarray) -> np.ndarray:
        """Send a message to a neighbour, if there is one, and return it."""
        if channel is not None:
            self._waits(channel.send, message)
        return message

    def _waits(self, transfer: Callable[..., T], *arguments: Any) -> T:
        """Call a method of a channel, which may block, and count its time as waiting."""
        began = time.perf_counter()
        result = transfer(*arguments)
        self.waited_s += time.perf_counter() - began
        return result


def warm_up(stage: int, stages: int, count: int) -> int:
    """Return how many of `count` micro-batches a stage runs forward before it alternates."""
    return min(stages - 1 - stage, count - 1)


def order(stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """Yield (whether forward, micro-batch) for each action of a stage in a step with `count` micro-batches."""
    first = warm_up(stage, stages, count)
    yield from ((True, number) for number in range(first))
    for number in range(count):
        if first + number < count:
            yield True, first + number
        yield False, number
