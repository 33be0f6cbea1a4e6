"""DistributedDataParallel with hvd.ddp_hook and several buckets, on ranks that count as hosts; rank 0 prints JSON."""

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
from hvdtrain.system.exits import Failure

launched = world.RankGroup.launched
world.RankGroup.launched = classmethod(
    lambda cls, env, *limit: dataclasses.replace(
        launched(env, *limit), endpoint=Endpoint(f"127.0.0.{1 + env.rank}", "lo", True)
    )
)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def gradients(strategy: str, steps: int) -> np.ndarray:
    """Return the gradients of each step as rows. Without a strategy, DistributedDataParallel computes them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.04)
    if strategy:
        ddp.register_comm_hook(*hvd.ddp_hook(strategy))
    rows = []
    for step in range(steps):
        net.zero_grad()
        draw = torch.Generator().manual_seed(step % 2 * size + rank)
        ddp(torch.randn(8, 64, generator=draw)).square().sum().backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy().copy())
    return np.stack(rows)


exact = gradients("", 12)
report: dict[str, object] = {}
for strategy in ("hierarchical", "bf16", "powersgd:rank=4", "topk"):
    reduced = gradients(strategy, 12)
    everyone = [torch.zeros(reduced.shape[1]) for _ in range(size)]
    dist.all_gather(everyone, torch.from_numpy(reduced[-1]))
    assert all(torch.equal(each, everyone[0]) for each in everyone), f"{strategy}: ranks differ"
    np.testing.assert_allclose(reduced[0], exact[0], rtol=1e-4, atol=1e-5)  # the first step is exact
    errors = np.linalg.norm(reduced - exact, axis=1) / np.linalg.norm(exact, axis=1)
    total, expected = reduced[1:].sum(0), exact[1:].sum(0)
    error_of_sum = np.linalg.norm(total - expected) / np.linalg.norm(expected)
    report[strategy] = [float(errors[1:].max()), float(error_of_sum)]
try:
    hvd.ddp_hook("local-sgd")
except Failure as error:
    report["exit code"] = error.code
if rank == 0:
    print(json.dumps(report), flush=True)
gc.collect()  # DistributedDataParallel has reference cycles, and Gloo's threads must end before the group
dist.destroy_process_group()
