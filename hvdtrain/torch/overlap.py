"""Sends a script's gradients during backward, once its steps are alike.

A script may run backward several times in a step, set gradients to zero in between, clip them, or step only now and
then. So the first steps exchange all gradients in `step`, and observe. Once two steps in a row were alike on all ranks,
a gradient is sent when backward has computed it as often as in those steps. If a gradient changes after it was sent,
all ranks learn that from the step's totals. They discard the sums, exchange the present gradients, and from then on
exchange in `step` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hvdtrain.frameworks.hooks_torch import GradientHooks

MOST_OBSERVED = 20
"""Steps that are observed; a script whose first steps differ exchanges in `step` for good"""


class Mark(NamedTuple):
    """What shows that a gradient has not changed. A change in place increments the version, unless it uses `.data`."""

    gradient: torch.Tensor
    version: int
    norm: torch.Tensor


class Overlap:
    """Decides when the gradients of a step are final."""

    def __init__(
        self, buckets: Sequence[range], parameters: Sequence[torch.nn.Parameter], send: Callable[[int], None]
    ) -> None:
        """`send(number)` starts the exchange of a bucket's gradients."""
        self._buckets, self._parameters, self._send = buckets, parameters, send
        self._hooks = GradientHooks(buckets, parameters, self._report, observe=self._observe)
        self._hooks.active = False
        self._allowed, self._observed = True, 0
        self._before: list[int] | None = None
        """How often each gradient was computed in the step before"""
        self._marks: dict[int, Mark] = {}
        """Gradients that were sent or observed in this step"""

    @property
    def active(self) -> bool:
        """Whether this step's gradients are sent during backward. Equal on all ranks."""
        return self._hooks.active

    @property
    def sent(self) -> int:
        """The number of buckets that were sent in this step."""
        return self._hooks.next

    def begin(self) -> None:
        """A backward pass begins, if somebody says so."""

    def pause(self) -> None:
        """Send nothing in the step that begins."""
        self._hooks.active = False

    def remove(self) -> None:
        self._hooks.remove()

    def _report(self, number: int) -> None:
        for index in self._buckets[number]:
            if (gradient := self._parameters[index].grad) is not None:
                self._marks[index] = Mark(gradient, gradient._version, gradient.detach().norm())
        self._send(number)

    def _observe(self, index: int) -> None:
        gradient = self._parameters[index].grad
        if self._allowed and gradient is not None:
            self._marks[index] = Mark(gradient, gradient._version, gradient.detach().norm())

    def changed(self) -> bool:
        """Whether a gradient has changed since it was sent or observed. Called in `step`."""
        number = self.sent if self.active else len(self._buckets)
        indices = [index for bucket in self._buckets[:number] for index in bucket]
        marks = [self._marks.get(index) for index in indices]
        gradients = [self._parameters[index].grad for index in indices]
        for mark, gradient in zip(marks, gradients, strict=True):
            if mark is None or gradient is None:
                if mark is not None or gradient is not None:
                    return True
            elif gradient is not mark.gradient or gradient._version != mark.version:
                return True
        before = [mark.norm for mark in marks if mark is not None]
        now = [gradient.detach().norm() for gradient in gradients if gradient is not None]
        return bool(now) and not torch.equal(torch.stack(now).nan_to_num(), torch.stack(before).nan_to_num())

    def is_steady(self) -> bool:
        """Whether this step was like the one before, so that the next one's gradients may be sent during backward."""
        if self.active or not self._allowed:
            return self._allowed
        alike, self._before = self._hooks.counts == self._before, self._hooks.counts
        return alike and not self.changed()

    def next_step(self, *, steady: bool, changed: bool) -> None:
        """The exchange of this step has ended. `steady`: on all ranks; `changed`: on any rank."""
        self._observed += 1
        if changed or (not steady and self._observed >= MOST_OBSERVED):
            self._allowed = False
        if not self._hooks.active:
            self._hooks.expected = self._hooks.counts
        self._hooks.active = steady and self._allowed
        self._hooks.begin()
        self._marks.clear()
