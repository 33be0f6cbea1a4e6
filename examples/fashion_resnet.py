"""ResNet-34 of width 0.25 on Fashion-MNIST at 80x80 with Muon, in plain DDP by the methods of byte_gpt.py.

Model, data and optimizer are hvdtrain's. Instead of a loss, the curve has the error: the share of 4,000 test images
that the averaged weights misclassify. Their BatchNorm statistics are computed from 512 training images.
"""

import math
import sys

import byte_gpt
import numpy as np
import torch
from torch.nn import functional

from hvdtrain import data
from hvdtrain.frameworks.muon_torch import Muon
from hvdtrain.models.resnet import NORM_MOMENTUM, ResNetSpec, initial_state
from hvdtrain.models.resnet_torch import ResNetTorch
from hvdtrain.system.exits import Failure

SIDE, NORMED, HELD_OUT, BATCH = 80, 512, 4000, 250


class Task:
    clip = math.inf

    def __init__(self, options):
        spec = ResNetSpec(channels=1, classes=10, width=0.25, zero_gamma=True)
        self.model = ResNetTorch(spec)
        start = initial_state(spec, options.seed)
        self.model.load_state_dict({name: torch.from_numpy(array) for name, array in start.items()})
        if options.text:
            sys.exit("fashion_resnet: --text is an option of byte_gpt.py")
        try:
            self.data = data.load("fashion-mnist", (SIDE, SIDE))
        except Failure as failure:
            sys.exit(f"fashion_resnet: {failure}")

    def optimizer(self, lr):
        return Muon(self.model.parameters(), lr)

    def parts(self):
        weights = [*self.model.parameters()]
        ends = np.cumsum([each.numel() for each in weights])
        quarters = (4 * ends - 1) // ends[-1]
        return [torch.nn.ParameterList(w for w, q in zip(weights, quarters, strict=True) if q == n) for n in range(4)]

    def batch(self, size, random):
        return images_of(self.data.train, torch.randint(len(self.data.train), (size,), generator=random).numpy())

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def held_out_loss(self, model, rank, ranks):
        statistics = [model.get_buffer(name).zero_() for name in model.statistics]
        model.train()(images_of(self.data.train, np.arange(NORMED))[0])
        torch._foreach_div_(statistics, NORM_MOMENTUM)
        model.eval()
        batches = [images_of(self.data.test, rows) for rows in np.arange(rank, HELD_OUT, ranks).reshape(-1, BATCH)]
        return sum((model(images).argmax(1) != labels).sum() for images, labels in batches) / HELD_OUT


def images_of(split, rows):
    images, labels = split.batch(rows, rows, None).arrays
    return torch.from_numpy(images), torch.from_numpy(labels)


if __name__ == "__main__":
    byte_gpt.main(Task, __doc__)
