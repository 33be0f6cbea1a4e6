"""A user's small training script, which tells what it can; used by test_own_record.py.

own_recorded.py [--seed N] [--quiet] [--fail]
"""

from __future__ import annotations

import sys

import torch

import hvdtrain.torch as hvd

torch.manual_seed(0)
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
images, labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
for epoch in range(2):
    for _ in range(8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if "--quiet" not in sys.argv:
            hvd.log(loss=loss.item(), samples=len(images))
    if "--quiet" not in sys.argv:
        right = (model(images).argmax(1) == labels).float().mean()
        hvd.log(epoch=epoch, accuracy=right, val_loss=loss.detach(), train_accuracy=right)
    scheduler.step()
if "--fail" in sys.argv:
    raise ValueError("the script's own mistake")
