"""The optimizers of torch.optim for TensorFlow variables, with equal results.

`slots` holds the optimizer's state as variables named SLOT.PARAMETER.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.config.options import TrainConfig
from hvdtrain.frameworks import ITERATIONS, NEWTON_SCHULZ, SMALLEST_SQUARE, by_muon


class SGD:
    """v = momentum v + g + weight_decay p; p -= lr v, or with Nesterov momentum p -= lr (g + momentum v)."""

    def __init__(self, weights: dict[str, tf.Variable], config: TrainConfig) -> None:
        self._momentum, self._decay = config.momentum, config.weight_decay
        self._nesterov = config.optimizer == "muon"
        self.slots = {f"momentum.{name}": _zeros(weight) for name, weight in weights.items()}

    def update(self, weights: dict[str, tf.Variable], gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            if self._decay:
                gradient += self._decay * weight
            slot = self.slots[f"momentum.{name}"]
            tf.raw_ops.ResourceApplyMomentum(
                var=weight.handle,
                accum=slot.handle,
                lr=lr,
                grad=gradient,
                momentum=self._momentum,
                use_nesterov=self._nesterov,
            )


class Adam:
    """torch.optim.AdamW: p -= lr (weight_decay p + m' / (sqrt(v') + 1e-8)) with corrected moments m' and v'."""

    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, weights: dict[str, tf.Variable], config: TrainConfig) -> None:
        self._decay = config.weight_decay
        names = [f"{slot}.{name}" for slot in ("adam_mean", "adam_square") for name in weights]
        self.slots = {name: _zeros(weights[name.partition(".")[2]]) for name in names}
        self.slots |= {f"adam_steps.{name}": tf.Variable(0.0, trainable=False) for name in weights}

    def update(self, weights: dict[str, tf.Variable], gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            if self._decay:
                weight.assign_sub(lr * self._decay * weight)
            steps = self.slots[f"adam_steps.{name}"].assign_add(1.0)
            first, second = (tf.pow(tf.constant(beta), steps) for beta in self.BETAS)
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle,
                m=self.slots[f"adam_mean.{name}"].handle,
                v=self.slots[f"adam_square.{name}"].handle,
                beta1_power=first,
                beta2_power=second,
                lr=lr,
                beta1=self.BETAS[0],
                beta2=self.BETAS[1],
                epsilon=self.EPSILON * tf.sqrt(1 - second),  # TensorFlow adds it before the correction
                grad=gradient,
            )


class Muon(SGD):
    """See `muon_torch.Muon`. SGD with Nesterov momentum updates the rest."""

    def update(self, weights: dict[str, tf.Variable], gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        rest = dict(zip(weights, gradients, strict=True))
        alike: dict[tuple[int, ...], dict[str, tf.Tensor]] = {}
        for name, weight in weights.items():
            if by_muon(name, weight.shape.ndims):
                gradient, slot = rest.pop(name), self.slots[f"momentum.{name}"]
                slot.assign(self._momentum * slot + gradient)
                alike.setdefault(tuple(weight.shape), {})[name] = gradient + self._momentum * slot
        for shape, directions in alike.items():
            for name, factor in zip(directions, factors(list(directions.values())), strict=True):
                if self._decay:
                    weights[name].assign_sub(lr * self._decay * weights[name])
                # Keras' kernels and convolutions have their outputs last, other matrices (out, in) have them first.
                outputs = shape[-1] if len(shape) > 2 or name.endswith("kernel") else shape[0]
                weights[name].assign_sub(lr * scale(shape, outputs) * factor)
        super().update({name: weights[name] for name in rest}, list(rest.values()), lr)


def scale(shape: Sequence[int], outputs: int) -> float:
    """Return sqrt(max(1, m / n)) of a weight's matrix with m = `outputs` rows."""
    return math.sqrt(max(1.0, outputs**2 / math.prod(shape)))


def factors(directions: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the orthogonal factors of tensors of one shape, as matrices with as many columns as the last axis."""
    shape = directions[0].shape
    matrices = tf.reshape(tf.stack(directions), (len(directions), -1, shape[-1]))
    return tf.unstack(tf.reshape(orthogonal(matrices), (len(directions), *shape)))


def orthogonal(matrices: tf.Tensor) -> tf.Tensor:
    """Return matrices (k, m, n) with singular values near 1, like `muon_torch.Stack.orthogonalise`."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[1] <= matrices.shape[2]
    gram = tf.matmul(matrices, matrices, transpose_a=not wide, transpose_b=wide)
    squares = tf.maximum(tf.linalg.trace(gram), SMALLEST_SQUARE)[:, None, None]
    gram = gram / squares
    product = tf.eye(gram.shape[1]) * tf.math.rsqrt(squares)
    for number in range(ITERATIONS):
        step = a * tf.eye(gram.shape[1]) + b * gram + c * gram @ gram
        product = step @ product
        gram = step @ gram @ step if number < ITERATIONS - 1 else gram
    return product @ matrices if wide else matrices @ product


def _zeros(weight: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.zeros_like(weight), trainable=False)


OPTIMIZERS: dict[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam, "muon": Muon}
