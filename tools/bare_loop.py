"""The baseline of `make bench`, and the script of `make bench-scripts`: ResNet-34 in a hand-written Horovod loop.

    mpirun -np 2 --bind-to none python tools/bare_loop.py torch --epochs 3

Trains on the same batches as `python -m hvdtrain.resnet`. Rank 0 prints one JSON line: images per second over all
ranks and the median time of a step without its batch, both without the first --warmup steps, the number of images, the
last step's loss per image, and peak RSS.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import time
from typing import Any

import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("framework", choices=("torch", "tensorflow"))
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--library", choices=("horovod", "hvdtrain"), default="horovod")
parser.add_argument("--width", type=float, default=1.0)
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--warmup", type=int, default=3)
parser.add_argument("--device", default="cpu", help="with torch, also cuda")
args = parser.parse_args()

from hvdtrain import data  # noqa: E402
from hvdtrain.models import resnet  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
BATCH_SIZE = 32
LR = 0.05
split = data.load("digits", (args.image_size, args.image_size)).train
spec = resnet.ResNetSpec(channels=1, classes=10, width=args.width)
hvd = importlib.import_module(f"{args.library}.{args.framework}")
state = resnet.initial_state(spec, 0)
model: Any

if args.framework == "torch":
    import torch

    from hvdtrain.models.resnet_torch import ResNetTorch

    hvd.init()
    torch.set_num_threads(1)
    model = ResNetTorch(spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    model.to(args.device)
    # fused=True is PyTorch's fastest variant, and hvdtrain uses it too.
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, fused=True)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    model.train()

    def step(arrays: tuple[np.ndarray, ...], samples: float) -> float:
        optimizer.zero_grad()
        loss, _ = model.loss(*(torch.from_numpy(array).to(args.device) for array in arrays))
        (loss / samples).backward()
        optimizer.step()
        return float(loss.item())
else:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # hvdtrain sets it too
    import tensorflow as tf

    from hvdtrain.config.options import TrainConfig
    from hvdtrain.frameworks.optimizers_tensorflow import SGD
    from hvdtrain.models.layers_tf import to_tensorflow
    from hvdtrain.models.resnet_tf import ResNetTF

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    model = ResNetTF(spec)
    for name, variable in (model.weights | model.buffers).items():
        variable.assign(to_tensorflow(state[name]))
    update = SGD(model.weights, TrainConfig(lr=LR)).update

    # One graph for every batch size: tracing a second one would fall into the timed steps.
    example = split.batch(np.arange(2), np.arange(2), 0).arrays
    signature = tuple(tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in example)

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


global_batch = BATCH_SIZE * hvd.size()
borders = [*range(0, len(split), global_batch), len(split)]
done, seconds, total, steps = 0, 0.0, 0, list[float]()
for epoch in range(args.epochs):
    # The seed and the random stream of hvdtrain.data.loader, so that the batches are the same.
    order = split.order(np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, epoch]))), borders)
    for number, first in enumerate(borders[:-1]):
        began = time.perf_counter()
        indices = order[first : first + global_batch]  # the last batch of an epoch is short
        local = np.array_split(indices, hvd.size())[hvd.rank()]
        key = (epoch * len(borders) + number) * 2**32 + hvd.rank()
        batch = split.batch(local, indices, key)
        computing = time.perf_counter()
        loss = step(batch.arrays, batch.total_weight / hvd.size())  # Horovod averages
        total += batch.total_weight
        if epoch or number >= args.warmup:
            done += len(indices)
            ended = time.perf_counter()
            seconds += ended - began
            if len(indices) == global_batch:
                steps.append(ended - computing)
if hvd.rank() == 0:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {
        "samples_per_s": done / seconds,
        "step_s": statistics.median(steps),
        "samples": total,
        "last_loss": loss / batch.weight,
    }
    print(json.dumps({**figures, "peak_rss_bytes": rss}), flush=True)
hvd.shutdown()
