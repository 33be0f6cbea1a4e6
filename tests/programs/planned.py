"""A script for `hvdtrain plan`: `planned.py FOLDER [--width N]`. It writes what it sees to FOLDER."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

import hvdtrain.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--width", type=int, default=300)
options = parser.parse_args()
hvd.init()
torch.manual_seed(3)
net = torch.nn.Sequential(
    torch.nn.Linear(20, options.width), torch.nn.BatchNorm1d(options.width), torch.nn.Linear(options.width, 4)
)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), strategy="powersgd")
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
seconds, step = [], 0
try:
    for step in range(40):
        began = time.perf_counter()
        time.sleep(0.01)  # as if it waited for the batch
        optimizer.zero_grad()
        net(torch.randn(24, 20)).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        if step == 15:
            torch.save(net.state_dict(), options.folder / "weights.pt")
finally:
    seen = {
        "steps": step + 1,
        "step_s": statistics.median(seconds),
        "shapes": [list(p.shape) for p in net.parameters()],
    }
    (options.folder / "seen.json").write_text(json.dumps(seen))
    if step < 39:
        os._exit(0)  # a script may end itself whatever happens
