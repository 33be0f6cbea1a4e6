"""The profile of one host: how long a step computes, when gradients are ready, and what coding costs.

profile = measured(...)      at most 30 s
keep(profile)                in ~/.cache/hvdtrain/plan, by everything that the times depend on
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.data import Batch
from hvdtrain.data.prepared import cache_folder, caching
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import Exchanged, Strategy, Vectors
from hvdtrain.strategies.algorithms.synchronous import buckets
from hvdtrain.strategies.base import ReducerCost
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements
from hvdtrain.system import cgroup, exits, files, proc
from hvdtrain.system.exits import Failure

SCHEMA = "hvdtrain/profile/1"
NAME = "profile.json"
STEPS_S = 12.0
"""Time for measuring steps, over all batch sizes"""
CODING_S = 15.0
"""Time for measuring reducers"""
WARM_UP_STEPS = 3
MOST_STEPS = 40
AVERAGINGS = 5
NAP_S = 0.005
FORWARD = 1 / 3
"""Share of forward in forward and backward, if it was not measured: backward multiplies twice as often"""
FIXED_SAMPLES = 10.0
"""A step costs as much as that many more samples, if only one batch size is known. Profiles of ResNet-34 and of the
captioner on CPUs have 5 to 41; 10 predicts recorded runs with other batches best (docs/benchmarks/predictions.md)"""
ASSUMED_FIXED = f"for other batches a step is taken to cost as much as {FIXED_SAMPLES:.0f} more samples"


# Bounds within which every prediction is finite. A profile may have been edited.
Samples = Annotated[int, Meta(ge=1, le=10**9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(ge=1e-9, le=1e9)]
Scale = Annotated[float, Meta(ge=1e-9, le=1e300)]
Shapes = list[list[Annotated[int, Meta(ge=0, le=10**12)]]]
MOST_PARAMETERS = 10**13


class Machine(TypedDict):
    """Where a profile was made."""

    processor: str | None
    cores: Positive


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Steps with one batch size."""

    batch: Samples
    """Samples per rank and step"""
    backward_s: Positive
    """Mean time of waiting for the batch, forward and backward"""
    update_s: Seconds
    """Mean time of the optimizer"""
    variation: Seconds
    """Standard deviation of a step's time, relative to its mean, without outliers"""
    steps: Samples


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    schema: str = SCHEMA
    machine: Machine
    """Processor and its cores, which a quota lowers"""
    workload: str
    model: str
    """For people"""
    setup: dict[str, Any]
    """What else the times depend on: framework, precision, device ..."""
    shapes: Shapes
    """Shapes of the trainable arrays in a replica's vector"""
    epoch_samples: Annotated[int, Meta(ge=1, le=10**18)] | None
    """None for a script, whose data are unknown"""
    threads: Samples
    points: Annotated[list[Point], Meta(min_length=1)]
    """In ascending order of the batch"""
    averaging_s: Seconds = 0.0
    """Processor seconds that local SGD adds to a step that averages weights, without the exchange"""
    waking_s: Seconds = 0.0
    """Mean delay of a thread that wakes while the model computes"""
    ready: list[Annotated[float, Meta(ge=0, le=1)]] = []
    """Share of forward and backward after which each bucket of gradients is ready; empty if it was not measured"""
    coding_s: dict[str, Seconds] = {}
    """Processor seconds of one all-reduce over two hosts, by reducer"""
    noise_scale: tuple[Scale, Scale | None] | None = None
    """Samples per step that need twice the epochs of a tiny batch: least and most of an interval, which may have no
    upper end. None if it was not measured, or the model learned too little"""
    pilot: dict[str, Any] = {}
    """Batches and settings with which it was measured"""
    peak_rss_bytes: int = 0
    from_run: bool = False
    """Whether the computation was not profiled, but recorded during a run"""
    factors: dict[str, Positive] = {}
    """Recorded / simulated time of a step on several hosts, by backend"""
    accumulation: Samples = 1
    """Backward passes of a script in each step, which together compute the point's batch"""
    drop_in: bool = False
    """Whether the optimizer of a drop-in module exchanges"""

    def __post_init__(self) -> None:
        batches, size = [each.batch for each in self.points], elements(self.shapes)
        if self.schema != SCHEMA or batches != sorted(set(batches)) or not 1 <= size <= MOST_PARAMETERS:
            raise ValueError("another schema, unordered points or no parameters")

    @property
    def cores(self) -> float:
        return float(self.machine["cores"])

    def line(self) -> tuple[float, float]:
        """Return f and c of step time = f + c x batch (seconds, seconds per sample), by least squares."""
        if len(self.points) == 1:
            fixed = FIXED_SAMPLES * self.accumulation
            slope = self.step_s(self.points[0].batch) / (self.points[0].batch + fixed)
            return fixed * slope, slope
        batches = [each.batch for each in self.points]
        slope, intercept = statistics.linear_regression(
            batches, [each.backward_s + each.update_s for each in self.points]
        )
        return max(0.0, intercept), slope

    def step_s(self, batch: float) -> float:
        return self.backward_s(batch) + self.update_s

    @property
    def update_s(self) -> float:
        return statistics.mean(each.update_s for each in self.points)

    @property
    def variation(self) -> float:
        return statistics.median(each.variation for each in self.points)

    def passes(self, batch: float) -> float:
        """Return the backward passes in a step of this batch: fewer for fewer samples if the script accumulates."""
        return max(1.0, self.accumulation * batch / self.points[0].batch) if self.accumulation > 1 else 1.0

    def backward_s(self, batch: float) -> float:
        """Return the time of forward and backward, between and beyond the measured batches along straight lines."""
        points = self.points
        if len(points) == 1:
            fixed, own = (FIXED_SAMPLES * passes for passes in (self.passes(batch), self.accumulation))
            return points[0].backward_s * (batch + fixed) / (points[0].batch + own)
        number = next((i for i in range(1, len(points) - 1) if batch < points[i].batch), len(points) - 1)
        low, high = points[number - 1], points[number]
        slope = (high.backward_s - low.backward_s) / (high.batch - low.batch)
        return max(low.backward_s + slope * (batch - low.batch), min(batch / low.batch, 1.0) * low.backward_s / 2)

    def ready_at(self, share: float) -> float:
        """Return the share of forward and backward after which a bucket is ready.

        `share`: see `Phase.ready_at`.
        """
        if self.ready and share > 0:
            return self.ready[max(0, round(share * len(self.ready)) - 1)]
        return min(1.0, FORWARD + (1 - FORWARD) * share)


class Probe(Strategy):
    """Exchanges nothing, and records when gradients are ready."""

    ready_s: list[float]

    @property
    def shapes(self) -> Sequence[Shape]:
        return self._shapes

    @property
    def ranks(self) -> Communicator:
        return self._world

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        return Cost()

    def buckets(self, *, late_tail: bool = False) -> list[range]:
        self.ready_s = []
        ranges = buckets(self._shapes)
        return ranges if len(ranges) > 1 else []

    def on_bucket_ready(self, bucket: int, vector: Any, ready: Callable[[], None] | None = None) -> None:
        if ready:
            ready()
        self.ready_s.append(time.perf_counter())

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        replica.vector()
        replica.apply(lr)
        return Exchanged()


def machine() -> Machine:
    """Return what identifies this machine in profiles."""
    return {"processor": proc.processor() or platform.machine(), "cores": round(cgroup.process_cores(), 2)}


def timed(
    replica: Any, probe: Probe, batches: Callable[[int], Iterator[Batch]], sizes: Iterable[int], budget_s: float
) -> tuple[list[Point], list[float]]:
    """Return a point for each batch size, and `Profile.ready` of the largest.

    `replica`: a `frameworks.Replica` with `probe`. Its weights do not change. `batches(n)` yields batches of n samples.
    """
    wanted = sorted(set(sizes))
    points, ready = [], list[float]()
    for size in wanted:
        limit_s = budget_s / len(wanted)
        rows = list[tuple[float, float, list[float]]]()
        first = began = time.perf_counter()
        endless = itertools.chain.from_iterable(batches(size) for _ in itertools.count())
        for step in range(WARM_UP_STEPS + MOST_STEPS):
            if step == WARM_UP_STEPS:
                began = time.perf_counter()
            now = time.perf_counter()
            enough = step > WARM_UP_STEPS and now - began > limit_s
            if enough or (step > 1 and now - first > 2 * limit_s):  # a step may take longer than the limit
                break
            start = time.perf_counter()
            probe.ready_s = []
            batch = next(endless)
            replica.backward(batch, 0.0, False)
            replica.synchronize()
            middle = time.perf_counter()
            probe.step(replica, 0.0, Clock())
            replica.synchronize()
            shares = [(at - start) / (middle - start) for at in probe.ready_s]
            rows.append((middle - start, time.perf_counter() - middle, shares))
        rows = rows[min(WARM_UP_STEPS, len(rows) - 1) :]
        spread = variation([backward + update for backward, update, _ in rows])
        backward_s = statistics.mean(row[0] for row in rows)
        update_s = statistics.mean(row[1] for row in rows)
        points.append(Point(batch=size, backward_s=backward_s, update_s=update_s, variation=spread, steps=len(rows)))
        ready = [statistics.mean(each) for each in zip(*(row[2] for row in rows), strict=True)]
    return points, ready


def variation(seconds: Sequence[float]) -> float:
    """Return `Point.variation` of steps that took these times."""
    ordered, quarter = sorted(seconds), len(seconds) // 4
    spread_s = (ordered[-1 - quarter] - ordered[quarter]) / 1.349 if len(ordered) > 3 else 0.0
    return spread_s / statistics.mean(ordered)


def averaging_s(replica: Any, probe: Strategy, local: Strategy, batch: Batch) -> float:
    """Return the processor seconds by which a step of local SGD in a single process exceeds one of `probe`."""
    seconds: dict[Strategy, list[float]] = {probe: [], local: []}
    for _ in range(AVERAGINGS):
        for strategy, spent in seconds.items():
            replica.backward(batch, 0.0, False)
            replica.synchronize()
            before = time.process_time()
            strategy.step(replica, 0.0, Clock())
            replica.synchronize()
            spent.append(time.process_time() - before)
    return max(0.0, statistics.median(seconds[local][1:]) - statistics.median(seconds[probe][1:]))


class Waking:
    """Measures how late a sleeping thread wakes while the block computes, as an exchange thread does.

    The scheduler, a CPU quota and Python's lock delay it.
    """

    late_s: float = 0.0
    """Mean delay"""

    def __enter__(self) -> Waking:
        self._ending = threading.Event()
        self._delays: list[float] = []
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()
        return self

    def _sleep(self) -> None:
        while not self._ending.is_set():
            began = time.perf_counter()
            time.sleep(NAP_S)
            self._delays.append(time.perf_counter() - began - NAP_S)

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join()
        self.late_s = max(0.0, statistics.mean(self._delays)) if self._delays else 0.0


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- files ------------------------------------------------------------------------------------------------------------


def path_of(key: Mapping[str, Any]) -> Path:
    """Return the cached profile's path for everything that its times depend on."""
    # Hosts may share the cache, and equal processors may have unequal load.
    text = json.dumps([key, machine(), os.uname().nodename], sort_keys=True, default=str)
    return cache_folder("plan") / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def cached(key: Mapping[str, Any]) -> Profile | None:
    """Return the cached profile; None if there is none. Raises Failure (65) if it is damaged or of another machine."""
    path = path_of(key)
    if not os.access(path, os.F_OK):
        return None
    profile = read(path)
    if profile.machine != machine():
        raise Failure(f"{path}: the profile of another machine; hint: remove it", exits.BAD_DATA)
    return profile


def keep(profile: Profile, key: Mapping[str, Any]) -> None:
    """Store a profile in the cache. Raises Failure (73, 74)."""
    path = path_of(key)
    with caching(path.parent):
        files.replace_text(path, json.dumps(as_json(profile), indent=2) + "\n")


def as_json(profile: Profile) -> dict[str, Any]:
    return msgspec.to_builtins(profile)


def read(path: Path) -> Profile:
    """Read a profile. Raises Failure (65, 74, 77)."""
    with records.open_plain(path) as stream:
        content = stream.read(1 << 22)
    try:
        profile = msgspec.convert(files.from_json(content), Profile)
    except (ValueError, msgspec.ValidationError) as error:
        raise Failure(f"{path}: not a profile ({error}); hint: remove it and profile again", exits.BAD_DATA) from None
    return profile


def with_coding(profile: Profile, coding_s: Mapping[str, float]) -> Profile:
    return msgspec.structs.replace(profile, coding_s={**profile.coding_s, **coding_s})


def sizes_of(batches: Iterable[int], largest: int) -> list[int]:
    """Return three batch sizes that span these, each with at least two samples (BatchNorm) and at most `largest`."""
    known = [min(max(2, each), largest) for each in batches]
    low, high = min(known), max(known)
    if high < 4 * low:
        low, high = min(max(2, low // 2), largest), min(2 * high, largest)
    return sorted({low, min(largest, round((low * high) ** 0.5)), high})
