"""Two ranks on this machine train ResNet-34 on the digits with bare_loop.py (a hand-written Horovod loop of the same
model) and with `python -m hvdtrain.resnet`, in turn. Medians over rounds, with the least and the most. The first
three steps of a run do not count.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from bench import document, in_turn, known, options_of, show, spread

FRAMEWORKS = ["torch", "tensorflow"]


def main(arguments: list[str]) -> int:
    top = options_of(__doc__, "loop", frameworks=FRAMEWORKS, rounds=5, epochs=3)
    options = top.parse_args(arguments)
    known(top, options.frameworks, FRAMEWORKS)
    rows: list[dict[str, Any]] = []
    for framework in options.frameworks:

        def run(*program: str) -> Any:
            ranks = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", sys.executable]
            return document([*ranks, *program, "--epochs", str(options.epochs)])

        def ours(framework: str = framework) -> Any:
            with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
                flags = ["--framework", framework, "--checkpoint-steps", "0", "--json", "--run-dir", f"{folder}/run"]
                return run("-m", "hvdtrain.resnet", *flags)

        variants = {"bare": lambda framework=framework: run("tools/bare_loop.py", framework), "hvdtrain": ours}
        results = in_turn(variants, options.rounds)
        ratios = [
            a["samples_per_s"] / b["samples_per_s"] for a, b in zip(results["hvdtrain"], results["bare"], strict=True)
        ]
        for name, runs in results.items():
            row = {
                "framework": framework,
                "loop": name,
                "images/s": spread([each["samples_per_s"] for each in runs], 1),
            }
            row["peak RSS per rank, MB"] = spread([each["peak_rss_bytes"] / 1e6 for each in runs], 0)
            rows.append(row | {"hvdtrain / bare": spread(ratios) if name == "hvdtrain" else "1"})
    return show(options, rows)
