"""Runs a module of this checkout, whatever the caller's folder and variables: python3 -I tools/isolated.py MODULE ...

With -I Python imports nothing from the current folder, PYTHONPATH or the user's own packages: root runs some of these
modules, and a file of anybody's must not pass for one of them. So this checkout has to be added here.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
