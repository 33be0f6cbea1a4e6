#!/usr/bin/env python3
"""Energy and EDP by device compared with Cruz Varona (undergraduate thesis, Universidad de Cantabria, 2021).

    hvdtrain results energy results/cruz2021_devices --json | launch/studies/cruz2021.py

The study trained ResNet-34 on 9 classes of fish (197x148, grayscale) with 128 images per device for 100 epochs by
PyTorch DistributedDataParallel, and sampled power every 500 ms. EDP is relative to one GPU. The machines and models
differ, so only ratios can be compared.
"""

from __future__ import annotations

import json
import sys

# Environment -> device, ranks on one host, whether through a distributed backend; energy (MJ), EDP, EDP with idle
PUBLISHED = {
    "CPU": (("cpu", 1, None), (8.48, 86.65, 103.79)),
    "1 GPU": (("gpu", 1, False), (1.17, 1.0, 1.0)),
    "1 GPU, distributed": (("gpu", 1, True), (1.18, 1.02, 1.02)),
    "2 GPUs": (("gpu", 2, None), (1.15, 0.56, 0.51)),
}


def main() -> None:
    rows = json.load(sys.stdin)["rows"]
    print(f"{'environment':20}{'energy (MJ)':>20}{'EDP':>16}{'EDP with idle':>20}   (here / published)")
    for name, ((device, ranks, distributed), published) in PUBLISHED.items():
        fitting = [
            row
            for row in rows
            if (row.get("device") or device, row.get("ranks_per_host") or 1, row["hosts"]) == (device, ranks, 1)
            and distributed in (None, row.get("backend", "none") != "none")
        ]
        cells = [f"- / {value:g}" for value in published]
        if fitting:
            found = (fitting[0]["energy_used_j"], fitting[0]["edp_used"], fitting[0]["edp"])
            scaled = [each and each["mean"] * factor for each, factor in zip(found, (1e-6, 1, 1), strict=True)]
            pairs = zip(scaled, published, strict=True)
            cells = [f"{'-' if here is None else f'{here:.3g}'} / {value:g}" for here, value in pairs]
        print(f"{name:20}{cells[0]:>20}{cells[1]:>16}{cells[2]:>20}")


if __name__ == "__main__":
    main()
