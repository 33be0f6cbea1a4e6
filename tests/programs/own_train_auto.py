"""Train with `hvdtrain.train` and strategy auto:exact, then with exact sums: `own_train_auto.py FRAMEWORK FOLDER`.

Raises if the final weights differ. Each rank is a host by itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from own_train import trained, weights
from strategy_hosts import joined, prepared_once

from hvdtrain.training import own

framework, folder = sys.argv[1], Path(sys.argv[2])
prepared_once(framework)
meeting = joined(per_host=1)
ends = []
for strategy in ("auto:exact", "hierarchical"):
    own._finished = False  # these ranks stay connected
    model, _ = trained(framework, 7, 0.2, strategy=strategy, epochs=1, run_dir=str(folder / strategy))
    ends.append(weights(model))
assert all(np.array_equal(*pair) for pair in zip(*ends, strict=True)), "auto:exact differs from exact sums"
if meeting.rank == 0:
    sys.stdout.write(json.dumps({"framework": framework}) + "\n")
