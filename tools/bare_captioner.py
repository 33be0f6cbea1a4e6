"""The yardstick of `make bench`: the same captioning model in a hand-written Horovod loop, with nothing else round it.

    mpirun -np 2 --bind-to none python tools/bare_captioner.py torch --epochs 1

It trains on the same batches of drawn scenes as `python -m hvdtrain.captioning --epochs 1`, the same number of words in
each. Rank 0 prints one JSON line: words predicted per second over all ranks without the first three steps, how many,
the last step's loss, and peak RSS.
"""

import argparse
import json
import os
import resource
import time
from typing import Any

import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("framework", choices=("torch", "tensorflow"))
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

from hvdtrain.captions.load import load  # noqa: E402
from hvdtrain.models.captioner import CaptionerSpec, initial_state  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
LR = 2e-3
dataset = load("shapes")
split = dataset.train
spec = CaptionerSpec(vocabulary=len(dataset.vocabulary), encoder="small")
state = initial_state(spec, args.seed)
model: Any

if args.framework == "torch":
    import horovod.torch as hvd
    import torch

    from hvdtrain.models.captioner_torch import CaptionerTorch

    hvd.init()
    torch.set_num_threads(1)
    model = CaptionerTorch(spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)  # the fastest that PyTorch has
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model.train()

    def step(pictures: np.ndarray, tokens: np.ndarray, key: np.ndarray, words: float) -> float:
        optimizer.zero_grad()
        loss, _ = model.loss(*map(torch.from_numpy, (pictures, tokens, key)))
        (loss / words).backward()
        optimizer.step()
        return float(loss.item())
else:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvdtrain.config import TrainConfig
    from hvdtrain.frameworks.optimizers_tensorflow import Adam
    from hvdtrain.models.captioner_tf import CaptionerTF

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    model = CaptionerTF(spec)
    for name, variable in model.weights.items():
        variable.assign(state[name].transpose(2, 3, 1, 0) if state[name].ndim == 4 else state[name])
    adam = Adam(model.weights, TrainConfig(optimizer="adam", lr=LR))

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *split.inputs.shape[1:]], tf.uint8),
            tf.TensorSpec([None, None], tf.int64),
            tf.TensorSpec([2], tf.int64),
            tf.TensorSpec([], tf.float32),
        ]
    )
    def graph(pictures: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss, _ = model.loss(pictures, tokens, key, training=True)
            mean = loss / words
        gradients = hvd.DistributedGradientTape(tape).gradient(mean, list(model.weights.values()))
        adam.update(model.weights, gradients, tf.constant(LR))
        return loss

    def step(pictures: np.ndarray, tokens: np.ndarray, key: np.ndarray, words: float) -> float:
        return float(graph(*map(tf.constant, (pictures, tokens, key)), tf.constant(words, tf.float32)).numpy())


whole = args.batch_size * hvd.size()
borders = [*range(0, len(split), whole), len(split)]
done, seconds, total = 0, 0.0, 0
for epoch in range(args.epochs):
    # The seed and the stream that hvdtrain.data.loader takes, so that batches are the same.
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([args.seed, epoch])))
    order = split.order(stream, borders)
    for number, first in enumerate(borders[:-1]):
        began = time.perf_counter()
        together = order[first : first + whole]  # the last one is short, as in every epoch of ours
        mine = np.array_split(together, hvd.size())[hvd.rank()]
        tokens = split.tokens[mine, : split.lengths[mine].max() + 1].astype(np.int64)
        key = np.array([epoch * len(borders) + number, hvd.rank()], np.int64)
        words = int(split.lengths[together].sum())
        loss = step(split.inputs[split.picture[mine]], tokens, key, words / hvd.size())  # Horovod averages
        total += words
        if epoch or number >= 3:
            done += words
            seconds += time.perf_counter() - began
if hvd.rank() == 0:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    last = loss / split.lengths[mine].sum()
    figures = {"samples_per_s": done / seconds, "samples": total, "last_loss": last, "peak_rss_bytes": rss}
    print(json.dumps(figures), flush=True)
hvd.shutdown()
