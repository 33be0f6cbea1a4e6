"""Horovod's Keras callbacks, for Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras import recorded
from hvdtrain.keras.optimizer import Distributed
from hvdtrain.tensorflow import api as horovod
from hvdtrain.tensorflow import broadcast_variables
from hvdtrain.tensorflow.step import tensor


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the variables of model and optimizer from one rank before the first step, and records each step.

    If `fit` builds the model in the first step, the broadcast follows that step. A strategy that averages weights does
    not exchange before it, and averages them again at the end of each epoch. After `load_exchange_state` nothing is
    broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """`local_variables`: a variable or several that are not broadcast. Raises ValueError for anything else."""
        super().__init__()
        self._root_rank, self._device, self._done = root_rank, device, False
        self._local: set[int] = set()
        is_one = isinstance(local_variables, tf.Variable | keras.Variable)
        for variable in [local_variables] if is_one else local_variables or ():
            if not isinstance(variable, tf.Variable | keras.Variable):
                raise ValueError(f"local_variables has {variable!r}, which is not a variable")
            self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(id(tensor(variable)))

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if self.model.built:
            if not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()
        elif not (self._done or getattr(optimizer, "restored", False)):
            self._postpone(True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()
        if isinstance(self.model.optimizer, Distributed):
            recorded.step(self.model.optimizer)
        steps = self.params.get("steps")
        if steps and batch >= steps - 1:  # before Keras' validation at the end of an epoch
            self._synchronize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._synchronize()

    def _broadcast(self) -> None:
        done, self._done = self._done, True
        if done or getattr(self.model.optimizer, "restored", False):
            return
        variables = [tensor(each) for each in (*self.model.variables, *self.model.optimizer.variables)]
        unique = {id(each): each for each in variables if id(each) not in self._local}
        with tf.device(self._device):
            broadcast_variables(list(unique.values()), root_rank=self._root_rank)
        self._postpone(False)

    def _postpone(self, postponed: bool) -> None:
        for optimizer in self._optimizers():
            optimizer.postpone_exchange(postponed)

    def _synchronize(self) -> None:
        for optimizer in self._optimizers():
            optimizer.synchronize_weights()

    def _optimizers(self) -> list[Distributed]:
        unique = {id(each): each for each in (self.model.optimizer, *vars(self.model).values())}  # a GAN has two
        return [each for each in unique.values() if isinstance(each, Distributed)]


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces each epoch's metrics by their means over ranks, and records them.

    Must precede callbacks that read the metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = [np.asarray(logs[name], np.float64) for name in names]  # F1Score is an array
        with tf.device(self._device):
            flat = tf.constant(np.concatenate([each.ravel() for each in values]))
            means = horovod.allreduce(flat, op=horovod.Average, name=f"MetricAverageCallback.{','.join(names)}")
        pieces = np.split(means.numpy(), np.cumsum([each.size for each in values])[:-1])
        for name, mean, value in zip(names, pieces, values, strict=True):
            logs[name] = mean.reshape(value.shape)[()]
        recorded.epoch(epoch, logs)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times `multiplier` from `start_epoch` until before `end_epoch`.

    `multiplier` is a function of the epoch, or a number that is raised to the power of the epochs since `start_epoch`.
    With `staircase` the rate changes once per epoch. Otherwise it changes before each batch, and the epoch is a
    fraction computed from `steps_per_epoch`. `momentum_correction` scales the momentum when the rate changes (Goyal et
    al., "Accurate, large minibatch SGD", 2017, remark 2). Keras 3 compiles the coefficient into the step, so the
    velocities are scaled instead, which contain the learning rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required")
        self._initial_lr, self._start, self._end = initial_lr, start_epoch, end_epoch
        self._staircase, self._momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        if callable(multiplier):
            self._multiplier = multiplier
        else:
            self._multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: the number of steps is unknown; hint: set steps_per_epoch=")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self._start or (self._end is not None and self._epoch >= self._end):
            return
        if not self._staircase:
            assert self.steps_per_epoch
            self._set(self._multiplier(self._epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set(self._multiplier(self._epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._lr()

    def _lr(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, multiplier: float) -> None:
        optimizer, old, new = self.model.optimizer, self._lr(), self._initial_lr * multiplier
        if np.float32(new) == np.float32(old):
            return
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # LossScaleOptimizer has one
        scalable = isinstance(inner, keras.optimizers.SGD | keras.optimizers.RMSprop)  # rate in velocities
        if self._momentum_correction and old and scalable and inner.momentum and inner.built:
            for velocity in getattr(inner, "momentums", None) or inner._momentums:  # SGD, RMSprop
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` within `warmup_epochs`, batch by batch.

    See Goyal et al., 2017. With `verbose`, rank 0 reports the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            done = epoch + 1 / self.steps_per_epoch  # epochs end with integers
            return float((done * (horovod.size() - 1) / warmup_epochs + 1) / horovod.size())

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self._end is not None and epoch == self._end - 1 and self._verbose and horovod.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has been raised to {self._lr():g}.")
