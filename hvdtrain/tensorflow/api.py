"""Horovod's functions for TensorFlow if it is installed, otherwise hvdtrain's own."""

from typing import Any

from hvdtrain.horovod_api.installed import either

mpi_ops, _names, MISSING = either(
    ["horovod.tensorflow.mpi_ops", "horovod.tensorflow"], ["hvdtrain.tensorflow.standalone"]
)
"""The module with the calls, and why Horovod cannot be imported (empty if it can)"""
globals().update(_names)
globals().pop("keras", None)  # Horovod's; hvdtrain.tensorflow.keras replaces it


def __getattr__(name: str) -> Any:
    raise AttributeError(f"Horovod has no {name}")
