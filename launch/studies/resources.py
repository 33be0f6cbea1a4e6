#!/usr/bin/env python3
"""Power and use of each host of a run over time, from a run with --monitor power,resources.

launch/studies/resources.py results/RUN resources.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def main(run: str, target: str) -> None:
    rows: dict[str, list[tuple[str, float, float]]] = {}  # axis -> (label, time, value)
    for path in sorted((Path(run) / "monitors").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["type"] != "sample":
                continue
            at_s, seconds, host = record["unix_s"], record["seconds"], path.stem
            for device, joules in record["energy_j"].items():
                rows.setdefault("power (W)", []).append((f"{host} {device}", at_s, joules / seconds))
            for gpu in record["gpus"]:
                rows.setdefault("GPU (%)", []).append((f"{host} {gpu['device']}", at_s, gpu["utilisation_percent"]))
            for direction in ("sent", "received"):
                mbit = sum(nic[f"{direction}_bytes"] for nic in record["nics"]) * 8e-6 / seconds
                rows.setdefault("network (Mbit/s)", []).append((f"{host} {direction}", at_s, mbit))
            for name, key, factor in (("CPU (%)", "cpu_percent", 1.0), ("RAM (GB)", "ram_used_bytes", 1e-9)):
                if record[key] is not None:
                    rows.setdefault(name, []).append((host, at_s, factor * record[key]))
    began_s = min(at_s for points in rows.values() for _, at_s, _ in points)
    figure, axes = plt.subplots(len(rows), 1, sharex=True, squeeze=False, figsize=(8, 2 * len(rows)))
    for axis, (name, points) in zip(axes[:, 0], rows.items(), strict=True):
        for label in dict.fromkeys(label for label, *_ in points):
            curve = [(at_s - began_s, value) for other, at_s, value in points if other == label]
            axis.plot(*zip(*curve, strict=True), label=label)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel("time (s)")
    figure.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
