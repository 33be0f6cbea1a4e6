"""Ranks of one host sum tensors on the device that the command line names; each compares with NumPy's sums."""

import sys

import numpy as np
import torch

from hvdtrain.comm import world
from hvdtrain.comm.backends.shared_gpu import SharedGpu
from hvdtrain.strategies import parse

LENGTHS = [1000, 300_000, 1_000_000, 300_001]
TAIL = 3

ranks = world.connect("torch", backend="tcp")
reducer = parse("hierarchical").reducer
assert reducer is not None
for number, length in enumerate(LENGTHS):
    drawn = np.random.default_rng(number).standard_normal((ranks.size, length), np.float32)
    total = drawn[0].copy()
    for other in drawn[1:]:  # in rank order, as the leader adds them
        total += other
    vector = torch.from_numpy(drawn[ranks.rank].copy()).to(sys.argv[1])
    ranks.reduce(vector, length - TAIL, reducer.cls([(length - TAIL,)], reducer.settings))
    assert np.array_equal(vector.cpu().numpy(), total), f"{length} numbers"
assert isinstance(ranks._gpu, SharedGpu) == (sys.argv[1] == "cuda")
print("equal")
ranks.shutdown()
