"""What a run shows and records about time: clocks, progress bars, TensorBoard."""
