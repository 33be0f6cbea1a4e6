"""Train your own model and data on any number of ranks: a small network learns handwritten digits.

python examples/own_model.py
mpirun -np 2 python examples/own_model.py --strategy powersgd:rank=4
"""

import sys

import torch

import hvdtrain
import hvdtrain.data

digits = hvdtrain.data.load("digits", (8, 8))
train, validation, test = (
    (split.samples.reshape(-1, 64), split.labels) for split in (digits.train, digits.validation, digits.test)
)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128),
    torch.nn.BatchNorm1d(128),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(128, 10),
)
hvdtrain.train(
    model,
    loss=torch.nn.functional.cross_entropy,
    train=train,
    validation=validation,
    test=test,
    epochs=6,
    argv=sys.argv[1:],
)
