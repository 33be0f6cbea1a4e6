"""A model and data of one's own, on any number of ranks: a small network learns scikit-learn's digits.

python examples/own_model.py
mpirun -np 2 python examples/own_model.py --strategy powersgd:rank=4
"""

import sys

import torch
from sklearn.datasets import load_digits

import hvdtrain

digits = load_digits()
pictures, labels = (digits.data / 16).astype("float32"), digits.target

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
    train=(pictures[:1200], labels[:1200]),
    validation=(pictures[1200:1500], labels[1200:1500]),
    test=(pictures[1500:], labels[1500:]),
    epochs=6,
    argv=sys.argv[1:],
)
