"""The statistics equal an independent calculation with exact fractions, on random tables."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from statistics import mean, median, variance
from typing import Any

import pandas as pd
import pytest
import runs as made
from scipy import stats

from hvdtrain.results import groups, scaling
from hvdtrain.results.columns import RUNS, Column
from hvdtrain.results.read import frame, steps
from hvdtrain.results.statistics import Interval, Statistic, summary
from hvdtrain.results.tables import energy, model

TABLES = 40


def close(found: float | None, exact: Any) -> None:
    """Equal to 1e-12 of its size; `exact` may be a Fraction."""
    assert found is not None
    assert math.isclose(found, float(exact), rel_tol=1e-12, abs_tol=1e-12)


def exact(values: list[float]) -> list[Fraction]:
    return [Fraction(value) for value in values]


def runs(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A data frame of complete runs with these values, and equal values otherwise."""
    base = dict.fromkeys(RUNS) | {
        "state": "complete",
        "kind": "timing",
        "workload": "resnet",
        "framework": "torch",
        "strategy": "allreduce",
        "device": "cpu",
        "backend": "mpi",
        "ranks_per_host": 1,
        "parameters": 1000,
        "train_samples": 6400,
        "epochs": 3,
        "epochs_done": 2,  # --target ended the runs
        "settings": "{}",
    }
    return frame.frame([base | row for row in rows])


def random_table(seed: int) -> dict[int, list[dict[str, Any]]]:
    """Hosts -> 1 to 6 runs, some without energy, some of kind energy."""
    draw = random.Random(seed)
    strong = draw.random() < 0.5
    table: dict[int, list[dict[str, Any]]] = {}
    for hosts in sorted(draw.sample(range(1, 9), draw.randint(1, 4))):
        table[hosts] = []
        for repeat in range(draw.randint(1, 6)):
            train_s = draw.uniform(0.01, 1000)
            used = draw.choice([None, draw.uniform(1, 1e6)])
            table[hosts].append(
                {
                    "hosts": hosts,
                    "rate_mbit": None if hosts == 1 else 10.0,
                    "rank_batch": 64 // hosts if strong else 32,
                    "global_batch": 64 if strong else 32 * hosts,
                    "seed": repeat,
                    "kind": "energy" if repeat and draw.random() < 0.2 else "timing",
                    "train_s": train_s,
                    "end_to_end_s": train_s + draw.uniform(0, 10),
                    "samples_per_s": draw.uniform(1, 1e4),
                    "energy_used_j": used,
                    "energy_j": None if used is None else used + draw.uniform(0, 1e3),
                }
            )
    return table


def timed(rows: list[dict[str, Any]], name: str) -> list[Fraction]:
    return exact([row[name] for row in rows if row["kind"] == "timing"])


def check_summary(found: Statistic | None, values: list[Fraction]) -> None:
    assert found is not None
    assert found.n == len(values)
    close(found.mean, mean(values))
    close(found.median, median(values))
    assert (found.min, found.max) == (float(min(values)), float(max(values)))
    if len(values) == 1:
        assert found.low is found.high is None
        return
    half = Fraction(stats.t.ppf(0.975, len(values) - 1)) * Fraction(math.sqrt(variance(values) / len(values)))
    close(found.low, mean(values) - half)
    close(found.high, mean(values) + half)


def test_equal_values_have_no_spread() -> None:
    found = summary([0.97] * 3)
    assert found is not None and found.mean == found.low == found.high == 0.97


def check_ratio(found: Interval | None, above: list[Fraction], below: list[Fraction], by: Fraction | int = 1) -> None:
    """The ratio of the means divided by `by`, with Welch's interval on the logarithm."""
    assert found is not None
    center = mean(above) / mean(below) / by
    close(found.mean, center)
    if min(len(above), len(below)) < 2:
        assert found.low is None
        return
    parts = [variance(side) / len(side) / mean(side) ** 2 for side in (above, below)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(s) - 1) for part, s in zip(parts, (above, below), strict=True))
    half = stats.t.ppf(0.975, float(freedom)) * math.sqrt(sum(parts))
    ends = (float(center) * math.exp(-half), float(center) * math.exp(half))
    assert found.span == pytest.approx(ends, rel=1e-9)  # scipy's t has ten digits there


def check_scaling(table: dict[int, list[dict[str, Any]]]) -> None:
    made = runs([row for rows in table.values() for row in rows])
    base = min(table)
    found = scaling.rows(groups.by(groups.usable(made)))
    assert {row.count for row in found} == set(table)
    for row in found:
        check_summary(row.group.statistic("train_s"), timed(table[int(row.count)], "train_s"))
        assert row.baseline.key["hosts"] == base
        if row.count == base:
            continue
        here, there = table[int(row.count)], table[base]
        n = Fraction(int(row.count), base)
        check_ratio(row.speedup, timed(there, "train_s"), timed(here, "train_s"))
        check_ratio(row.speedup_end_to_end, timed(there, "end_to_end_s"), timed(here, "end_to_end_s"))
        if row.kind == "strong":
            check_ratio(row.efficiency, timed(there, "train_s"), timed(here, "train_s"), n)
        else:
            check_ratio(row.efficiency, timed(here, "samples_per_s"), timed(there, "samples_per_s"), n)


def check_energy(table: dict[int, list[dict[str, Any]]]) -> None:
    made = runs([row for rows in table.values() for row in rows])
    for group in energy.energies(frame.Loaded([], made, [])):
        rows, found = table[int(group.key["hosts"])], energy.cells(group)
        sampled = [row for row in rows if row["energy_j"] is not None]
        check_summary(found["energy_j"], exact([row["energy_j"] for row in sampled]))
        check_summary(found["energy_used_j"], exact([row["energy_used_j"] for row in sampled]))
        check_summary(found["samples_per_j"], [Fraction(2 * 6400) / Fraction(row["energy_j"]) for row in sampled])
        own = [row for row in rows if row["kind"] == "timing"]
        if own and all(row["kind"] == "energy" for row in sampled):
            times = mean(exact([row["end_to_end_s"] for row in own]))
            close(found["edp_used_js"].mean, times * mean(exact([row["energy_used_j"] for row in sampled])))
        else:
            products = [Fraction(row["end_to_end_s"]) * Fraction(row["energy_used_j"]) for row in sampled]
            close(found["edp_used_js"].mean, mean(products))


def test_statistics_equal_exact_fractions_on_random_tables() -> None:
    for seed in range(TABLES):
        table = random_table(seed)
        check_scaling(table)
        check_energy(table)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
def test_blocks_are_means_of_equal_parts_in_order(count: int) -> None:
    sums, seconds = steps.Sums(), [0.1 + number % 7 for number in range(count)]
    for number, each in enumerate(seconds):
        sums.add(made.step(made.Made(data_s=0.0, compute_s=each, communication_s=None), number + 2, 0))
    size = sums.block_steps
    parts = [seconds[at : at + size] for at in range(0, count - size + 1, size)]
    assert sums.blocks == pytest.approx([sum(part) / size for part in parts])
    assert len(parts) < steps.MOST_BLOCKS and (size == 1 or len(parts) >= steps.MOST_BLOCKS // 2)


@pytest.mark.parametrize(("done", "speedup"), [(3, 2.0), (2, None)])
def test_runs_with_different_numbers_of_epochs_give_no_speed_up(done: int, speedup: float | None) -> None:
    """--target ended the two hosts after 2 of 3 epochs, so their shorter time is not a speed-up."""
    one = {"hosts": 1, "rank_batch": 2, "global_batch": 2, "samples_per_s": 5.0, "epochs_done": 3}
    two = one | {"hosts": 2, "rank_batch": 1, "epochs_done": done, "train_s": 5.0, "end_to_end_s": 6.0}
    made = runs([one | {"train_s": 10.0, "end_to_end_s": 12.0}, two])
    _, row = scaling.rows(groups.by(made))
    found = [row.speedup, row.speedup_end_to_end, row.efficiency]
    expected = [None] * 3 if speedup is None else [speedup, speedup, speedup / 2]
    assert [each and each.mean for each in found] == expected


def test_the_most_similar_baseline_is_used_then_the_fastest() -> None:
    """Less similar baselines are faster here. Each round removes the best one."""
    two = {"strategy": "hierarchical", "launcher": "launch/mpirun.sh", "hosts": 2, "train_s": 50.0}
    best_first: list[dict[str, Any]] = [
        {},
        {"launcher": "horovodrun"},
        {"backend": "gloo"},
        {"strategy": "allreduce"},
        {"strategy": "allreduce", "launcher": "horovodrun"},
    ]
    single = [two | {"hosts": 1, "train_s": 100.0 - place} | each for place, each in enumerate(best_first)]
    for place, each in enumerate(single):
        found = scaling.rows(groups.by(runs([two, *reversed(single[place:])])))
        (row,) = [row for row in found if row.count == 2]
        assert row.train_s and row.baseline.values("train_s") == [each["train_s"]], each
    sooner, later = ({"hosts": 1, "train_s": train_s, "strategy": name} for train_s, name in ((80.0, "a"), (90.0, "b")))
    found = scaling.rows(groups.by(runs([two, later, sooner])))
    assert [row.baseline.values("train_s") for row in found if row.count == 2] == [[80.0]]


def test_no_values_and_zeros_give_no_ratio() -> None:
    assert summary([]) is None
    assert summary([None, math.nan]) is None
    zero = {"hosts": 1, "rank_batch": 1, "global_batch": 1, "train_s": 0.0, "end_to_end_s": 0.0, "samples_per_s": None}
    two = zero | {"hosts": 2, "train_s": 1.0}
    found = scaling.rows(groups.by(runs([zero, two])))
    assert {row.speedup for row in found} == {None, Interval(1.0, None, None)}


@pytest.mark.parametrize("mean", [0.83, 0.083, 1.0, 7.5, 250.0])
def test_a_ratio_keeps_its_digits_however_wide_its_interval(mean: float) -> None:
    printed = model.cell(Interval(mean, mean / 90, mean * 90), Column("speedup", "speed-up"))
    assert float(printed.partition(" ")[0].replace(",", "")) == pytest.approx(mean, rel=0.05)
    assert float(model.cell(Interval(mean, mean * 0.99, mean * 1.01), Column("x", "x")).split()[0]) == mean
