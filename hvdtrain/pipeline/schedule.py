"""A stage's part of a step: in which order it goes forward and backward, and what it sends and receives meanwhile.

Of K stages and M micro-batches, stage s of `1f1b` goes forward with K - 1 - s of them before its first backward, and
then alternates: it holds the activations of at most K - s micro-batches. `eager` goes forward with twice as many first,
so that there is something to compute while activations and gradients are on a slow link (Zhuang et al., "On optimizing
the communication of model parallelism", MLSys 2023). `gpipe` goes forward with all first and holds all M. All go
backward in the order of the micro-batches, so gradients are added up in that order and the weights are those of one
process that goes through the same micro-batches, bit for bit where its arithmetic is the same.

Behind the last activations of a step each stage sends on whether any rank before was asked to stop; behind the last
gradients the last stage sends back the step's totals, which it alone knows. So all stages record the same and stop
together, and nothing waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np

from hvdtrain.comm.channel import Channel
from hvdtrain.data import Batch
from hvdtrain.strategies.reducers import quantize
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

Order = Literal["1f1b", "eager", "gpipe"]
Coding = Literal["fp32", "bf16", "int8"]
NUMBER_BYTES: dict[Coding, float] = {"fp32": 4, "bf16": 2, "int8": 1 + 4 / quantize.LENGTH}
"""Of a number on its way"""


class Part(Protocol):
    """The layers of a stage, in a framework. Arrays are float32, images laid out (samples, height, width, channels)."""

    def forward(self, number: int, batch: Batch, inputs: np.ndarray | None) -> np.ndarray | None:
        """Micro-batch `number`, from the stage before (None: the batch's own inputs); what the next stage is to get.
        The last stage keeps the loss and has None."""

    def back(self, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        """From the gradient of what `forward` returned to that of its inputs; None at the ends."""

    def totals(self) -> np.ndarray:
        """Of the last stage, since it was asked last: the sums of losses and the metric's sums."""

    def see(self, batch: Batch, inputs: np.ndarray | None, training: bool) -> np.ndarray:
        """Forward alone. In `training` running statistics learn from it. The last stage's totals, else its outputs."""


Again = tuple[Batch, np.ndarray | None, Any]
"""What it takes to go forward once more: batch, inputs, state of the random numbers"""


class Parted:
    """What replicas of both frameworks have in common that go through a batch in parts: see `frameworks.Replica` and
    `Part`.

    Theirs are `through`, forward, which leaves a micro-batch in `_under_way` and returns what the next stage gets and
    the last stage's totals, and `backward_of`, which is `Part.back` of one that is under way.
    """

    one_backward = False

    def __init__(self, model: Any, *, pipe: Pipe, **told: Any) -> None:
        super().__init__(model, **told)  # type: ignore[call-arg]
        self._pipe = pipe
        self._under_way: dict[int, Any] = {}
        self._again: dict[int, Again] = {}
        """Micro-batches that are to go forward anew before they go backward"""
        self._totals: list[Any] = []
        self._mean_of = 1.0

    def forward(self: Any, number: int, batch: Batch, inputs: np.ndarray | None) -> np.ndarray | None:
        random = self.random_state() if self._pipe.recomputes else None
        output, totals = self.through(number, batch, inputs)
        if totals is not None:
            self._totals.append(totals)
        if self._pipe.recomputes:
            self._again[number] = batch, inputs, random
            del self._under_way[number]
        return output

    def back(self: Any, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        if number not in self._again:
            return self.backward_of(number, gradient)
        batch, inputs, random = self._again.pop(number)
        seen, now = {name: array.copy() for name, array in self.local_state().items()}, self.random_state(random)
        self.through(number, batch, inputs)
        self.random_state(now)
        found = self.backward_of(number, gradient)
        self.load_local(seen)  # running statistics have learnt of the micro-batch before
        return found

    def _given(self, batch: Batch, inputs: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """The batch's arrays, the first of them from the stage before, if there is one."""
        return batch.arrays if inputs is None else (inputs, *batch.arrays[1:])

    def random_state(self, state: Any = None) -> Any:
        """That of the framework's own random numbers, which `state` replaces; None where a model takes none of them."""

    def observe(self: Any, batch: Batch) -> None:
        self._pipe.see(self, batch, training=True)

    def evaluate(self: Any, batch: Batch) -> np.ndarray:
        found = self._pipe.see(self, batch, training=False)
        return np.zeros(self._metric.size) if found is None else found

    def waited_s(self) -> float | None:
        return self._pipe.waited_s

    def sent_bytes(self) -> tuple[int, int]:
        return self._pipe.take_sent_bytes()


class Pipe:
    """One rank's place in its pipeline.

    `before` and `after`: the neighbours, None at the ends; `inputs` and `outputs`: the shapes of what comes from the
    one and goes to the other for a sample; `coding`: of activations and gradients on their way.
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
        order: Order = "1f1b",
        coding: Coding = "fp32",
        recompute: bool = False,
    ) -> None:
        self._stage, self._stages, self._order, self._coding = stage, stages, order, coding
        self._before, self._after, self._inputs, self._outputs = before, after, inputs, outputs
        self.last = stage == stages - 1
        self.recomputes = recompute and not (self.last and order != "gpipe")
        """Whether micro-batches go forward anew; not where only one is held, which would save nothing"""
        self.waited_s = 0.0
        """That this rank waited for its neighbours in the last step"""
        self._sent_bytes = 0, 0

    def take_sent_bytes(self) -> tuple[int, int]:
        """Payload given to neighbours on other hosts and on this one, since it was asked last, or a step began."""
        neighbours, (network, local) = [each for each in (self._before, self._after) if each], self._sent_bytes
        self._sent_bytes = (
            sum(each.sent_bytes for each in neighbours),
            sum(each.local_sent_bytes for each in neighbours),
        )
        return self._sent_bytes[0] - network, self._sent_bytes[1] - local

    def train(self, part: Part, batch: Batch, stop: bool) -> np.ndarray:
        """Forward and backward of a step's micro-batches; its totals, float32 (metric.size + 1,): losses, the
        metric's sums, samples, whether to stop. The gradients are the part's."""
        self.waited_s = 0.0
        self.take_sent_bytes()
        micros = batch.parts or (batch,)
        asked, tail = np.array([stop], np.float32), np.empty(0, np.float32)
        for forward, number in order(self._order, self._stage, self._stages, len(micros)):
            micro, is_last = micros[number], number == len(micros) - 1
            if forward:
                self._send(self._after, part.forward(number, micro, self._receive(self._before, micro, self._inputs)))
                if is_last:
                    asked = np.maximum(asked, self._told(self._before, asked))
                    tail = self._passed(self._after, asked)
                    if self.last:
                        tail = np.concatenate([part.totals(), [batch.weight], asked], dtype=np.float32)
            else:
                self._send(self._before, part.back(number, self._receive(self._after, micro, self._outputs)))
                if is_last:
                    tail = self._passed(self._before, self._told(self._after, tail))
        return tail

    def see(self, part: Part, batch: Batch, *, training: bool) -> np.ndarray | None:
        """Forward alone; the totals of the last stage, None of the others."""
        totals: list[np.ndarray] = []
        for micro in batch.parts or (batch,):
            found = part.see(micro, self._receive(self._before, micro, self._inputs), training)
            if self.last:
                totals.append(found)
            else:
                self._send(self._after, found)
        return np.sum(totals, axis=0) if self.last else None

    def leave(self) -> None:
        """Closes the connections, after what was sent has gone out."""
        for each in (self._before, self._after):
            if each is not None:
                each.leave()

    def _send(self, channel: Channel | None, array: np.ndarray | None) -> None:
        if channel is not None and array is not None:
            channel.send(packed(array, self._coding))

    def _receive(self, channel: Channel | None, batch: Batch, shape: tuple[int, ...]) -> np.ndarray | None:
        if channel is None:
            return None
        began = time.perf_counter()
        message = channel.receive()
        self.waited_s += time.perf_counter() - began
        return unpacked(message, (len(batch.arrays[0]), -1, *shape[1:]), self._coding)

    def _told(self, channel: Channel | None, mine: np.ndarray) -> np.ndarray:
        """What a neighbour says of the step, this rank's own word without one."""
        return mine if channel is None else channel.receive().view(np.float32)

    def _passed(self, channel: Channel | None, words: np.ndarray) -> np.ndarray:
        if channel is not None:
            channel.send(words)
        return words


def packed(array: np.ndarray, coding: Coding) -> np.ndarray:
    """Float32 numbers as they are sent. int8: of each block of 64 in row, a float32 scale, 1/127 of the largest
    magnitude, and the nearest multiple of it, so that a number is off by at most 1/254 of that magnitude."""
    if coding == "fp32":
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    if coding == "bf16":
        return to_bf16(flat)
    whole = np.pad(flat, (0, -flat.size % quantize.LENGTH)) if flat.size % quantize.LENGTH else flat
    message = quantize.encode(whole.reshape(-1, quantize.LENGTH), 8)
    return message[: message.size - (whole.size - flat.size)]


def unpacked(message: np.ndarray, shape: tuple[int, ...], coding: Coding) -> np.ndarray:
    """What a message of `packed` stands for, in this shape, of which one side may be -1."""
    if coding == "fp32":
        return message.view(np.float32).reshape(shape)
    if coding == "bf16":
        return from_bf16(message.view(np.uint16)).reshape(shape)
    blocks = np.empty((-(-message.size // (4 + quantize.LENGTH)), quantize.LENGTH), np.float32)
    numbers = message.size - 4 * len(blocks)
    quantize.decode(np.pad(message, (0, blocks.size - numbers)) if blocks.size > numbers else message, blocks, 8)
    return blocks.reshape(-1)[:numbers].reshape(shape)


def ahead(how: Order, stage: int, stages: int, count: int) -> int:
    """How many of `count` micro-batches a stage goes forward with before it alternates: forward, backward, forward."""
    behind = stages - 1 - stage
    return min({"1f1b": behind, "eager": 2 * behind, "gpipe": count - 1}[how], count - 1)


def order(how: Order, stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """(whether forward, micro-batch) of each act of a stage in a step of `count` micro-batches."""
    first = ahead(how, stage, stages, count)
    yield from ((True, number) for number in range(first))
    for number in range(count):
        if first + number < count:
            yield True, first + number
        yield False, number
