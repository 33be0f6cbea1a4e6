"""Twelve steps of DistributedDataParallel with PowerSGD on a small network of one rank, and what was compressed at
each of the factors' ranks that are asked for."""

from __future__ import annotations

import json
import sys

import torch

from hvdtrain.comm.backends import ddp_powersgd
from hvdtrain.comm.backends.base import Communicator, Endpoint
from hvdtrain.comm.backends.ddp import DdpCommunicator
from hvdtrain.strategies.algorithms.native import Native

STEPS = 12


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 24, 3), torch.nn.Flatten(),
            torch.nn.Linear(24 * 16, 5),
        )  # fmt: skip

    def loss(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(images).square().sum(), torch.zeros(())


def counted(rank: int) -> tuple[int, int]:
    """Numbers sent by compressed steps as PyTorch counts them, and as we do."""
    model = Network()
    ranks = DdpCommunicator(Communicator(), Endpoint("127.0.0.1", "lo", loopback=True), gpu=False)
    settings = Native.Settings(hook="powersgd", rank=rank)
    step = ranks.in_framework.overlapped(model, torch.optim.SGD(model.parameters(), lr=0.01), settings)
    for _ in range(STEPS):
        model.zero_grad()
        step.backward(step.loss(torch.randn(4, 3, 8, 8))[0])
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    theirs = ranks._power_sgd._torch_state.total_numel_after_compression
    ranks.shutdown()
    return theirs, sum(ddp_powersgd.elements_sent(shapes, rank, n) for n in range(ddp_powersgd.START_STEP, STEPS))


sys.stdout.write(json.dumps({word: counted(int(word)) for word in sys.argv[1:]}) + "\n")
