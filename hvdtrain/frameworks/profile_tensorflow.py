"""TensorFlow's profiler, and the conversion of its output to a Chrome trace.

TensorFlow 2.21 writes `plugins/profile/<UTC>/<host>.xplane.pb` for TensorBoard's profile plugin. The file contains
planes (the host, each GPU) of lines (threads, streams) of events.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.system import stderr

NOTES = (b"profiler_session.cc", b"save_profile.cc", b"absl::InitializeLog")


class TensorFlowProfiler:
    """See `frameworks.Profiler`."""

    def start(self, folder: Path) -> None:
        self._folder = folder
        with stderr.suppress(NOTES):
            tf.profiler.experimental.start(str(folder))

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        return tf.profiler.experimental.Trace("step", step_num=number, _r=1)  # _r: a step for TensorBoard

    def stop(self, name: str) -> Path:
        before = set(self._folder.rglob("*.xplane.pb"))
        try:
            with stderr.suppress(NOTES):
                tf.profiler.experimental.stop()
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        path = self._folder / f"{name}.trace.json.gz"
        with gzip.open(path, "wt") as stream:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(self._events(before))}, stream)
        return path

    def _events(self, before: set[Path]) -> Iterator[dict[str, Any]]:
        from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

        for file in sorted(set(self._folder.rglob("*.xplane.pb")) - before):
            for number, plane in enumerate(XSpace.FromString(file.read_bytes()).planes, start=1):
                yield from plane_events(plane, number)


def plane_events(plane: Any, pid: int) -> Iterator[dict[str, Any]]:
    """Convert an XPlane to the Trace Event Format: planes become processes, lines threads, times microseconds."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": plane.name}}
    for tid, line in enumerate(plane.lines, start=1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": line.name}}
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            arguments = {plane.stat_metadata[stat.metadata_id].name: value_of(stat, plane) for stat in event.stats}
            yield {
                "ph": "X",
                "name": f"{name} {arguments['step_num']}" if "step_num" in arguments else name,
                "pid": pid,
                "tid": tid,
                "ts": line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
                "dur": event.duration_ps / 1e6,
                "args": arguments,
            }


def value_of(stat: Any, plane: Any) -> Any:
    """Return an XStat's value. The plane stores each recurring text once."""
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return plane.stat_metadata[stat.ref_value].name
    value = getattr(stat, kind) if kind else None
    return value.hex() if isinstance(value, bytes) else value
