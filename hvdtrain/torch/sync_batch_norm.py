"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.horovod_api.functions import Sum
from hvdtrain.torch.collectives import allreduce


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` whose mean and variance in training are those of all ranks' samples.

    Batches may have different sizes. The gradient includes the statistics. Runs on CPUs too, unlike Horovod's.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised batch. Collective in training."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        self._check_input_dim(input)
        axes, shape = [0, *range(2, input.dim())], [1, -1] + [1] * (input.dim() - 2)
        wide = input.float()
        count = torch.tensor([wide.numel() / wide.shape[1]], dtype=torch.float64, device=wide.device)
        sums = [each.sum(axes, dtype=torch.float64) for each in (wide, wide * wide)]
        total = allreduce(torch.cat([*sums, count]), op=Sum)
        mean, square = (total[:-1] / total[-1]).chunk(2)
        variance = (square - mean * mean).clamp_min(0)
        self._remember(mean.detach(), variance.detach(), float(total[-1]))
        scale = (variance + self.eps).rsqrt()
        result = (wide - mean.float().view(shape)) * scale.float().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics, with the unbiased variance, as PyTorch does."""
        if not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * (count / max(count - 1, 1))).to(self.running_var.dtype), share)
