"""The optimizers of torch.optim for TensorFlow variables, with equal results.

`slots` holds the optimizer's state as variables named SLOT.PARAMETER.
"""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.config.options import TrainConfig


class SGD:
    """v = momentum v + g + weight_decay p; p -= lr v."""

    def __init__(self, weights: dict[str, tf.Variable], config: TrainConfig) -> None:
        self._momentum, self._decay = config.momentum, config.weight_decay
        self.slots = {f"momentum.{name}": _zeros(weight) for name, weight in weights.items()}

    def update(self, weights: dict[str, tf.Variable], gradients: list[tf.Tensor], lr: tf.Tensor) -> None:
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            if self._decay:
                gradient += self._decay * weight
            slot = self.slots[f"momentum.{name}"]
            tf.raw_ops.ResourceApplyMomentum(
                var=weight.handle, accum=slot.handle, lr=lr, grad=gradient, momentum=self._momentum
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


def _zeros(weight: tf.Variable) -> tf.Variable:
    return tf.Variable(tf.zeros_like(weight), trainable=False)


OPTIMIZERS: dict[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam}
