"""Sends the buffers of a DistributedDataParallel model only after they have changed.

DDP sends rank 0's buffers to all ranks before each forward pass. BatchNorm's statistics change in each, but masks and
tables of positions never do, and over a slow link they can take longer than the gradients. So ranks say in each
exchange whether theirs have changed since they were sent. As long as no rank's have, nothing is sent.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.torch.reading import Marks


class Buffers:
    """The buffers of a model."""

    equal = False
    """Whether the last exchange has told all ranks that theirs have not changed since they were sent"""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self._sent: list[torch.Tensor] = []
        self._marks = Marks(self._sent)

    def changed(self) -> bool:
        """Whether this rank's have changed since they were sent."""
        model: Any = self._model()
        if not model.modules_buffers:
            return False
        model._assign_modules_buffers()  # a script may have put other tensors in their place
        return list(map(id, model.modules_buffers)) != list(map(id, self._sent)) or self._marks.changed()

    def sent(self) -> None:
        """All ranks have rank 0's."""
        model: Any = self._model()
        self._sent[:] = model.modules_buffers
        self._marks.set()


@functools.cache
def send_only_changed() -> None:
    """From now on, models whose gradients a strategy sums send their buffers only if a rank's may differ."""
    send = DistributedDataParallel._sync_buffers

    @functools.wraps(send)
    def unless_equal(self: Any) -> None:
        buffers = getattr(self.reducer, "buffers", None)
        may_skip = not self._join_config.enable and not hasattr(self, "buffer_hook")  # they have rules of their own
        if buffers is not None and buffers.equal and may_skip:
            return
        send(self)
        if buffers is not None:
            buffers.sent()

    unless_equal._torchdynamo_disable = True  # type: ignore[attr-defined] # torch.compile would trace it
    DistributedDataParallel._sync_buffers = unless_equal
