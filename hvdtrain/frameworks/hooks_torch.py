"""Reports buckets of PyTorch gradients during backward."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import torch


class GradientHooks:
    """Calls `report(bucket)` for each bucket as soon as backward has computed all of its gradients.

    Buckets are reported in order: one that is ready early waits for those before it. PyTorch does not call the hooks of
    parameters that the loss does not use, so the owner reports the buckets from `next` on after backward.
    """

    def __init__(
        self,
        buckets: Sequence[range],
        parameters: Sequence[torch.nn.Parameter],
        report: Callable[[int], None],
        repeated: Callable[[int], None] = lambda _: None,
        observe: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`buckets`: ranges of indices of `parameters`. `repeated(index)` is called if a gradient is computed more
        often than `expected`, `observe(index)` whenever one is computed while this object is not `active`. Hooks do not
        keep this object alive."""
        self.buckets = buckets
        self.active = True
        """Whether buckets are reported"""
        self.expected = [1] * len(parameters)
        """How often backward computes each gradient in a step"""
        self.counts = [0] * len(parameters)
        """How often backward has computed each gradient in this step"""
        self.next = 0
        """The bucket that is reported next"""
        self._report, self._repeated, self._observe = report, repeated, observe
        self._lock = threading.RLock()  # with a model on several GPUs, each has a thread that calls hooks
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._missing: list[int] = []
        """For each bucket, the number of gradients that are not final yet"""
        this = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_computed, this, index))
            for index, parameter in enumerate(parameters)
        ]
        self.begin()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """A step begins."""
        self.counts = [0] * len(self.counts)
        self._missing = [sum(self.expected[index] > 0 for index in bucket) for bucket in self.buckets]
        self.next = 0

    def report_next(self) -> None:
        self.next += 1
        self._report(self.next - 1)

    def computed(self, index: int) -> None:
        """Backward has computed a gradient."""
        self.counts[index] += 1
        if not self.active:
            self._observe(index)
        elif self.counts[index] > self.expected[index]:
            self._repeated(index)
        elif self.counts[index] == self.expected[index]:
            self._missing[self._bucket_of[index]] -= 1
            while self.next < len(self.buckets) and not self._missing[self.next]:
                self.report_next()


def _computed(hooks: weakref.ref[GradientHooks], index: int, parameter: torch.nn.Parameter) -> None:
    if this := hooks():
        with this._lock:
            this.computed(index)
