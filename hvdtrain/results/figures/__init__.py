"""The figures of `hvdtrain results plot`, a file for each sort."""
