"""Adapter for a user's Keras 3 model: its loss returns sums over samples, as the training loop needs them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.options import TrainConfig
from hvdtrain.models.layers import Layer, grouped, regression_terms
from hvdtrain.models.layers_tf import to_pytorch, to_tensorflow
from hvdtrain.system.exits import BAD_CONFIG, Failure

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Shapes = Mapping[str, tuple[int, ...]]


class Own:
    """Trains the model's trainable weights.

    Moving statistics of BatchNormalization are kept separately on each rank. Other weights are constants, except for
    the seeds of random layers, which are set to the step's key (see `data.halves`).

    `loss` has the same forms as in `compile`: a name, a function of (targets, outputs) or a keras.losses.Loss. The
    model's own losses (regularizers) are added. `sums(outputs, targets)` returns by name each sample's terms in the
    sums of `shapes` (n, *shape). `threads` is the number of threads that TensorFlow started with. `layers` are those of
    a keras.Sequential with pipeline stages, known after `probe`.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        sums: Callable[[Any, Any], Mapping[str, tf.Tensor]],
        shapes: Shapes,
        config: TrainConfig,
        inputs: Sequence[str] = (),
        names: Mapping[int, str] | None = None,
    ) -> None:
        """`inputs`: the keys of the dict that the model takes; empty if it takes a tensor or a list.

        `names`: names of a stage's variables in the whole model, by id.

        Raises Failure (78) for a model without weights, weights that are not float32, an unknown loss, or a precision
        or number of threads that TensorFlow did not start with.
        """
        self.threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        self.threads = int(os.environ.get("TF_NUM_INTRAOP_THREADS", self.threads))
        if config.threads not in (0, self.threads):
            message = f"--threads {config.threads}: TensorFlow already started with {self.threads}"
            raise Failure(f"{message}; hint: set TF_NUM_INTRAOP_THREADS={config.threads}", BAD_CONFIG)
        if not model.built or not model.trainable_variables:
            raise Failure("the model has no weights yet; hint: give it a keras.Input, or call it once", BAD_CONFIG)
        if wrong := [weight for weight in model.trainable_variables if weight.dtype != "float32"]:
            raise Failure(f"model: {wrong[0].path} is {wrong[0].dtype}; hint: use float32 weights", BAD_CONFIG)
        if PRECISIONS.get(model.compute_dtype) != config.precision:
            message = f"--precision {config.precision}, but the model computes in {model.compute_dtype}"
            hint = "make both the same, e.g. with keras.config.set_dtype_policy('mixed_bfloat16')"
            raise Failure(f"{message}; hint: {hint}", BAD_CONFIG)
        try:
            self._loss = tf.keras.losses.get(loss)
        except ValueError as error:
            raise Failure(f"loss={loss!r} is not a Keras loss: {error}", BAD_CONFIG) from error
        self.model, self._sums, self._shapes, self._config = model, sums, shapes, config
        self._inputs = () if isinstance(model, tf.keras.Sequential) else tuple(inputs)
        self.layers: list[Layer] = []
        self._begins: list[int] = []
        """The first of the model's layers in each of `layers`"""
        # Not named by paths, since Keras numbers the layers of all models in a process.
        self._names = names or {
            id(weight): f"{n}.{weight.name}"
            for variables in (model.trainable_variables, model.non_trainable_variables)
            for n, weight in enumerate(variables)
        }
        self.weights = {self._names[id(weight)]: weight.value for weight in model.trainable_variables}
        layers = list(model._flatten_layers())
        norms = [layer for layer in layers if isinstance(layer, tf.keras.layers.BatchNormalization)]
        momentum = {
            id(weight.value): 1 - layer.momentum
            for layer in norms
            for weight in (layer.moving_mean, layer.moving_variance)
            if layer.trainable
        }
        others = {self._names[id(weight)]: weight.value for weight in model.non_trainable_variables}
        self._moving = {name: weight for name, weight in others.items() if id(weight) in momentum}
        self.statistics = {name: momentum[id(weight)] for name, weight in self._moving.items()}
        """Names of the moving statistics, and their momentum in PyTorch's convention"""
        seeds = {name: seed for name, seed in others.items() if name.endswith(".seed_generator_state")}
        self._seeds = {int(name.partition(".")[0]): seed for name, seed in seeds.items()}
        self._constants = {name: weight for name, weight in others.items() if name not in self._moving | seeds}
        self.shapes: Shapes = {name: array.shape for name, array in self.arrays().items() if name in self.weights}
        self._first: dict[str, np.ndarray] = {}
        self._has_trained = False

    @property
    def buffers(self) -> dict[str, tf.Variable]:
        """The moving statistics. Raises Failure (78) if training has changed a constant."""
        if self._has_trained and self._first:
            now = self.constants()
            if changed := [name for name, array in self._first.items() if not np.array_equal(array, now[name])]:
                raise Failure(
                    f"model: training changes {changed[0]}; besides trained weights, only moving statistics of "
                    "BatchNormalization may change, since ranks cannot agree on other values",
                    BAD_CONFIG,
                )
            self._first = {}
        return self._moving

    def arrays(self) -> dict[str, np.ndarray]:
        """Trained weights in PyTorch's layout, and moving statistics."""
        trained = {name: to_pytorch(weight.numpy()) for name, weight in self.weights.items()}
        return trained | {name: weight.numpy() for name, weight in self._moving.items()}

    def constants(self) -> dict[str, np.ndarray]:
        return {name: weight.numpy() for name, weight in self._constants.items()}

    def set_constants(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, weight in self._constants.items():
            weight.assign(arrays[name])
        self._first = dict(arrays)

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets the model's values, in PyTorch's layout."""
        for name, weight in (self.weights | self._moving).items():
            weight.assign(to_tensorflow(arrays[name]))

    def part(self, part: range) -> Own:
        """The model of a stage, with only these `layers`. It shares its values with this model."""
        layers, begins = self.model.layers, [*self._begins, len(self.model.layers)]
        shape, kind = self.model.inputs[0].shape[1:], self.model.inputs[0].dtype
        entry = (self.layers[part.start - 1].output, "float32") if part.start else (shape, kind)
        children = layers[begins[part.start] : begins[part.stop]]
        stage = tf.keras.Sequential([tf.keras.Input(entry[0], dtype=entry[1]), *children])
        result = Own(stage, self._loss, self._sums, self._shapes, self._config, names=self._names)
        result._first = {name: array for name, array in self._first.items() if name in result._constants}
        return result

    def __call__(self, *arrays: tf.Tensor, training: bool) -> Any:
        """Outputs for inputs, targets and key as in `loss`; for a stage, its output for the previous stage's output."""
        *inputs, _, key = arrays
        if training:
            self._has_trained = True
            for number, seed in self._seeds.items():
                seed.assign(tf.cast(tf.stack([key[0], key[1] + number]), seed.dtype))
        outputs = self.model(self._argument(inputs), training=training)
        return tf.nest.map_structure(lambda output: tf.cast(output, tf.float32), outputs)

    def _argument(self, inputs: Sequence[Any]) -> Any:
        """The inputs as the model takes them."""
        if self._inputs:
            return dict(zip(self._inputs, inputs, strict=True))
        return inputs[0] if len(inputs) == 1 else list(inputs)

    def loss(self, *arrays: tf.Tensor, training: bool) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Sum of the losses, and the metric's sums, for inputs, targets (n, ...) and key."""
        outputs, targets = self(*arrays, training=training), arrays[-2]
        count = tf.shape(targets)[0]
        losses = self._loss(targets, outputs)
        number = tf.cast(count, losses.dtype)
        mean = losses if losses.shape.rank == 0 else tf.reduce_mean(tf.reshape(losses, (count, -1)))
        total = tf.add_n([mean, *self.model.losses]) * number
        sums = self._sums(outputs, targets)
        return total, {name: _summed(terms, self._shapes.get(name, ()), count) for name, terms in sums.items()}

    def probe(self, arrays: list[np.ndarray]) -> float:
        """Mean multiply-adds of a layer for one sample, if each weight is used once.

        Raises Failure (78) if the model does not take these inputs, or the loss is a sum over samples, since their
        number would be unknown.
        """
        structure = getattr(self.model, "_inputs_struct", None)  # of a functional model
        keys = list(structure) if isinstance(structure, dict) else getattr(self.model, "input_names", self._inputs)
        if self._inputs and set(keys) != set(self._inputs):
            message = f"model has the inputs {', '.join(keys)}, but a sample has {', '.join(self._inputs)}"
            raise Failure(f"{message}; hint: name the keras.Input layers as the keys of the samples", BAD_CONFIG)
        *inputs, targets, _ = arrays
        values = []
        for repeated in (1, 2):
            *batch, truth = [np.concatenate([array] * repeated) for array in (*inputs, targets)]
            outputs = self.model(self._argument(batch), training=False)
            values.append(self._loss(truth, outputs))
        if values[0].shape.rank == 0 and values[0] and abs(float(values[1] / values[0]) - 2) < 0.01:
            raise Failure(
                "loss returns a sum over samples; hint: return their mean, or one loss per sample", BAD_CONFIG
            )
        if self._config.stages > 1 and type(self.model) is tf.keras.Sequential:
            self.layers, self._begins = grouped(self._children(tf.constant(inputs[0])))
        layers = [int(np.prod(shape)) for shape in self.shapes.values() if len(shape) > 1]
        return sum(layers) / max(1, len(layers))

    def _children(self, x: Any) -> Iterator[tuple[Layer, bool, bool]]:
        """The children of a keras.Sequential, for `grouped`; x: its inputs. Raises Failure (78) for a model with losses
        of its own, which its last stage would not know."""
        if self.model.losses:
            message = "cannot be combined with a model that has its own losses (regularizers)"
            raise Failure(f"--stages {self._config.stages} {message}", BAD_CONFIG)
        kept = self.weights | self._moving
        for child in self.model.layers:
            masked = getattr(x, "_keras_mask", None) is not None
            fits = isinstance(x, tf.Tensor) and x.dtype.is_floating and len(x.shape) > 1 and not masked
            x = child(x)
            shape = tuple(x.shape[1:]) if isinstance(x, tf.Tensor) else ()
            weights = [math.prod(weight.shape) for weight in child.trainable_variables if len(weight.shape) > 1]
            layer = Layer(
                name=child.name,
                arrays=tuple(name for name in (self._names[id(array)] for array in child.variables) if name in kept),
                output=shape,
                multiply_adds=sum(weights) * math.prod(shape[:-1]),
            )
            yield layer, bool(child.trainable_variables), fits

    def release(self) -> None:
        """Does nothing, since the loop trains the model's own variables."""


def correct(outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
    """Each sample's term in the sum of `metrics.Accuracy`: scores (n, ..., classes), classes (n, ...) or (n, ...,
    1)."""
    if targets.shape.rank == outputs.shape.rank and targets.shape[-1] == 1:
        targets = tf.squeeze(targets, -1)
    if targets.shape.rank != outputs.shape.rank - 1 or outputs.shape[-1] == 1:
        shapes = f"outputs {outputs.shape}, targets {targets.shape}"
        hint = "give the class numbers as targets, or metric= and sums="
        raise Failure(f"accuracy needs one score per class: {shapes}; hint: {hint}", BAD_CONFIG)
    return {"correct": tf.argmax(outputs, -1) == targets}


def errors(outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
    """Each sample's terms in the sums of `metrics.Regression`, for numbers (n, ...)."""
    outputs = tf.reshape(outputs, tf.shape(targets))
    return regression_terms(tf.cast(outputs, tf.float64), tf.cast(targets, tf.float64))


def _summed(values: tf.Tensor, shape: tuple[int, ...], count: tf.Tensor) -> tf.Tensor:
    """The sum over samples. If a sample has several values per term, their mean is used."""
    parts = tf.reshape(tf.cast(values, tf.float64), (count, int(np.prod(shape)), -1))
    return tf.reshape(tf.reduce_sum(tf.reduce_mean(parts, -1), 0), shape)
