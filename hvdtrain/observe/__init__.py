"""Clocks, progress bars and TensorBoard."""
