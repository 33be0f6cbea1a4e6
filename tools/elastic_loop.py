"""A bare training loop that continues after a loss, for `tools/bench_elastic.py`.

    launch/mpirun.sh --elastic -H a:1,b:1,c:1,d:1 python tools/elastic_loop.py hvdtrain FOLDER
    horovodrun -np 4 --min-np 3 --host-discovery-script SCRIPT python tools/elastic_loop.py horovod FOLDER
    torchrun --nnodes 4 --max-restarts 9 ... tools/elastic_loop.py torchrun FOLDER

Trains ResNet-34 at width 0.125 on digits for --seconds. Each process appends the time of each step to FOLDER/PID.txt.
With torchrun, which starts all ranks again, rank 0 saves a checkpoint every 8 steps; the others commit as often.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain import data
from hvdtrain.models import resnet
from hvdtrain.models.resnet_torch import ResNetTorch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("library", choices=("hvdtrain", "horovod", "torchrun"))
parser.add_argument("folder", type=Path)
parser.add_argument("--seconds", type=float, default=60)
options = parser.parse_args()
if not options.folder.is_dir():
    parser.error(f"{options.folder} is not a folder")

BATCH, EVERY = 32, 8
torch.set_num_threads(1)
split = data.load("digits", (8, 8)).train
spec = resnet.ResNetSpec(channels=1, classes=10, width=0.125)
model: Any = ResNetTorch(spec)
model.load_state_dict({name: torch.from_numpy(array) for name, array in resnet.initial_state(spec, 0).items()})
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
end = time.time() + options.seconds
times = (options.folder / f"{os.getpid()}.txt").open("a", buffering=1)


def batches(rank: int) -> Iterator[Any]:
    for first in itertools.cycle(range(rank * BATCH, len(split) - BATCH, 4 * BATCH)):
        samples = np.arange(first, first + BATCH)
        yield split.batch(samples, samples, None)


def step(loss_of: Callable[..., Any], batch: Any) -> None:
    optimizer.zero_grad()
    loss, _ = loss_of(*map(torch.from_numpy, batch.arrays))
    (loss / BATCH).backward()
    optimizer.step()
    print(time.time(), file=times)


def with_horovod() -> None:
    global optimizer
    if options.library == "horovod":
        import horovod.torch as hvd
    else:
        import hvdtrain.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        for batch in batches(hvd.rank()):
            step(model.loss, batch)
            state.step += 1
            if state.step % EVERY == 0:
                if hvd.allreduce(torch.tensor(float(time.time() > end)), name="end"):
                    return
                state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def with_torchrun() -> None:
    checkpoint = options.folder / "checkpoint.pt"
    torch.distributed.init_process_group("gloo")
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    rank = torch.distributed.get_rank()
    parallel = torch.nn.parallel.DistributedDataParallel(_WithLoss(model))
    for number, batch in zip(itertools.count(first + 1), batches(rank), strict=False):
        step(lambda *arrays: (parallel(*arrays), None), batch)
        if number % EVERY == 0:
            late = torch.tensor(float(time.time() > end))
            torch.distributed.all_reduce(late)
            if late:
                return
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)


class _WithLoss(torch.nn.Module):
    """A model whose forward pass returns its loss, as DDP needs."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arrays: Any) -> Any:
        return self.inner.loss(*arrays)[0]


with_torchrun() if options.library == "torchrun" else with_horovod()
