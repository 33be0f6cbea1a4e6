"""Horovod's functions for TensorFlow if it is installed, otherwise hvdtrain's own."""

from typing import Any

from hvdtrain.horovod_api.installed import either

mpi_ops, _names, MISSING = either(
    ["horovod.tensorflow.mpi_ops", "horovod.tensorflow"], ["hvdtrain.tensorflow.standalone"]
)
"""The module with the calls, and why Horovod cannot be imported (empty if it can)"""
globals().update(_names)
for _replaced in ("keras", "elastic"):  # Horovod's; modules of hvdtrain.tensorflow replace them
    globals().pop(_replaced, None)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"Horovod has no {name}")
