"""Check that Keras' fit and tapes exchange in buckets as backward computes them, with the sums of one process.

Each rank has its own loopback address, as on several hosts. Every check raises if it fails.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import rank_per_host  # noqa: F401 (each rank is a host)
import tensorflow as tf

import hvdtrain.keras
import hvdtrain.tensorflow as hvd
from hvdtrain.strategies.algorithms.synchronous import Synchronous

WIDTH, STEPS, LR = 80, 6, 0.05
reported: list[int] = []
stepped = Synchronous.step


def noting(self: Any, *arguments: Any) -> Any:
    reported.append(len(self._pending))
    return stepped(self, *arguments)


Synchronous.step = noting  # type: ignore[method-assign]


def model() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.layers.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, activation="tanh") for _ in range(4))]
    )


def data(ranks: range) -> np.ndarray:
    """The samples of these ranks for each step, of shape (steps, samples, WIDTH)."""
    draws = [np.random.default_rng(rank).normal(size=(STEPS, 8, WIDTH)).astype(np.float32) for rank in ranks]
    return np.concatenate(draws, axis=1)


def loss_of(net: Any, inputs: Any) -> Any:
    return tf.reduce_mean(tf.square(net(inputs) - 1.0))


def weights(net: Any) -> np.ndarray:
    return np.concatenate([each.numpy().reshape(-1) for each in net.trainable_variables])


def by_tape(net: Any, graph: bool) -> np.ndarray:
    """Gradients of the first step are kept, and must not change in later ones."""
    kept: list[Any] = []

    def step(inputs: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(net, inputs)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, net.trainable_variables)
        for variable, gradient in zip(net.trainable_variables, gradients, strict=True):
            variable.assign_sub(LR * gradient)
        return gradients

    run = tf.function(step, autograph=False) if graph else step
    for inputs in data(range(hvd.rank(), hvd.rank() + 1)):
        kept.append([(each, np.array(each)) for each in run(tf.constant(inputs))])
    assert all(np.array_equal(each, copy) for step in kept for each, copy in step)
    return weights(net)


hvd.init()
single = model()
for inputs in data(range(hvd.size())):
    with tf.GradientTape() as tape:
        loss = loss_of(single, inputs)
    for variable, gradient in zip(
        single.trainable_variables, tape.gradient(loss, single.trainable_variables), strict=True
    ):
        variable.assign_sub(LR * gradient)
expected = weights(single)
for graph in (True, False):
    np.testing.assert_allclose(by_tape(model(), graph), expected, rtol=2e-5, atol=2e-6)
net, own = model(), data(range(hvd.rank(), hvd.rank() + 1)).reshape(-1, WIDTH)
net.compile(hvdtrain.keras.DistributedOptimizer(keras.optimizers.SGD(LR)), loss="mse", run_eagerly=False)
net.fit(own, np.ones_like(own), batch_size=8, epochs=1, shuffle=False, verbose=0)
np.testing.assert_allclose(weights(net), expected, rtol=2e-5, atol=2e-6)
reported_before = list(reported)


def joining(strategy: str) -> None:
    """Rank 0 has 3 batches and rank 1 has 5. A rank that has joined counts as zeros."""
    net, one = model(), model()
    optimizer = hvdtrain.keras.DistributedOptimizer(keras.optimizers.SGD(LR), strategy=strategy)
    optimizer.build(net.trainable_variables)
    draws = [data(range(rank, rank + 1)) for rank in range(hvd.size())]
    counts = [3, 5]
    for step in range(counts[hvd.rank()]):
        with tf.GradientTape() as tape:
            loss = loss_of(net, draws[hvd.rank()][step])
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
    assert hvd.join() == 1
    optimizer.synchronize_weights()
    if not strategy.startswith("local-sgd"):
        hvd.broadcast_variables(net.variables, root_rank=1)
    for step in range(max(counts)):
        with tf.GradientTape() as tape:
            present = [loss_of(one, each[step]) for each, count in zip(draws, counts, strict=True) if step < count]
            loss = tf.add_n(present) / hvd.size()
        for variable, gradient in zip(
            one.trainable_variables, tape.gradient(loss, one.trainable_variables), strict=True
        ):
            variable.assign_sub(LR * gradient)
    difference = np.linalg.norm(weights(net) - weights(one)) / np.linalg.norm(weights(one))
    assert difference < (1e-6 if strategy == "hierarchical" else 0.03), (strategy, difference)


for strategy in ("hierarchical", "powersgd:rank=8", "local-sgd:every=2"):
    joining(strategy)
reported = reported_before
assert reported == [3] * 3 * STEPS, reported
