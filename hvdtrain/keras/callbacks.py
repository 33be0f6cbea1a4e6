"""Horovod's Keras callbacks, for Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras import recorded
from hvdtrain.keras.optimizer import Distributed
from hvdtrain.tensorflow import broadcast_variables
from hvdtrain.tensorflow.step import tensor


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the variables of model and optimizer that one has, before the first step. If `fit` builds the
    model in that step, the broadcast follows it; with a strategy that averages weights, ranks exchange nothing before.

    With a strategy that lets weights differ for a while it makes them the same again at the end of each epoch. Ranks
    that loaded their own exchange's state (`load_exchange_state`) go on from what they have: nothing is broadcast. It
    writes each step to the run's records.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """`local_variables`: one or more that stay each rank's own. Raises ValueError for other things."""
        super().__init__()
        self._root_rank, self._device, self._done = root_rank, device, False
        self._local: set[int] = set()
        given = [local_variables] if isinstance(local_variables, tf.Variable | keras.Variable) else local_variables
        for variable in given or ():
            if not isinstance(variable, tf.Variable | keras.Variable):
                raise ValueError(f"local_variables: no variable: {variable!r}")
            self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Leaves a variable out."""
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
        if steps and batch >= steps - 1:  # before the validation that Keras makes at the end of an epoch
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
        every = {id(each): each for each in (self.model.optimizer, *vars(self.model).values())}  # a GAN has two
        return [each for each in every.values() if isinstance(each, Distributed)]


class MetricAverageCallback(keras.callbacks.Callback):
    """Means over ranks in place of each epoch's metrics; it goes before callbacks that read them. They are written to
    the run's records."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        own = [np.asarray(logs[name], np.float64) for name in names]  # of F1Score an array
        with tf.device(self._device):
            flat = tf.constant(np.concatenate([each.ravel() for each in own]))
            means = horovod.allreduce(flat, op=horovod.Average, name=f"MetricAverageCallback.{','.join(names)}")
        parts = np.split(means.numpy(), np.cumsum([each.size for each in own])[:-1])
        logs.update((name, part.reshape(each.shape)[()]) for name, part, each in zip(names, parts, own, strict=True))
        recorded.epoch(epoch, logs)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times `multiplier` from `start_epoch` until before `end_epoch`.

    `multiplier`: a function of the epoch, or a number that is raised to the power of the epochs since the start.
    `staircase`: once an epoch; else before each batch, with an epoch of so many `steps_per_epoch` as a fraction.
    `momentum_correction` scales the momentum with a learning rate that changes (Goyal et al., "Accurate, large
    minibatch SGD", 2017, remark 2). In Keras 3 the coefficient is part of the compiled step, so the velocities, which
    contain the learning rate, are scaled instead.
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
            raise ValueError("initial_lr: give the learning rate at the start")
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
                raise ValueError(
                    f"{type(self).__name__}: Keras does not know the steps of an epoch: steps_per_epoch=..."
                )

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
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        scalable = isinstance(inner, keras.optimizers.SGD | keras.optimizers.RMSprop)  # the rate is in their velocities
        if self._momentum_correction and old and scalable and inner.momentum and inner.built:
            for velocity in getattr(inner, "momentums", None) or inner._momentums:  # SGD, RMSprop
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` within `warmup_epochs`, batch by batch
    (Goyal et al., 2017). `verbose`: rank 0 says when it is done."""

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
            reached = epoch + 1 / self.steps_per_epoch  # so that epochs end with round numbers
            return float((reached * (horovod.size() - 1) / warmup_epochs + 1) / horovod.size())

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
