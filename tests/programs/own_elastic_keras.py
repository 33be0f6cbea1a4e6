"""Keras' fit, and then a loop with a gradient tape, in ranks that kill themselves: see own_elastic.py.

KILLS is a JSON object: the step of `fit` and the step of the loop before which each rank dies, by rank. A third
argument is the strategy of `fit`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.tensorflow.keras as hvd
from hvdtrain.tensorflow import DistributedGradientTape, allgather_object

STEPS, EPOCHS = 6, 2

folder, kills, strategy = Path(sys.argv[1]), json.loads(sys.argv[2]), (*sys.argv[3:], None)[0]
hvd.init()
first_rank = int(os.environ.get("HVDTRAIN_ELASTIC_RANK", hvd.rank()))
keras.utils.set_random_seed(hvd.rank())  # the state makes the ranks equal
x = np.random.default_rng(5).normal(size=(240, 8)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int64)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), strategy=strategy), loss)
state = hvd.elastic.KerasState(model, epoch=0, batch=0)
resets: list[list[int]] = []
state.register_reset_callbacks([lambda: resets.append([state.epoch, state.batch, hvd.rank(), hvd.size()])])


class Counter(keras.callbacks.Callback):
    """Counts the steps that a commit keeps, and kills the rank."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if state.epoch * STEPS + state.batch == kills.get(str(first_rank), [None])[0]:
            os.kill(os.getpid(), signal.SIGKILL)


def digests() -> list[str]:
    weights = b"".join(np.asarray(each).tobytes() for each in model.variables)
    return allgather_object(hashlib.sha256(weights).hexdigest(), name="digests")


@hvd.elastic.run
def fit(state: Any) -> list[str]:
    shard = slice(hvd.rank(), None, hvd.size())
    callbacks = [
        Counter(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    epochs = EPOCHS - state.epoch
    model.fit(x[shard], y[shard], batch_size=8, steps_per_epoch=STEPS, epochs=epochs, callbacks=callbacks, verbose=0)
    return digests()


report: dict[str, Any] = {"fit": fit(state), "steps of fit": int(model.optimizer.iterations)}
other = keras.optimizers.SGD(0.05)
loop = hvd.elastic.KerasState(model, other, step=0)
loop.register_reset_callbacks([lambda: resets.append([loop.step, 0, hvd.rank(), hvd.size()])])


@tf.function
def step(inputs: Any, labels: Any) -> None:
    with tf.GradientTape() as tape:
        value = loss(labels, model(inputs, training=True))
    gradients = DistributedGradientTape(tape).gradient(value, model.trainable_variables)
    other.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@hvd.elastic.run
def train(loop: Any) -> list[str]:
    while loop.step < STEPS:
        if loop.step == kills.get(str(first_rank), [None, None])[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = 8 * (loop.step * hvd.size() + hvd.rank())
        step(x[begin : begin + 8], y[begin : begin + 8])
        loop.step += 1
        loop.commit()
    return digests()


report |= {"loop": train(loop), "steps of the loop": int(other.iterations)}
report |= {"resets": resets, "epoch": state.epoch, "rank": hvd.rank(), "size": hvd.size()}
(folder / f"{first_rank}.json").write_text(json.dumps(report))
