"""A small training script that logs losses, samples and scores; used by test_own_record.py.

own_recorded.py [--seed N] [--quiet] [--begin STATEMENTS] [--end STATEMENTS]
"""

from __future__ import annotations

import os  # noqa: F401 (for the statements)
import sys

import mpi4py
import torch

import hvdtrain.torch as hvd

mpi4py.rc.initialize = False  # Horovod initialises MPI
torch.manual_seed(0)
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
other = torch.nn.Linear(2, 2)  # a GAN has two optimizers
second = torch.optim.SGD(other.parameters(), lr=0.1)
compression = hvd.Compression.none if "--quiet" in sys.argv else hvd.Compression.fp16
second = hvd.DistributedOptimizer(second, other.named_parameters(), compression)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
images, labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
batches = 8
if "--begin" in sys.argv:
    exec(sys.argv[-1])
for epoch in range(2):
    for _ in range(batches):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        second.zero_grad()
        other(torch.ones(2)).sum().backward()
        second.step()
        if "--quiet" not in sys.argv:
            hvd.log(loss=loss.item(), samples=len(images))
    optimizer.synchronize_weights()
    second.synchronize_weights()
    if "--quiet" not in sys.argv:
        right = (model(images).argmax(1) == labels).float().mean()
        hvd.log(epoch=epoch, accuracy=right, val_loss=loss.detach(), train_accuracy=right)
    scheduler.step()
if "--end" in sys.argv:
    exec(sys.argv[-1])
