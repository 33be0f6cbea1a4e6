"""Runs a module in ranks each of which is a host by itself: `mpirun -np 2 python on_hosts.py MODULE FLAGS...`."""

from __future__ import annotations

import runpy
import sys

from strategy_hosts import joined

if __name__ == "__main__":
    joined(per_host=1)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
