"""Watches the ranks of a job from outside, and measures the link to the next host. Standard library only.

Horovod and MPI wait forever for a host whose link is cut, or for a stopped rank. So the first rank of each host starts
a small process, the sentinel. `watch` is its program, `orders` are the requests of that rank, `ending` ends a job,
`goodput` measures the link, and `processes` observes the processes of a host. `rank` is the rank's side; `interfaces`
finds the route to another host.
"""
