"""From run folders to a data frame with one row per run."""
