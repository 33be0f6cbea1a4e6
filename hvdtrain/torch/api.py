"""Horovod's functions for PyTorch if it is installed, otherwise hvdtrain's own."""

from typing import Any

from hvdtrain.horovod_api.installed import either

mpi_ops, _names, MISSING = either(["horovod.torch.mpi_ops", "horovod.torch"], ["hvdtrain.torch.standalone"])
"""The module with the calls, and why Horovod cannot be imported (empty if it can)"""
globals().update(_names)
globals().pop("elastic", None)  # Horovod's; hvdtrain.torch.elastic replaces it


def __getattr__(name: str) -> Any:
    raise AttributeError(f"Horovod has no {name}")
