"""Find problems that make jobs hang or run slowly, before a job starts.

`agent` is a connection to a host and `probe` the script that answers there. `checks`, `host_checks` and `link_checks`
judge the answers. `__main__` is the command.
"""
