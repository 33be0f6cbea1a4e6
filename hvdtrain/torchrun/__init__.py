"""Ranks of a DDP script on all hosts, with the variables that torchrun gives them."""
