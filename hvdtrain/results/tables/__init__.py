"""One module per table of `hvdtrain results`."""
