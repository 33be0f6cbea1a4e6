"""Ranks 0 and 1 train on 3 and 5 batches with hvdtrain.torch, join, and normalise; used by test_own_torch.py.

Sums and weights equal those of one process in which the rank that has joined counts as zeros. A normalised batch and
its gradient equal those of one process with the whole batch.
"""

from __future__ import annotations

import torch

import hvdtrain.torch as hvd
from hvdtrain.horovod_api import job

hvd.init()
rank, size = hvd.rank(), hvd.size()
BATCHES = [3, 5]
LR = 0.5
net, one = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
for each in (net, one):
    torch.nn.init.ones_(each.weight)
optimizer = torch.optim.SGD(net.parameters(), LR)
optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), hvd.Compression.fp16)  # by calls
norm, plain = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
torch.manual_seed(1)
images = torch.randn(6, 3, 4) * 2 + 5
own, whole = images[:2] if rank == 0 else images[2:], images.clone().requires_grad_()
own = own.clone().requires_grad_()
plain(whole).pow(3).sum().backward()
normed = norm(own)
normed.pow(3).sum().backward()
mine = slice(0, 2) if rank == 0 else slice(2, 6)
torch.testing.assert_close(normed, plain(images)[mine], atol=1e-4, rtol=1e-4)
torch.testing.assert_close(own.grad, whole.grad[mine], atol=1e-3, rtol=1e-3)
torch.testing.assert_close(norm.running_var, (0.9 + 0.1 * images.var((0, 2))), atol=1e-4, rtol=1e-4)
for batch in range(BATCHES[rank]):
    assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == sum(batch < count for count in BATCHES)
    grouped = hvd.grouped_allreduce([torch.ones(5000), torch.ones(1, dtype=torch.int64)], op=hvd.Sum)
    assert {each[-1].item() for each in grouped} == {sum(batch < count for count in BATCHES)}
    optimizer.zero_grad()
    net(torch.tensor([[1.0, rank]])).sum().backward()
    optimizer.step()
assert hvd.join() == 1
expected = one.weight.detach().clone()
for batch in range(max(BATCHES)):
    for other in range(size):
        if batch < BATCHES[other]:
            expected -= LR / size * torch.tensor([[1.0, other]])
weights = hvd.broadcast(net.weight.detach(), root_rank=1, name="weights")
torch.testing.assert_close(weights, expected)
if job.is_connected():  # in Horovod, calls without a name no longer match
    assert hvd.allgather(torch.full([2], rank)).tolist() == [0, 0, 1, 1]
print("joined", flush=True)
