"""Reducers: how one vector of each host becomes the sum over hosts."""
