"""hvd.attach with DistributedDataParallel and with a plain model; rank 0 prints the distance to one process as JSON."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

import hvdtrain.torch as hvd

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
report = {}
for strategy in ("hierarchical", "local-sgd:every=1"):
    for wrapped in (True, False):
        torch.manual_seed(0)
        net, alone = torch.nn.Linear(6, 2), torch.nn.Linear(6, 2)
        alone.load_state_dict(net.state_dict())
        model = torch.nn.parallel.DistributedDataParallel(net) if wrapped else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        hvd.attach(model, optimizer, strategy=strategy)
        own = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in range(6):
            rows = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(step))
            for each, part in ((optimizer, rows[4 * rank :][:4]), (own, rows)):
                each.zero_grad()
                (model if each is optimizer else alone)(part).square().mean().backward()
                each.step()
        distance = float((net.weight.detach() - alone.weight.detach()).abs().max())
        report[f"{strategy} {wrapped}"] = distance
if rank == 0:
    print(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
