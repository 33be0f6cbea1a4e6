#!/usr/bin/env python3
"""Step and inference time over model size, by device and depth: the figures of the study in docs/workloads/solar.md.

    hvdtrain results export results/martin2019_pyramids -o runs.csv
    launch/studies/martin2019.py runs.csv time.svg

Each curve is a device and a number of hidden layers (p1 to p3); a point is the median over its runs. The script prints
the size from which the GPU is faster.
"""

from __future__ import annotations

import json
import re
import sys

import matplotlib.pyplot as plt
import pandas as pd

SETTINGS = ["framework", "strategy", "precision", "hosts", "rank_batch", "net", "parameters"]


def main(source: str, target: str) -> None:
    runs = pd.read_csv(source)
    runs = runs[(runs["state"] == "complete") & runs["marked"].isna() & (runs["ranks"] == 1)]
    nets = [str(json.loads(text).get("net")) for text in runs["settings"]]
    times = runs.assign(net=[re.sub(r"-k\d+$", "", net) for net in nets])  # p2-k5 has two hidden layers
    times = times.rename(columns={"step_s": "training step"})
    for samples in sorted({int(size) for text in runs["inference"].dropna() for size in json.loads(text)}):
        read = [json.loads(text).get(str(samples)) if isinstance(text, str) else None for text in runs["inference"]]
        times[f"{samples} samples"] = read
    names = [name for name in times if name == "training step" or str(name).endswith(" samples")]
    medians = times.groupby([*SETTINGS, "device"], dropna=False)[names].median().reset_index()
    figure, axes = plt.subplots(1, len(names), squeeze=False, figsize=(4 * len(names), 4), layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        for (device, net), curve in medians.dropna(subset=[name]).groupby(["device", "net"]):
            ordered = curve.sort_values("parameters")
            axis.loglog(ordered["parameters"], 1e3 * ordered[name], marker="o", label=f"{device}, {net}")
        axis.set(title=name, xlabel="parameters", ylabel="time (ms)")
        both = medians.pivot_table(index=SETTINGS, columns="device", values=name, dropna=False)
        if {"cpu", "gpu"} <= set(both):
            both = both.dropna(subset=["cpu", "gpu"]).reset_index()
            slower = both.loc[both["gpu"] >= both["cpu"], "parameters"].max()
            beyond = both.loc[~(both["parameters"] <= slower), "parameters"]
            print(f"{name}: GPU faster from {beyond.min():,.0f} parameters" if len(beyond) else f"{name}: GPU slower")
    axes[0][0].legend()
    figure.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
