"""Ranks that wait for each other repeatedly until a test ends them. Used by test_faults.py.

    waiting.py FOLDER MEGABYTES

Each rank writes its process number to FOLDER/rank<number>. Unless MEGABYTES is 0, the ranks first sum a vector of
this size, and rank 0 writes to FOLDER/summed whether the sum was right.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from hvdtrain.comm import lifecycle, world


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)


def main(stop: lifecycle.StopSignal) -> int:
    folder, megabytes = Path(sys.argv[1]), int(sys.argv[2])
    ranks = world.connect("torch")
    ranks.sentinel.set_run_folder(str(folder), f"waiting.py {folder}")
    ranks.measure_links()
    write(folder / f"rank{ranks.rank}", str(os.getpid()))
    if megabytes:
        total = ranks.sum(np.ones(megabytes * 250_000, np.float32), "all")
        if ranks.rank == 0:
            write(folder / "summed", "right" if (total == ranks.size).all() else "wrong")
    while True:
        ranks.sum(np.ones(4), "waiting")
        time.sleep(0.2)


lifecycle.run(main, debug=False)
