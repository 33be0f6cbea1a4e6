"""The captioning model in TensorFlow: the layers of `captioner.py`, built from native operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.models.captioner import (
    CONVOLUTIONS,
    PAD,
    PADDING,
    STRIDE,
    CaptionerSpec,
    image_values,
    layer_shapes,
    parameters,
)
from hvdtrain.models.layers_tf import Held, Scope, dropped


class CaptionerTF(Held):
    """The model of `spec`: see `layers_tf.Held`. The LSTM's state is always float32."""

    def __init__(
        self, spec: CaptionerSpec, compute_dtype: tf.DType = tf.float32, scope: Scope = None, stage: range | None = None
    ) -> None:
        """`stage`: only these layers (`captioner.layers`)."""
        super().__init__(parameters(spec, stage), compute_dtype, scope)
        self.spec = spec
        methods = {"encoder": self._encoder, "image": self._image, "lstm": self._lstm_layer, "words": self._words}
        names = [list(layer_shapes(spec))[number] for number in stage or range(len(layer_shapes(spec)))]
        self._layers = [methods[name] for name in names]
        self.sequences = ("inputs", "tokens") if names[0] == "words" else ("tokens",)
        state = [tf.TensorSpec((None, spec.hidden))] * 2
        encoded_and_words = [tf.TensorSpec((None, spec.hidden)), tf.TensorSpec((None,), tf.int64)]
        self._step_graph = tf.function(self._one_step, input_signature=[*encoded_and_words, *state], autograph=False)
        self._encode_graph: Any = None

    def __call__(self, inputs: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor, training: bool) -> Any:
        """Logits (words, vocabulary) float32 and targets (words,) of all target words, caption after caption; for a
        stage without the last layer, its output for the previous stage's output, float32.

        inputs: (N, height, width, 3) uint8, or (N, features) float32; tokens (N, T + 1) int64: start, words, end,
        padding; key (2,) int64, which determines dropout in `training`.
        """
        x, dropout_key = inputs, tf.ensure_shape(key, (2,)) if training and self.spec.dropout else None
        for layer in self._layers:
            x = layer(x, tokens, dropout_key)
        return x if isinstance(x, tuple) else tf.cast(x, tf.float32)

    def loss(
        self, inputs: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Sum of the cross-entropies of all target words (without padding), and the number of correct predictions."""
        logits, targets = self(inputs, tokens, key, training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
        return tf.reduce_sum(losses), {"correct": tf.math.count_nonzero(tf.argmax(logits, 1) == targets)}

    def encode(self, inputs: np.ndarray) -> np.ndarray:
        """The encoded images (N, hidden) float32, without dropout; inputs as in `__call__`."""
        if self.spec.encoder == "none":
            return np.zeros((len(inputs), self.spec.hidden), np.float32)
        if self._encode_graph is None:
            any_number = tf.TensorSpec((None, *inputs.shape[1:]), inputs.dtype)
            self._encode_graph = tf.function(self._encoding, input_signature=[any_number], autograph=False)
        return self._encode_graph(tf.constant(inputs)).numpy()

    def step(
        self, encoded: np.ndarray, words: np.ndarray, hidden: np.ndarray, cell: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Advances captions by one word, without dropout: see `hvdtrain.captions.generation.Writer`."""
        log_probabilities, h, c = self._step_graph(*(tf.constant(array) for array in (encoded, words, hidden, cell)))
        return log_probabilities.numpy(), h.numpy(), c.numpy()

    def _encoding(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self._layers[:-2]:
            x = layer(x, x, None)
        return tf.cast(x, tf.float32)

    def _one_step(
        self, encoded: tf.Tensor, words: tf.Tensor, hidden: tf.Tensor, cell: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        embedded = tf.gather(self._array("embedding.weight"), words)
        h, c, _ = _one_word(self._drives(embedded), hidden, cell, self._array("lstm.weight_hh"))
        return tf.nn.log_softmax(self._logits(h + encoded)), h, c

    # The layers. Each takes the output of the layer before, the tokens, and the key if dropout is on.

    def _encoder(self, images: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
        """(N, values), output of the small encoder."""
        x = tf.cast(images, self.compute_dtype) / 255
        for number in range(1, len(CONVOLUTIONS) + 1):
            name = f"encoder.conv{number}"
            x = tf.pad(x, [[0, 0], [PADDING, PADDING], [PADDING, PADDING], [0, 0]])
            x = tf.nn.conv2d(x, self._array(f"{name}.weight"), STRIDE, "VALID")
            x = tf.nn.relu(tf.nn.bias_add(x, self._array(f"{name}.bias")))
        return tf.reshape(x, (-1, image_values(self.spec)))

    def _image(self, x: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
        """(N, hidden), the encoded image."""
        return tf.nn.relu(self._linear("image", dropped(tf.cast(x, self.compute_dtype), self.spec.dropout, key)))

    def _lstm_layer(self, image: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
        """(N, T, hidden) float32: the LSTM's output at each word, plus the encoded image if there is one."""
        embedded = _looked_up(self._array("embedding.weight"), tokens[:, :-1])
        read = self._read(dropped(embedded, self.spec.dropout, None if key is None else key + 1))
        return read if self.spec.encoder == "none" else read + tf.cast(image, tf.float32)[:, tf.newaxis]

    def _words(self, merged: tf.Tensor, tokens: tf.Tensor, key: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Logits and targets, as `__call__` returns them."""
        targets = tokens[:, 1:]
        is_word = tf.where(targets != PAD)  # the widest layer is computed only for these
        return self._logits(tf.gather_nd(merged, is_word)), tf.gather_nd(targets, is_word)

    def _read(self, embedded: tf.Tensor) -> tf.Tensor:
        """What the LSTM makes of the words so far, (N, T, hidden), at each of their positions."""
        time_first = self._drives(tf.transpose(embedded, (1, 0, 2)))
        return tf.transpose(_lstm(time_first, self._array("lstm.weight_hh")), (1, 0, 2))

    def _drives(self, embedded: tf.Tensor) -> tf.Tensor:
        """The words' contribution to the gates, float32."""
        products = tf.matmul(embedded, self._array("lstm.weight_ih"), transpose_b=True)
        return tf.cast(products, tf.float32) + self.weights["lstm.bias"]

    def _logits(self, merged: tf.Tensor) -> tf.Tensor:
        x = tf.nn.relu(self._linear("merge", tf.cast(merged, self.compute_dtype)))
        return tf.cast(self._linear("words", x), tf.float32)


@tf.custom_gradient
def _looked_up(table: tf.Tensor, words: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[Any, None]]]:
    """Rows `words` of the table. Its gradient is a dense array, as the exchange needs it, not TensorFlow's slices."""

    def backward(slope: tf.Tensor) -> tuple[tf.Tensor, None]:
        rows = tf.reshape(slope, (-1, table.shape[1]))
        return tf.math.unsorted_segment_sum(rows, tf.reshape(words, (-1,)), table.shape[0]), None

    return tf.gather(table, words), backward


# --- the LSTM ---------------------------------------------------------------------------------------------------------
# On a CPU, forward and backward take 54 % of the time of TensorFlow's own gradient of the same loop. BlockLSTMV2 is as
# slow and does not support bfloat16. The gradient of the recurrent weights is one product for all positions, and the
# backward loop contains only operations that depend on other positions.


def _one_word(
    drive: tf.Tensor, hidden: tf.Tensor, cell: tf.Tensor, recurrent: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """New hidden state, cell state (N, H) and the gates (N, 4H), all float32; `drive` is the word's contribution."""
    fed_back = tf.matmul(tf.cast(hidden, recurrent.dtype), recurrent, transpose_b=True)
    i, f, g, o = tf.split(drive + tf.cast(fed_back, tf.float32), 4, 1)
    i, f, g, o = tf.sigmoid(i), tf.sigmoid(f), tf.tanh(g), tf.sigmoid(o)
    cell = f * cell + i * g
    return o * tf.tanh(cell), cell, tf.concat([i, f, g, o], 1)


@tf.custom_gradient
def _lstm(drives: tf.Tensor, recurrent: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[Any, Any]]]:
    """Hidden states (T, N, H) float32 from the words' contribution to the gates (T, N, 4H); recurrent weights (4H,
    H)."""
    size = recurrent.shape[1]
    length, start = tf.shape(drives)[0], tf.zeros((tf.shape(drives)[1], size))

    def word(
        t: tf.Tensor, hidden: tf.Tensor, cell: tf.Tensor, *kept: tf.TensorArray
    ) -> tuple[tf.Tensor | tf.TensorArray, ...]:
        now = _one_word(drives[t], hidden, cell, recurrent)
        return t + 1, now[0], now[1], *(array.write(t, value) for array, value in zip(kept, now, strict=True))

    empty = [tf.TensorArray(tf.float32, length, element_shape=(None, width)) for width in (size, size, 4 * size)]
    _, _, _, *kept = tf.while_loop(lambda t, *_: t < length, word, (0, start, start, *empty))
    hiddens, cells, gates = (array.stack() for array in kept)

    def backward(slopes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        slopes = _gate_slopes(slopes, cells, gates, recurrent)
        flat = tf.cast(tf.reshape(slopes, (-1, 4 * size)), recurrent.dtype)
        before = tf.cast(tf.reshape(tf.concat([start[tf.newaxis], hiddens[:-1]], 0), (-1, size)), recurrent.dtype)
        return slopes, tf.matmul(flat, before, transpose_a=True)

    return hiddens, backward


def _gate_slopes(slopes: tf.Tensor, cells: tf.Tensor, gates: tf.Tensor, recurrent: tf.Tensor) -> tf.Tensor:
    """Slopes of the loss by what goes into the gates (T, N, 4H), from those by the hidden states (T, N, H)."""
    length, start = tf.shape(slopes)[0], tf.zeros_like(slopes[0])
    i, f, g, o = tf.split(gates, 4, 2)
    before, bent = tf.concat([start[tf.newaxis], cells[:-1]], 0), tf.tanh(cells)
    cell_by_hidden = o * (1 - bent * bent)
    gates_by_cell = tf.concat([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g)], 2)
    out_by_hidden = bent * o * (1 - o)

    def word(
        t: tf.Tensor, hidden: tf.Tensor, cell: tf.Tensor, kept: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.TensorArray]:
        hidden += slopes[t]
        cell += hidden * cell_by_hidden[t]
        now = tf.concat([tf.tile(cell, (1, 3)) * gates_by_cell[t], hidden * out_by_hidden[t]], 1)
        fed_back = tf.matmul(tf.cast(now, recurrent.dtype), recurrent)
        return t - 1, tf.cast(fed_back, tf.float32), cell * f[t], kept.write(t, now)

    empty = tf.TensorArray(tf.float32, length, element_shape=(None, gates.shape[2]))
    return tf.while_loop(lambda t, *_: t >= 0, word, (length - 1, start, start, empty))[3].stack()
