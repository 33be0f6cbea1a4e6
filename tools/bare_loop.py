"""The yardstick of `make bench`: a model of ours in a hand-written Horovod loop, with nothing else round it.

    mpirun -np 2 --bind-to none python tools/bare_loop.py torch resnet --epochs 3
    mpirun -np 2 --bind-to none python tools/bare_loop.py torch captioner

The captioner trains on the same batches of drawn scenes as `python -m hvdtrain.captioning --epochs 1`, the same number
of words in each. Rank 0 prints one JSON line: samples (images, or captions) per second over all ranks without
the first three steps, how many (images, words), the last step's loss for each, and peak RSS.
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
parser.add_argument("model", choices=("resnet", "captioner"))
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()

from hvdtrain import data  # noqa: E402
from hvdtrain.captions.load import load  # noqa: E402
from hvdtrain.models import captioner, resnet  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
BATCH_SIZE = 32
LR = {"resnet": 0.05, "captioner": 2e-3}[args.model]
split: Any
spec: Any
model: Any

if args.model == "resnet":
    split = data.load("digits").train
    spec = resnet.ResNetSpec(channels=1, classes=10)
    state = resnet.initial_state(spec, 0)
else:
    dataset = load("shapes")
    split = dataset.train
    spec = captioner.CaptionerSpec(vocabulary=len(dataset.vocabulary), encoder="small")
    state = captioner.initial_state(spec, 0)

if args.framework == "torch":
    import horovod.torch as hvd
    import torch

    from hvdtrain.models.captioner_torch import CaptionerTorch
    from hvdtrain.models.resnet_torch import ResNetTorch

    hvd.init()
    torch.set_num_threads(1)
    model = ResNetTorch(spec) if args.model == "resnet" else CaptionerTorch(spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    if args.model == "resnet":  # fused: the fastest that PyTorch has, as in ours
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model.train()

    def step(arrays: tuple[np.ndarray, ...], samples: float) -> float:
        optimizer.zero_grad()
        loss, _ = model.loss(*map(torch.from_numpy, arrays))
        (loss / samples).backward()
        optimizer.step()
        return float(loss.item())
else:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as ours
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvdtrain.config.options import TrainConfig
    from hvdtrain.frameworks.optimizers_tensorflow import SGD, Adam
    from hvdtrain.models.captioner_tf import CaptionerTF
    from hvdtrain.models.layers_tf import to_tensorflow
    from hvdtrain.models.resnet_tf import ResNetTF

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    model = ResNetTF(spec) if args.model == "resnet" else CaptionerTF(spec)
    for name, variable in (model.weights | getattr(model, "buffers", {})).items():
        variable.assign(to_tensorflow(state[name]))
    update = (SGD if args.model == "resnet" else Adam)(model.weights, TrainConfig(lr=LR)).update

    # One graph for any number of samples, and words: a second one would be traced in the timed steps.
    free = {"resnet": (1, 1), "captioner": (1, 2, 0)}[args.model]
    given = zip(free, split.batch(np.arange(2), np.arange(2), 0).arrays, strict=True)
    signature = tuple(tf.TensorSpec([None] * axes + list(array.shape[axes:]), array.dtype) for axes, array in given)

    @tf.function(input_signature=[signature, tf.TensorSpec([], tf.float32)])
    def graph(arrays: tuple[tf.Tensor, ...], samples: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss, _ = model.loss(*arrays, training=True)
            mean = loss / samples
        gradients = hvd.DistributedGradientTape(tape).gradient(mean, list(model.weights.values()))
        update(model.weights, gradients, tf.constant(LR))
        return loss

    def step(arrays: tuple[np.ndarray, ...], samples: float) -> float:
        return float(graph(tuple(map(tf.constant, arrays)), tf.constant(samples, tf.float32)).numpy())


whole = BATCH_SIZE * hvd.size()
borders = [*range(0, len(split), whole), len(split)]
done, seconds, total = 0, 0.0, 0
for epoch in range(args.epochs):
    # The seed and the stream that hvdtrain.data.loader takes, so that batches are the same.
    order = split.order(np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, epoch]))), borders)
    for number, first in enumerate(borders[:-1]):
        began = time.perf_counter()
        together = order[first : first + whole]  # the last one is short, as in every epoch of ours
        mine = np.array_split(together, hvd.size())[hvd.rank()]
        key = (epoch * len(borders) + number) * 2**32 + hvd.rank()
        batch = split.batch(mine, together, key)
        loss = step(batch.arrays, batch.total_weight / hvd.size())  # Horovod averages
        total += batch.total_weight
        if epoch or number >= 3:
            done += len(together)
            seconds += time.perf_counter() - began
if hvd.rank() == 0:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"samples_per_s": done / seconds, "samples": total, "last_loss": loss / batch.weight}
    print(json.dumps({**figures, "peak_rss_bytes": rss}), flush=True)
hvd.shutdown()
