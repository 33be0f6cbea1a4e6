"""`hvdtrain results measured`: files of `hvdtrain measure` as a table, each row a preset on all hosts of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

SCHEMA = "hvdtrain/measured/1"
LARGEST_BYTES = 100_000


def read(path: Path) -> dict[str, Any]:
    """Raises Failure (65) for a file that is none of `hvdtrain measure`, or as `files.read` does."""
    content = files.read(path, LARGEST_BYTES)
    try:
        document = msgspec.json.decode(content)
        text([document])
        if document["schema"] == SCHEMA:
            return document
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        pass
    raise Failure(f"{path}: not a file of hvdtrain measure; hint: it has the schema {SCHEMA}", exits.BAD_DATA)


def text(documents: Sequence[dict[str, Any]]) -> str:
    """Return the table: seconds per step as predicted before the run and as measured, and the gain over one host."""
    lines = [f"{'hosts':>5} {'Mbit/s':>7} {'ms':>6}  {'preset':<9} {'predicted':>9} {'step':>8} {'off':>6} {'gain':>6}"]
    for each in documents:
        slowest = min(min(link["there_mbit"], link["back_mbit"]) for link in each["links"])
        trip_ms = max(link["round_trip_ms"] for link in each["links"])
        rows = [{**each["one_host"], "preset": "one host", "speedup": 1.0}, *each["presets"]]
        for number, row in enumerate(rows):
            hosts = 1 if number == 0 else len(each["hosts"])
            off = row["predicted_s"] / row["step_s"] - 1
            lines.append(
                f"{hosts:>5} {slowest:>7.4g} {trip_ms:>6.3g}  {row['preset']:<9} {row['predicted_s']:>7.3f} s "
                f"{row['step_s']:>6.3f} s {100 * off:>+5.0f}% {row['speedup']:>5.2f}x"
            )
    lines.append("off: prediction against measurement; gain: time of a step on one host / on all, with equal batches")
    return "\n".join(lines) + "\n"
