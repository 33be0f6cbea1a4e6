"""Single steps of hvdtrain.keras and hvdtrain.tensorflow on two ranks.

Weights start at 0, the learning rate is 1, and gradients are 1 on rank 0 and 2 on rank 1. Rank 0 prints how far each
step moved its weights; test_own_tensorflow.py has the expected values.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras
import hvdtrain.tensorflow as hvd

distributed = hvdtrain.keras.DistributedOptimizer


def one(**named: Any) -> Any:
    return distributed(keras.optimizers.SGD(1.0), **named)


def moved(optimizer: Any, gradient: tf.Tensor, passes: int = 1, then: Any = None) -> list[float]:
    """Return how far the weight moved and the number of steps. The optimizer `then` resumes after the first pass."""
    weight = keras.Variable([0.0])
    optimizer.build([weight])
    for number in range(passes):
        if number == 1 and then is not None:
            state, optimizer = optimizer.exchange_state(), then
            optimizer.build([weight])
            optimizer.load_exchange_state(state)
        optimizer.apply([(number + 1) * gradient], [weight])
    return [float(-weight.value[0]), int(optimizer.iterations)]


def rolled_back(gradient: tf.Tensor) -> list[float]:
    """A compiled step resumes twice from a state between two passes."""
    optimizer, weight = one(backward_passes_per_step=2), keras.Variable([0.0])
    optimizer.build([weight])
    step = tf.function(lambda factor: optimizer.apply([factor * gradient], [weight]), autograph=False)
    step(tf.constant(1.0))
    state, ends = optimizer.exchange_state(), []
    for _ in range(2):
        optimizer.load_exchange_state(state)
        weight.assign([0.0])
        step(tf.constant(2.0))
        ends.append(float(-weight.value[0]))
    return ends


def partial(gradient: tf.Tensor) -> dict[str, Any]:
    """A group and a variable outside of it, and a layer that is not exchanged."""
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2)]
    for layer in layers:
        layer.build((None, 1))
    weights = [layer.kernel for layer in layers]
    one(groups=[weights[:1]]).apply([gradient[None]] * 2, weights)
    report: dict[str, Any] = {"in a group and in none": [float(-each.value[0, 0]) for each in weights]}
    optimizer = hvdtrain.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(weights[1])
    optimizer.apply([gradient[None]] * 2, weights)
    report["one layer local"] = [float(-each.value[0, 0]) for each in weights]
    for name, named in (("on a tape", {}), ("sum on a tape", {"op": hvd.Sum})):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(gradient * (weights[0] + weights[1]))
        apart = hvd.DistributedGradientTape(tape, **named)
        apart.register_local_source(weights[1].value)
        pairs = apart.get_local_and_global_gradients(loss, [each.value for each in weights])
        report[name] = [[float(each[0, 0]) for _, each in part] for part in pairs]
    return report


def called_back() -> list[float]:
    """Return a velocity after the rate changed, a weight that is not broadcast, and one broadcast from rank 1."""
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    built = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(4)])
    built.compile(plain, "mse")
    plain.build(built.trainable_variables)
    for each in (*plain.momentums, *built.weights):
        each.assign(tf.fill(each.shape, 1.0 + hvd.rank()))
    change = hvdtrain.keras.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1)
    to_all = hvdtrain.keras.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=built.weights[0])
    for callback in (change, to_all):
        callback.set_model(built)
    to_all.on_train_begin()
    change.on_epoch_begin(3)
    change.on_train_batch_begin(0)
    return [float(np.ravel(each)[0]) for each in (plain.momentums[0], *built.weights[:2])]


def validated() -> list[float]:
    """Return the validation loss of an epoch that ends between two exchanges, and the averaged weights' loss."""
    draw = np.random.default_rng(hvd.rank())
    inputs, targets = draw.normal(size=(8, 2)).astype(np.float32), draw.normal(size=(8, 1)).astype(np.float32)
    everyone = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    keras.utils.set_random_seed(3)
    built = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    built.compile(distributed(keras.optimizers.SGD(0.1), strategy="local-sgd:every=3"), "mse")
    history = built.fit(inputs, targets, 2, 1, 0, shuffle=False, validation_data=everyone)
    return [float(history.history["val_loss"][0]), float(built.evaluate(*everyone, verbose=0))]


def main() -> None:
    hvd.init()
    gradient = tf.ones(1) * (hvd.rank() + 1)
    report: dict[str, Any] = {
        "sum": moved(one(op=hvd.Sum), gradient),
        "predivided": moved(one(gradient_predivide_factor=4.0), gradient),
        "two passes": moved(one(backward_passes_per_step=2), gradient, 2),
        "two passes, resumed between": moved(
            one(backward_passes_per_step=2), gradient, 2, then=one(backward_passes_per_step=2)
        ),
        "rolled back": rolled_back(gradient),
        **partial(gradient),
        "velocity at half the rate, local, broadcast": called_back(),
    }
    if "HVDTRAIN_STRATEGY" in os.environ:
        report["validated"] = validated()
    if hvd.rank() == 0:
        print(json.dumps(report))
    hvd.shutdown()


main()
