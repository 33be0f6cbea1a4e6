"""Drop-in module for `import horovod.keras as hvd`, for Keras 3 and with hvdtrain's strategies.

Horovod's optimizer and callbacks require Keras 2. This module has its own, with the same names and arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras as _keras

from hvdtrain.keras import callbacks as callbacks
from hvdtrain.keras import elastic as elastic
from hvdtrain.keras.api import *  # noqa: F403
from hvdtrain.keras.api import __getattr__ as __getattr__
from hvdtrain.keras.muon import Muon as Muon
from hvdtrain.keras.optimizer import Distributed
from hvdtrain.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.tensorflow import init as init
from hvdtrain.tensorflow import log as log
from hvdtrain.tensorflow import shutdown as shutdown
from hvdtrain.tensorflow.api import Compression
from hvdtrain.tensorflow.api import broadcast_global_variables as broadcast_global_variables


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **named: Any,
) -> Any:
    """Load a saved model and wrap its optimizer, with its state, in a `DistributedOptimizer`.

    `custom_optimizers` and `custom_objects` are classes that Keras does not have. `named` are further arguments of
    `DistributedOptimizer`, such as strategy=.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers; hint: leave legacy_opts= out")
    custom = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = _keras.models.load_model(filepath, custom_objects=custom)
    if model.optimizer is not None and not isinstance(model.optimizer, Distributed):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **named)
    return model
