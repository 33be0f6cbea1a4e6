"""hvdtrain finds out what your network does to your distributed training, and beats it."""

__version__ = "0.1.0"
