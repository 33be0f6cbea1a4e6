"""Figures show the numbers of the tables, are the same to the byte each time, and report missing data."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
import runs
from conftest import failing

from hvdtrain.results import figures
from hvdtrain.results.figures import style
from hvdtrain.results.read.frame import Loaded, load
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

T_2 = 4.302652729911275  # Student's t at 97.5 % for 2 degrees of freedom
SEEDS = range(3)


def train_s(hosts: int, rate_mbit: float | None, seed: int) -> float:
    """The hosts share the computation; the network takes longer at a lower rate."""
    network_s = 0.0 if rate_mbit is None else 2 * (hosts - 1) / hosts * 1000 / rate_mbit
    return (100 / hosts + network_s) * (1 + 0.01 * seed)


def make(folder: Path, strategy: str = "allreduce", **changes: Any) -> Path:
    """1, 2 and 4 hosts at 10 and 1000 Mbit/s with a global batch of 64."""
    for hosts, rate_mbit in ((1, None), (2, 10.0), (2, 1000.0), (4, 10.0), (4, 1000.0)):
        for seed in SEEDS:
            runs.make(
                folder / f"{strategy}-h{hosts}-{rate_mbit}-s{seed}",
                hosts=hosts,
                rate_mbit=rate_mbit,
                seed=seed,
                strategy=strategy,
                rank_batch=64 // hosts,
                steps_per_epoch=4,
                train_s=train_s(hosts, rate_mbit, seed),
                compute_s=0.5 / hosts + 0.01 * seed,
                communication_s=0.0 if hosts == 1 else 5 / (rate_mbit or 1),
                test_accuracy=0.97 - 0.01 * seed,
                **changes,
            )
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Two strategies and three seeds: data for every figure."""
    folder = tmp_path_factory.mktemp("runs")
    make(folder)
    make(folder, "native")
    return load([folder])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A single run on one host without monitors."""
    return load([runs.make(tmp_path_factory.mktemp("runs") / "one")])


def curves(axis: Any) -> dict[str, tuple[list[float], list[float], list[tuple[float, float]]]]:
    """Label -> x, y and ends of the error bars of each curve."""
    found = {}
    for container in axis.containers:
        line, _, (bars,) = container.lines
        ends = [(float(bar[0][1]), float(bar[1][1])) for bar in bars.get_segments()]
        found[container.get_label()] = (list(line.get_xdata()), list(map(float, line.get_ydata())), ends)
    return found


# --- every figure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", figures.KINDS)
def test_the_same_runs_give_the_same_bytes_whatever_the_users_settings(kind: str, loaded: Loaded) -> None:
    figure = figures.draw(kind, loaded)
    first = style.encode(figure, "svg")
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "savefig.bbox": "tight"}):
        before = dict(matplotlib.rcParams)
        second = style.encode(figures.draw(kind, loaded), "svg")
        assert dict(matplotlib.rcParams) == before
    assert first == second
    ElementTree.fromstring(first)
    assert not re.search(rb"<dc:date>|Matplotlib v|matplotlib.org", first)
    assert figure.get_figwidth() <= 7  # an A4 page
    labels = " ".join(axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes)
    assert re.search(r"hosts|epoch|\(m?s\)|MB|%|s per", labels)


@pytest.mark.parametrize("kind", figures.KINDS)
def test_a_single_run_is_drawn_or_the_error_names_the_missing_data(kind: str, one: Loaded, tmp_path: Path) -> None:
    with failing(exits.BAD_DATA):
        figures.draw(kind, load([runs.make(tmp_path / "unfinished", complete=False, hosts=2, rate_mbit=10.0)]))
    assert style.encode(figures.draw(kind, one), "svg")


@pytest.mark.parametrize("kind", figures.KINDS)
def test_missing_values_cause_no_traceback(kind: str, tmp_path: Path) -> None:
    for hosts in (1, 2):
        runs.make(
            tmp_path / f"h{hosts}",
            hosts=hosts,
            rate_mbit=10.0 if hosts > 1 else None,
            rank_batch=32 // hosts,
            steps_per_epoch=4,
            communication_s=None,
            accuracies=[None, None],
            test_accuracy=None,
            network_bytes_per_step=0.0,
        )
    found = load([tmp_path])
    found.runs.loc[found.runs["hosts"] == 2, ["global_batch", "ranks_per_host", "goodput_mbit"]] = math.nan
    try:
        style.encode(figures.draw(kind, found), "svg")
    except Failure as failure:
        assert failure.code == exits.BAD_DATA


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_time_shows_mean_and_interval_of_each_group(loaded: Loaded) -> None:
    axes = figures.draw("time", loaded).axes
    assert [axis.get_title("left") for axis in axes] == ["torch allreduce", "torch native"]
    for axis in axes:
        drawn = curves(axis)
        assert list(drawn) == ["10 Mbit/s", "1000 Mbit/s"]
        for rate_mbit in (10.0, 1000.0):
            x, y, bars = drawn[f"{rate_mbit:g} Mbit/s"]
            assert x == [1, 2, 4]
            for hosts, mean, ends in zip(x, y, bars, strict=True):
                values = [train_s(int(hosts), None if hosts == 1 else rate_mbit, seed) for seed in SEEDS]
                center, half = statistics.fmean(values), T_2 * statistics.stdev(values) / math.sqrt(3)
                assert (mean, *ends) == pytest.approx((center, center - half, center + half), rel=1e-9)


def test_no_group_is_dropped(tmp_path: Path) -> None:
    """Each group differs from the others in one of these only."""
    for number, (hosts, ranks, rate) in enumerate(itertools.product((1, 2), (1, 2), (10.0, 100.0))):
        if hosts > 1 or rate == 10.0:
            changes = {"rate_mbit": rate if hosts > 1 else None, "rank_batch": 64 // (hosts * ranks)}
            runs.make(tmp_path / str(number), hosts=hosts, ranks_per_host=ranks, compute_s=1.0 + number, **changes)
    found = load([tmp_path])
    assert sum(len(curves(axis)) for axis in figures.draw("time", found).axes) == 4


def test_accuracy_is_the_mean_of_the_repeats_after_each_epoch(loaded: Loaded) -> None:
    line = figures.draw("accuracy-time", loaded).axes[0].lines[0]
    final = 100 * statistics.fmean(0.97 - 0.01 * seed for seed in SEEDS)
    assert list(line.get_ydata()) == pytest.approx([final / 2, final])
    # two epochs with validation (0.1 s), and a checkpoint (0.05 s) between them
    trained = statistics.fmean(train_s(1, None, seed) for seed in SEEDS)
    assert list(line.get_xdata()) == pytest.approx([trained / 2 + 0.1, trained + 0.25])


# --- limits -----------------------------------------------------------------------------------------------------------


def test_too_many_settings_are_an_error_with_a_hint(tmp_path: Path) -> None:
    for number in range(13):
        runs.make(tmp_path / str(number), hosts=2, rate_mbit=10.0, config={"lr": number / 10})
    for kind in figures.KINDS:
        with failing(exits.USAGE, r"13 settings exceed the 12 of one figure; hint: .*--where"):
            figures.draw(kind, load([tmp_path]))
