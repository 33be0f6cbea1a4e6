"""Connected ranks that only compute for a while, and what the link's interface sent meanwhile. For test_native.py."""

from __future__ import annotations

import json
import sys
import time

from hvdtrain.comm.world import connect

framework = sys.argv[1]
if framework == "torch":
    from hvdtrain.frameworks.pytorch import prepare
else:
    from hvdtrain.frameworks.tensorflow import prepare
prepare("cpu", 0, 1)
world = connect(framework, backend="native")
world.gather("all are here")
time.sleep(1)  # what was said has been acknowledged
began = world.sentinel.nic_counters()
time.sleep(4)
ended = world.sentinel.nic_counters()
world.gather("that was it")
if world.rank == 0:
    assert began and ended
    sys.stdout.write(json.dumps({"sent_bytes": ended[0] - began[0]}) + "\n")
world.shutdown()
