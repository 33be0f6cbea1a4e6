"""DistributedDataParallel with hvd.ddp_hook and several buckets, on ranks that count as hosts; rank 0 prints JSON.

Without a launcher, torch.multiprocessing starts two ranks, which at last give the hook groups of one rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile

import numpy as np
import rank_per_host  # noqa: F401 (each rank is a host)
import torch
import torch.distributed as dist

import hvdtrain.torch as hvd
from hvdtrain.system.exits import Failure


def gradients(strategy: str, steps: int, group: dist.ProcessGroup | None = None) -> np.ndarray:
    """Return the gradients of each step as rows. Without a strategy, DistributedDataParallel computes them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.04, process_group=group)
    if strategy:
        ddp.register_comm_hook(*hvd.ddp_hook(strategy))
    rows = []
    for step in range(steps):
        net.zero_grad()
        draw = torch.Generator().manual_seed(step % 2 * dist.get_world_size() + dist.get_rank())
        ddp(torch.randn(8, 64, generator=draw)).square().sum().backward()
        rows.append(torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy().copy())
    return np.stack(rows)


def compare(strategies: tuple[str, ...]) -> None:
    exact = gradients("", 12)
    report: dict[str, object] = {}
    for strategy in strategies:
        reduced = gradients(strategy, 12)
        everyone = [torch.zeros(reduced.shape[1]) for _ in range(dist.get_world_size())]
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
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)


def spawned(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    compare(("hierarchical",))
    groups = [dist.new_group([each]) for each in range(2)]
    gradients("hierarchical", 1, groups[rank])


if __name__ == "__main__" and "RANK" in os.environ:
    dist.init_process_group("gloo")
    compare(("hierarchical", "bf16", "powersgd:rank=4"))
    gc.collect()  # DistributedDataParallel has reference cycles, and Gloo's threads must end before the group
    dist.destroy_process_group()
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(spawned, (f"{folder}/store",), 2)
        except torch.multiprocessing.ProcessExitedException as error:
            sys.exit(error.exit_code)
