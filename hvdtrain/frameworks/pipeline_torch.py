"""A PyTorch replica of one pipeline stage, which processes a batch in micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain.data import Batch
from hvdtrain.frameworks.pytorch import TorchReplica
from hvdtrain.pipeline.schedule import Parted


class PipelineTorch(Parted, TorchReplica):
    """See `frameworks.Replica` and `pipeline.schedule.StageModel`.

    `model(*arrays)` runs the stage's layers. The last stage has `model.loss(*arrays)`, which also computes the sum of
    losses. The arrays are the batch's, except that the first one comes from the previous stage.
    """

    def backward(self, batch: Batch, lr: float, stop: float) -> None:
        self._train(True)
        if self._flat is None:
            self._optimizer.zero_grad()
        else:
            self._flat.gradients.zero_()
        self._samples = batch.weight, batch.total_weight
        self._mean_of = (batch.weight if self._local else batch.total_weight) / self._step.loss_factor
        tail = torch.from_numpy(self._pipe.train(self, batch, stop)).to(self._device)
        self._tail = self._world.in_framework.start_sum(tail, "step.totals")

    def through(self, number: int, batch: Batch, inputs: np.ndarray | None) -> tuple[np.ndarray | None, Any]:
        arrays = self._tensors(self._given(batch, inputs))
        x = None if inputs is None else arrays[0].requires_grad_()
        if x is not None:
            arrays[0] = x.clone()  # layers may work in place, which a leaf does not permit
        with self._autocast:
            if self._pipe.last:
                loss, sums = self._model.loss(*arrays)
                output = self._scaler.scale(loss / self._mean_of)
            else:
                output = self._model(*arrays)
        self._under_way[number] = x, output
        if self._pipe.last:
            return None, torch.cat(self._numbers(loss, sums))
        return output.detach().float().cpu().numpy(), None

    def back(self, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        x, output = self._under_way.pop(number)
        output.backward(None if gradient is None else torch.from_numpy(gradient).to(output))
        return None if x is None or x.grad is None else x.grad.cpu().numpy()

    def totals(self) -> np.ndarray:
        totals, self._totals = self._totals, []
        return np.asarray(torch.stack(totals).sum(0).cpu().numpy())

    def see(self, batch: Batch, inputs: np.ndarray | None, training: bool) -> np.ndarray:
        self._train(training)
        arrays = self._tensors(self._given(batch, inputs))
        with torch.no_grad(), self._autocast:
            if not self._pipe.last:
                return np.asarray(self._model(*arrays).float().cpu().numpy())
            loss, sums = self._model.loss(*arrays)
        return np.append(torch.cat(self._numbers(loss.double(), sums)).cpu().numpy(), batch.weight)
