"""hvdtrain finds out what your network does to your distributed training, and beats it."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`train`, which is imported when it is asked for: see `own.train`."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvdtrain.training.own import train

    return train
