"""Makes each call of hvdtrain.torch once; rank 0 prints the results of all ranks as JSON.

own_calls.py [late]        late: hvdtrain's TCP backend takes over from Horovod
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.horovod_api import job

try:
    import horovod.torch as horovod
except ImportError:
    horovod = None

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


def results() -> Iterator[tuple[str, Any]]:
    rank, size = hvd.rank(), hvd.size()
    yield "ranks", [rank, size, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    yield (
        "is",
        [hvd.is_initialized(), hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built(), hvd.mpi_ops.is_homogeneous()],
    )
    for dtype in TYPES:
        matrix = (torch.arange(6, dtype=torch.float32).reshape(3, 2) * (rank + 1)).to(dtype)
        yield f"broadcast {dtype}", hvd.broadcast(matrix, root_rank=size - 1)
        yield f"allgather {dtype}", hvd.allgather(matrix[: rank + 1])
        yield (f"alltoall {dtype}", hvd.alltoall(matrix, splits=torch.tensor([1, 2]).int()))
        if dtype in TYPES[3:]:
            ops = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
            for name, op in ops.items():
                yield f"allreduce {name} {dtype}", hvd.allreduce(matrix, op=op)
    vector = torch.full([100_001], rank + 1.0)
    yield "scaled", hvd.allreduce(vector, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)[::50_000]
    yield "in place", [hvd.allreduce_(vector, name="in place") is vector, vector[::50_000]]
    yield "broadcast_", hvd.broadcast_(torch.full([3], float(rank)), 1)
    handle = hvd.allreduce_async(torch.ones(4), name="later")
    yield "async", hvd.synchronize(handle)
    pair = [torch.ones(2) * rank, torch.ones(3) * rank]
    yield "reducescatter", hvd.reducescatter(torch.arange(6.0).reshape(3, 2) * (rank + 1), op=hvd.Sum)
    yield (
        "grouped",
        [*hvd.grouped_allreduce(pair, op=hvd.Sum), *hvd.grouped_allgather(pair), *hvd.grouped_reducescatter(pair)],
    )
    yield "empty", [hvd.allgather(torch.zeros(0, 2)), hvd.allreduce(torch.tensor(float(rank)))]
    yield (
        "sparse",
        hvd.sparse_allreduce_async(torch.eye(size)[[rank, rank]].to_sparse(), name="s", op=hvd.Sum)().to_dense(),
    )
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    (hvd.allreduce(weight * (rank + 1), op=hvd.Sum) * torch.tensor([1.0, 3.0])).sum().backward()
    yield "backward", weight.grad
    yield "objects", [hvd.broadcast_object({"from": rank}, root_rank=1), hvd.allgather_object([rank])]
    yield (
        "functions",
        [
            hvd.broadcast_object(lambda x: [rank, x], root_rank=1)(5),
            [function() for function in hvd.allgather_object(lambda: -rank)],
        ],
    )
    yield "compressed", hvd.allreduce(torch.tensor([0.25 * rank]), compression=hvd.Compression.fp16)
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    yield "state", [model.weight, optimizer.param_groups[0]["lr"]]
    rank_1 = hvd.add_process_set([1])
    yield "set", [rank_1.size(), rank_1.included(), str(rank_1)]
    if rank_1.included():
        yield "in set", [rank_1.rank(), hvd.allreduce(torch.tensor([rank + 1.0]), process_set=rank_1)]
        hvd.barrier(process_set=rank_1)
    yield "removed", [hvd.remove_process_set(rank_1), rank_1.process_set_id]
    hvd.barrier()


def train_without_horovod(compression: Any) -> None:
    """A bfloat16 model with channels_last kernels starts with rank 1's weights and trains as in one process."""
    nets, rates = [], (0.5 if hvd.rank() == 1 else 0.25, 0.5)
    for seed in (hvd.rank(), 1):
        torch.manual_seed(seed)
        net = torch.nn.Conv2d(3, 4, 2).to(torch.bfloat16, memory_format=torch.channels_last)
        nets.append(net)
    optimizers = [torch.optim.SGD(net.parameters(), rate, 0.5) for net, rate in zip(nets, rates, strict=True)]
    hvd.broadcast_parameters(nets[0].state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizers[0], root_rank=1)
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0], nets[0].named_parameters(), compression)
    for _ in range(2):
        for net, optimizer, ranks in zip(nets, optimizers, ([hvd.rank()], range(hvd.size())), strict=True):
            optimizer.zero_grad()
            sum(net(torch.ones(1, 3, 2, 2).bfloat16()).sum() * 2**rank / len(ranks) for rank in ranks).backward()
            optimizer.step()
    for own, expected in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(own, expected)
    long = torch.full((3001,), hvd.rank() + 1).bfloat16()  # longer than what travels with the request
    assert hvd.allreduce(long, op=hvd.Sum).tolist() == [sum(range(hvd.size() + 1))] * 3001


def mistakes() -> Iterator[tuple[str, str]]:
    """Yield the type of error that each mistake raises."""
    rank = hvd.rank()
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(torch.zeros(rank + 1), name="shape"),
        "type": lambda: hvd.allreduce(torch.zeros(2, dtype=[torch.float32, torch.int64][rank % 2]), name="type"),
        "root": lambda: hvd.broadcast(torch.zeros(2), root_rank=rank, name="root"),
        "kind": lambda: hvd.allreduce(torch.zeros(2, dtype=torch.bool)),
        "both": lambda: hvd.allreduce(torch.zeros(2), average=True, op=hvd.Sum),
        "not in line": lambda: hvd.allreduce(torch.zeros(2, 2).t()),
        "foreign": lambda: hvd.ProcessSet(["a"]),
    }
    for name, call in calls.items():
        try:
            call()
            yield name, "nothing"
        except Exception as error:
            yield name, type(error).__name__


def plain(value: Any) -> Any:
    """Convert to JSON types."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.detach().double().round(decimals=6).tolist()]
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


try:
    hvd.size()
    before = "nothing"
except ValueError as error:
    before = str(error)
hvd.init()
hvd.init()
if "late" in sys.argv:
    hvd.allreduce(torch.ones(2))
    job.exchange("powersgd")
report = {name: plain(value) for name, value in results()} | {"before": before, "errors": dict(mistakes())}
everyone = hvd.allgather_object(report)
on_horovod = hvd.mpi_enabled() or hvd.gloo_enabled()
unsupported = []
if not on_horovod:
    for name, call in {"Adasum": lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum)}.items():
        try:
            call()
        except RuntimeError:
            unsupported.append(name)
if horovod is None:
    train_without_horovod(hvd.Compression.none)
    train_without_horovod(hvd.Compression.fp16)
assert all(hasattr(hvd, name) for name in dir(horovod) if not name.startswith("_"))
if hvd.rank() == 0:
    backend = "Horovod" if on_horovod else "tcp"
    print(json.dumps({"backend": backend, "ranks": everyone, "needs Horovod": unsupported}), flush=True)
hvd.shutdown()
assert not hvd.is_initialized()
