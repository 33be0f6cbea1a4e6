"""A synthetic benchmark in PyTorch, in the order of calls that Horovod's documentation gives; argv[1]: what is imported
as hvd; argv[2]: the file that rank 0 writes."""

import importlib
import json
import sys
import timeit
from pathlib import Path

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F

hvd = importlib.import_module(sys.argv[1])
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(42 + hvd.rank())
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
    nn.Linear(128, 10),
)
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
compression = hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
drawn = torch.Generator().manual_seed(hvd.rank())
data, target = torch.randn(16, 3, 32, 32, generator=drawn), torch.randint(10, (16,), generator=drawn)


def benchmark_step() -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=2)
rates = [16 * 3 / timeit.timeit(benchmark_step, number=3) for _ in range(2)]
total = hvd.allreduce(torch.tensor([np.mean(rates)]), name="rate", op=hvd.Sum)
assert total.item() > np.mean(rates) / 2
if hvd.rank() == 0:
    norms = {name: [weight.sum().item(), weight.norm().item()] for name, weight in model.named_parameters()}
    Path(sys.argv[2]).write_text(json.dumps(norms))
hvd.shutdown()
