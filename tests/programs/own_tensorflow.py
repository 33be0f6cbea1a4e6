"""A script with hvdtrain.tensorflow and hvdtrain.keras: own_tensorflow.py FOLDER

Rank 0 prints the results of each call and each training as JSON, which test_own_tensorflow.py compares.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

try:
    import horovod.keras
    import horovod.tensorflow
except ImportError:
    horovod = None

import hvdtrain.keras
import hvdtrain.tensorflow as hvd
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import ring_bytes
from hvdtrain.tensorflow import recorded

RANK_1 = hvd.ProcessSet([1])
ON_TCP = "HVDTRAIN_STRATEGY" in os.environ
BATCH = 16
ERRORS = (Failure, NotImplementedError, ValueError, tf.errors.OpError)


def tolist(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [tolist(each) for each in value]
    if isinstance(value, tf.IndexedSlices):
        return tolist([value.values, value.indices])
    return np.asarray(value).astype(np.float64).tolist()


def calls() -> dict[str, Any]:
    """Return the results of each call, eagerly and in a graph, and of its gradient."""
    rank = hvd.rank()
    matrix = tf.constant(np.arange(12, dtype=np.float32).reshape(4, 3) + 100 * rank)
    rows = matrix[: rank + 1]
    functions = {
        "average": lambda matrix, rows: hvd.allreduce(matrix),
        "sum": lambda matrix, rows: hvd.allreduce(matrix, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        "min": lambda matrix, rows: hvd.allreduce(matrix, op=hvd.Min),
        "max": lambda matrix, rows: hvd.allreduce(matrix, op=hvd.Max),
        "product": lambda matrix, rows: hvd.allreduce(matrix, op=hvd.Product),
        "int": lambda matrix, rows: hvd.allreduce(tf.cast(matrix, tf.int64), op=hvd.Sum),
        "half": lambda matrix, rows: hvd.allreduce(tf.cast(matrix, tf.float16), op=hvd.Sum),
        "scalar": lambda matrix, rows: hvd.allreduce(tf.reduce_sum(rows), op=hvd.Sum),
        "compressed": lambda matrix, rows: hvd.allreduce(matrix, compression=hvd.Compression.fp16),
        "sparse": lambda matrix, rows: hvd.allreduce(
            tf.IndexedSlices(matrix[:2], tf.cast(rows[:1, 0] // 100 + [0.0, 2.0], tf.int32), tf.constant([4, 3]))
        ),
        "grouped": lambda matrix, rows: hvd.grouped_allreduce([matrix, rows[:1]]),
        "gather": lambda matrix, rows: hvd.allgather(rows),
        "grouped_gather": lambda matrix, rows: hvd.grouped_allgather([rows, matrix]),
        "broadcast": lambda matrix, rows: hvd.broadcast(matrix, root_rank=1),
        "alltoall": lambda matrix, rows: hvd.alltoall(matrix),
        "splits": lambda matrix, rows: hvd.alltoall(matrix, splits=tf.constant([3 - rank, 1 + rank])),
    }

    def at_once(matrix: Any, rows: Any) -> Any:
        return {name: call(matrix, rows) for name, call in functions.items()}

    results: dict[str, Any] = {name: tolist(value) for name, value in at_once(matrix, rows).items()}
    in_graph = tf.function(at_once, autograph=False)(matrix, rows)
    results |= {f"{name} in a graph": tolist(value) for name, value in in_graph.items()}
    weights = tf.Variable(matrix)
    differentiable = {
        "average": lambda: hvd.allreduce(weights),
        "gather": lambda: hvd.allgather(weights[: rank + 1]),
        "broadcast": lambda: hvd.broadcast(weights, root_rank=1),
        "alltoall": lambda: hvd.alltoall(weights, splits=tf.constant([3 - rank, 1 + rank]))[0],
        "grouped": lambda: hvd.grouped_allreduce([weights, 2 * weights])[1],
    }

    for name, call in differentiable.items():

        def gradient(call: Any = call) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(call() ** 2)
            return tf.convert_to_tensor(tape.gradient(loss, weights))

        results[f"gradient of {name}"] = tolist(gradient())
        results[f"gradient of {name} in a graph"] = tolist(tf.function(gradient, autograph=False)())
    weights.assign(matrix)
    hvd.broadcast_variables([weights, keras.Variable(matrix, name=f"of_{rank}")], root_rank=1)
    results["variables"] = tolist(weights)
    weights.assign(matrix)
    results["in place"] = tolist(hvd.broadcast_([weights], root_rank=1))
    results["objects"] = [hvd.broadcast_object({"rank": rank}, root_rank=1), hvd.allgather_object(["rank", rank])]
    results["sizes"] = [*tolist([hvd.size_op(), hvd.local_size_op()]), hvd.size(), hvd.local_size(), hvd.cross_size()]
    results["set"] = tolist(hvd.allreduce(matrix, process_set=RANK_1)) if rank else None
    return results


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    inputs = random.normal(size=(64, 12)).astype(np.float32)
    return inputs, (inputs @ random.normal(size=(12, 4))).argmax(1)


def shard(array: np.ndarray) -> np.ndarray:
    """Return this rank's shard of each batch."""
    parts = array.reshape(-1, hvd.size(), BATCH // hvd.size(), *array.shape[1:])[:, hvd.rank()]
    return parts.reshape(-1, *array.shape[1:])


@keras.saving.register_keras_serializable()
class Each(keras.metrics.Metric):
    """A metric that is an array, like F1Score."""

    def update_state(self, *_: Any, **__: Any) -> None:
        pass

    def result(self) -> Any:
        return tf.constant([hvd.rank(), 1.0])


class Decay(keras.optimizers.schedules.ExponentialDecay):
    """A schedule that is not registered with Keras."""


def model(optimizer: Any, seed: int = 3, *between: Any, built_by_fit: bool = False) -> Any:
    keras.utils.set_random_seed(seed)
    dense = keras.layers.Dense
    first = [] if built_by_fit else [keras.layers.Input((12,))]
    built = keras.Sequential([*first, dense(8, activation="tanh"), *between, dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="Top-2")
    built.compile(optimizer, loss, metrics=["accuracy", top, Each(name="each")])
    return built


def sgd(**named: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **named)


def fitted(built: Any, epochs: int = 3, **named: Any) -> dict[str, Any]:
    """Train on this rank's shard; return the weights of all ranks and the history."""
    inputs, labels = map(shard, data())
    averaging = [hvdtrain.keras.callbacks.MetricAverageCallback(), *named.pop("callbacks", [])]
    callbacks = [hvdtrain.keras.callbacks.BroadcastGlobalVariablesCallback(0), *averaging]
    size = BATCH // hvd.size()
    history = built.fit(inputs, labels, size, epochs, 0, callbacks=callbacks, shuffle=False, **named)
    return weights_of(built) | {name: tolist(values) for name, values in history.history.items()}


def weights_of(built: Any) -> dict[str, Any]:
    flat = np.concatenate([np.asarray(each).ravel() for each in built.trainable_weights])
    return {"weights": tolist(hvd.allgather(tf.constant(flat)[None]))}


def alone(optimizer: Any, *between: Any, epochs: int = 3) -> dict[str, Any]:
    """Train in one process with the whole batch."""
    built = model(optimizer, 3, *between)
    history = built.fit(*data(), BATCH, epochs, 0, shuffle=False)
    return weights_of(built) | {name: tolist(values) for name, values in history.history.items()}


def fits(folder: Path) -> dict[str, Any]:
    distributed = hvdtrain.keras.DistributedOptimizer
    adam = lambda: keras.optimizers.Adam(Decay(0.01, 4, 0.5))  # noqa: E731
    runs = {
        "alone": lambda: alone(sgd()),
        "fit": lambda: fitted(model(distributed(sgd()), seed=3 + hvd.rank())),
        "two passes": two_passes,
        "tape": taped,
    }
    if ON_TCP:
        stale = "local-sgd:every=2,staleness=1,parts=2"
        late_built = lambda: model(distributed(sgd(), strategy=stale), 3 + hvd.rank(), built_by_fit=True)  # noqa: E731
        runs["alone, plain"] = lambda: alone(plain())
        runs["averaged"] = lambda: fitted(model(distributed(plain(), strategy="local-sgd:every=1")))
        runs["scaled sgd"] = lambda: fitted(model(distributed(plain(), strategy="local-sgd:every=1,lr_scaling=sqrt")))
        larger = lambda: keras.optimizers.Adam(0.01 * 2**0.5)  # noqa: E731
        runs["adam, larger"] = lambda: fitted(model(distributed(larger(), strategy="local-sgd:every=2")))
        scaled = "local-sgd:every=2,lr_scaling=sqrt"
        runs["adam, scaled"] = lambda: fitted(model(distributed(keras.optimizers.Adam(0.01), strategy=scaled)))
        runs["stale"] = lambda: fitted(model(distributed(sgd(), strategy=stale)))
        runs["stale, built by fit"] = lambda: fitted(late_built())
        runs["stale, resumed"] = lambda: resumed(folder, strategy=stale)
    else:
        runs["resumed"] = lambda: resumed(folder)
        runs["alone, adam"] = lambda: alone(adam())
        runs["adam"] = lambda: fitted(model(distributed(adam(), groups=2)))
        runs["alone, muon"] = lambda: alone(hvdtrain.keras.Muon())
        runs["muon"] = lambda: fitted(model(distributed(hvdtrain.keras.Muon())))
        runs["alone, norm"] = lambda: alone(plain(), keras.layers.BatchNormalization())
        runs["norm"] = lambda: fitted(model(distributed(plain()), 3, hvd.SyncBatchNormalization()))
        runs["rates"] = rates
        runs["rank 0 resumed"] = lambda: fitted(
            model(distributed(sgd()), seed=9) if hvd.rank() else hvdtrain.keras.load_model(folder / "0.keras"), epochs=2
        )
        # the TCP backend takes over from Horovod here
        runs["late change"] = lambda: fitted(model(distributed(sgd(), strategy="powersgd")))
    return {name: call() for name, call in runs.items()}


def plain() -> Any:
    return keras.optimizers.SGD(0.1)


def two_passes() -> dict[str, Any]:
    """Train with two backward passes, each of half a batch."""
    inputs, labels = map(shard, data())
    halves = model(
        hvdtrain.keras.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True)
    )
    halves.fit(inputs, labels, BATCH // hvd.size() // 2, 3, 0, shuffle=False)
    return weights_of(halves)


def resumed(folder: Path, **named: Any) -> dict[str, Any]:
    """Train one epoch, save the model, load it and train two epochs."""
    first = model(hvdtrain.keras.DistributedOptimizer(sgd(), **named))
    fitted(first, epochs=1)
    path = str(folder / f"{hvd.rank()}.keras")
    first.save(path)
    np.savez(folder / f"{hvd.rank()}.npz", **first.optimizer.exchange_state())
    config = first.optimizer.get_config()
    assert first.optimizer.from_config(config).get_config() == config
    again = hvdtrain.keras.load_model(path, **named)
    again.optimizer.load_exchange_state(dict(np.load(folder / f"{hvd.rank()}.npz")))
    kinds = [isinstance(again.optimizer, keras.optimizers.SGD), type(again.optimizer).__name__]
    return fitted(again, epochs=2) | {"kinds": [*kinds, type(keras.models.load_model(path).optimizer).__module__]}


def taped() -> dict[str, Any]:
    """Train in a loop with Horovod's tape and the batches of `fit`."""
    built, optimizer = model(None), sgd()
    inputs, labels = map(shard, data())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, built(inputs))
        tape = hvd.DistributedGradientTape(tape)
        weights = [each.value for each in built.trainable_weights]
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))

    hvd.broadcast_variables(built.variables, root_rank=0)
    each = BATCH // hvd.size()
    for begin in [*range(0, len(labels), each)] * 3:
        step(tf.constant(inputs[begin : begin + each]), tf.constant(labels[begin : begin + each]))
    return weights_of(built)


def rates() -> dict[str, Any]:
    """Return the learning rate of each step and each epoch."""
    seen: list[float] = []
    scheduled = model(hvdtrain.keras.DistributedOptimizer(sgd()))
    notes = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(
            float(keras.ops.convert_to_numpy(scheduled.optimizer.learning_rate))
        )
    )
    changes = [
        hvdtrain.keras.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2),
        hvdtrain.keras.callbacks.LearningRateScheduleCallback(0.2, 0.1, start_epoch=2),
    ]
    return {"lr": fitted(scheduled, epochs=4, callbacks=[*changes, notes])["lr"], "rates": seen}


def errors() -> dict[str, str]:
    """Return the errors of unsupported calls, by name."""
    distributed = hvdtrain.keras.DistributedOptimizer
    calls = {
        "unknown": lambda: distributed(sgd(), strategy="powersdg"),
        "native": lambda: distributed(sgd(), strategy="native"),
        "compression": lambda: distributed(sgd(), strategy="powersgd", compression=hvd.Compression.fp16),
        "tape": lambda: hvd.DistributedGradientTape(tf.GradientTape(), strategy="local-sgd"),
        "session": _in_session,
        "op": lambda: distributed(sgd(), op=hvd.Max),
        "twice": lambda: distributed(distributed(sgd())),
        "xla": lambda: _compiled(distributed(sgd())),
        "half": lambda: _half(lambda: distributed(sgd(), strategy="powersgd")),
        "half tape": lambda: _half(lambda: hvd.DistributedGradientTape(tf.GradientTape(), strategy="powersgd")),
        "shapes": lambda: hvd.allreduce(tf.zeros(2 + hvd.rank()), name="shapes"),
    }
    if ON_TCP:
        calls["adasum"] = lambda: hvd.allreduce(tf.ones(2), op=hvd.Adasum)
        calls["weights"] = lambda: _apart(distributed(plain(), strategy="local-sgd"))
    report = {}
    for name, call in calls.items():
        try:
            call()
        except ERRORS as error:
            report[name] = f"{type(error).__name__}: {error}"
    return report


def _in_session() -> None:
    with tf.Graph().as_default():
        hvd.allreduce(tf.zeros(2))


def _apart(optimizer: Any) -> None:
    """Ranks start with different weights and do not broadcast."""
    model(optimizer, 3 + hvd.rank()).fit(*data(), BATCH, verbose=0)


def _half(call: Any) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        call()
    finally:
        keras.config.set_dtype_policy("float32")


def _compiled(optimizer: Any) -> None:
    built = model(optimizer)
    built.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=True)
    built.fit(*data(), BATCH, verbose=0)


def main() -> None:
    hvd.init(process_sets=[RANK_1])
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # init must not start TensorFlow
    folder = Path(sys.argv[1])
    for module, own in ((horovod.tensorflow, hvd), (horovod.keras, hvdtrain.keras)) if horovod else ():
        assert all(hasattr(own, name) for name in vars(module) if not name.startswith("_") and name != "keras")
    report = {"calls": calls(), "errors": errors(), "fits": fits(folder)}
    values = [tf.Variable(tf.zeros(6, dtype)) for dtype in (tf.float64, tf.int32)]
    for compression, sent in ((hvd.Compression.none, 72), (hvd.Compression.fp16, 36)):
        assert recorded.Recorded(None, values, compression).sent_bytes == ring_bytes(sent, hvd.size())
    every = hvd.allgather_object(report["calls"])
    if hvd.rank() == 0:
        report["calls"] = {name: [each[name] for each in every] for name in report["calls"]}
        print(json.dumps(report))
    hvd.shutdown()


main()
