"""Runs in Prometheus' text format, for the textfile collector of node_exporter.

Every number of a run becomes a gauge with the name of its column, `hvdtrain_run_samples_per_s`, and the run's folder as
its only label. `hvdtrain_run_info` has the other facts as labels. Values that were not measured are absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.results import groups
from hvdtrain.results.live import Frame, LiveRun
from hvdtrain.results.read.folders import Problem
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scores import all_columns
from hvdtrain.system.exits import Failure

INFO = ("run", "state", "workload", "framework", "strategy", "backend", "device", "started_utc")
PROGRESS = {
    "step": "steps done",
    "loss": "loss of the last step",
    "updated_unix_s": "last write to the run's records (s since 1970)",
    "samples_per_s": "training samples per second over all ranks, at present",
    "step_s": "mean step at present (s)",
}
"""Numbers of an unfinished run: field of its frame -> meaning"""


def text(loaded: Loaded) -> str:
    """All runs that can be read. Adds a problem for a run whose progress cannot be read."""
    rows = [row for row in loaded.runs.to_dict("records") if row["state"] != "refused"]
    families = [
        _family(
            "info", "a run; its value is always 1", [({"run_dir": row["run_dir"], **_info(row)}, 1) for row in rows]
        )
    ]
    for name, column in all_columns(loaded.runs).items():
        if column.kind in ("number", "flag"):
            meaning = f"{column.meaning} ({column.unit})" if column.unit else column.meaning
            values = [({"run_dir": row["run_dir"]}, row[name]) for row in rows]
            families.append(_family(name, meaning, values))
    frames = [_frame(row, loaded) for row in rows if row["state"] == "unfinished"]
    for name, meaning in PROGRESS.items():
        values = [({"run_dir": frame.run_dir}, getattr(frame, name)) for frame in frames if frame]
        families.append(_family(f"progress_{name}", f"unfinished run: {meaning}", values))
    return "".join(families)


def _info(row: Mapping[Any, Any]) -> dict[str, str]:
    return {name: str(row[name]) for name in INFO if not groups.is_missing(row[name])}


def _frame(row: Mapping[Any, Any], loaded: Loaded) -> Frame | None:
    try:
        return LiveRun(row["run_dir"]).frame()
    except Failure as failure:
        loaded.problems.append(Problem(str(row["run_dir"]), None, str(failure)))
        return None


def _family(name: str, meaning: str, values: list[tuple[dict[str, str], Any]]) -> str:
    """A gauge with its samples; empty if no run has a value."""
    known = [(labels, float(value)) for labels, value in values if not groups.is_missing(value)]
    if not known:
        return ""
    full, escaped = f"hvdtrain_run_{name}", meaning.replace("\\", "\\\\").replace("\n", "\\n")
    lines = [f"# HELP {full} {escaped}", f"# TYPE {full} gauge"]
    for labels, value in known:
        pairs = ",".join(f'{key}="{_quoted(label)}"' for key, label in labels.items())
        lines.append(f"{full}{{{pairs}}} {value!r}")
    return "\n".join(lines) + "\n"


def _quoted(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
