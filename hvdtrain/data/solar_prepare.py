"""Convert files of irradiance stations to memory-mapped arrays: `hvdtrain data solar SRC DST`.

**Input**: a file, or a folder of files, perhaps gzipped. Each is a day of NREL's Oahu Solar Measurement Grid: one line
per second, no header, 23 columns. They are second, year, day of the year, HHMM in Hawaii's time, and W/m2 of 17
horizontal and 2 tilted instruments, which are not used. -99999 means missing.

**Output**: DST with `times.npy`, int64 (T,) seconds since 1970; `readings.npy`, float32 (T, stations) W/m2, with NaN
for readings that break a rule of hvdtrain.data.solar; and `index.json`. Errors name the file and the line.
"""

from __future__ import annotations

import csv
import errno
import gzip
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import __version__
from hvdtrain.config.constraints import bounded, problem
from hvdtrain.config.parser import flag as as_flag
from hvdtrain.data import SHIPPED
from hvdtrain.data.making import check_destination, making, seal
from hvdtrain.data.pixels import npy_header
from hvdtrain.data.solar import SCHEMA, flag
from hvdtrain.data.tree import report_ignored, visible
from hvdtrain.observe.progress import Progress
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

SUMMARY = "hvdtrain.data.solar/1"
MOST_BYTES = 1024 * files.MIB
"""Limit for an unpacked file; a day of the Oahu grid has 8 MB"""
ZONE = -10
"""Hours from UTC in Hawaii"""
OAHU_COLUMNS = 23
OAHU = {
    int(row["column"]): (row["station"], float(row["latitude"]), float(row["longitude"]))
    for row in csv.DictReader((SHIPPED / "oahu.csv").read_text().splitlines())
}
"""Column -> station, latitude, longitude"""


@dataclass(frozen=True, kw_only=True)
class SolarConfig:
    """Options of `hvdtrain data solar`."""

    source: str
    """A file, or a folder of files: days of the Oahu grid."""
    destination: str
    """Folder to create; must not exist."""
    least: float = -10.0
    """W/m2; lower readings are bad. An instrument's offset at night is a few W/m2."""
    most: float = 2000.0
    """W/m2; higher readings are bad. Clouds that reflect the sun reach 1,900 for seconds."""
    spoils_s: int = bounded(0, least=0)
    """Seconds before and after a reading outside these bounds, in the same file, that are bad too."""
    dry_run: bool = False
    """Read everything and report the result, but write nothing."""

    def __post_init__(self) -> None:
        if wrong := problem(self, as_flag):
            raise Failure(wrong, BAD_CONFIG)
        if not self.least < self.most:
            raise Failure(f"--least {self.least:g} is not below --most {self.most:g}", BAD_CONFIG)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Contents of one file."""

    path: Path
    times: NDArray[np.int64]
    readings: NDArray[np.float32]


def prepare(config: SolarConfig) -> dict[str, Any]:
    """Prepares the data and returns a summary fit for JSON.

    Raises Failure: BAD_DATA for an unusable file, NO_PERMISSION for an unreadable one, CANNOT_WRITE if the destination
    exists, IO_ERROR if the disk is full.
    """
    check_destination(config.source, config.destination)
    paths, destination = _listed(Path(config.source)), Path(config.destination).absolute()
    if config.dry_run:
        return {**_written(config, paths, None), "destination": str(destination), "dry_run": True, "schema": SUMMARY}
    with making(destination) as result:
        about = _written(config, paths, result)
        index = seal(result, {"schema": SCHEMA, **about}, ("times.npy", "readings.npy"))
    return {**index, "destination": str(destination), "schema": SUMMARY}


def _listed(source: Path) -> list[Path]:
    """The files, ordered by name."""
    ignored: list[str] = []
    try:
        inside = [Path(entry.path) for entry in visible(source, ignored)] if source.is_dir() else [source]
    except OSError as error:
        raise files.refused(source, error, BAD_DATA, "give a file, or a folder of files") from error
    report_ignored(ignored)
    if paths := [path for path in inside if path.is_file()]:
        return paths
    raise Failure(f"{source} contains no files; hint: give a file, or a folder of files", BAD_DATA)


def _written(config: SolarConfig, paths: Sequence[Path], result: Path | None) -> dict[str, Any]:
    """Reads all files, writes the arrays if a folder is given, and returns the contents of the index."""
    first = read(paths[0])
    steps, counts = np.unique(np.diff(first.times), return_counts=True)
    step_s = int(steps[counts.argmax()]) if len(steps) else 1
    flagged: dict[str, int] = {}
    spans: list[tuple[int, int, Path]] = []
    ticks = 0
    with Progress("reading", len(paths), "files") as progress:
        for path in paths:
            part = first if path == first.path else read(path)
            kept, broken = flag(part.readings, (config.least, config.most), config.spoils_s // step_s)
            flagged = {rule: flagged.get(rule, 0) + count for rule, count in broken.items()}
            spans.append((int(part.times[0]), int(part.times[-1]), path))
            ticks += len(part.times)
            if result is not None:
                (result / f"{len(spans) - 1}.part").write_bytes(part.times.tobytes() + kept.tobytes())
            progress.advance(1)
    order = sorted(range(len(spans)), key=lambda number: spans[number][0])
    for before, after in itertools.pairwise(order):
        if spans[after][0] <= spans[before][1]:
            raise Failure(f"{spans[after][2]} and {spans[before][2]} overlap in time; hint: keep one", BAD_DATA)
    if result is not None:
        _joined(result, order, ticks)
    return {
        "made_by": f"hvdtrain {__version__}",
        "unit": "W/m2",
        "stations": [name for name, *_ in OAHU.values()],
        "places": [place for _, *place in OAHU.values()],
        "readings": ticks,
        "step_s": step_s,
        "bounds_w_m2": [config.least, config.most],
        "spoils_s": config.spoils_s,
        "flagged": flagged,
        "source": {"path": config.source, "files": len(paths)},
    }


def _joined(result: Path, order: Sequence[int], ticks: int) -> None:
    """Joins the parts of all files into the two arrays, and removes the parts."""
    with (result / "times.npy").open("wb") as times, (result / "readings.npy").open("wb") as readings:
        times.write(npy_header(ticks, (), "int64"))
        readings.write(npy_header(ticks, (len(OAHU),), "float32"))
        for number in order:
            part = result / f"{number}.part"
            data = part.read_bytes()
            border = len(data) // (8 + 4 * len(OAHU)) * 8
            times.write(data[:border])
            readings.write(data[border:])
            part.unlink()


# --- a file -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Part:
    """The readings of a file. Raises Failure (65, 77) with file and line."""
    try:
        data = files.read(path, MOST_BYTES)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as packed:
                data = packed.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise OSError(errno.EFBIG, f"unpacks to more than {MOST_BYTES // files.MIB:,} MiB", str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Failure(f"{path}: the gzip file is damaged ({error}); hint: copy it again", BAD_DATA) from None
    except OSError as error:
        raise files.refused(path, error, BAD_DATA, "give the files of a station") from error
    lines = data.decode("utf-8-sig", errors="replace").splitlines()
    head = lines[0].split(",") if lines else [""]
    if len(head) != OAHU_COLUMNS or not head[0].strip().isdigit():
        hint = "give days of NREL's Oahu grid (23 columns, no header)"
        raise Failure(f"{path}:1: unknown format; hint: {hint}", BAD_DATA)
    numbers, values = _table(path, lines)
    readings = values[:, 4:]
    readings[readings == -99999] = np.nan
    return Part(path=path, times=_clock(path, numbers, values), readings=readings.astype(np.float32))


def _table(path: Path, lines: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Line numbers, and the values of the columns that are used, of the lines that are not empty."""
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    rows, columns = [lines[number - 1] for number in numbers], [0, 1, 2, 3, *OAHU]
    try:
        values = np.loadtxt(rows, delimiter=",", usecols=columns, comments=None, ndmin=2)
    except ValueError:
        for number, row in zip(numbers, rows, strict=True):
            words = row.split(",")
            for column in columns:
                if column >= len(words):
                    message = f"{len(words)} columns, but {max(columns) + 1} are needed"
                    raise Failure(f"{path}:{number}: {message}", BAD_DATA) from None
                try:
                    float(words[column])
                except ValueError:
                    message = f"column {column + 1}: {words[column]!r:.40} is not a number"
                    raise Failure(f"{path}:{number}: {message}", BAD_DATA) from None
        raise
    return np.array(numbers), values


def _clock(path: Path, lines: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Seconds since 1970 from the columns second, year, day of the year, HHMM. Raises Failure (65) for invalid
    times."""
    second, year, day, clock = values[:, :4].T
    hour, minute = np.divmod(clock, 100)
    valid = np.isin(year, range(1970, 2200)) & np.isin(day, range(1, 367)) & np.isin(hour, range(24))
    valid &= np.isin(minute, range(60)) & np.isin(second, range(60))
    if not valid.all():
        first = int(np.flatnonzero(~valid)[0])
        fields = ", ".join(f"{value:g}" for value in values[first, :4])
        raise Failure(f"{path}:{lines[first]}: {fields} is not a time", BAD_DATA)
    since = (year.astype(np.int64) - 1970).astype("datetime64[Y]").astype("datetime64[s]").astype(np.int64)
    times = since + ((day - 1) * 86400 + (hour - ZONE) * 3600 + minute * 60 + second).astype(np.int64)
    if len(wrong := np.flatnonzero(np.diff(times) <= 0)):
        raise Failure(f"{path}:{lines[wrong[0] + 1]}: the time is not later than on the line before", BAD_DATA)
    return times
