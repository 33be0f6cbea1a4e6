"""A synthetic benchmark in TensorFlow 2, in the order of calls that Horovod's documentation gives; argv[1]: what is
imported as hvd; argv[2]: the file that rank 0 writes."""

import importlib
import json
import sys
import timeit
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

hvd = importlib.import_module(sys.argv[1])
hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())
model = keras.Sequential([keras.layers.Conv2D(8, 3, strides=2), keras.layers.Flatten(), keras.layers.Dense(10)])
opt = keras.optimizers.SGD(0.01 * hvd.size(), momentum=0.9)
drawn = np.random.default_rng(hvd.rank())
data, target = drawn.standard_normal((16, 32, 32, 3), np.float32), drawn.integers(10, size=16)
model.build(data.shape)
opt.build(model.trainable_variables)


@tf.function
def benchmark_step() -> None:
    with tf.GradientTape() as tape:
        logits = model(data, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(opt.variables, root_rank=0)
timeit.timeit(benchmark_step, number=2)
rates = [16 * 3 / timeit.timeit(benchmark_step, number=3) for _ in range(2)]
total = hvd.allreduce(tf.constant([np.mean(rates)]), op=hvd.Sum)
assert float(total[0]) > np.mean(rates) / 2
if hvd.rank() == 0:
    arrays = {str(place): each.numpy() for place, each in enumerate(model.variables)}
    norms = {name: [float(each.sum()), float(np.linalg.norm(each))] for name, each in arrays.items()}
    Path(sys.argv[2]).write_text(json.dumps(norms))
