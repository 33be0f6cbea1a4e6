"""One training run, from its options to its summary."""
