"""Convert files of irradiance stations to memory-mapped arrays: `hvdtrain data solar SRC DST`.

**Input**: a file, or a folder whose files are all of the same kind, perhaps gzipped.
  * A day of NREL's Oahu Solar Measurement Grid: one line per second, no header, 23 columns. They are second, year, day
    of the year, HHMM in Hawaii's time, and W/m2 of 17 horizontal and 2 tilted instruments, which are not used. -99999
    means missing.
  * A raw export of NREL's Measurement and Instrumentation Data Center (MIDC): one line per minute. The header names an
    arbitrary first column, Year, DOY, the time zone (a column with HHMM) and the quantities. -7999 means missing.
  * A month of a BSRN station ("station-to-archive"): one value per minute, global irradiance from logical record 0100.
    -999 means missing.

**Output**: DST with `times.npy`, int64 (T,) seconds since 1970; `readings.npy`, float32 (T, stations) W/m2, with NaN
for readings that break a rule of hvdtrain.data.solar; and `index.json`. Errors name the file and the line.
"""

from __future__ import annotations

import calendar
import csv
import errno
import gzip
import itertools
import re
import shutil
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
ZONES = {"HST": -10, "PST": -8, "MST": -7, "CST": -6, "EST": -5, "AST": -4, "GMT": 0, "UTC": 0}
"""Hours from UTC"""
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
    """A file, or a folder of files: days of the Oahu grid, raw exports of MIDC, or BSRN station-to-archive files."""
    destination: str
    """Folder to create; must not exist."""
    columns: str | None = None
    """Columns of a MIDC export, separated by ';' (default: all named Global in W/m^2)."""
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
    kind: str
    stations: tuple[str, ...]
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
    with making(destination) as unfinished:
        result = unfinished / "result"
        shutil.rmtree(result, ignore_errors=True)  # left behind by a killed process
        result.mkdir()
        about = _written(config, paths, result)
        index = seal(result, {"schema": SCHEMA, **about}, {name: name for name in ("times.npy", "readings.npy")})
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
    first = read(paths[0], config.columns)
    steps, counts = np.unique(np.diff(first.times), return_counts=True)
    step_s = int(steps[counts.argmax()]) if len(steps) else 1
    flagged: dict[str, int] = {}
    spans: list[tuple[int, int, Path]] = []
    ticks = 0
    with Progress("reading", len(paths), "files") as progress:
        for path in paths:
            part = first if path == first.path else read(path, config.columns)
            if (part.kind, part.stations) != (first.kind, first.stations):
                expected = f"{first.kind} with {', '.join(first.stations)}"
                message = f"{path}: {part.kind} with {', '.join(part.stations)}, but {first.path} is {expected}"
                raise Failure(f"{message}; hint: prepare them separately", BAD_DATA)
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
        _joined(result, order, len(first.stations), ticks)
    return {
        "made_by": f"hvdtrain {__version__}",
        "kind": first.kind,
        "unit": "W/m2",
        "stations": list(first.stations),
        "places": [OAHU[column][1:] for column in OAHU] if first.kind == "oahu" else [],
        "readings": ticks,
        "step_s": step_s,
        "bounds_w_m2": [config.least, config.most],
        "spoils_s": config.spoils_s,
        "flagged": flagged,
        "source": {"path": config.source, "files": len(paths)},
    }


def _joined(result: Path, order: Sequence[int], stations: int, ticks: int) -> None:
    """Joins the parts of all files into the two arrays, and removes the parts."""
    with (result / "times.npy").open("wb") as times, (result / "readings.npy").open("wb") as readings:
        times.write(npy_header(ticks, (), "int64"))
        readings.write(npy_header(ticks, (stations,), "float32"))
        for number in order:
            part = result / f"{number}.part"
            data = part.read_bytes()
            border = len(data) // (8 + 4 * stations) * 8
            times.write(data[:border])
            readings.write(data[border:])
            part.unlink()


# --- the three kinds of file ------------------------------------------------------------------------------------------


def read(path: Path, columns: str | None = None) -> Part:
    """The readings of a file; its first line shows its kind. Raises Failure (65, 77) with file and line."""
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
    stations: tuple[str, ...]
    if re.fullmatch(r"\*[UC]0001\s*", lines[0] if lines else ""):
        kind, stations, (times, readings) = "bsrn", ("ghi",), _bsrn(path, lines)
    elif len(head) > 4 and [word.strip() for word in head[1:3]] == ["Year", "DOY"]:
        kind, (stations, times, readings) = "midc", _midc(path, lines, head, columns)
    elif len(head) == OAHU_COLUMNS and head[0].strip().isdigit():
        kind, stations = "oahu", tuple(name for name, *_ in OAHU.values())
        numbers, values = _table(path, lines, 0, [0, 1, 2, 3, *OAHU])
        times, readings = _clock(path, numbers, values, ZONES["HST"]), values[:, 4:]
        readings[readings == -99999] = np.nan
    else:
        known = "a day of the Oahu grid (23 columns), a raw MIDC export (,Year,DOY,...) and a BSRN file (*U0001)"
        raise Failure(f"{path}:1: unknown format; hint: supported are {known}", BAD_DATA)
    return Part(path=path, kind=kind, stations=stations, times=times, readings=readings.astype(np.float32))


def _midc(
    path: Path, lines: Sequence[str], head: Sequence[str], columns: str | None
) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.float64]]:
    """A raw MIDC export: column names, times and readings."""
    names = [word.strip() for word in head]
    if names[3] not in ZONES:
        raise Failure(f"{path}:1: unknown time zone {names[3]!r}; hint: supported are {', '.join(ZONES)}", BAD_DATA)
    chosen = (
        [word.strip() for word in columns.split(";")]
        if columns
        else [name for name in names[4:] if re.fullmatch(r"Global(?!.*stdev).*\[W/m\^2\]", name)]
    )
    if missing := [name for name in chosen if name not in names[4:]] or ([] if chosen else ["Global ... [W/m^2]"]):
        raise Failure(f"{path}:1: no column {missing[0]!r}; hint: --columns can be {'; '.join(names[4:])}", BAD_DATA)
    numbers, values = _table(path, lines, 1, [0, 1, 2, 3, *map(names.index, chosen)])
    values[:, 0] = 0  # the logger's number, not seconds
    readings = values[:, 4:]
    readings[readings == -7999] = np.nan
    return tuple(chosen), _clock(path, numbers, values, ZONES[names[3]]), readings


def _table(
    path: Path, lines: Sequence[str], skipped: int, columns: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Line numbers, and the values of some columns, of the lines that are not empty."""
    numbers = [number for number, line in enumerate(lines, start=1) if number > skipped and line.strip()]
    rows = [lines[number - 1] for number in numbers]
    if not rows:
        raise Failure(f"{path} contains no readings; hint: remove it", BAD_DATA)
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


def _clock(path: Path, lines: NDArray[np.int64], values: NDArray[np.float64], zone: int) -> NDArray[np.int64]:
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
    times = since + ((day - 1) * 86400 + (hour - zone) * 3600 + minute * 60 + second).astype(np.int64)
    return _rising(path, lines, times)


def _rising(path: Path, lines: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(wrong := np.flatnonzero(np.diff(times) <= 0)):
        raise Failure(f"{path}:{lines[wrong[0] + 1]}: the time is not later than on the line before", BAD_DATA)
    return times


def _bsrn(path: Path, lines: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Times, and global irradiance (T, 1), of record 0100, which has two lines for each minute."""
    begin = next((n for n, line in enumerate(lines) if re.match(r"\*[UC]0100", line)), None)
    if begin is None:
        raise Failure(f"{path}: no logical record 0100 with global irradiance", BAD_DATA)
    month, year, days = _month(path, lines)
    end = next((n for n in range(begin + 1, len(lines)) if lines[n].startswith("*")), len(lines))
    if (end - begin - 1) % 2 or end == begin + 1:
        message = f"record 0100 has {end - begin - 1} lines, but needs two for each minute"
        raise Failure(f"{path}:{end}: {message}", BAD_DATA)
    start = int(np.datetime64(f"{year:04d}-{month:02d}-01", "s").astype(np.int64))
    numbers, times, readings = [], [], []
    for number, line in zip(range(begin + 2, end + 1, 2), lines[begin + 1 : end : 2], strict=True):
        try:
            day, minute, value = int(line[0:3]), int(line[4:9]), float(line[10:16])
        except ValueError:
            message = f"{line[:16]!r} is not a day, a minute and a global irradiance"
            raise Failure(f"{path}:{number}: {message}", BAD_DATA) from None
        if not (1 <= day <= days and 0 <= minute < 1440):
            raise Failure(f"{path}:{number}: day {day}, minute {minute} is not in that month", BAD_DATA)
        numbers.append(number)
        times.append(start + (day - 1) * 86400 + minute * 60)
        readings.append(np.nan if value == -999 else value)
    return _rising(path, np.array(numbers), np.array(times)), np.array(readings)[:, np.newaxis]


def _month(path: Path, lines: Sequence[str]) -> tuple[int, int, int]:
    """Month, year and number of days, from the second line: station, month, year, version."""
    try:
        _, month, year, *_ = map(int, lines[1].split())
        return month, year, calendar.monthrange(year, month)[1]
    except (ValueError, IndexError, calendar.IllegalMonthError):
        raise Failure(f"{path}:2: no station, month and year", BAD_DATA) from None
