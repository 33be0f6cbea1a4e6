"""`hvd.elastic` for Keras; see `horovod_api.elastic`."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.horovod_api.elastic import State
from hvdtrain.tensorflow.elastic import ObjectState as ObjectState
from hvdtrain.tensorflow.elastic import TensorFlowKerasState
from hvdtrain.tensorflow.elastic import run as run

KerasState = TensorFlowKerasState


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after every `batches_per_commit` batches, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._every = state, batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % self._every == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Counts the batches of the present epoch in `state.batch`.

    If `fit` begins with `state.batch` batches done, it makes only the others in its first epoch. It must precede
    `CommitStateCallback`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._begun, self._cut = state, 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begun = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = self._begun + batch + 1
        steps = self.params.get("steps")
        if self._begun and steps and self._state.batch >= steps:
            self._cut = self.model.stop_training = True  # ends this epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.batch = 0
        if self._cut:
            self._cut = self.model.stop_training = False  # the next one follows


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the epochs of the whole training in `state.epoch`, while `fit` counts from 0 after a loss."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state, self._begun = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._begun = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.epoch = self._begun + epoch + 1
