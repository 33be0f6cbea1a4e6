"""A script's run folder (see `hvdtrain.script.record`): each step that Keras' callbacks see, and each epoch's logs."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.script import record
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
    """Records an epoch. Keras' names without val_ are those of the training."""
    own = {name: value for name, value in logs.items() if name != "lr"}
    told = {name if name == "loss" or name.startswith("val_") else f"train_{name}": own[name] for name in own}
    record.log(epoch=number, **told)
