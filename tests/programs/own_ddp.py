"""A DistributedDataParallel script without a line of hvdtrain, with accumulation, clipping, a scheduler and a scaler.

It also registers a communication hook, as Accelerate does if it is asked to.

Usage: own_ddp.py STEPS [CHECKPOINT | --double]. Resumes from CHECKPOINT, which rank 0 saves at the end. Rank 0 prints
JSON: what each rank saw of the weights in the middle and at the end, and the distance to one process with the whole
batch. --double: with float64.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
steps, double = int(sys.argv[1]), "--double" in sys.argv
path = Path(sys.argv[2]) if len(sys.argv) > 2 and not double else None
dtype = torch.float64 if double else torch.float32


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(24, 3))
    net.to(dtype)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(8, 12, generator=draw).to(dtype), torch.randint(3, (8,), generator=draw)


def crc(state: dict[str, torch.Tensor]) -> int:
    return zlib.crc32(b"".join(each.numpy().tobytes() for each in state.values()))


def collect(value: object) -> list[object]:
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, value)
    return everyone


net, optimizer = made()
first = dist.new_group([0])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
ddp = torch.nn.parallel.DistributedDataParallel(net)
if not double:
    ddp.register_comm_hook(None, fp16_compress_hook)
begin = 0
if path is not None and path.exists():
    kept = torch.load(path)
    ddp.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    begin = kept["step"]
middle = []
for step in range(begin, steps):
    ddp.train()
    for part, context in enumerate((ddp.no_sync(), contextlib.nullcontext())):
        x, y = batch(step, 2 * rank + part)
        with context:
            scaler.scale(torch.nn.functional.cross_entropy(ddp(x), y) / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scheduler.step()
    if step == 4 and rank == 0:  # on one rank alone: nothing may be sent
        dist.barrier(first)
        net.eval()
        with torch.no_grad():
            net(batch(0, 0)[0])
    middle.append(collect(crc(net.state_dict())) if step in (4, 5) else None)
final = collect(crc(ddp.state_dict()))
net.eval()
with torch.no_grad():
    shown = collect(crc({"output": net(batch(0, 0)[0])}))
if rank == 0:
    if path is not None:
        torch.save({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, path)
    alone, own = made()
    for step in range(steps):
        own.zero_grad()
        for part in range(2 * size):
            x, y = batch(step, part)
            (torch.nn.functional.cross_entropy(alone(x), y) / (2 * size)).backward()
        own.step()
    pairs = zip(alone.state_dict().values(), net.state_dict().values(), strict=True)
    worst = max(float((a - b).abs().max()) for a, b in pairs)
    pairs = zip(made()[0].state_dict().values(), net.state_dict().values(), strict=True)
    moved = max(float((a - b).abs().max()) for a, b in pairs)
    seen = [*(each for each in middle if each), final, shown]
    print(json.dumps({"equal": [len(set(each)) == 1 for each in seen], "worst": worst, "moved": moved}))
dist.barrier()
dist.destroy_process_group()
