"""Ranks that wait for each other again and again until something ends them, as told by test_faults.py.

    waiting.py FOLDER [MEGABYTES]

Each rank writes its process number to FOLDER/rank<number>. With MEGABYTES the ranks sum so much, once, and end; rank 0
prints what the links were measured to carry and how long the sum took, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from hvdtrain import world


def main(stop: world.StopSignal) -> int:
    folder, megabytes = Path(sys.argv[1]), [float(text) for text in sys.argv[2:]]
    ranks = world.World("torch")
    ranks.keeps(str(folder), f"waiting.py {folder}")
    links = ranks.measure_links()
    part = folder / f".rank{ranks.rank}"
    part.write_text(str(os.getpid()))
    part.rename(folder / f"rank{ranks.rank}")
    if megabytes:
        began = time.monotonic()
        total = ranks.sum(np.ones(int(megabytes[0] * 250_000), np.float32), "all")
        report = {"links": links, "seconds": time.monotonic() - began, "right": bool((total == ranks.size).all())}
        if ranks.rank == 0:
            sys.stdout.write(json.dumps(report) + "\n")
        ranks.leave()
        return 0
    while True:
        ranks.sum(np.ones(4), "waiting")
        time.sleep(0.02)


world.run(main, debug=False)
