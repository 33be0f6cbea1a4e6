"""`import hvdtrain.keras as hvd` in place of `import horovod.keras as hvd`, for Keras 3, and our strategies.

Horovod's own optimizer and callbacks are for Keras 2; those here are ours, with Horovod's names and arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras as _keras
from horovod.keras import *  # noqa: F403
from horovod.tensorflow import Compression
from horovod.tensorflow import broadcast_global_variables as broadcast_global_variables
from horovod.tensorflow.keras import allgather as allgather
from horovod.tensorflow.keras import allreduce as allreduce
from horovod.tensorflow.keras import broadcast as broadcast
from horovod.tensorflow.keras import reducescatter as reducescatter

from hvdtrain.keras.optimizer import Distributed
from hvdtrain.keras.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.tensorflow import elastic as elastic
from hvdtrain.tensorflow import init as init
from hvdtrain.tensorflow import log as log
from hvdtrain.tensorflow import shutdown as shutdown

del callbacks  # noqa: F821 (Horovod's; ours has the same name)
from hvdtrain.keras import callbacks as callbacks  # noqa: E402


def PartialDistributedOptimizer(optimizer: Any, *arguments: Any, local_layers: Any = None, **named: Any) -> Any:
    """`DistributedOptimizer` that leaves the gradients of these layers' weights to each rank.

    Raises ValueError for local layers that are none of Keras.
    """
    layers: Sequence[Any] = [local_layers] if isinstance(local_layers, _keras.layers.Layer) else local_layers or ()
    if not all(isinstance(layer, _keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers: give layers of Keras")
    made = DistributedOptimizer(optimizer, *arguments, **named)
    for variable in (variable for layer in layers for variable in layer.trainable_weights):
        made.register_local_var(variable)
    return made


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **named: Any,
) -> Any:
    """A saved model, its optimizer with its state as a `DistributedOptimizer`.

    `custom_optimizers`, `custom_objects`: classes that Keras does not have. `named`: further arguments of
    `DistributedOptimizer`, such as strategy=.
    """
    if legacy_opts:
        raise ValueError("legacy_opts: Keras 3 has no legacy optimizers")
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = _keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None and not isinstance(model.optimizer, Distributed):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **named)
    return model
