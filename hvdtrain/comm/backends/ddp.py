"""torch.distributed (Gloo between CPUs, NCCL between GPUs) and DistributedDataParallel.

Rank 0 opens PyTorch's TCP store on the address of the link, and sends its address to the other ranks through the
rendezvous. Gloo and NCCL use the interface of the link unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names another.
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

from hvdtrain.comm.backends.base import Communicator, Endpoint, Rendezvous
from hvdtrain.comm.backends.framework import FrameworkExchange, TorchStep

LONGEST_S = 30 * 60
"""Limit for one exchange, PyTorch's own for Gloo. The sentinel ends the job of a dead host or rank much earlier"""


class DdpCommunicator(Communicator, FrameworkExchange):
    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint, *, gpu: bool) -> None:
        self.in_framework = self
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self._rendezvous = rendezvous
        self._step: DdpStep | None = None
        if endpoint.interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", endpoint.interface)
            if not endpoint.loopback:  # on one host NCCL needs no network
                os.environ.setdefault("NCCL_SOCKET_IFNAME", endpoint.interface)
        timeout = timedelta(seconds=LONGEST_S)
        store = None
        if self.rank == 0:
            listener = socket.create_server((endpoint.address, 0))  # the store's own would listen on every address
            store = dist.TCPStore(
                endpoint.address,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        addresses = rendezvous.gather_bytes(f"{endpoint.address} {store.port}".encode() if store else b"")
        if store is None:
            address, _, port = addresses[0].decode().rpartition(" ")
            store = dist.TCPStore(address, int(port), is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.library = "nccl" if gpu else "gloo"
        self._gpu = gpu

    def _disconnect(self) -> None:
        self._rendezvous.gather_bytes(b"")  # a barrier: another rank may still read from a connection
        # Gloo's threads end with the last reference to the group. One that still runs when Python exits would abort.
        if self._step is not None:
            self._step.release()
        dist.destroy_process_group()

    # --- small host arrays --------------------------------------------------------------------------------------

    def gather_bytes(self, own: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = max(int(length) for length in lengths)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, torch.from_numpy(np.frombuffer(own.ljust(longest, b"\0"), dtype=np.uint8).copy()))
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
        """Wraps `model` in DistributedDataParallel, with the communication hook of the settings."""
        self._step = DdpStep(model, optimizer, hook=settings.hook, gpu=self._gpu)
        return self._step


class Loss(torch.nn.Module):
    """A module whose forward is the model's `loss`, since DistributedDataParallel calls forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arrays: torch.Tensor) -> Any:
        return self.model.loss(*arrays)


class DdpStep(TorchStep):
    """A step with DistributedDataParallel, which divides the sum by the number of ranks; `loss_factor` undoes this.

    Nothing is broadcast: weights are already equal on all ranks, and each rank keeps its own BatchNorm statistics.
    Backward returns when all sums have arrived. How long it waited after the last gradient is measured on the CPU. On a
    GPU the device waits, and the time is unknown.
    """

    def __init__(self, model: Any, optimizer: Any, *, hook: str, gpu: bool) -> None:
        super().__init__(model, optimizer)
        self.loss_factor = float(dist.get_world_size())
        self._ddp = torch.nn.parallel.DistributedDataParallel(Loss(model), forward_sync_buffers=False, init_sync=False)
        # The strides of a 1x1 kernel's last two dimensions are arbitrary; DistributedDataParallel warns if they differ.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        if hook == "fp16":
            self._ddp.register_comm_hook(None, fp16_compress_hook)
        self._gpu = gpu
        self._last_gradient = self._waited_s = 0.0
        if not gpu:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def release(self) -> None:
        """Release the process group. No step can follow."""
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
