"""Horovod's functions for Keras if it is installed, otherwise hvdtrain's own."""

from typing import Any

from hvdtrain.horovod_api.installed import either

_names = either(["horovod.tensorflow.keras", "horovod.keras"], ["hvdtrain.tensorflow.standalone"])[1]
_values = either(["horovod.tensorflow.keras"], ["hvdtrain.keras.standalone"])[1]
globals().update(_names | {name: _values[name] for name in ("allgather", "allreduce", "broadcast", "reducescatter")})
for _replaced in ("callbacks", "elastic"):  # Horovod's, for Keras 2
    globals().pop(_replaced, None)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"Horovod has no {name}")
