"""What makes jobs hang or crawl, found before they start.

`agent` is one connection to a host and `probe` the script that answers there; `checks`, `host_checks` and `link_checks`
judge the answers; `__main__` is the command.
"""
