"""A TensorFlow replica that goes through a batch in parts, and through the model with the ranks that hold other stages.

Forward is a compiled graph; the tape round it makes the compiled graph of its gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data import Batch
from hvdtrain.frameworks.tensorflow import TensorFlowReplica, _dense
from hvdtrain.pipeline.schedule import Parted

# Before step 0 each layer is timed, with a graph of its own, which TensorFlow takes for one graph that is made anew.
tf.get_logger().addFilter(lambda record: "triggered tf.function retracing" not in record.getMessage())


class PipelineTensorFlow(Parted, TensorFlowReplica):
    """See `frameworks.Replica` and `stages.pipe.Part`. `model(*arrays, training=...)` goes through the stage's layers,
    the last one's `model.loss(*arrays, training=...)` further to the sum of losses. The arrays are the batch's, but for
    the first, which is what the stage before made, if there is one."""

    _gradients: Any = ()
    """Of the micro-batches that went backward in this step, added up"""

    def backward(self, batch: Batch, lr: float, stop: bool) -> None:
        self._gradients = []
        self._samples = batch.weight, batch.total_weight
        self._mean_of = float(batch.weight if self._local else batch.total_weight)
        self._tail = tf.constant(self._pipe.train(self, batch, stop))
        self._gathered = False
        if self._in_backward:  # nothing is exchanged: this is the only replica
            self._apply_graph(self._gradients, tf.constant(lr, tf.float32))

    def through(self, number: int, batch: Batch, inputs: np.ndarray | None) -> tuple[np.ndarray | None, Any]:
        arrays = [tf.constant(array) for array in self._given(batch, inputs)]
        with tf.GradientTape() as tape:
            if inputs is not None:
                tape.watch(arrays[0])
            output, found = self._run(arrays, training=True)
            if self._pipe.last:
                output = output / self._mean_of * self._scale
        self._under_way[number] = arrays[0], output, tape
        return (None, found) if self._pipe.last else (np.asarray(output.numpy()), None)

    def back(self, number: int, gradient: np.ndarray | None) -> np.ndarray | None:
        (x, output, tape), weights = self._under_way.pop(number), list(self._weights.values())
        given = None if gradient is None else tf.constant(gradient)
        *gradients, of_inputs = tape.gradient(output, [*weights, x], output_gradients=given)
        gradients = _dense(gradients, weights)
        pairs = zip(self._gradients, gradients, strict=True) if self._gradients else ()
        self._gradients = [each + more for each, more in pairs] or gradients
        return None if of_inputs is None else np.asarray(of_inputs.numpy())

    def totals(self) -> np.ndarray:
        taken, self._totals = self._totals, []
        return np.asarray(tf.add_n(taken).numpy())

    def see(self, batch: Batch, inputs: np.ndarray | None, training: bool) -> np.ndarray:
        output, found = self._run([tf.constant(array) for array in self._given(batch, inputs)], training)
        return np.append(np.float64(found.numpy()), batch.weight) if self._pipe.last else np.asarray(output.numpy())

    def _run(self, arrays: list[tf.Tensor], training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        """What the next stage gets, or the sum of losses; the totals of the last stage."""
        if training not in self._forward_graphs:
            self._forward_graphs[training] = tf.function(
                lambda arrays: self._layers(arrays, training),
                input_signature=[self._any_length(arrays)],
                autograph=False,
            )
        output, found = self._forward_graphs[training](arrays)
        return output, found

    def _layers(self, arrays: list[tf.Tensor], training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        if not self._pipe.last:
            return self._model(*arrays, training=training), tf.zeros(0)
        loss, sums = self._model.loss(*arrays, training=training)
        return loss, self._numbers((loss, sums), tf.float32)
