"""Measured irradiance in W/m2, and windows of it from which a model learns to forecast.

A reading of a **series** that breaks one of these rules becomes NaN, is counted, and is never filled in:
  * missing: no number was recorded;
  * out of bounds: outside the range that the sun and the instrument's offset at night allow;
  * near one out of bounds: within `spoils_s` seconds of such a reading, since the instrument is not reliable then.

A **window** is the model's input, up to some reading; its target is the reading `ahead` steps later. Some windows are
left out and counted: those with a bad reading or target, those over a gap in the times, and those at night, when
neither the last reading nor the target reaches DARK_W_M2. Windows are views of the series; each batch copies its own.

**The split** is by time: 70 % of the readings train, the next 15 % validate, the last 15 % test. A window across a
border is left out. Inputs and targets are scaled by mean and deviation of the training part.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hvdtrain.data import Batch, Split, halves, packaged
from hvdtrain.data.prepared import PARTS, open_array, opening
from hvdtrain.system import files
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

DARK_W_M2 = 5.0
SHARES = (0.70, 0.15, 0.15)
SIDE = 50
"""Width and height of a map in pixels; also the readings per window, and windows, of a stack"""
SCHEMA = "hvdtrain.solar/1"
COMMAND = "hvdtrain data solar"

PACKAGED = "pvanalytics"
PACKAGED_FILE = "data/system_15_poa_irradiance.parquet"
PACKAGED_SHA256 = "92e6c30404ce64cf4aecf38adc1ab7b2ea81fc68bfc198c5b951f481eceec361"
PACKAGED_BOUNDS = (-10.0, 1361.0)
"""W/m2; no mean of 15 minutes exceeds the sun's radiation outside the atmosphere"""

Look = Literal["window", "stack", "map"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Readings of one or more stations at the same times."""

    name: str
    stations: tuple[str, ...]
    places: tuple[tuple[float, float], ...]
    """(latitude, longitude) of each station in degrees; () if unknown"""
    times: NDArray[np.int64]
    """(T,) seconds since 1970, increasing"""
    readings: NDArray[np.float32]
    """(T, stations) W/m2; NaN for a reading that breaks a rule. May be a memory map."""
    step_s: int
    """Seconds between two readings"""
    flagged: Mapping[str, int]
    """Number of readings that break each rule"""
    fingerprint: str


def flag(
    readings: NDArray[np.float32], bounds: tuple[float, float], spoilt: int
) -> tuple[NDArray[np.float32], dict[str, int]]:
    """The readings (T, stations) with NaN for those that break a rule, and the number that break each rule.

    `spoilt` is the number of readings before and after one out of bounds that are bad too.
    """
    least, most = bounds
    missing = ~np.isfinite(readings)
    with np.errstate(invalid="ignore"):
        beyond = ~missing & ((readings < least) | (readings > most))
    close = np.zeros_like(beyond)
    for column in range(readings.shape[1]):
        for place in np.flatnonzero(beyond[:, column]):
            close[max(0, place - spoilt) : place + spoilt + 1, column] = True
    close &= ~(missing | beyond)
    kept = np.where(missing | beyond | close, np.float32(np.nan), readings)
    rules = {"missing": missing, "out of bounds": beyond, "near one out of bounds": close}
    return kept, {rule: int(broken.sum()) for rule, broken in rules.items()}


def load(name: str) -> Series:
    """The series with this name: 'pvanalytics', or a folder made by `hvdtrain data solar`. Raises Failure (65, 77)."""
    if name == PACKAGED:
        return shipped()
    if not Path(name).is_dir():
        raise Failure(f"unknown readings '{name}'; hint: give '{PACKAGED}' or a folder made by `{COMMAND}`", BAD_DATA)
    return open_series(Path(name))


def shipped() -> Series:
    """Global irradiance in the plane of a solar array at NREL in Golden, Colorado: means of 15 minutes, from February
    2019 to October 2023 (system 15 of PVDAQ, doi:10.25984/1846021). The file comes with the package pvanalytics (MIT).

    Neither pvanalytics nor its dependencies are imported. In May to July 2023 the instrument reports up to 5,627 W/m2,
    several times too much from morning to evening, so a reading out of bounds spoils a day before and after it.
    Raises Failure (65) without the file, or without pyarrow, which reads it.
    """
    install = "pip install --no-deps -c tools/constraints.txt pvanalytics pyarrow"
    path = packaged(PACKAGED, PACKAGED_FILE)
    if path is None or importlib.util.find_spec("pyarrow") is None:
        raise Failure(f"{PACKAGED} and pyarrow are not installed; hint: {install}", BAD_DATA)
    data = files.read(path, 16 * files.MIB)
    if hashlib.sha256(data).hexdigest() != PACKAGED_SHA256:
        raise Failure(f"{path} is not the expected file; hint: {install} --force-reinstall", BAD_DATA)
    import pyarrow
    from pyarrow import parquet

    times, values = parquet.ParquetFile(pyarrow.BufferReader(data)).read().columns
    numbers = values.combine_chunks().fill_null(
        pyarrow.scalar(np.nan, pyarrow.float32())
    )  # a float would import pandas
    kept, flagged = flag(np.asarray(np.from_dlpack(numbers), np.float32)[:, np.newaxis], PACKAGED_BOUNDS, 24 * 4)
    return Series(
        name=PACKAGED,
        stations=("poa",),
        places=(),
        times=np.asarray(np.from_dlpack(times.cast("int64").combine_chunks()), np.int64) // 1_000_000,
        readings=kept,
        step_s=900,
        flagged=flagged,
        fingerprint=PACKAGED_SHA256,
    )


def open_series(folder: Path) -> Series:
    """The series in a folder made by `hvdtrain data solar`; readings stay a memory map. Raises Failure (65, 77)."""
    with opening(folder, COMMAND, SCHEMA) as index:
        stations, stated = tuple(map(str, index["stations"])), index["files"]
        places = tuple((float(latitude), float(longitude)) for latitude, longitude in index["places"])
        ticks, step_s = int(index["readings"]), int(index["step_s"])
        times = open_array(folder / "times.npy", stated["times.npy"], (ticks,), "int64", verify=True)
        shape = (ticks, len(stations))
        readings = open_array(folder / "readings.npy", stated["readings.npy"], shape, "float32", shares=False)
        flagged = {str(rule): int(count) for rule, count in index["flagged"].items()}
        if len(places) not in (0, len(stations)) or step_s < 1:
            raise ValueError("its numbers of stations and places differ, or its time step is not positive")
    if not (times[1:] > times[:-1]).all():
        raise Failure(f"{folder / 'times.npy'}: the times do not increase; hint: prepare it again", BAD_DATA)
    return Series(
        name=folder.name,
        stations=stations,
        places=places,
        times=times,
        readings=readings,
        step_s=step_s,
        flagged=flagged,
        fingerprint=stated["readings.npy"]["sha256"],
    )


@dataclass(frozen=True, kw_only=True)
class WindowSplit(Split):
    """One part of the windows."""

    views: NDArray[np.float32]
    """(T - span + 1, ...), views of the readings: the input that begins at each reading"""
    truth: NDArray[np.float32]
    """(T,), readings of the station to forecast"""
    starts: NDArray[np.int64]
    """(N,), first reading of each window"""
    span: int
    """Number of readings from a window's first to its last"""
    ahead: int
    weights: NDArray[np.float32] | None
    """(stations, SIDE * SIDE), which turn the stations' readings into a map"""
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        """Arrays, all scaled: inputs, float32 (n, window) or (n, SIDE, SIDE); targets, float32 (n, 2): the reading to
        forecast and the last reading of the window. Inputs (n, SIDE, SIDE) add the step's key (see `data.halves`)."""
        first = self.starts[items]
        last = first + (self.span - 1)
        seen = self.views[first]
        if self.weights is not None:
            seen = (seen @ self.weights).reshape(-1, SIDE, SIDE)
        targets = np.stack([self.truth[last + self.ahead], self.truth[last]], axis=1)
        for values in (seen, targets):
            values -= np.float32(self.mean)
            values /= np.float32(self.deviation)
        arrays = (seen, targets) if seen.ndim == 2 else (seen, targets, halves(key))
        return Batch(arrays=arrays, weight=len(items), total_weight=len(global_items))


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of a series, split by time."""

    name: str
    fingerprint: str
    """SHA-256 that changes if a reading, a window or the split changes"""
    train: WindowSplit
    validation: WindowSplit
    test: WindowSplit
    shape: tuple[int, ...]
    """Shape of one input"""
    about: Mapping[str, Any]
    """For the manifest: station, unit, scale, and how many windows were left out for each reason"""


def windows(series: Series, *, look: Look, window: int, ahead: int, station: str | None = None) -> Windows:
    """All good windows of a station (default: the first), in one of three forms:

    * window: the station's last `window` readings;
    * stack: its last 2 SIDE - 1 readings as a matrix, whose row i is the window of SIDE readings from reading i on;
    * map: the readings of all stations at that moment, interpolated to SIDE x SIDE pixels (see `map_weights`).

    Raises Failure: BAD_CONFIG for an unknown station, BAD_DATA if a part has no windows.
    """
    if station is not None and station not in series.stations:
        known = ", ".join(series.stations)
        message = f"--station {station}: unknown station{near(station, series.stations)}"
        raise Failure(f"{message}; hint: the stations are {known}", BAD_CONFIG)
    chosen = station or series.stations[0]
    truth = series.readings[:, series.stations.index(chosen)]
    span = {"window": window, "stack": 2 * SIDE - 1, "map": 1}[look]
    if len(truth) < span + ahead:
        raise Failure(f"{series.name}: {len(truth):,} readings, but a window needs {span + ahead}", BAD_DATA)
    views, weights = truth, None
    if look == "map":
        views, weights = series.readings, map_weights(series.places)
    else:
        views = sliding_window_view(truth, window if look == "window" else SIDE)
        views = sliding_window_view(views, SIDE, axis=0).swapaxes(1, 2) if look == "stack" else views
    good = ~np.isnan(truth if look != "map" else series.readings.sum(axis=1))
    starts, left_out = _starts(series, good, truth, span, ahead)
    borders = [round(sum(SHARES[:part]) * len(truth)) for part in range(4)]
    training = truth[: borders[1]].astype(np.float64)
    mean, deviation = float(np.nanmean(training)), float(np.nanstd(training)) or 1.0
    parts = {}
    for name, (begin, end) in zip(PARTS, itertools.pairwise(borders), strict=True):
        inside = starts[(starts >= begin) & (starts + (span - 1 + ahead) < end)]
        if not len(inside):
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
            message = f"{series.name}: a part of its {len(truth):,} readings has no windows"
            raise Failure(f"{message}; left out: {reasons}", BAD_DATA)
        parts[name] = WindowSplit(
            views=views,
            truth=truth,
            starts=inside,
            span=span,
            ahead=ahead,
            weights=weights,
            mean=mean,
            deviation=deviation,
        )
    left_out["over a cut"] = len(starts) - sum(map(len, parts.values()))
    identity = [series.fingerprint, look, window, ahead, chosen, SHARES, DARK_W_M2, SIDE]
    return Windows(
        name=series.name,
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        shape=views.shape[1:] if weights is None else (SIDE, SIDE),
        about={
            **({} if look == "window" else {"image_shape": (SIDE, SIDE, 1)}),
            **({} if look != "map" else {"stations": series.stations, "places": series.places}),
            "look": look,
            "station": chosen,
            "unit": "W/m2",
            "step_s": series.step_s,
            "mean_w_m2": mean,
            "deviation_w_m2": deviation,
            "readings_flagged": dict(series.flagged),
            "windows_left_out": left_out,
        },
        **parts,
    )


def _starts(
    series: Series, good: NDArray[np.bool_], truth: NDArray[np.float32], span: int, ahead: int
) -> tuple[NDArray[np.int64], dict[str, int]]:
    """The first readings of the good windows, and the number of other windows for each reason."""
    count = len(truth) - (span - 1) - ahead
    first = np.arange(count)
    last, target = slice(span - 1, span - 1 + count), slice(span - 1 + ahead, None)
    broken = np.concatenate([[0], np.cumsum(~good)])
    bad = (broken[span : span + count] != broken[:count]) | ~good[target]
    skips = ~bad & (series.times[target] - series.times[:count] != (span - 1 + ahead) * series.step_s)
    night = ~(bad | skips) & (truth[last] < DARK_W_M2) & (truth[target] < DARK_W_M2)
    reasons = {"with a bad reading": bad, "over a gap": skips, "at night": night}
    return first[~(bad | skips | night)], {reason: int(windows.sum()) for reason, windows in reasons.items()}


def map_weights(places: Sequence[tuple[float, float]]) -> NDArray[np.float32]:
    """(stations, SIDE * SIDE), each station's weight in each pixel, by inverse square distance.

    From Shepard, "A two-dimensional interpolation function for irregularly-spaced data", 1968. A pixel at a station has
    the station's value. Pixels go from north to south and from west to east over the stations' bounding box. Degrees of
    longitude are shortened by the cosine of the box's latitude.
    """
    latitudes, longitudes = np.array(places, np.float64).T
    x, y = longitudes * np.cos(np.deg2rad(latitudes.mean())), latitudes
    columns, rows = np.linspace(x.min(), x.max(), SIDE), np.linspace(y.max(), y.min(), SIDE)
    squared = (columns[np.newaxis, :, np.newaxis] - x) ** 2 + (rows[:, np.newaxis, np.newaxis] - y) ** 2
    least = 1e-12 * max(squared.max(), 1e-12)
    weights = 1 / np.maximum(squared, least).reshape(SIDE * SIDE, -1)
    return (weights / weights.sum(axis=1, keepdims=True)).T.astype(np.float32)
