"""Hosts and the links between them. Standard library only, so that it runs under sudo's plain python3.

`hosts` reads host lists, `nic` looks at network interfaces, `virtual` makes a cluster of network namespaces from a
`topology`, `throttle` shapes links, `launch` starts ranks with settings that suit the link, `doctor` finds what would
make a job hang. Whatever changes a machine is first a list of commands, which `--dry-run` prints and tests read.
"""
