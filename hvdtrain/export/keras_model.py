"""Write a model as a .keras file, or as a TensorFlow SavedModel.

The model is built from Keras' own layers, because a file with layers of another package would need that package.
"""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from numpy.typing import NDArray

from hvdtrain.captions.generation import UNWRITTEN, WORDS_LIMIT
from hvdtrain.captions.vocabulary import END, PAD, START
from hvdtrain.data.solar import SIDE, map_weights
from hvdtrain.export.source import Source
from hvdtrain.models import captioner, mlp, resnet, solar, vgg16
from hvdtrain.models.layers_tf import to_tensorflow
from hvdtrain.models.resnet import ConvNorm

DOCUMENT = "hvdtrain.json"
"""Name of the document of `Source.about` in a .keras archive, and in a SavedModel's folder `assets.extra`"""

Arrays = dict[str, NDArray[Any]]
NEVER = -1e30
"""Added to the logits of words that no caption contains. Keras' configuration is JSON, which has no infinity"""


class Builder:
    """Makes Keras layers with the arrays of a source."""

    def __init__(self, source: Source) -> None:
        self._arrays = source.arrays
        self._values: list[tuple[Any, list[NDArray[Any]]]] = []

    def layer(self, made: Any, *values: NDArray[Any]) -> Any:
        """Remembers the layer's weights, which it gets when it is built."""
        self._values.append((made, list(values)))
        return made

    def set_weights(self) -> None:
        for made, values in self._values:
            made.set_weights(values)

    def convolution(self, name: str, *, stride: int = 1, same: bool = True, bias: bool = True, **more: Any) -> Any:
        """A convolution. `same`: padded by half of the kernel's size on each side."""
        kernel = to_tensorflow(self._arrays[f"{name}.weight"])
        padding, size = kernel.shape[0] // 2, kernel.shape[0]
        made = layers.Conv2D(
            kernel.shape[3],
            size,
            stride,
            padding="same" if same and stride == 1 else "valid",
            use_bias=bias,
            **more,
        )
        self.layer(made, kernel, *([self._arrays[f"{name}.bias"]] if bias else []))
        # With a stride, Keras' "same" pads even sizes on one side only.
        return made if not same or stride == 1 or not padding else lambda x: made(layers.ZeroPadding2D(padding)(x))

    def linear(self, name: str, activation: str | None = None, weight: NDArray[Any] | None = None) -> Any:
        weight = self._arrays[f"{name}.weight"] if weight is None else weight
        return self.layer(layers.Dense(len(weight), activation), weight.T, self._arrays[f"{name}.bias"])

    def norm(self, name: str) -> Any:
        values = [self._arrays[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")]
        return self.layer(layers.BatchNormalization(epsilon=resnet.NORM_EPSILON), *values)


# --- models that take raw inputs --------------------------------------------------------------------------------------


def _images(source: Source, build: Builder, images: Any) -> Any:
    plan, rounded = resnet.plan(source.spec), source.preprocessing.get("rounded_to")
    if rounded is None:
        x = layers.Rescaling(1 / 255)(images)
    else:
        x = ops.cast(ops.cast(ops.divide(ops.cast(images, "float32"), 255.0), rounded), "float32")

    def conv_norm(layer: ConvNorm, x: Any) -> Any:
        return build.norm(layer.norm)(build.convolution(layer.conv, stride=layer.stride, bias=False)(x))

    x = layers.ZeroPadding2D(resnet.POOL_SIZE // 2)(layers.ReLU()(conv_norm(plan.stem, x)))
    x = layers.MaxPooling2D(resnet.POOL_SIZE, resnet.POOL_STRIDE)(x)
    for block in plan.blocks.values():
        shortcut = x if block.shortcut is None else conv_norm(block.shortcut, x)
        x = conv_norm(block.second, layers.ReLU()(conv_norm(block.first, x)))
        x = layers.ReLU()(layers.Add()([x, shortcut]))
    return build.linear("fc")(layers.GlobalAveragePooling2D()(x))


def _perceptron(build: Builder, spec: mlp.MLPSpec, x: Any) -> Any:
    for number in range(last := len(spec.sizes) - 2):
        x = build.linear(f"layers.{number}", "relu")(x)
    return build.linear(f"layers.{last}")(x)


def _rows(source: Source, build: Builder, features: Any) -> Any:
    mean, scale = (np.array(source.preprocessing[name], np.float64) for name in ("mean", "scale"))
    x = ops.divide(ops.subtract(features, mean), scale)
    if source.preprocessing["missing"] == "mean":
        x = ops.nan_to_num(x, nan=0.0)
    return _perceptron(build, source.spec, ops.cast(x, "float32"))


def _readings(source: Source, build: Builder, readings: Any) -> Any:
    about, x = source.preprocessing, readings
    if about["look"] == "map":
        weights = map_weights(about["places"])
        x = build.layer(layers.Dense(weights.shape[1], use_bias=False), weights)(x)
        x = layers.Reshape((SIDE, SIDE))(x)
    elif about["look"] == "stack":
        x = ops.stack([x[:, row : row + SIDE] for row in range(SIDE)], 1)
    x = ops.divide(ops.subtract(x, about["mean"]), about["deviation"])
    x = _perceptron(build, source.spec, x) if about["look"] == "window" else _cnn(build, source.spec, x)
    return layers.Rescaling(about["deviation"], about["mean"])(x)


def _cnn(build: Builder, spec: solar.CNNSpec, x: Any) -> Any:
    x = layers.Reshape((spec.side, spec.side, 1))(x)
    for name in ("conv1", "conv2"):
        x = build.convolution(name, same=False, activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(solar.POOL)(x))
    return build.linear("dense2")(build.linear("dense1", "relu")(x))


def _captions(source: Source, build: Builder, images: Any) -> Any:
    """Greedy captions and their logits: see `torch_program.Captions`."""
    spec = source.spec
    x = _vgg16(source, build, images) if spec.encoder == "vgg16" else _small(build, images)
    image = build.linear("image", "relu")(x)
    step = _step(source, build)
    hidden = cell = ops.zeros_like(image)
    last = ops.full_like(image[:, :1], START, dtype="int64")
    words, logits = [], []
    for _ in range(WORDS_LIMIT):
        last, scores, hidden, cell = step([image, last, hidden, cell])
        words.append(last)
        logits.append(scores)
    return [ops.concatenate(words, 1), ops.stack(logits, 1)]


def _small(build: Builder, images: Any) -> Any:
    x = layers.Rescaling(1 / 255)(images)
    for number in range(1, len(captioner.CONVOLUTIONS) + 1):
        x = build.convolution(f"encoder.conv{number}", stride=captioner.STRIDE, activation="relu")(x)
    return layers.Flatten()(x)


def _vgg16(source: Source, build: Builder, images: Any) -> Any:
    about = source.preprocessing
    x = ops.flip(images, 3) if about["reverse"] else images
    x = layers.Rescaling(list(about["scale"]), list(about["shift"]))(x)
    for name in vgg16.LAYERS:
        pool = name == vgg16.POOL
        x = (layers.MaxPooling2D(2) if pool else build.convolution(f"encoder.{name}", activation="relu"))(x)
    # PyTorch flattens images with channels first.
    x = layers.Flatten()(layers.Permute((3, 1, 2))(x))
    for name in vgg16.LINEAR:
        x = build.linear(f"encoder.{name}", "relu")(x)
    return x


def _step(source: Source, build: Builder) -> Any:
    """A model that advances captions by one word: the next word, its logits, and the LSTM's states."""
    spec, arrays = source.spec, source.arrays
    state = (spec.hidden,)
    image, hidden, cell = (keras.Input(state, name=name) for name in ("image", "hidden", "cell"))
    last = keras.Input((1,), dtype="int64", name="last")
    table = arrays["embedding.weight"]
    embedded = build.layer(layers.Embedding(*table.shape), table)(last)
    gates = [arrays[name] for name in ("lstm.weight_ih", "lstm.weight_hh", "lstm.bias")]
    lstm = build.layer(layers.LSTM(spec.hidden, return_state=True, unroll=True), gates[0].T, gates[1].T, gates[2])
    read, new_hidden, new_cell = lstm(embedded, initial_state=[hidden, cell])
    scores = build.linear("words")(build.linear("merge", "relu")(layers.Add()([read, image])))
    mask = np.zeros(spec.vocabulary)
    mask[list(UNWRITTEN)] = NEVER
    best = ops.argmax(layers.Rescaling(1.0, mask.tolist())(scores), axis=1, keepdims=True)
    over = ops.logical_or(ops.equal(last, END), ops.equal(last, PAD))
    word = ops.where(over, PAD, ops.cast(best, "int64"))
    return keras.Model([image, last, hidden, cell], [word, scores, new_hidden, new_cell], name="step")


MODELS: dict[str, Callable[[Source, Builder, Any], Any]] = {
    "resnet": _images,
    "tabular": _rows,
    "solar": _readings,
    "captioning": _captions,
}


# --- files ------------------------------------------------------------------------------------------------------------


def model(source: Source) -> Any:
    """The Keras model with its preprocessing."""
    keras.config.set_image_data_format("channels_last")
    build = Builder(source)
    given = keras.Input(source.input.shape, dtype=source.input.dtype, name=source.input.name)
    made = keras.Model(given, MODELS[source.workload](source, build, given), name=source.workload)
    build.set_weights()
    return made


def save_keras(source: Source, path: Path) -> None:
    """Writes a file for keras.models.load_model. Raises OSError."""
    model(source).save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(DOCUMENT, json.dumps(source.about()))


def save_savedmodel(source: Source, path: Path) -> None:
    """Writes a folder for tf.saved_model.load. Raises OSError."""
    try:
        model(source).export(path, format="tf_saved_model", verbose=False)
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, str(error)) from None
    (path / "assets.extra").mkdir()
    (path / "assets.extra" / DOCUMENT).write_text(json.dumps(source.about()))
