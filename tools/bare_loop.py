"""The yardstick of `make bench`: the same ResNet-34 in a hand-written Horovod loop, with nothing else round it.

    mpirun -np 2 --bind-to none python tools/bare_loop.py torch --epochs 3

Rank 0 prints one JSON line: images/s over all ranks without the first three steps, and peak RSS.
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
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=float, default=1.0)
args = parser.parse_args()

from hvdtrain.data import load  # noqa: E402
from hvdtrain.models.resnet import ResNetSpec, initial_state  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
split = load("digits", None).train
images, labels = split.samples.astype(np.float32), split.labels
if split.samples.dtype == np.uint8:
    images /= 255
spec = ResNetSpec(channels=1, classes=10, width=args.width)
state = initial_state(spec, 0)
model: Any

if args.framework == "torch":
    import horovod.torch as hvd
    import torch

    from hvdtrain.models.resnet_torch import ResNetTorch

    hvd.init()
    torch.set_num_threads(1)
    model = ResNetTorch(spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model.train()

    def step(x: np.ndarray, y: np.ndarray) -> None:
        optimizer.zero_grad()
        loss, _ = model.loss(torch.from_numpy(x), torch.from_numpy(y))
        (loss / len(y)).backward()
        optimizer.step()
        loss.item()
else:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvdtrain.models.resnet_tf import ResNetTF

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    model = ResNetTF(spec)
    for name, variable in (model.weights | model.buffers).items():
        variable.assign(state[name].transpose(2, 3, 1, 0) if state[name].ndim == 4 else state[name])
    weights = list(model.weights.values())
    slots = [tf.Variable(tf.zeros_like(weight)) for weight in weights]

    @tf.function(
        input_signature=[tf.TensorSpec([None, *images.shape[1:]], tf.float32), tf.TensorSpec([None], tf.int64)]
    )
    def graph(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss, _ = model.loss(x, y, training=True)
            loss /= tf.cast(tf.shape(y)[0], tf.float32)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        for weight, slot, gradient in zip(weights, slots, gradients, strict=True):
            tf.raw_ops.ResourceApplyMomentum(var=weight.handle, accum=slot.handle, lr=0.05, grad=gradient, momentum=0.9)
        return loss

    def step(x: np.ndarray, y: np.ndarray) -> None:
        graph(tf.constant(x), tf.constant(y)).numpy()


whole = args.batch_size * hvd.size()
done, seconds = 0, 0.0
for epoch in range(args.epochs):
    order = np.random.default_rng(epoch).permutation(len(labels))
    for number, first in enumerate(range(0, len(labels), whole)):
        began = time.perf_counter()
        together = order[first : first + whole]  # the last one is short, as in every epoch of ours
        mine = np.array_split(together, hvd.size())[hvd.rank()]
        step(images[mine], labels[mine])
        if epoch or number >= 3:
            done += len(together)
            seconds += time.perf_counter() - began
if hvd.rank() == 0:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"samples_per_s": done / seconds, "peak_rss_bytes": rss}), flush=True)
hvd.shutdown()
