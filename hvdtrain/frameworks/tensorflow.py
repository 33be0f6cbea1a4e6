"""A TensorFlow replica: one tf.Module on one device.

With Horovod or MultiWorkerMirroredStrategy, one compiled graph contains backward, the exchange and the update, and
updates each parameter as soon as its gradient has arrived. For other strategies backward and the update are two graphs.
Models and optimizers use TensorFlow's control flow, because AutoGraph would take longer than building the graph.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.frameworks import Profiler, statistics_of
from hvdtrain.records.metrics import Metric
from hvdtrain.strategies import Strategy
from hvdtrain.system import exits, stderr
from hvdtrain.system.exits import Failure

BUILD_NOTES = (b"absl::InitializeLog", b"oneDNN custom operations", b"cpu_feature_guard", b"To enable the following")

KERAS_EXTRAS = ("matplotlib", "pandas", "scipy", "sklearn")
"""Packages that Keras imports if they are installed.

`import tensorflow` imports Keras, which is not used here. Without these packages a rank needs 1.5 to 2.5 s less
processor time to start, and 150 MB less memory (docs/project/decisions.md)."""


@contextmanager
def without_modules(names: tuple[str, ...]) -> Iterator[None]:
    """Make imports of these modules fail, unless they are loaded already."""
    blocked = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


# TensorFlow enables oneDNN by default only with AVX-512 (docs/project/known-issues.md).
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
with stderr.suppress(BUILD_NOTES), without_modules(KERAS_EXTRAS):
    import tensorflow as tf

    from hvdtrain.frameworks.flat_tensorflow import FlatVariables, aligned, concatenate, shared_tensor
    from hvdtrain.frameworks.optimizers_tensorflow import OPTIMIZERS
    from hvdtrain.models.layers_tf import to_pytorch, to_tensorflow

# Dynamic loss scaling with the constants of torch.amp.GradScaler, so that both frameworks scale alike.
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_, which adds it to the norm before dividing by it"""


def prepare(device: str, local_rank: int, threads: int, *, exclusive_gpu: bool = False) -> str:
    """Select this rank's GPU, or the CPU with `threads` threads, and return the device's name.

    Must be called before the first operation, when TensorFlow fixes the devices. With `exclusive_gpu` and device
    "auto", surplus ranks use the CPU. Raises Failure (78) if "gpu" is requested and none exists.
    """
    gpus = [] if device == "cpu" else tf.config.list_physical_devices("GPU")
    if device == "gpu" and not gpus:
        raise Failure("--device gpu: TensorFlow finds no GPU; hint: use --device cpu or auto", exits.BAD_CONFIG)
    available = device == "gpu" or not exclusive_gpu or local_rank < len(gpus)
    own = gpus[local_rank % len(gpus)] if gpus and available else None
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
        tf.config.set_visible_devices([own] if own else [], "GPU")
        if own:
            tf.config.experimental.set_memory_growth(own, True)
    except RuntimeError:  # a script has built its model, so TensorFlow's devices are fixed
        return "gpu:0" if tf.config.get_visible_devices("GPU") else "cpu"
    return f"gpu:{local_rank % len(gpus)}" if own else "cpu"


def dense(gradients: list[Any], weights: list[tf.Variable]) -> list[tf.Tensor]:
    """Return gradients as tensors. TensorFlow returns None for unused weights, and slices for embeddings."""
    pairs = zip(gradients, weights, strict=True)
    return [tf.zeros_like(weight) if each is None else tf.convert_to_tensor(each) for each, weight in pairs]


class TensorFlowReplica:
    """See `frameworks.Replica`.

    `model.loss(*arrays, training=...)` returns the sum of losses and the metric's sums by name. `model.weights` are the
    trained variables by name. A model may have `buffers`, other variables by name, and `sequences`, the arguments of
    `loss` whose second axis differs in length between batches.
    """

    reports = True
    one_backward = True
    """Whether each step runs backward once, so that gradients are final when they are computed"""

    def __init__(
        self, model: Any, *, device: str, config: TrainConfig, world: Communicator, strategy: Strategy, metric: Metric
    ) -> None:
        self.device, self._metric = device, metric
        self._model, self._world = model, world
        self._in_backward = strategy.capabilities.in_backward
        self._weights: dict[str, tf.Variable] = model.weights
        untrained = self._buffers() or {each.name: each for each in getattr(model, "non_trainable_variables", ())}
        self.statistics = statistics_of(model, [name for name, each in untrained.items() if each.dtype.is_floating])
        self._optimizer = OPTIMIZERS[config.optimizer](self._weights, config)
        self._clip_norm = config.clip_norm
        averaged = self._weights.items() if config.ema else ()
        self._averages = {name: tf.Variable(weight, trainable=False) for name, weight in averaged}
        self._average_graph = tf.function(self._average, autograph=False)
        self._scale = tf.Variable(FIRST_SCALE if config.precision == "fp16" else 1.0, trainable=False)
        self._good_steps = tf.Variable(0, trainable=False)
        self._scaled = config.precision == "fp16"
        self._forward_graphs: dict[bool, Any] = {}
        self._update_graphs: dict[range, Any] = {}
        """By range of arrays: the graph that updates them"""
        self._flat = FlatVariables(self._weights.values())
        self._vector = aligned(self._flat.size + metric.size + 1)
        self._gathered = False
        """Whether the vector holds the gradients of the last backward"""
        self.use(strategy)

    def use(self, strategy: Strategy) -> None:
        self._strategy, self._local = strategy, strategy.capabilities.local_updates
        self._buckets = strategy.buckets() if self.one_backward else ()
        self._backward_graph: Any = None  # the graph reports the buckets

    def backward(self, batch: Batch, lr: float, stop: float) -> None:
        arrays = [tf.constant(array) for array in batch.arrays]
        if self._backward_graph is None:
            self._backward_graph = tf.function(
                lambda arrays, numbers: self._world.in_framework.run(self._backward, arrays, numbers),
                input_signature=[self._any_length(arrays), tf.TensorSpec([4], tf.float32)],
                autograph=False,
            )
        mean_of = batch.weight if self._local else batch.total_weight
        numbers = tf.constant([mean_of, batch.weight, lr, stop], tf.float32)
        self._gradients, self._tail = self._backward_graph(arrays, numbers)
        self._samples = batch.weight, batch.total_weight
        self._gathered = bool(self._buckets)

    def _any_length(self, arrays: list[tf.Tensor]) -> list[tf.TensorSpec]:
        """Return the arrays' types for any number of samples and any length of sequences.

        Then a short batch does not compile another graph, which takes seconds.
        """
        names, sequences = inspect.signature(self._model.loss).parameters, getattr(self._model, "sequences", ())
        with_length = {index for index, name in enumerate(names) if name in sequences}
        free = [2 if index in with_length else 1 for index in range(len(arrays))]
        each = zip(arrays, free, strict=True)
        return [tf.TensorSpec([None] * count + array.shape[count:], array.dtype) for array, count in each]

    def _buffers(self) -> Mapping[str, tf.Variable]:
        return getattr(self._model, "buffers", {})

    def _backward(self, arrays: list[tf.Tensor], numbers: tf.Tensor) -> Any:
        mean_of, samples, lr, stop = tf.unstack(numbers)
        tape = tf.GradientTape()
        with tape:
            loss, sums = self._model.loss(*arrays, training=True)
            mean = loss / mean_of * self._scale
        tail = tf.concat([self._numbers((loss, sums), loss.dtype), [samples, stop]], 0)
        tail = self._world.in_framework.graph_sum(tail, "step.totals")
        weights = list(self._weights.values())
        if not self._in_backward:
            gradients = dense(tape.gradient(mean, weights), weights)
            if not self._buckets:
                return gradients, tail
            self._report(gradients, tail)
            return [], tail
        self._apply(self._weights, dense(self._world.in_framework.summed_gradients(tape, mean, weights), weights), lr)
        return [], tail

    def _report(self, gradients: list[tf.Tensor], tail: tf.Tensor) -> None:
        """Add operations to the graph that copy each bucket's gradients into the vector and report it to the strategy.

        They run in the order of the buckets. The first one also copies the tail.
        """
        before: list[tf.Operation] = []
        for number, bucket in enumerate(self._buckets):
            arrays = [gradients[index] for index in bucket] + ([tail] if number == 0 else [])
            begin = self._flat.borders[bucket.start]

            def report(*arrays: np.ndarray, number: int = number, begin: int = begin) -> None:
                size = sum(array.size for array in arrays)
                np.concatenate([array.reshape(-1) for array in arrays], out=self._vector[begin : begin + size])
                if self.reports:
                    self._strategy.on_bucket_ready(number, self._vector)

            with tf.control_dependencies(before):
                before = [tf.numpy_function(report, arrays, [])]

    def vector(self) -> np.ndarray:
        if not self._gathered:
            self._gathered = True
            concatenate([*self._gradients, self._tail], out=self._vector)
        return self._vector

    def tail(self) -> np.ndarray:
        return np.asarray(self._tail.numpy(), dtype=np.float64)

    def share(self) -> tuple[int, int]:
        return self._samples

    @property
    def updates_parts(self) -> bool:
        return bool(self._buckets) and self.device == "cpu" and not self._clip_norm and not self._scaled

    def apply(self, lr: float, arrays: range | None = None) -> None:
        if self._in_backward:
            return
        gradients, arrays = list(self._gradients), arrays or range(len(self._weights))
        if self._gathered:
            # On a GPU the next step may fill the vector while this one is still being copied from it.
            to_tensor = shared_tensor if self.device == "cpu" else tf.constant
            gradients = [to_tensor(gradient) for gradient in self._flat.split(self._vector)]
        # A strategy may join buckets. A graph for each of its choices would take seconds to build.
        parts = [bucket for bucket in self._buckets if bucket.start in arrays] if self.updates_parts else [arrays]
        for part in parts:
            self._run_update(gradients[part.start : part.stop], lr, part)

    def _run_update(self, gradients: list[tf.Tensor], lr: float, arrays: range) -> None:
        if arrays not in self._update_graphs:
            weights = dict(list(self._weights.items())[arrays.start : arrays.stop])
            self._update_graphs[arrays] = tf.function(functools.partial(self._apply, weights), autograph=False)
        self._update_graphs[arrays](gradients, tf.constant(lr, tf.float32))

    def weights(self, arrays: range | None = None) -> np.ndarray:
        return self._flat.weights(arrays)

    def set_weights(self, weights: np.ndarray, arrays: range | None = None) -> None:
        self._flat.set_weights(weights, arrays)

    def _apply(self, weights: dict[str, tf.Variable], gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        if not self._scaled:
            self._update(weights, gradients, lr)
            return
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        unscaled = [gradient / self._scale for gradient in gradients]
        tf.cond(finite, lambda: self._update(weights, unscaled, lr), lambda: None)
        good_steps = tf.where(finite, self._good_steps + 1, 0)
        grows = good_steps == GROWTH_INTERVAL
        self._scale.assign(self._scale * tf.where(finite, tf.where(grows, GROWTH, 1.0), BACKOFF))
        self._good_steps.assign(tf.where(grows, 0, good_steps))

    def _update(self, weights: dict[str, tf.Variable], gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        if self._clip_norm:
            factor = tf.minimum(1.0, self._clip_norm / (tf.linalg.global_norm(gradients) + CLIP_EPSILON))
            gradients = [gradient * factor for gradient in gradients]
        self._optimizer.update(weights, gradients, lr)

    def waited_s(self) -> float | None:
        return None if self._in_backward else 0.0

    def sent_bytes(self) -> tuple[int, int]:
        return 0, 0

    def observe(self, batch: Batch) -> None:
        self._forward(batch, training=True)

    def evaluate(self, batch: Batch) -> np.ndarray:
        return np.append(self._forward(batch, training=False).numpy(), batch.weight)

    def _forward(self, batch: Batch, training: bool) -> tf.Tensor:
        arrays = [tf.constant(array) for array in batch.arrays]
        if training not in self._forward_graphs:
            self._forward_graphs[training] = tf.function(
                lambda arrays: self._world.in_framework.run(
                    lambda *each: self._numbers(self._model.loss(*each, training=training), tf.float64), *arrays
                ),
                input_signature=[self._any_length(arrays)],
                autograph=False,
            )
        return self._forward_graphs[training](arrays)

    def _numbers(self, losses: tuple[tf.Tensor, Mapping[str, tf.Tensor]], dtype: tf.DType) -> tf.Tensor:
        """Concatenate the results of a model's `loss`."""
        loss, sums = losses
        return tf.concat([tf.reshape(tf.cast(x, dtype), [-1]) for x in (loss, *self._metric.in_order(sums))], 0)

    def state(self) -> dict[str, np.ndarray]:
        arrays = {f"parameter.{name}": to_pytorch(weight.numpy()) for name, weight in self._weights.items()}
        arrays |= {name: to_pytorch(slot.numpy()) for name, slot in self._optimizer.slots.items()}
        arrays |= {f"average.{name}": to_pytorch(each.numpy()) for name, each in self._averages.items()}
        if self._scaled:
            arrays["loss_scale"] = np.array([self._scale.numpy(), self._good_steps.numpy()], dtype=np.float64)
        return arrays

    def load(self, state: dict[str, np.ndarray]) -> None:
        for name, weight in self._weights.items():
            weight.assign(to_tensorflow(state[f"parameter.{name}"]))
        for name, slot in self._optimizer.slots.items():
            if name in state:
                slot.assign(to_tensorflow(state[name]))
        for name, average in self._averages.items():
            average.assign(to_tensorflow(state.get(f"average.{name}", state[f"parameter.{name}"])))
        if self._scaled and "loss_scale" in state:
            scale, steps = state["loss_scale"]
            self._scale.assign(scale)
            self._good_steps.assign(int(steps))

    def local_state(self) -> dict[str, np.ndarray]:
        return {name: buffer.numpy() for name, buffer in self._buffers().items()}

    def load_local(self, state: dict[str, np.ndarray]) -> None:
        for name, buffer in self._buffers().items():
            if name in state:
                buffer.assign(state[name])

    def average(self, decay: float, weights: np.ndarray | None) -> None:
        given = [] if weights is None else [tf.constant(each) for each in self._flat.split(weights)]
        self._average_graph(tf.constant(decay, tf.float32), given)

    def _average(self, decay: tf.Tensor, given: list[tf.Tensor]) -> None:
        for average, weight in zip(self._averages.values(), given or self._weights.values(), strict=True):
            average.assign_sub((1 - decay) * (average - weight))

    def swap_average(self) -> None:
        for average, weight in zip(self._averages.values(), self._weights.values(), strict=True):
            kept = weight.numpy()
            weight.assign(average)
            average.assign(kept)

    def synchronize(self) -> None:
        if self.device != "cpu":  # on a CPU, graphs have finished when they return
            with tf.device("GPU:0"):
                tf.raw_ops.SyncDevice()

    def now(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def profiler(self) -> Profiler:
        from hvdtrain.frameworks.profile_tensorflow import TensorFlowProfiler

        return TensorFlowProfiler()
