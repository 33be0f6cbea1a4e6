"""Runs a script in a process that cannot import Horovod: without_horovod.py SCRIPT [ARGUMENTS]."""

import runpy
import sys
from pathlib import Path

sys.modules["horovod"] = None  # type: ignore[assignment]
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
