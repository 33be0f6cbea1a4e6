"""Records the steps and epochs of a Keras script in its run folder."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np

from hvdtrain.horovod_api import record
from hvdtrain.records import metrics
from hvdtrain.tensorflow.recorded import Recorded


def step(optimizer: Any) -> None:
    """Record a step of a `DistributedOptimizer` that has just ended. Collective the first time."""
    state, settings = optimizer._hvd_state, optimizer._hvd_settings
    if settings.process_set.process_set_id:
        return  # other ranks may train another model
    if state.recorded is None:
        state.recorded = Recorded(state.step, optimizer._trainable_variables, settings.calls["compression"])
    state.recorded.done(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def epoch(number: int, logs: dict[str, Any]) -> None:
    """Record an epoch. Keras' names without val_ belong to the training. Logs that cannot be scores are left out."""
    scores = {}
    for key, value in logs.items():
        part, name = ("val_", key[4:]) if key.startswith("val_") else ("train_", key)
        score = re.sub("[^a-z0-9_]+", "_", name.lower())
        if name == "loss":
            scores[key] = value
        elif name != "lr" and np.ndim(value) == 0 and metrics.NAME.fullmatch(score):
            scores[part + score] = value
    record.log(epoch=number, **scores)
