"""DistributedDataParallel with hvd.ddp_hook, each rank a host of its own, several buckets; rank 0 prints JSON."""

from __future__ import annotations

import dataclasses
import gc
import json

import numpy as np
import torch
import torch.distributed as dist

import hvdtrain.torch as hvd
from hvdtrain.comm import world
from hvdtrain.comm.backends.base import Endpoint

launched = world.RankGroup.launched
world.RankGroup.launched = classmethod(
    lambda cls, where, *limit: dataclasses.replace(
        launched(where, *limit), endpoint=Endpoint(f"127.0.0.{1 + where.rank}", "lo", True)
    )
)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def gradients(strategy: str, steps: int) -> list[np.ndarray]:
    """Of each step, one vector; without a strategy DistributedDataParallel's own."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.04)
    if strategy:
        ddp.register_comm_hook(*hvd.ddp_hook(strategy))
    found = []
    for step in range(steps):
        net.zero_grad()
        draw = torch.Generator().manual_seed(step % 2 * size + rank)
        ddp(torch.randn(8, 64, generator=draw)).square().sum().backward()
        found.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy().copy())
    return found


plain, told = gradients("", 12), {}
for strategy in ("hierarchical", "bf16", "powersgd:rank=4", "topk"):
    ours = gradients(strategy, 12)
    alike = [torch.zeros(len(ours[-1])) for _ in range(size)]
    dist.all_gather(alike, torch.from_numpy(ours[-1]))
    assert all(torch.equal(each, alike[0]) for each in alike), f"{strategy}: ranks differ"
    np.testing.assert_allclose(ours[0], plain[0], rtol=1e-4, atol=1e-5)  # the first step is exact
    off = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(ours, plain, strict=True)]
    total, right = sum(ours[1:]), sum(plain[1:])
    told[strategy] = [max(off[1:]), float(np.linalg.norm(total - right) / np.linalg.norm(right))]
try:
    hvd.ddp_hook("local-sgd")
except Exception as error:
    told["refused"] = str(error)
if rank == 0:
    print(json.dumps(told), flush=True)
gc.collect()  # DistributedDataParallel is in cycles, and Gloo's threads must not outlive the group
dist.destroy_process_group()
