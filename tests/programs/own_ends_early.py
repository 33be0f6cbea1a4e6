"""Rank 1 makes fewer steps than rank 0, which waits for it. Each rank is a host."""

from __future__ import annotations

import rank_per_host  # noqa: F401
import torch

import hvdtrain.torch as hvd

hvd.init()
net = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(3)))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
for _ in range(6 if hvd.rank() else 10):
    optimizer.zero_grad()
    net(torch.randn(4, 200)).square().mean().backward()
    optimizer.step()
print("all steps", hvd.rank())
