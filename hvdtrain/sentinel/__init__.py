"""Watches the ranks of a job from outside, and measures the link to the next host. Standard library only.

Horovod and MPI wait for ever for a host whose link is cut, or for a rank that is stopped. So the first rank of each
host starts a small process, the sentinel. `watch` is its program, `ending` ends a job, `goodput` measures the link, and
`processes` observes the processes of a host. `rank` is the rank's side; `interfaces` finds the route to another host.
"""
