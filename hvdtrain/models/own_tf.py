"""A script's own Keras 3 model, as the loop wants a model: its loss returns sums over samples."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.options import TrainConfig
from hvdtrain.models.layers import Layer, grouped, regression_terms
from hvdtrain.models.layers_tf import turned, turned_back
from hvdtrain.system.exits import BAD_CONFIG, Failure

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
Shapes = Mapping[str, tuple[int, ...]]


class Own:
    """Trains the model's trainable weights. Moving statistics of BatchNormalization are each rank's own; other weights
    are constants, but for the seeds of random layers, which are set to the step's key: see `data.halves`.

    `loss` is what `compile` takes: a name, a function of (targets, outputs) or a keras.losses.Loss; the model's own
    losses (regularisers) are added. `sums(outputs, targets)` returns by name what each sample adds to the sums of
    `shapes` (n, *shape). `threads`: those that TensorFlow has begun with.
    `dense`: see `workload.Workload.dense`; of layers in models whose layers are known beforehand. `layers`: of a
    keras.Sequential that is to be cut into stages, known once the model was `probe`d.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        sums: Callable[[Any, Any], Mapping[str, tf.Tensor]],
        shapes: Shapes,
        config: TrainConfig,
        names: Mapping[int, str] | None = None,
    ) -> None:
        """`names`: of a part's variables in the whole, by id. Raises Failure (78) for a model without weights yet,
        weights that are not float32, an unknown loss, or another precision or number of threads than TensorFlow has
        begun with."""
        self.threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
        self.threads = int(os.environ.get("TF_NUM_INTRAOP_THREADS", self.threads))
        if config.threads not in (0, self.threads):
            told = f"--threads {config.threads}: TensorFlow has begun with {self.threads}"
            raise Failure(f"{told}; start with TF_NUM_INTRAOP_THREADS={config.threads}", BAD_CONFIG)
        if not model.built or not model.trainable_variables:
            raise Failure("model has no weights to train yet: give it a keras.Input, or call it once", BAD_CONFIG)
        if wrong := [each for each in model.trainable_variables if each.dtype != "float32"]:
            raise Failure(f"model: {wrong[0].path} is {wrong[0].dtype}; float32 weights are trained", BAD_CONFIG)
        if PRECISIONS.get(model.compute_dtype) != config.precision:
            told = f"--precision {config.precision}: the model computes in {model.compute_dtype}; let both be the same"
            raise Failure(f"{told}, with keras.config.set_dtype_policy('mixed_bfloat16'), say", BAD_CONFIG)
        try:
            self._loss = tf.keras.losses.get(loss)
        except ValueError as error:
            raise Failure(f"loss={loss!r} is none of Keras': {error}", BAD_CONFIG) from error
        self.model, self._sums, self._shapes, self._config = model, sums, shapes, config
        self.layers: list[Layer] = []
        self._begins: list[int] = []
        """Which layer of the model each of ours begins with"""
        # Not by their paths: Keras counts the layers of all models that a process makes.
        self._names = names or {
            id(each): f"{n}.{each.name}"
            for variables in (model.trainable_variables, model.non_trainable_variables)
            for n, each in enumerate(variables)
        }
        self.weights = {self._names[id(each)]: each.value for each in model.trainable_variables}
        layers = list(model._flatten_layers())
        norms = [each for each in layers if isinstance(each, tf.keras.layers.BatchNormalization)]
        momentum = {
            id(each.value): 1 - layer.momentum
            for layer in norms
            for each in (layer.moving_mean, layer.moving_variance)
            if layer.trainable
        }
        others = {self._names[id(each)]: each.value for each in model.non_trainable_variables}
        self._moving = {name: each for name, each in others.items() if id(each) in momentum}
        self.statistics = {name: momentum[id(each)] for name, each in self._moving.items()}
        """Moving statistics by name, and their momentum as PyTorch counts it"""
        seeds = {name: each for name, each in others.items() if name.endswith(".seed_generator_state")}
        self._seeds = {int(name.partition(".")[0]): each for name, each in seeds.items()}
        self._constants = {name: each for name, each in others.items() if name not in self._moving | seeds}
        dense = {id(each.kernel.value): each for each in layers if type(each) is tf.keras.layers.Dense}
        places = {name: getattr(dense.get(id(each)), "output", None) for name, each in self.weights.items()}
        self.dense = {name: math.prod(each.shape[1:-1]) for name, each in places.items() if each is not None}
        self.shapes: Shapes = {name: each.shape for name, each in self.arrays().items() if name in self.weights}
        self._first: dict[str, np.ndarray] = {}
        self._has_trained = False

    @property
    def buffers(self) -> dict[str, tf.Variable]:
        """The moving statistics. Raises Failure (78) if training has changed what is taken for a constant."""
        if self._has_trained and self._first:
            now = self.constants()
            if changed := [name for name, array in self._first.items() if not np.array_equal(array, now[name])]:
                raise Failure(
                    f"model: training changes {changed[0]}; beside trained weights only moving statistics of "
                    "BatchNormalization may change, since nobody knows what others are to be on all ranks together",
                    BAD_CONFIG,
                )
            self._first = {}
        return self._moving

    def arrays(self) -> dict[str, np.ndarray]:
        """What is trained, in PyTorch's layout, and the moving statistics."""
        trained = {name: turned_back(each.numpy()) for name, each in self.weights.items()}
        return trained | {name: each.numpy() for name, each in self._moving.items()}

    def constants(self) -> dict[str, np.ndarray]:
        return {name: each.numpy() for name, each in self._constants.items()}

    def set_constants(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, each in self._constants.items():
            each.assign(arrays[name])
        self._first = dict(arrays)

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gives the model these values, in PyTorch's layout."""
        for name, each in (self.weights | self._moving).items():
            each.assign(turned(arrays[name]))

    def part(self, part: range) -> Own:
        """These `layers` alone, which share their values with this one."""
        layers, begins = self.model.layers, [*self._begins, len(self.model.layers)]
        given, kind = self.model.inputs[0].shape[1:], self.model.inputs[0].dtype
        entry = (self.layers[part.start - 1].output, "float32") if part.start else (given, kind)
        children = layers[begins[part.start] : begins[part.stop]]
        mine = tf.keras.Sequential([tf.keras.Input(entry[0], dtype=entry[1]), *children])
        made = Own(mine, self._loss, self._sums, self._shapes, self._config, self._names)
        made._first = {name: array for name, array in self._first.items() if name in made._constants}
        return made

    def __call__(self, *arrays: tf.Tensor, training: bool) -> Any:
        """Outputs of inputs, targets and key as in `loss`; of a part, what it makes of what the one before made."""
        *inputs, _, key = arrays
        if training:
            self._has_trained = True
            for number, seed in self._seeds.items():
                seed.assign(tf.cast(tf.stack([key[0], key[1] + number]), seed.dtype))
        outputs = self.model(inputs[0] if len(inputs) == 1 else inputs, training=training)
        return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

    def loss(self, *arrays: tf.Tensor, training: bool) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Sum of the losses, and the metric's sums, of inputs, targets (n, ...) and key."""
        outputs, targets = self(*arrays, training=training), arrays[-2]
        count = tf.shape(targets)[0]
        losses = self._loss(targets, outputs)
        number = tf.cast(count, losses.dtype)
        mean = losses if losses.shape.rank == 0 else tf.reduce_mean(tf.reshape(losses, (count, -1)))
        total = tf.add_n([mean, *self.model.losses]) * number
        found = self._sums(outputs, targets)
        return total, {name: _summed(each, self._shapes.get(name, ()), count) for name, each in found.items()}

    def probe(self, arrays: list[np.ndarray]) -> float:
        """Multiply-adds of a layer of mean size for one sample, if each weight is used once.

        Raises Failure (78) if the loss is a sum over samples, which nobody could tell from their mean.
        """
        *inputs, targets, _ = arrays
        values = []
        for repeated in (1, 2):
            *given, truth = [np.concatenate([each] * repeated) for each in (*inputs, targets)]
            outputs = self.model(given[0] if len(given) == 1 else given, training=False)
            values.append(self._loss(truth, outputs))
        if values[0].shape.rank == 0 and values[0] and abs(float(values[1] / values[0]) - 2) < 0.01:
            raise Failure("loss returns a sum over samples: let it return their mean, or each one's", BAD_CONFIG)
        if self._config.stages > 1 and type(self.model) is tf.keras.Sequential:
            self.layers, self._begins = grouped(self._children(tf.constant(inputs[0])))
        layers = [int(np.prod(shape)) for shape in self.shapes.values() if len(shape) > 1]
        return sum(layers) / max(1, len(layers))

    def _children(self, x: Any) -> Iterator[tuple[Layer, bool, bool]]:
        """Those of a keras.Sequential, as `grouped` wants them; x: its inputs. Raises Failure (78) for a model with
        losses of its own, which its last part would not know."""
        if self.model.losses:
            told = f"--stages {self._config.stages}: the model has losses of its own (regularisers)"
            raise Failure(f"{told}, and only the loss of its outputs goes through stages", BAD_CONFIG)
        kept = self.weights | self._moving
        for each in self.model.layers:
            masked = getattr(x, "_keras_mask", None) is not None
            fits = isinstance(x, tf.Tensor) and x.dtype.is_floating and len(x.shape) > 1 and not masked
            x = each(x)
            shape = tuple(x.shape[1:]) if isinstance(x, tf.Tensor) else ()
            weights = [math.prod(weight.shape) for weight in each.trainable_variables if len(weight.shape) > 1]
            layer = Layer(
                name=each.name,
                arrays=tuple(name for name in (self._names[id(array)] for array in each.variables) if name in kept),
                output=shape,
                multiply_adds=sum(weights) * math.prod(shape[:-1]),
            )
            yield layer, bool(each.trainable_variables), fits

    def release(self) -> None:
        """Nothing: the loop trains the model's own variables."""


def correct(outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
    """What `metrics.Accuracy` adds up, of scores (n, ..., classes) and classes (n, ...), or (n, ..., 1)."""
    if targets.shape.rank == outputs.shape.rank and targets.shape[-1] == 1:
        targets = tf.squeeze(targets, -1)
    if targets.shape.rank != outputs.shape.rank - 1 or outputs.shape[-1] == 1:
        told = f"outputs {outputs.shape}, targets {targets.shape}; give each class's number as target"
        raise Failure(f"accuracy needs a score for each class: {told}, or metric= and sums=", BAD_CONFIG)
    return {"correct": tf.argmax(outputs, -1) == targets}


def errors(outputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
    """What `metrics.Regression` adds up, of numbers (n, ...)."""
    outputs = tf.reshape(outputs, tf.shape(targets))
    return regression_terms(tf.cast(outputs, tf.float64), tf.cast(targets, tf.float64))


def _summed(values: tf.Tensor, shape: tuple[int, ...], count: tf.Tensor) -> tf.Tensor:
    """The sum over samples; of several numbers where one is to be added up, their mean is."""
    parts = tf.reshape(tf.cast(values, tf.float64), (count, int(np.prod(shape)), -1))
    return tf.reshape(tf.reduce_sum(tf.reduce_mean(parts, -1), 0), shape)
