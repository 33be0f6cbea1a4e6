"""Watches over the ranks of a job from outside, and measures the way to the next host. Standard library only.

Horovod and MPI wait for ever for a host whose link is cut or a rank that is stopped. So the first rank of each host
starts a small process, the sentinel: `watch` is its program, `ending` how it ends a job, `goodput` its measurement,
`processes` what it sees of a host. `rank` is the rank's side, `interfaces` finds the way to another host.
"""
