"""The run folder of a Keras script: each step that callbacks see, and the logs of each epoch."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np

from hvdtrain.horovod_api import record
from hvdtrain.records import metrics
from hvdtrain.tensorflow.recorded import Recorded


def step(optimizer: Any) -> None:
    """Records a step of a `DistributedOptimizer` that is done just now. Collective the first time."""
    state = optimizer._hvd_state
    if optimizer._hvd_settings.process_set.process_set_id:
        return  # others may train something else
    if state.recorded is None:
        state.recorded = Recorded(state.step, optimizer._trainable_variables)
    state.recorded.done(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def epoch(number: int, logs: dict[str, Any]) -> None:
    """Records an epoch. Keras' names without val_ are those of the training; what cannot be a score is left out."""
    told = {}
    for key, value in logs.items():
        part, name = ("val_", key[4:]) if key.startswith("val_") else ("train_", key)
        score = re.sub("[^a-z0-9_]+", "_", name.lower())
        if name == "loss":
            told[key] = value
        elif name != "lr" and np.ndim(value) == 0 and metrics.NAME.fullmatch(score):
            told[part + score] = value
    record.log(epoch=number, **told)
