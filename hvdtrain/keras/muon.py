"""Muon as an optimizer of Keras 3. Keras' own takes matrices only, and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from hvdtrain.frameworks import by_muon
from hvdtrain.frameworks.optimizers_tensorflow import factors, scale
from hvdtrain.tensorflow.step import tensor


@keras.saving.register_keras_serializable(package="hvdtrain")
class Muon(keras.optimizers.Optimizer):
    """See `hvdtrain.torch.Muon`. A kernel (h, w, in, out) is a matrix with h w in rows and out columns.

    Vectors, and weights whose path contains "embed" or one of the words in `exclude`, are updated by `rest`.
    `weight_decay` is decoupled from the gradient for all weights, as in Keras. `named` are further arguments of
    keras.optimizers.Optimizer, such as clipnorm.
    """

    def __init__(
        self,
        learning_rate: Any = 0.02,
        momentum: float = 0.9,
        weight_decay: float | None = None,
        *,
        rest: Literal["sgd", "adamw"] = "sgd",
        rest_scale: float = 1.0,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        exclude: Sequence[str] = (),
        **named: Any,
    ) -> None:
        """Raises ValueError for an unknown `rest`."""
        if rest not in ("sgd", "adamw"):
            raise ValueError(f"rest {rest!r} is unknown; hint: sgd, adamw")
        super().__init__(learning_rate, weight_decay=weight_decay, **named)
        self._own: dict[str, Any] = {"momentum": momentum, "rest": rest, "rest_scale": rest_scale}
        self._own |= {"betas": list(betas), "eps": eps, "exclude": list(exclude)}

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "momentum")
        self._orthogonal = [self._by_muon(each) for each in variables]
        self._squares = [
            None if is_muon or self._own["rest"] == "sgd" else self.add_variable_from_reference(each, name="square")
            for each, is_muon in zip(variables, self._orthogonal, strict=True)
        ]

    def _by_muon(self, variable: Any) -> bool:
        excluded = any(word in variable.path for word in self._own["exclude"])
        return not excluded and by_muon(variable.path, len(variable.shape))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        index, weight = self._get_variable_index(variable), tensor(variable)
        velocity, square, is_muon = tensor(self._velocities[index]), self._squares[index], self._orthogonal[index]
        gradient = tf.convert_to_tensor(gradient)  # those of embeddings are slices
        lr = tf.cast(learning_rate, weight.dtype) * (1.0 if is_muon else self._own["rest_scale"])
        if square is not None:
            self._adamw(gradient, weight, velocity, tensor(square), lr)
            return
        momentum = self._own["momentum"]
        velocity.assign(momentum * velocity + gradient)
        direction = gradient + momentum * velocity
        if is_muon:
            (factor,) = factors([direction])
            direction = scale(weight.shape, weight.shape[-1]) * factor
        weight.assign_sub(lr * direction)

    def _adamw(self, gradient: Any, weight: Any, mean: Any, square: Any, lr: Any) -> None:
        (first, second), steps = self._own["betas"], tf.cast(tensor(self.iterations) + 1, weight.dtype)
        mean.assign_add((1 - first) * (gradient - mean))
        square.assign_add((1 - second) * (gradient**2 - square))
        correction = tf.sqrt(1 - second**steps)
        weight.assign_sub(
            lr * correction / (1 - first**steps) * mean / (tf.sqrt(square) + self._own["eps"] * correction)
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._own}
