"""Ranks that the script forks, as notebook launchers do. Rank 1 still works when rank 0 has ended."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import hvdtrain.torch as hvd


def train(rank: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hvd.attach(net, optimizer, strategy="local-sgd:every=2")
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    if rank:
        time.sleep(4)
        print("evaluated")


if __name__ == "__main__":
    torch.multiprocessing.start_processes(train, (sys.argv[1],), 2, start_method="fork")
