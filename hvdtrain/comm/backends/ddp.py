"""torch.distributed (Gloo between CPUs, NCCL between GPUs) and DistributedDataParallel, as PyTorch users know them.

Rank 0 opens PyTorch's TCP store on the link's address, and tells the others where through the meeting.
Gloo and NCCL are held to the interface of the link unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says otherwise.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from hvdtrain.comm.backends.base import Alone, Meeting, Reach, TorchStep
from hvdtrain.comm.backends.ddp_powersgd import PowerSGD

LONGEST_S = 30 * 60
"""For one exchange: PyTorch's own limit for Gloo. The sentinel ends the job of a dead host or rank long before"""


class DdpRanks(Alone):
    """See `collectives.Alone`."""

    def __init__(self, meeting: Meeting, reach: Reach, *, gpu: bool) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self._meeting = meeting
        self._power_sgd: PowerSGD | None = None
        self._step: DdpStep | None = None
        if reach.interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", reach.interface)
            if not reach.loopback:  # on one host NCCL needs no network
                os.environ.setdefault("NCCL_SOCKET_IFNAME", reach.interface)
        timeout = timedelta(seconds=LONGEST_S)
        store = None
        if self.rank == 0:
            listener = socket.create_server((reach.address, 0))  # by itself the store listens on every address
            store = dist.TCPStore(
                reach.address,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        told = meeting.gather(f"{reach.address} {store.port}".encode() if store else b"")
        if store is None:
            address, _, port = told[0].decode().rpartition(" ")
            store = dist.TCPStore(address, int(port), is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.carrier = "nccl" if gpu else "gloo"
        self._gpu = gpu

    def leave(self) -> None:
        self._meeting.gather(b"")  # nobody closes a connection that another still reads from
        # Gloo's threads end with the last reference to the group; one that still ran while Python ends would abort.
        if self._step is not None:
            self._step.release()
        dist.destroy_process_group()

    # --- small host arrays --------------------------------------------------------------------------------------

    def gather(self, mine: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.from_numpy(np.frombuffer(mine.ljust(longest, b"\0"), dtype=np.uint8).copy()))
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        tensor = torch.from_numpy(np.array(values))
        dist.all_reduce(tensor)
        return np.asarray(tensor.numpy())

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        tensor = torch.from_numpy(np.array(values))
        dist.broadcast(tensor, src=0)
        return np.asarray(tensor.numpy())

    # --- the training step --------------------------------------------------------------------------------------

    def start_sum(self, tensor: Any, name: str) -> Any:
        return tensor, dist.all_reduce(tensor, async_op=True)

    def finish_sum(self, handle: Any) -> Any:
        tensor, work = handle
        work.wait()
        return tensor

    def overlapped(self, model: Any, optimizer: Any, settings: Any) -> TorchStep:
        """DistributedDataParallel round `model`, with the hook that is set."""
        if settings.hook == "powersgd":
            self._power_sgd = PowerSGD(dict(model.named_parameters()), settings.rank)
        self._step = DdpStep(model, optimizer, hook=settings.hook, power_sgd=self._power_sgd, gpu=self._gpu)
        return self._step

    def state(self) -> dict[str, np.ndarray]:
        return self._power_sgd.state() if self._power_sgd else {}

    def load(self, state: dict[str, np.ndarray]) -> None:
        if self._power_sgd:
            self._power_sgd.load(state)


class Loss(torch.nn.Module):
    """The model's `loss` as a module's forward, which is what DistributedDataParallel calls."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arrays: torch.Tensor) -> Any:
        return self.model.loss(*arrays)


class DdpStep(TorchStep):
    """DistributedDataParallel divides the sum by the number of ranks, and so the loss is multiplied by it first.

    Weights are equal on all ranks already and statistics of BatchNorm are each rank's own: neither is broadcast.
    Backward returns when all sums have arrived. What it waited after the last gradient is measured on the CPU; on a GPU
    the waiting is on the device and cannot be told apart.
    """

    def __init__(self, model: Any, optimizer: Any, *, hook: str, power_sgd: PowerSGD | None, gpu: bool) -> None:
        super().__init__(model, optimizer)
        self.loss_factor = float(dist.get_world_size())
        # One bucket holds everything: torch's powerSGD_hook crashes on Gloo when two are on their way (its callbacks
        # start further sums, in an order that differs between ranks). It then hides nothing behind backward.
        capacity = {"bucket_cap_mb": 1 << 20} if power_sgd else {}
        self._ddp = torch.nn.parallel.DistributedDataParallel(
            Loss(model), forward_sync_buffers=False, init_sync=False, **capacity
        )
        # Of a kernel of 1x1 the strides of two dimensions say nothing; DistributedDataParallel warns that they differ.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        if hook == "fp16":
            self._ddp.register_comm_hook(None, fp16_compress_hook)
        elif power_sgd is not None:
            self._ddp.register_comm_hook(power_sgd, lambda state, bucket: state.hook(bucket))
        self._gpu = gpu
        self._last_gradient = self._waited_s = 0.0
        if not gpu:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def release(self) -> None:
        """Lets go of the process group; no step can follow."""
        del self._ddp
        gc.collect()

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def loss(self, *arrays: Any) -> Any:
        return self._ddp(*arrays)

    def backward(self, loss: Any) -> None:
        loss.backward()
        self._waited_s = time.perf_counter() - self._last_gradient

    def waited_s(self) -> float | None:
        return None if self._gpu else self._waited_s
