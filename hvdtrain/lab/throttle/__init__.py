"""Limit the rate of links: `tools/throttle.sh 10mbit`.

`request` parses what the user asks for, `qdisc` builds tc commands, `links` knows a link's original and target state,
`watchdog` makes changes atomic, `goodput` measures links, and `remote` calls the throttle on other machines.
`__main__` is the command.
"""
