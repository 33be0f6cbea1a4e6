"""A TensorFlow replica of one pipeline stage, which processes a batch in micro-batches.

Forward is a compiled graph. The tape around it creates the compiled graph of its gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data import Batch
from hvdtrain.frameworks.tensorflow import TensorFlowReplica, dense
from hvdtrain.pipeline.schedule import Parted

# Before step 0 each layer is timed in its own graph. TensorFlow mistakes these for retracing of one graph.
tf.get_logger().addFilter(lambda record: "triggered tf.function retracing" not in record.getMessage())


class PipelineTensorFlow(Parted, TensorFlowReplica):
    """See `frameworks.Replica` and `pipeline.schedule.StageModel`.

    `model(*arrays, training=...)` runs the stage's layers. The last stage has `model.loss(*arrays, training=...)`,
    which also computes the sum of losses. The arrays are the batch's, except that the first one comes from the previous
    stage.
    """

    _gradients: Any = ()
    """Sums over the micro-batches of this step"""

    def backward(self, batch: Batch, lr: float, stop: float) -> None:
        self._gradients = []
        self._samples = batch.weight, batch.total_weight
        self._mean_of = float(batch.weight if self._local else batch.total_weight)
        self._tail = tf.constant(self._pipe.train(self, batch, stop))
        self._gathered = False
        if self._in_backward:  # this is the only replica, so nothing is exchanged
            self._run_update(self._gradients, lr, range(len(self._weights)))

    def through(self, number: int, batch: Batch, inputs: np.ndarray | None) -> tuple[np.ndarray | None, Any]:
        arrays = [tf.constant(array) for array in self._given(batch, inputs)]
        with tf.GradientTape() as tape:
            if inputs is not None:
                tape.watch(arrays[0])
            output, totals = self._run(arrays, training=True)
            if self._pipe.last:
                output = output / self._mean_of * self._scale
        self._under_way[number] = arrays[0], output, tape
        return (None, totals) if self._pipe.last else (np.asarray(output.numpy()), None)

    def back(self, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        (x, output, tape), weights = self._under_way.pop(number), list(self._weights.values())
        output_gradients = None if gradient is None else tf.constant(gradient)
        *gradients, input_gradient = tape.gradient(output, [*weights, x], output_gradients)
        gradients = dense(gradients, weights)
        pairs = zip(self._gradients, gradients, strict=True) if self._gradients else ()
        self._gradients = [total + gradient for total, gradient in pairs] or gradients
        return None if input_gradient is None else np.asarray(input_gradient.numpy())

    def totals(self) -> np.ndarray:
        totals, self._totals = self._totals, []
        return np.asarray(tf.add_n(totals).numpy())

    def see(self, batch: Batch, inputs: np.ndarray | None, training: bool) -> np.ndarray:
        output, totals = self._run([tf.constant(array) for array in self._given(batch, inputs)], training)
        return np.append(np.float64(totals.numpy()), batch.weight) if self._pipe.last else np.asarray(output.numpy())

    def _run(self, arrays: list[tf.Tensor], training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the next stage's input, or the sum of losses, and the totals of the last stage."""
        if training not in self._forward_graphs:
            self._forward_graphs[training] = tf.function(
                lambda arrays: self._layers(arrays, training),
                input_signature=[self._any_length(arrays)],
                autograph=False,
            )
        output, totals = self._forward_graphs[training](arrays)
        return output, totals

    def _layers(self, arrays: list[tf.Tensor], training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        if not self._pipe.last:
            return self._model(*arrays, training=training), tf.zeros(0)
        loss, sums = self._model.loss(*arrays, training=training)
        return loss, self._numbers((loss, sums), tf.float32)
