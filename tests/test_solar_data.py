"""Irradiance: rules for good readings, windows within the parts of the split, and files of stations."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import failing
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from hvdtrain.data import solar, solar_prepare
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

STEP_S = 60
NAN = np.float32(np.nan)


def made(readings: np.ndarray, times: np.ndarray | None = None, places: int = 0) -> solar.Series:
    return solar.Series(
        name="made",
        stations=tuple(f"s{column}" for column in range(readings.shape[1])),
        places=tuple((0.1 * column, 0.01 * column**2) for column in range(places)),
        times=np.arange(len(readings)) * STEP_S if times is None else times,
        readings=readings.astype(np.float32),
        step_s=STEP_S,
        flagged={},
        fingerprint="made",
    )


def test_the_packaged_readings_without_impossible_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pvlib", None)  # pvanalytics' dependencies are not needed
    series = solar.load("pvanalytics")
    assert "pvanalytics" not in sys.modules
    assert solar.DARK_W_M2 == 5, (
        "another value gives other windows, and scores that cannot be compared with the study's"
    )
    assert series.readings.shape == (165_588, 1)
    assert set(np.diff(series.times)) == {900}
    assert series.flagged == {"missing": 13_360, "out of bounds": 2_375, "near one out of bounds": 668}
    assert np.isnan(series.readings).sum() == sum(series.flagged.values())
    assert -10 <= np.nanmin(series.readings) < 1000 < np.nanmax(series.readings) <= 1361


def test_missing_readings_are_an_error_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match="'pvanalytics' or a folder made by `hvdtrain data solar`"):
        solar.load("nowhere")
    monkeypatch.setattr(solar, "PACKAGED_SHA256", "0" * 64)
    with pytest.raises(
        Failure, match=r"is not the expected file; hint: pip install --no-deps -c tools/constraints\.txt pvanalytics"
    ):
        solar.load("pvanalytics")
    monkeypatch.setattr(solar, "PACKAGED", "pvanalytics_that_is_absent")
    with failing(BAD_DATA, "pip install --no-deps"):
        solar.shipped()


def test_a_reading_that_breaks_a_rule_is_counted_once() -> None:
    readings = np.array([[1, NAN, 3, 9999, 5, 6, -50, NAN, 9]], np.float32).T
    kept, flagged = solar.flag(readings, (-10, 2000), 1)
    assert flagged == {"missing": 2, "out of bounds": 2, "near one out of bounds": 3}
    assert np.flatnonzero(~np.isnan(kept[:, 0])).tolist() == [0, 8]


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3), st.sampled_from(["window", "map"]))
def test_windows_equal_those_of_a_loop(seed: int, window: int, ahead: int, look: solar.Look) -> None:
    """No bad reading, no gap, no night, none across a border of the split."""
    draw = np.random.default_rng(seed)
    readings = draw.uniform(0, 30, (150, 3)).astype(np.float32)
    readings[draw.random(readings.shape) < 0.02] = NAN
    times = np.cumsum(draw.choice([STEP_S, 2 * STEP_S], 150, p=[0.97, 0.03]))
    series = made(readings, times, places=3)
    try:
        found = solar.windows(series, look=look, window=window, ahead=ahead, station="s1")
    except Failure:  # a part without windows
        reject()
    span, borders = (window if look == "window" else 1), [0, 105, 128, 150]
    truth = readings[:, 1]
    everyone = []
    for part, begin, end in zip((found.train, found.validation, found.test), borders[:-1], borders[1:], strict=True):
        expected = []
        for start in range(begin, end - (span - 1) - ahead):
            last, target = start + span - 1, start + span - 1 + ahead
            seen = readings[start : last + 1] if look == "map" else truth[start : last + 1]
            whole = (
                not np.isnan(seen).any() and not np.isnan(readings[target] if look == "map" else truth[target]).any()
            )
            ticks = times[target] - times[start] == (target - start) * STEP_S
            if whole and ticks and (truth[last] >= solar.DARK_W_M2 or truth[target] >= solar.DARK_W_M2):
                expected.append(start)
        assert part.starts.tolist() == expected
        assert np.shares_memory(part.views, series.readings), "views, not copies"
        rows = draw.permutation(len(part))[:7]
        seen, targets = part.batch(rows, rows, None).arrays[:2]
        mean, deviation = np.nanmean(truth[:105]), np.nanstd(truth[:105])
        starts = part.starts[rows]
        np.testing.assert_allclose(
            targets[:, 0], (truth[starts + span - 1 + ahead] - mean) / deviation, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(targets[:, 1], (truth[starts + span - 1] - mean) / deviation, rtol=1e-4, atol=1e-5)
        if look == "window":
            rest = np.stack([(truth[start : start + window] - mean) / deviation for start in starts])
            np.testing.assert_allclose(seen, rest, rtol=1e-4, atol=1e-5)
        everyone += expected
    left_out = found.about["windows_left_out"]
    assert len(everyone) + sum(left_out.values()) == 150 - (span - 1) - ahead


def test_a_stack_is_fifty_windows_one_reading_apart() -> None:
    truth = np.arange(1000, dtype=np.float32)[:, np.newaxis] + 100
    found = solar.windows(made(truth), look="stack", window=50, ahead=2)
    assert found.shape == (50, 50)
    first = np.zeros(1, np.int64)
    seen, targets, _ = found.train.batch(first, first, None).arrays
    readings = seen[0] * found.train.deviation + found.train.mean
    np.testing.assert_allclose(readings, 100 + np.add.outer(np.arange(50), np.arange(50)), rtol=1e-4)
    np.testing.assert_allclose(
        targets[0] * found.train.deviation + found.train.mean, [100 + 98 + 2, 100 + 98], rtol=1e-4
    )


def test_a_map_interpolates_between_the_stations() -> None:
    places = [(21.31, -158.08), (21.32, -158.08), (21.32, -158.07)]
    weights = solar.map_weights(places)
    drawn = np.array([100, 200, 700], np.float32) @ weights
    image = drawn.reshape(50, 50)
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-5)
    np.testing.assert_allclose([image[-1, 0], image[0, 0], image[0, -1]], [100, 200, 700], rtol=1e-4)
    assert drawn.min() >= 100 - 1e-3 and drawn.max() <= 700 + 1e-3


def test_a_part_without_windows_and_an_unknown_station_are_errors() -> None:
    with failing(BAD_CONFIG, "--station s9: unknown station"):
        solar.windows(made(np.ones((50, 2))), look="window", window=5, ahead=1, station="s9")
    with pytest.raises(Failure, match=r"a part of its 50 readings has no windows.*45 at night"):
        solar.windows(made(np.zeros((50, 1))), look="window", window=5, ahead=1)
    with pytest.raises(Failure, match="4 readings, but a window needs 6"):
        solar.windows(made(np.ones((4, 1))), look="window", window=5, ahead=1)


# --- the files of stations -------------------------------------------------------------------------------------------


def oahu(day: int, seconds: int, value: float = 500.0) -> str:
    """Some seconds of a day from 10:59:58; each reading encodes its column and its second."""
    lines = []
    for second in range(seconds):
        clock = 10 * 3600 + 59 * 60 + 58 + second
        hhmm = clock // 3600 * 100 + clock // 60 % 60
        values = ",".join(f"{value + column + second / 4}" for column in range(4, 23))
        lines.append(f"{clock % 60},2010,{day},{hhmm},{values}")
    return "\n".join(lines) + "\n"


def prepared(source: Path, folder: Path, **more: object) -> solar.Series:
    index = solar_prepare.prepare(
        solar_prepare.SolarConfig(source=str(source), destination=str(folder), **more)  # type: ignore[arg-type]
    )
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "readings.npy", "times.npy"]
    assert not list(folder.parent.glob(".*unfinished"))
    series = solar.load(str(folder))
    assert dict(series.flagged) == index["flagged"]
    return series


def utc(text: str) -> int:
    return int(np.datetime64(text, "s").astype(int))


def test_days_of_the_oahu_grid(tmp_path: Path) -> None:
    source = tmp_path / "201003"
    source.mkdir()
    (source / "a.txt").write_text(oahu(81, 300))
    lines = oahu(80, 200).splitlines()
    columns = lines[7].split(",")
    columns[4], columns[5] = "-99999", "2500"
    lines[7] = ",".join(columns)
    (source / "b.txt").write_text("\n".join([*lines[:20], "", *lines[20:]]))
    series = prepared(source, tmp_path / "oahu", spoils_s=2)
    assert series.stations[:3] == ("DH3", "DH4", "DH5") and len(series.stations) == len(series.places) == 17
    assert series.step_s == 1 and series.readings.shape == (500, 17)
    assert (series.times[0], series.times[200]) == (utc("2010-03-21T20:59:58"), utc("2010-03-22T20:59:58"))
    assert np.flatnonzero(np.isnan(series.readings[:, 0])).tolist() == [7]
    assert np.flatnonzero(np.isnan(series.readings[:, 1])).tolist() == [5, 6, 7, 8, 9]
    assert np.isnan(series.readings).sum() == 6 == sum(series.flagged.values())
    assert series.readings[203, 16] == 500 + 22 + 3 / 4, "DH8 is the last column, after the tilted instruments"
    windows = solar.windows(series, look="map", window=50, ahead=10, station="AP1")
    assert windows.shape == (50, 50) and windows.about["windows_left_out"]["over a gap"] == 10
    file = tmp_path / "oahu" / "readings.npy"
    file.write_bytes(file.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(Failure, match="damaged"):
        solar.load(str(tmp_path / "oahu"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1: unknown format; hint: give days of NREL's Oahu grid"),
        (oahu(80, 3).replace("504.25", "x", 1), ":2: column 5: 'x' is not a number"),
        (oahu(80, 3) + "1,2010\n", ":4: 2 columns, but 23 are needed"),
        (oahu(80, 3).replace("0,2010,80,1100", "0,2010,400,1100"), ":3: 0, 2010, 400, 1100 is not a time"),
        (oahu(80, 3).replace("0,2010,80,1100", "57,2010,80,1059"), ":3: the time is not later than on the line before"),
        ("\x1f\x8b not gzip", ": the gzip file is damaged"),
    ],
    ids=lambda value: value.strip()[:40] if value.startswith(":") else "",
)
def test_errors_name_file_and_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(Failure) as failure:
        prepared(path, tmp_path / "made")
    assert f"{path}{message}" in str(failure.value) and failure.value.code == BAD_DATA
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"], "nothing is left behind"


def test_leftovers_of_a_killed_process_and_a_gzip_file_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "day.txt.gz").write_bytes(gzip.compress(oahu(80, 3).encode()))
    (tmp_path / ".made.unfinished" / "result").mkdir(parents=True)
    assert len(prepared(tmp_path / "day.txt.gz", tmp_path / "made").times) == 3
    monkeypatch.setattr("hvdtrain.data.solar_prepare.MOST_BYTES", len(oahu(80, 3)) - 1)
    with pytest.raises(Failure, match="unpacks to more than"):
        prepared(tmp_path / "day.txt.gz", tmp_path / "again")


def test_files_that_do_not_fit_together_are_errors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(Failure, match="contains no files"):
        prepared(source, tmp_path / "made")
    (source / "1.txt").write_text(oahu(80, 5))
    (source / "2.txt").write_text(oahu(80, 5))
    with pytest.raises(Failure, match=r"2\.txt and .*1\.txt overlap in time"):
        prepared(source, tmp_path / "made")
    with pytest.raises(Failure, match="--least 5 is not below --most 5"):
        solar_prepare.SolarConfig(source="a", destination="b", least=5, most=5)
