"""Run a module of this checkout in isolation: python3 -I tools/isolated.py MODULE ...

With -I, Python imports nothing from the current folder, PYTHONPATH or the user's packages. Root runs some modules, and
no user's file may replace them. Only this checkout is added to the path.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (the system's own may be older than .venv's)
    for newer in ("python3.14", "python3.13", "python3.12", "python3.11"):
        if shutil.which(newer):
            os.execvp(newer, [newer, "-I", "-B", *sys.argv])
    sys.exit("hvdtrain: python3 here is older than 3.11; install python3.11 or newer")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
